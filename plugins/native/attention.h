/* Attention of consecutive tokens to what is cached: between attention.c and the kernels. */
#ifndef MOTLEY_ATTENTION_H
#define MOTLEY_ATTENTION_H
#include <stdint.h>

enum {
    SIGHT = 128, /* positions that are attended to at a time */
    ABREAST = 16 /* tokens that attend at a time */
};

/* SHARED with library.py. `size` is that of a head; `turned` the number of angles, half of its dimensions that turn. */
struct attention {
    struct pool *pool;
    const float *qkv; /* [rows, (heads + 2 * kv_heads) * size] */
    float *keys;      /* [kv_heads, capacity, size] */
    float *values;    /* the same */
    const float *cos; /* [places, turned] */
    const float *sin; /* the same */
    const int64_t *position; /* of the first row; the others follow */
    const float *sinks; /* [heads], a logit each that is no position's; or NULL */
    float *y;           /* [rows, heads * size] */
    int64_t rows, heads, kv_heads, size, capacity, places, turned, window;
    float scale;
    float soft_cap; /* scores are cap * tanh(score / cap); 0: they are not */
};

/* Some rows' attention under way. A *query* is a row's head: query (k * rows + r) * group + h is head k * group + h of
 * row r. Stretch s is of the positions from (first + s) * SIGHT on, of which a query may see some, all or none. */
struct attending {
    struct attention a;
    int64_t row, rows;  /* the first of the rows, and how many */
    int64_t position;   /* of the first of them */
    int64_t group;      /* heads that share keys and values */
    int64_t wide;       /* a head's size, filled up to whole sixteens */
    int64_t first, stretches;
    float *q;           /* [queries, wide] */
    float *sinks;       /* [queries] */
    float *largest;     /* score: [stretches, queries]; then what a stretch's sums are weighed with */
    float *sums;        /* of exponentials: the same */
    float *sights;      /* sums of weighed values: [stretches, queries, wide] */
};
#endif
