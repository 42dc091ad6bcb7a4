/* What is done to rows of float32, one by one: between rows.c and the kernels. */
#ifndef MOTLEY_ROWS_H
#define MOTLEY_ROWS_H
#include <stdint.h>

/* SHARED with library.py. y[rows, columns] = total / sqrt(mean(total^2) + epsilon) * weight, of total = x + skip. */
struct norm {
    const float *x;
    const float *skip; /* or NULL */
    const float *weight;
    float *y;
    float *total; /* or NULL; may be x or skip */
    int64_t rows, columns;
    float epsilon;
};

enum activation { SILU, GELU_TANH, CLAMPED, SIGMOID };

/* SHARED with library.py. y[rows, columns] of gate and up, rows of as many columns that are `stride` apart: see rows.c.
 */
struct gated {
    const float *gate;
    const float *up;
    float *y;
    int64_t rows, columns, stride;
    int32_t activation;
};
#endif
