/* Level: AVX-512 with VNNI (Ice Lake and later servers, Zen 4 and later). */
#ifdef __x86_64__
#include <immintrin.h>
#include <string.h>

#include "library.h"
#define LANES 16
#define HALVES HALVES_16
#define TILE_ROWS 4
#define TILE_TOKENS 4
#define TWICE 0, 0, 1, 1, 2, 2, 3, 3
#pragma STDC FP_CONTRACT OFF
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"))), \
                             apply_to = function)
#include "lanes.h"

ALWAYS ints dots(const int bits, const int count, ints sum, const bytes *codes, const uint8_t *values) {
    (void)bits;
    UNROLL for (int i = 0; i < count; i++)
        sum = (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes[i], (__m512i)load_bytes(values + i * 4 * LANES));
    return sum;
}

ALWAYS floats fused(floats a, floats b, floats c) { return (floats)_mm512_fmadd_ps(a, b, c); }

ALWAYS floats permute(floats few, ints which) { return (floats)_mm512_permutexvar_ps((__m512i)which, (__m512)few); }

ALWAYS bytes words_low(bytes a, bytes b) { return (bytes)_mm512_unpacklo_epi32((__m512i)a, (__m512i)b); }
ALWAYS bytes words_high(bytes a, bytes b) { return (bytes)_mm512_unpackhi_epi32((__m512i)a, (__m512i)b); }
ALWAYS bytes pairs_low(bytes a, bytes b) { return (bytes)_mm512_unpacklo_epi64((__m512i)a, (__m512i)b); }
ALWAYS bytes pairs_high(bytes a, bytes b) { return (bytes)_mm512_unpackhi_epi64((__m512i)a, (__m512i)b); }

ALWAYS floats widen(halves x) { return (floats)_mm512_cvtph_ps((__m256i)x); }

ALWAYS halves narrow(floats x) {
    return (halves)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

ALWAYS floats load_first(const float *from, int count) {
    return (floats)_mm512_maskz_loadu_ps((__mmask16)((1 << count) - 1), from);
}

ALWAYS void store_first(float *to, floats value, int count) {
    _mm512_mask_storeu_ps(to, (__mmask16)((1 << count) - 1), (__m512)value);
}

#include "kernels.h"
#pragma clang attribute pop

const struct kernels avx512_vnni = KERNELS;
#endif
