/* Which positions rows see: those that an indexer scores best. Between choosing.c and the kernels. */
#ifndef MOTLEY_CHOOSING_H
#define MOTLEY_CHOOSING_H
#include "attention.h"

/* SHARED with structs.py. The index keys of one layer, and rows that choose by them. With `pooling`, a cached row is a key
 * and its gates, and the row of the last position of a block is the block's key and zeros. With `gain`, a cached row is a
 * key that is not turned, and that of the last position of a block is the block's key, turned. */
struct choice {
    struct attention attention; /* spans and caches, of one head of keys alone; its qkv, y and what follows are not used */
    const float *q;             /* [rows, heads * query_size()] */
    const float *k;             /* [rows, size] */
    const float *weights;       /* [rows, heads]; or NULL: each head chooses, or with `gain` all count alike */
    const float *pooling;       /* [block, size / 2], what is added to gates; or NULL: keys are not pooled by gates */
    const float *gain;          /* [size], of the norm of keys that are means of blocks; or NULL: they are none */
    int64_t *chosen;            /* [rows, lists, copies, count]: positions, ascending, then -1 */
    int64_t count;              /* of whole blocks, and where keys are pooled of block - 1 positions behind them */
    int64_t block;              /* positions that are chosen together, from a multiple of it on */
    int64_t latest;             /* blocks up to a row's own that are always chosen */
    int64_t copies;             /* how often each list is told */
    float epsilon;              /* of the norm */
};

static inline int64_t query_size(const struct choice *c) { return c->attention.size / (c->pooling ? 2 : 1); }

/* Whether blocks have keys of their own. */
static inline int pools(const struct choice *c) { return c->pooling || c->gain; }

/* How many keys are scored of so many positions. */
static inline int64_t keys_of(const struct choice *c, int64_t positions) {
    return pools(c) ? positions / c->block : positions;
}

/* How many lists are chosen for a row: one, or one for each head. */
static inline int64_t lists_of(const struct choice *c) { return c->weights || c->gain ? 1 : c->attention.heads; }

/* At most ABREAST rows of one span that choose, under way. Query r * heads + h is head h of row r. */
struct choosing {
    const struct choice *c;
    struct piece piece; /* whose stretches are all from position 0 on; of pooled keys they are of blocks */
    float *totals;      /* scores: [rows, lists, stretches * SIGHT] */
};
#endif
