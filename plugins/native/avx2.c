/* Level: AVX2 and FMA (Haswell, Zen and later). */
#ifdef __x86_64__
#include <immintrin.h>
#include <string.h>

#include "library.h"
#define LANES 8
#define HALVES HALVES_8
#define TILE_ROWS 2
#define TILE_TOKENS 4
#pragma STDC FP_CONTRACT OFF
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#include "lanes.h"

ALWAYS ints dots(const int bits, const int count, ints sum, const bytes *codes, const uint8_t *values) {
    __m256i pairs = _mm256_setzero_si256();
    UNROLL for (int i = 0; i < count; i++) {
        const __m256i code = (__m256i)codes[i], value = (__m256i)load_bytes(values + i * STRETCH);
        if (bits == 4) { /* two products are at most 2 * 15 * 127, and `count` at most four: nothing saturates */
            pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(code, value));
        } else {
            const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(value, 8), 8), odd = _mm256_srai_epi16(value, 8);
            sum += (ints)_mm256_madd_epi16(_mm256_and_si256(code, _mm256_set1_epi16(255)), even);
            sum += (ints)_mm256_madd_epi16(_mm256_srli_epi16(code, 8), odd);
        }
    }
    return bits == 4 ? sum + (ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)) : sum;
}

#include "avx256.h"
#include "kernels.h"
#pragma clang attribute pop

const struct kernels avx2 = KERNELS;
#endif
