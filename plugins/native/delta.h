/* The recurrent states of gated DeltaNet layers, read and changed by rows of several sequences: see delta.c. */
#ifndef MOTLEY_DELTA_H
#define MOTLEY_DELTA_H
#include <stdint.h>

enum { WIDEST_HEAD = 512 }; /* SHARED with delta.py. Elements of a head at most. */

/* SHARED with library.py. Rows that are consecutive tokens of one sequence. */
struct delta_span {
    int64_t row, rows; /* the first of them, and how many */
    int64_t position;  /* of the first of them */
    int64_t slot;      /* where the sequence's state is */
    int64_t guesses;   /* how many of the rows, the last ones, leave the state as it is before them */
};

/* SHARED with library.py. */
struct delta_spans {
    const struct delta_span *all;
    int64_t count;
};

/* SHARED with library.py. `columns` are those of q, k and v, side by side; `group` value heads read a key head. */
struct delta {
    struct pool *pool;
    const struct delta_spans *spans; /* every call reads them again */
    const float *qkvz;    /* [rows, columns + values * value_size] */
    const float *ba;      /* [rows, 2 * values] */
    const float *filters; /* [reach, columns] */
    const float *rate;    /* [values], e^decay */
    const float *bias;    /* [values] */
    const float *gain;    /* [value_size] */
    float *states;        /* [slots, values, key_size, value_size] */
    float *recent;        /* [slots, reach - 1, columns]: rows that the next one's convolution sees */
    float *guessed;       /* [slots, most_guesses, columns + 2 * values]: q, k, v, b and a of rows that were guessed */
    int64_t *marks;       /* [slots, 2]: the position that a state stands before; how many rows have been guessed */
    float *y;             /* [rows, values * value_size] */
    int64_t rows, slots, keys, group, key_size, value_size, columns, reach, most_guesses;
    float epsilon;
};

/* A span under way: first `before` rows that were guessed and turned out to be right, then its own; the state changes
 * up to the row that is `sure`. */
struct recurring {
    const struct delta *d;
    const struct delta_span *span;
    int64_t before, sure;
    float *scratch; /* [values, key_size, value_size], for states beyond that */
};
#endif
