/* What is done to rows of float32, one by one: between rows.c and the kernels. */
#ifndef MOTLEY_ROWS_H
#define MOTLEY_ROWS_H
#include <stdint.h>

/* SHARED with structs.py. y[rows, columns] = t / sqrt(mean(t^2) + epsilon) * weight + bias, of t = total = x * factor + skip,
 * or of t = total - mean(total). */
struct norm {
    const float *x;
    const float *skip; /* or NULL */
    const float *weight;
    const float *bias; /* or NULL */
    float *y;
    float *total; /* or NULL; may be x or skip */
    int64_t rows, columns;
    float epsilon;
    float factor;    /* without skip, 1 */
    int32_t centred; /* whether the mean is subtracted */
};

enum { PARTS_OF_HEADS = 3 };

/* SHARED with structs.py. Parts of rows, as queries, keys and values are, to lie side by side: the heads of a part are
 * normed, each by itself, or copied. */
struct head_norms {
    const float *x;                     /* [rows, width] */
    float *y;                           /* [rows, size * heads of all parts] */
    const float *gains[PARTS_OF_HEADS]; /* [size] of each part; or NULL: it is copied */
    int64_t heads[PARTS_OF_HEADS];
    int64_t firsts[PARTS_OF_HEADS]; /* where each part begins in a row of x */
    int64_t rows, size, width;
    float epsilon;
};

enum activation { SILU, GELU_TANH, CLAMPED, SIGMOID };

/* SHARED with structs.py. y[rows, columns] of gate and up, rows of as many columns that are so far apart: see rows.c. */
struct gated {
    const float *gate;
    const float *up;
    float *y;
    int64_t rows, columns, gate_stride, up_stride;
    int32_t activation;
    float gate_limit, up_limit; /* SILU: the largest that a gate is, and that up is in magnitude; infinite: any */
};

enum { MOST_STREAMS = 8 };

/* SHARED with structs.py. y[rows, columns] of logits of S, 2 S or 2 S + S S columns, for S residual streams: see rows.c. */
struct stream_gates {
    const float *logits, *scale, *base;
    float *y;
    int64_t rows, columns, streams;
    float epsilon, written, least;
    int32_t rounds;
};

/* SHARED with structs.py. Of S residual streams x[rows, S * columns] and gates, as struct stream_gates makes them: what is
 * read, y[rows, columns]; or streams again, y as x, of which each gets some of own[rows, columns]. */
struct streams {
    const float *x, *gates;
    const float *own; /* or NULL: streams are read */
    float *y;
    int64_t rows, columns, streams, gates_stride; /* stride 0: all rows have the same gates */
    int32_t mixes;
};
#endif
