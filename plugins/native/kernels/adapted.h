/* What adapters add to a product: between adapted.c and the kernels. */
#ifndef MOTLEY_ADAPTED_H
#define MOTLEY_ADAPTED_H
#include <stdint.h>

struct pool;

enum factor_kind { FACTOR_FP32, FACTOR_FP16, FACTOR_BF16 }; /* SHARED with structs.py */

/* SHARED with adapted.py. How far the panels go in which matrices lie. */
enum { PANEL_ROWS = 4, PANEL_STRETCH = 16, PANEL_COLUMNS = 64 };

/* SHARED with structs.py. What an adapter has for a part of a product, each matrix in the order in which it is read:
 * down[rank, columns] by panels of PANEL_ROWS rows (the last one has what is left), in each PANEL_STRETCH columns of one
 * row after another; up[width, rank] by panels of PANEL_COLUMNS of its rows, in each column by column. Zeros fill up
 * columns of down and rows of up that are none.
 *
 * Without an up, down[width, columns] is what the part is multiplied with in place of the base's matrix. */
struct factors {
    const void *down, *up;
    int64_t rank; /* 0: nothing */
    int32_t down_kind, up_kind;
};

/* SHARED with structs.py. Columns of y, and the factors that the adapter of each slot has for them. */
struct adapted_part {
    const struct factors *slots;
    int64_t first, width;
};

/* SHARED with structs.py. Rows of a step whose adapter is in a slot: `count` of the step's list of rows. */
struct adapted_group {
    int64_t slot, first, count;
};

/* SHARED with structs.py. Whose rows are whose in a step. */
struct adapted_rows {
    const int64_t *rows;
    const struct adapted_group *groups;
    int64_t count; /* of groups */
};

/* SHARED with structs.py. y[tokens, width] += up @ (down @ x[tokens, columns]), each row with its own adapter's. */
struct adapted {
    struct pool *pool;
    const struct adapted_rows *step;
    const struct adapted_part *parts;
    const float *x;
    float *y;
    int64_t tokens, columns, width, count; /* of parts */
};

/* What is computed of one group's rows and one part at a time, see adapted.c: between[tokens, rank], of its columns in
 * [begin, end), or y[rows, ..], likewise; y, too, of factors without an up. */
struct adapted_piece {
    const struct factors *own;
    const float *x;
    float *between, *y; /* y at the part's first column */
    const int64_t *rows;
    int64_t tokens, columns, y_apart, begin, end;
};
#endif
