/* Which positions rows see: those that an indexer scores best. Between choosing.c and the kernels. */
#ifndef MOTLEY_CHOOSING_H
#define MOTLEY_CHOOSING_H
#include "attention.h"

/* SHARED with library.py. The index keys of one layer, and rows that choose by them. */
struct choice {
    struct attention attention; /* spans and caches, of one head of keys alone; its qkv, y and what follows are not used */
    const float *q;             /* [rows, heads * size] */
    const float *k;             /* [rows, size] */
    const float *weights;       /* [rows, heads] */
    int64_t *chosen;            /* [rows, count]: positions, ascending, then -1 */
    int64_t count;
};

/* At most ABREAST rows of one span that choose, under way. Query r * heads + h is head h of row r. */
struct choosing {
    const struct choice *c;
    struct piece piece; /* whose stretches are all from position 0 on */
    float *totals;      /* scores: [rows, stretches * SIGHT] */
};
#endif
