/* Layers with recurrent states, which are read and changed by rows of several sequences: see recurrent.c. */
#ifndef MOTLEY_RECURRENT_H
#define MOTLEY_RECURRENT_H
#include <stdint.h>

enum { WIDEST_HEAD = 512 };    /* SHARED with plugins/recurrent.py. Elements of a head at most. */
enum { COLUMNS_OF_JOB = 256 }; /* of a short convolution */

/* SHARED with recurrent.py. */
enum recurrence { GATED_DELTA, STATE_SPACE, SHORT_CONVOLUTION, DILATED_CONVOLUTION };

/* SHARED with structs.py. Rows that are consecutive tokens of one sequence. */
struct recurrent_span {
    int64_t row, rows; /* the first of them, and how many */
    int64_t position;  /* of the first of them */
    int64_t slot;      /* where the sequence's state is */
    int64_t guesses;   /* how many of the rows, the last ones, leave the state as it is before them */
};

/* SHARED with structs.py. */
struct recurrent_spans {
    const struct recurrent_span *all;
    int64_t count;
};

/* SHARED with structs.py. A row of what the convolution sees has `columns` elements: the first of `first`, then those
 * of `second`. */
struct recurrent {
    struct pool *pool;
    const struct recurrent_spans *spans; /* every call reads them again */
    const float *first;   /* [rows, first_stride]: first_columns that are convolved, and behind them what opens gates */
    const float *second;  /* [rows, columns - first_columns]; may be null */
    const float *gates;   /* [rows, gate_columns]; may be null */
    const float *filters; /* [reach, columns]; of a dilated convolution [(reach - 1) / dilation + 1, columns] */
    const float *filter_bias; /* [columns]; may be null */
    const float *rate;    /* [heads], e^decay */
    const float *bias;    /* [heads, decays]; state space: [heads] */
    const float *gain;    /* gated delta: [value_size]; state space: [heads], how much of its input a head adds */
    float *states;        /* [slots, heads, key_size, value_size] */
    float *recent;        /* [slots, reach - 1, columns]: rows that the next one's convolution sees */
    float *guessed;       /* [slots, most_guesses, columns + gate_columns]: rows that were guessed */
    int64_t *marks;       /* [slots, 2]: the position that a state stands before; how many rows have been guessed */
    float *y;             /* [rows, width] */
    int64_t kind, rows, slots, heads, group, key_size, value_size, columns, first_columns, first_stride, gate_columns;
    int64_t reach, dilation, most_guesses, width;
    int64_t decays;  /* gated delta: numbers by which a head's state decays: 1, or key_size, each of a row of it */
    int64_t squashed; /* gated delta: gates are opened by s(z), not by z * s(z) */
    float epsilon, least, most; /* of a norm; bounds of a state space's steps */
    float written; /* gated delta: how much of a value is written at most */
    float floor;   /* gated delta: the logarithm of what is left of a state at least; 0: there is none */
};

/* A span under way: first `before` rows that were guessed and turned out to be right, then its own; the state changes
 * up to the row that is `sure`. */
struct recurring {
    const struct recurrent *d;
    const struct recurrent_span *span;
    int64_t before, sure;
    float *scratch; /* [heads, key_size, value_size], for states beyond that */
};
#endif
