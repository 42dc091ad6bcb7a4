/* Level: any processor. */
#include <string.h>

#include "library.h"
#define LANES 4
#define HALVES HALVES_4
#define TILE_ROWS 2
#define TILE_TOKENS 2
#define TWICE 0, 0
#ifdef __x86_64__
#define SMALL /* for processors from before 2013: not worth minutes of the compiler's */
#endif
#include "lanes.h"
typedef double doubles __attribute__((vector_size(8 * LANES)));
typedef int64_t longs __attribute__((vector_size(8 * LANES)));
typedef int16_t shorts __attribute__((vector_size(16)));
typedef uint16_t unsigned_shorts __attribute__((vector_size(16)));
#pragma STDC FP_CONTRACT OFF

ALWAYS ints dots(const int bits, const int count, ints sum, const bytes *codes, const uint8_t *values) {
    (void)bits;
    UNROLL for (int i = 0; i < count; i++) {
        const shorts code = (shorts)codes[i], value = (shorts)load_bytes(values + i * 4 * LANES);
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

ALWAYS floats permute(floats few, ints which) {
    floats result;
    for (int lane = 0; lane < LANES; lane++) result[lane] = few[which[lane] & (LANES - 1)];
    return result;
}

ALWAYS bytes words_low(bytes a, bytes b) { return (bytes)__builtin_shufflevector((ints)a, (ints)b, 0, 4, 1, 5); }
ALWAYS bytes words_high(bytes a, bytes b) { return (bytes)__builtin_shufflevector((ints)a, (ints)b, 2, 6, 3, 7); }
ALWAYS bytes pairs_low(bytes a, bytes b) { return (bytes)__builtin_shufflevector((ints)a, (ints)b, 0, 1, 4, 5); }
ALWAYS bytes pairs_high(bytes a, bytes b) { return (bytes)__builtin_shufflevector((ints)a, (ints)b, 2, 3, 6, 7); }

/* Its bits, as a float's, are a 2^112th of it, also where they are no normal float's. */
ALWAYS floats widen(halves x) {
    const ints bits = __builtin_convertvector(x, ints), magnitude = bits & 0x7fff;
    const floats value = (floats)(magnitude << 13) * 0x1p112f;
    return (floats)((ints)value | ((magnitude >= 0x7c00) & 0x7f800000) | (bits & 0x8000) << 16);
}

ALWAYS halves narrow(floats x) {
    halves result;
    for (int lane = 0; lane < LANES; lane++) {
        uint32_t bits = ((unsigneds)x)[lane], sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
        if (magnitude > 0x7f800000) magnitude = 0x7e00 | (magnitude >> 13 & 0x3ff); /* not a number */
        else if (magnitude >= 0x477ff000) magnitude = 0x7c00; /* from where it rounds to infinity */
        else if (magnitude >= 0x38800000) magnitude = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
        else { /* below 2^-14: a sum with 0.5 ends in the bits of a whole number of 2^-24 */
            float value;
            memcpy(&value, &magnitude, sizeof value);
            value += 0.5f;
            memcpy(&magnitude, &value, sizeof value);
            magnitude -= 0x3f000000;
        }
        result[lane] = (uint16_t)(sign | magnitude);
    }
    return result;
}

ALWAYS floats load_first(const float *from, int count) {
    floats value = {0};
    memcpy(&value, from, (size_t)count * 4);
    return value;
}

ALWAYS void store_first(float *to, floats value, int count) {
    for (int lane = 0; lane < count; lane++) to[lane] = value[lane];
}

#include "kernels.h"

const struct kernels portable = KERNELS;
