/* What adapters add to a product: between adapted.c and the kernels. */
#ifndef MOTLEY_ADAPTED_H
#define MOTLEY_ADAPTED_H
#include <stdint.h>

struct pool;

enum factor_kind { FACTOR_FP32, FACTOR_FP16, FACTOR_BF16 }; /* SHARED with library.py */

/* SHARED with library.py. What an adapter has for a part of a product: down[rank, columns] and up[width, rank]. */
struct factors {
    const void *down, *up;
    int64_t rank; /* 0: nothing */
    int32_t down_kind, up_kind;
};

/* SHARED with library.py. Columns of y, and the factors that the adapter of each slot has for them. */
struct adapted_part {
    const struct factors *slots;
    int64_t first, width;
};

/* SHARED with library.py. Rows of a step whose adapter is in a slot: `count` of the step's list of rows. */
struct adapted_group {
    int64_t slot, first, count;
};

/* SHARED with library.py. Whose rows are whose in a step. */
struct adapted_rows {
    const int64_t *rows;
    const struct adapted_group *groups;
    int64_t count; /* of groups */
};

/* SHARED with library.py. y[tokens, width] += up @ (down @ x[tokens, columns]), each row with its own adapter's. */
struct adapted {
    struct pool *pool;
    const struct adapted_rows *step;
    const struct adapted_part *parts;
    const float *x;
    float *y;
    int64_t tokens, columns, width, count; /* of parts */
};

/* Some rows of a matrix of factors, [.., columns], by some rows of x: one row of y for each of these. */
struct small_product {
    const void *matrix;
    int64_t columns, row, end; /* of the matrix's rows, those in [row, end) */
    const float *x;
    float *y;
    int64_t x_apart, y_apart;
    const int64_t *x_rows, *y_rows; /* NULL: they follow each other */
    int64_t tokens;
    int32_t kind;
    int32_t adds; /* to y, in the place of overwriting it */
};
#endif
