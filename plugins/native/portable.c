/* Level: any processor. */
#include <string.h>

#include "library.h"
#define LANES 4
#define HALVES HALVES_4
#define TILE_ROWS 2
#define TILE_TOKENS 2
#include "lanes.h"
typedef double doubles __attribute__((vector_size(8 * LANES)));
typedef int64_t longs __attribute__((vector_size(8 * LANES)));
typedef int16_t shorts __attribute__((vector_size(16)));
typedef uint16_t unsigned_shorts __attribute__((vector_size(16)));
#pragma STDC FP_CONTRACT OFF

ALWAYS ints dots(const int bits, const int count, ints sum, const bytes *codes, const uint8_t *values) {
    (void)bits;
    UNROLL for (int i = 0; i < count; i++) {
        const shorts code = (shorts)codes[i], value = (shorts)load_bytes(values + i * STRETCH);
        const ints even = (ints)((code & 255) * (value << 8 >> 8)); /* products fit: 255 * 127 */
        const ints odd = (ints)((shorts)((unsigned_shorts)code >> 8) * (value >> 8));
        sum += (even << 16 >> 16) + (even >> 16) + (odd << 16 >> 16) + (odd >> 16);
    }
    return sum;
}

/* a * b + c, rounded once: the product is exact in double, and a sum that is rounded to odd there rounds to float as
 * the exact one would. */
ALWAYS floats fused(floats a, floats b, floats c) {
#ifdef __ARM_FEATURE_FMA
    return __builtin_elementwise_fma(a, b, c);
#else
    const doubles product = __builtin_convertvector(a, doubles) * __builtin_convertvector(b, doubles);
    const doubles other = __builtin_convertvector(c, doubles), sum = product + other, added = sum - product;
    const doubles lost = (product - (sum - added)) + (other - added);
    longs bits = (longs)sum;
    const longs inexact = (lost > 0) | (lost < 0), even = (bits & 1) - 1, away = ((lost > 0) ^ (sum > 0)) | 1;
    bits += inexact & even & away;
    return __builtin_convertvector((doubles)bits, floats);
#endif
}

ALWAYS floats spread(const float *from, const int count, ints which) {
    floats result = {0};
    for (int lane = 0; lane < LANES; lane++)
        if (which[lane] < count) result[lane] = from[which[lane]];
    return result;
}

ALWAYS floats load_first(const float *from, int count) {
    floats value = {0};
    for (int lane = 0; lane < count; lane++) value[lane] = from[lane];
    return value;
}

ALWAYS void store_first(float *to, floats value, int count) {
    for (int lane = 0; lane < count; lane++) to[lane] = value[lane];
}

#include "kernels.h"

const struct kernels portable = KERNELS;
