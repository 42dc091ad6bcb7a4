/* Level: AVX-VNNI (Alder Lake and later without AVX-512). */
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
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avxvnni"))), apply_to = function)
#include "lanes.h"

ALWAYS ints dots(const int bits, const int count, ints sum, const bytes *codes, const uint8_t *values) {
    (void)bits;
    UNROLL for (int i = 0; i < count; i++)
        sum = (ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes[i], (__m256i)load_bytes(values + i * 4 * LANES));
    return sum;
}

#include "avx256.h"
#include "kernels.h"
#pragma clang attribute pop

const struct kernels avx_vnni = KERNELS;
#endif
