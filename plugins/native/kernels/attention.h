/* Attention of rows of several sequences to what is cached in blocks: between attention.c and the kernels. */
#ifndef MOTLEY_ATTENTION_H
#define MOTLEY_ATTENTION_H
#include <stdint.h>

enum {
    SIGHT = 128, /* positions that are attended to at a time */
    ABREAST = 16 /* rows of a span that attend at a time */
};

/* SHARED with attention.py. What keys and values are cached as. */
enum format { FP32, FP16, INT8 };

/* SHARED with structs.py. What a rotary embedding turns by at each position. */
struct table {
    const float *cos; /* [places, turned] */
    const float *sin; /* the same */
    int64_t places, turned;
};

/* SHARED with structs.py. Rows of qkv that are consecutive tokens of one sequence. */
struct span {
    int64_t row, rows;     /* the first of them, and how many */
    int64_t position;      /* of the first of them */
    const int32_t *blocks; /* position p is in blocks[p / tokens], at place p % tokens */
    int64_t count;         /* of blocks */
    const int32_t *away;   /* stretches, ascending, whose blocks are not read: their summaries are told */
    int64_t away_count;
    const float *told; /* [away_count, rows, heads, size + 2], as a question has its summaries */
};

/* SHARED with structs.py. */
struct spans {
    const struct span *all;
    const struct table *tables; /* [count, ropes] */
    int64_t count, ropes;
};

/* SHARED with structs.py. Consecutive numbers of blocks, and what is cached in these. */
struct tier {
    uint8_t *keys;       /* [count, kv_heads, tokens, size] of the format */
    uint8_t *values;     /* the same */
    float *key_scales;   /* of INT8: [count, kv_heads, tokens] */
    float *value_scales; /* the same */
    int64_t first, count;
};

/* SHARED with structs.py. `size` is that of a head; `turned` the number of angles, half of its dimensions that turn. */
struct attention {
    struct pool *pool;
    const struct spans *spans; /* every call reads them again */
    const float *qkv;          /* [rows, (heads + 2 * kv_heads) * size], or (heads + kv_heads) if keys are values */
    struct tier near;          /* blocks that are written to, from number 0 on */
    struct tier far;           /* those after them, which are only read; perhaps none */
    const float *sinks;        /* [heads], a logit each that is no position's; or NULL */
    const float *q_gain;       /* [size], what turned queries are multiplied by; or NULL */
    const float *k_gain;       /* the same of keys */
    const float *warmth;       /* [context], what queries of a position are multiplied by besides; or NULL */
    const int64_t *chosen;     /* [rows, kv_heads, choices], which positions heads of keys see; or NULL: all */
    float *y;                  /* [rows, heads * size] */
    int64_t rows, heads, kv_heads, size, tokens, turned, window;
    int64_t rope;    /* which of a span's tables */
    int64_t context; /* no position is as large */
    int64_t choices; /* rows that see no more positions than these see all; the others' are chosen: ascending, then -1 */
    int32_t format;  /* an enum format */
    int32_t keys_alone; /* the cached keys are the values too: a tier's `values` are its `keys` */
    int32_t chunked;    /* a row sees no positions before the last multiple of `window` */
    float scale;
    float soft_cap;      /* scores are cap * tanh(score / cap); 0: they are not */
    void (*await_told)(void); /* called once what is here is attended to, before what is told is read; or NULL */
};

/* The first position that is seen from one. */
static inline int64_t first_seen(const struct attention *a, int64_t position) {
    if (a->chunked) return position / a->window * a->window;
    return a->window && a->window <= position ? position - a->window + 1 : 0;
}

/* SHARED with structs.py. Which summaries of stretches of one sequence are wanted, for rows that come after them. */
struct question {
    const struct attention *a; /* of which spans, qkv, sinks and y are not read */
    const float *queries;      /* [rows, heads, size], turned and scaled */
    const int32_t *blocks;     /* as a span's; those of the stretches are read */
    const int32_t *stretches;  /* [count], ascending */
    float *summaries; /* [count, rows, heads, size + 2]: sums of weighed values, largest score, sum of exponentials */
    int64_t position; /* of the first of the rows */
    int64_t rows, block_count, count;
};

/* The attention of at most ABREAST rows of one span, under way. A *query* is a row's head: query
 * (k * rows + r) * group + h is head k * group + h of row r. Stretch s is of the positions from (first + s) * SIGHT on,
 * of which a query may see some, all or none; but where stretches are chosen, these have those numbers. Where positions
 * are picked, stretch s is of a head's picked[s * SIGHT] and those that follow it there, up to as many as are chosen. */
struct piece {
    const struct attention *a;
    const struct table *table; /* or NULL: nothing turns */
    const int32_t *blocks;
    int64_t last;      /* number in `blocks` of the last one that is seen */
    int64_t row, rows; /* the first of the rows, and how many */
    int64_t position;  /* of the first of them */
    int64_t group;     /* heads that share keys and values */
    int64_t wide;      /* a head's size, filled up to whole sixteens */
    int64_t first, stretches;
    const int32_t *chosen;    /* [stretches], or NULL */
    const int64_t *picked;    /* [kv_heads, choices] that a single row sees, in place of those of stretches, or NULL */
    const struct span *span;  /* whose summaries of some stretches are told, or NULL */
    int64_t done;             /* rows of the span before those of this piece */
    float *q;          /* [queries, wide] */
    float *sinks;      /* [queries] */
    float *largest;    /* score: [stretches, queries]; then what a stretch's sums are weighed with */
    float *sums;       /* of exponentials: the same */
    float *sights;     /* sums of weighed values: [stretches, queries, wide] */
};

/* Of attention.c: whether there are the rows, the blocks and the angles of span n; and its table, or NULL. */
int attention_fits(const struct attention *a, int64_t n);
const struct table *attention_table(const struct attention *a, int64_t n);
#endif
