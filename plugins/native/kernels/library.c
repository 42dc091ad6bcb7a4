/* What library.py uses, but for the operators: what it was written for, levels and pools. */
#include "library.h"

#include "pool.h"

#ifdef __x86_64__
#include <cpuid.h>
#endif

enum { PORTABLE, AVX2, AVX_VNNI, AVX512_VNNI, LEVELS }; /* SHARED with library.py */

/* SHARED with library.py: a number that both count up when they no longer understand each other, and what each struct
 * takes. */
EXPORT const int32_t motley_interface[] = {
    24,
    sizeof(struct matmul),
    sizeof(struct norm),
    sizeof(struct head_norms),
    sizeof(struct gated),
    sizeof(struct stream_gates),
    sizeof(struct streams),
    sizeof(struct mixture),
    sizeof(struct table),
    sizeof(struct span),
    sizeof(struct spans),
    sizeof(struct tier),
    sizeof(struct attention),
    sizeof(struct question),
    sizeof(struct choice),
    sizeof(struct factors),
    sizeof(struct adapted_part),
    sizeof(struct adapted_group),
    sizeof(struct adapted_rows),
    sizeof(struct adapted),
    sizeof(struct recurrent_span),
    sizeof(struct recurrent_spans),
    sizeof(struct recurrent),
    sizeof(struct encoding),
    sizeof(struct draw),
    sizeof(struct masses),
};

static const struct kernels *const all_kernels[LEVELS] = {
    &portable,
#ifdef __x86_64__
    &avx2, &avx_vnni, &avx512_vnni,
#endif
};

const struct kernels *kernels = &portable;

/* Whether this processor, and its operating system, can do a level. */
EXPORT int32_t motley_supports(int32_t level) {
#ifdef __x86_64__
    unsigned a, b, c, d, state, high;
    if (level == PORTABLE) return 1;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE) || !(c & bit_FMA) || !(c & bit_F16C)) return 0;
    __asm__("xgetbv" : "=a"(state), "=d"(high) : "c"(0));
    if ((state & 0x06) != 0x06) return 0; /* xmm and ymm registers are kept */
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & bit_AVX2)) return 0;
    const unsigned avx512 = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    switch (level) {
        case AVX2: return 1;
        case AVX_VNNI: return a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & bit_AVXVNNI);
        case AVX512_VNNI: return (state & 0xe6) == 0xe6 && (b & avx512) == avx512 && (c & bit_AVX512VNNI);
    }
    return 0;
#else
    return level == PORTABLE;
#endif
}

/* Take a level that this processor supports, for all of the process from now on. */
EXPORT void motley_set_level(int32_t level) { kernels = all_kernels[level]; }

EXPORT struct pool *motley_pool_open(int32_t threads) { return pool_open(threads); }

EXPORT void motley_pool_stop(struct pool *pool) { pool_stop(pool); }

EXPORT void motley_pool_free(struct pool *pool) { pool_free(pool); }
