/* What the 256-bit levels share. */
ALWAYS floats fused(floats a, floats b, floats c) { return (floats)_mm256_fmadd_ps(a, b, c); }

ALWAYS floats permute(floats few, ints which) { return (floats)_mm256_permutevar8x32_ps((__m256)few, (__m256i)which); }

ALWAYS bytes words_low(bytes a, bytes b) { return (bytes)_mm256_unpacklo_epi32((__m256i)a, (__m256i)b); }
ALWAYS bytes words_high(bytes a, bytes b) { return (bytes)_mm256_unpackhi_epi32((__m256i)a, (__m256i)b); }
ALWAYS bytes pairs_low(bytes a, bytes b) { return (bytes)_mm256_unpacklo_epi64((__m256i)a, (__m256i)b); }
ALWAYS bytes pairs_high(bytes a, bytes b) { return (bytes)_mm256_unpackhi_epi64((__m256i)a, (__m256i)b); }

ALWAYS floats widen(halves x) { return (floats)_mm256_cvtph_ps((__m128i)x); }

ALWAYS halves narrow(floats x) { return (halves)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT); }

ALWAYS __m256i first_lanes(int count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

ALWAYS floats load_first(const float *from, int count) { return (floats)_mm256_maskload_ps(from, first_lanes(count)); }

ALWAYS void store_first(float *to, floats value, int count) {
    _mm256_maskstore_ps(to, first_lanes(count), (__m256)value);
}
