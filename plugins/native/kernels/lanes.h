/* Vectors of LANES lanes of four bytes. */
#include <stdint.h>
#include <string.h>

#ifdef SMALL
#define UNROLL
#else
#define UNROLL _Pragma("clang loop unroll(full)")
#endif
#define ALWAYS static inline __attribute__((always_inline))

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t unsigneds __attribute__((vector_size(4 * LANES)));
typedef uint8_t bytes __attribute__((vector_size(4 * LANES)));
typedef int8_t chars __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES))); /* the bits of FP16 numbers */

ALWAYS bytes load_bytes(const void *from) {
    bytes value;
    memcpy(&value, from, sizeof value);
    return value;
}
