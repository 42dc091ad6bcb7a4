/* Numbers rounded up, of a >= 0 and b > 0. */
#ifndef MOTLEY_ROUNDING_H
#define MOTLEY_ROUNDING_H
#include <stdint.h>

static inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

static inline int64_t up_to_multiple(int64_t a, int64_t b) { return divide_up(a, b) * b; }
#endif
