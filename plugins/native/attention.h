/* One token's attention to what is cached: between attention.c and the kernels. */
#ifndef MOTLEY_ATTENTION_H
#define MOTLEY_ATTENTION_H
#include <stdint.h>

enum { SIGHT = 128 }; /* positions that are attended to at a time */

/* SHARED with library.py. `size` is that of a head; `turned` the number of angles, half of its dimensions that turn. */
struct attention {
    struct pool *pool;
    const float *qkv; /* [(heads + 2 * kv_heads) * size] */
    float *keys;      /* [kv_heads, capacity, size] */
    float *values;    /* the same */
    const float *cos; /* [places, turned] */
    const float *sin; /* the same */
    const int64_t *position;
    const float *sinks; /* [heads], a logit each that is no position's; or NULL */
    float *y;           /* [heads * size] */
    int64_t heads, kv_heads, size, capacity, places, turned, window;
    float scale;
    float soft_cap; /* scores are cap * tanh(score / cap); 0: they are not */
};

/* An attention under way, in stretches of SIGHT positions, the last of which may be shorter. */
struct attending {
    struct attention a;
    int64_t group;      /* heads that share keys and values */
    int64_t wide;       /* a head's size, filled up to whole sixteens */
    int64_t position;   /* of the token: the last that it sees */
    int64_t first;      /* position that it sees */
    int64_t stretches;
    float *q;           /* [heads, wide] */
    float *largest;     /* score: [stretches, heads]; then what a stretch's sums are weighed with */
    float *sums;        /* of exponentials: the same */
    float *sights;      /* sums of weighed values: [stretches, heads, wide] */
};
#endif
