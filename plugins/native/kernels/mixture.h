/* What a layer's experts make of few rows: between mixture.c and the kernels. */
#ifndef MOTLEY_MIXTURE_H
#define MOTLEY_MIXTURE_H
#include <stdint.h>

#include "matmul.h"

/* SHARED with structs.py. total[tokens, D] = base + the weighted sum of what the chosen experts make of x[tokens, K].
 *
 * An expert is two products and a gate between them: `first` makes gate and up, 2F columns, of K, `last` makes D of F.
 * There is one of each for every expert; they differ in nothing but codes, scales, zeros and bias, and have no operands. */
struct mixture {
    struct pool *pool;
    const struct matmul *first, *last;
    const float *x;
    const int64_t *chosen; /* [tokens, choices]: different ones in each row */
    const float *weights;  /* [tokens, choices] */
    const float *base;     /* or NULL: 0; may be total */
    float *total;
    int64_t experts, tokens, choices;
    int32_t activation;
    float gate_limit, up_limit; /* see struct gated */
};

/* Columns from `from` to `end` of a weighted sum of rows: y = base + weight * row + weight * row ..., in this order. */
struct weighing {
    const float *base; /* or NULL: 0 */
    const float *rows, *weights;
    const int32_t *which; /* of the rows, and of their weights */
    float *y;
    int64_t count, columns, from, end;
};
#endif
