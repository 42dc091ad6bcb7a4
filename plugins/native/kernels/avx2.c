/* Level: AVX2 and FMA (Haswell, Zen and later). */
#ifdef __x86_64__
#include <immintrin.h>
#include <string.h>

#include "library.h"
#define LANES 8
#define HALVES HALVES_8
#define TILE_ROWS 2
#define TILE_TOKENS 4
#define TWICE 0, 0, 1, 1
#pragma STDC FP_CONTRACT OFF
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#include "lanes.h"

/* Of nibbles, two products are at most 2 * 15 * 127, and there are at most eight: sums of 16 bits hold them. */
ALWAYS ints dots(const int bits, const int count, ints sum, const bytes *codes, const uint8_t *values) {
    __m256i low = _mm256_setzero_si256(), high = low;
    UNROLL for (int i = 0; i < count; i++) {
        const bytes code = codes[i];
        const __m256i value = (__m256i)load_bytes(values + i * 4 * LANES);
        low = _mm256_add_epi16(low, _mm256_maddubs_epi16((__m256i)(bits == 4 ? code : code & 15), value));
        if (bits == 8) high = _mm256_add_epi16(high, _mm256_maddubs_epi16((__m256i)(code >> 4), value));
    }
    if (bits == 8) sum += (ints)_mm256_madd_epi16(high, _mm256_set1_epi16(16));
    return sum + (ints)_mm256_madd_epi16(low, _mm256_set1_epi16(1));
}

#include "avx256.h"
#include "kernels.h"
#pragma clang attribute pop

const struct kernels avx2 = KERNELS;
#endif
