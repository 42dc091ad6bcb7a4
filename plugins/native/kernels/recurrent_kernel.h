/* What the kernels of recurrent.c have in common, of one level. */
#define ABREAST_VALUES 4 /* vectors of a state's columns at a time */

/* log(1 + e) of e from 0 to 1: twice the inverse tanh of e / (2 + e). */
static float log_of_more(float e) {
    const double t = (double)e / (2.0 + (double)e), s = t * t;
    double sum = 1.0 / 17;
    for (int n = 15; n > 0; n -= 2) sum = sum * s + 1.0 / n;
    return (float)(2 * t * sum);
}

ALWAYS float sigmoid_of(float x) { return open_gate(all_lanes(1), all_lanes(x))[0]; }

/* The sum of squares of a head, as a norm's. */
ALWAYS float squares_of(const float *x, int64_t size) {
    floats squares[PARTS][TILE];
    float sum;
    UNROLL for (int p = 0; p < PARTS; p++) squares[p][0] = (floats){0};
    for (int64_t i = 0; i < size; i += LANES_IN_ALL)
        UNROLL for (int p = 0; p < PARTS; p++) {
            const int64_t at = i + p * LANES, left = size - at;
            if (left <= 0) continue;
            const floats value = load_floats(x + at, left);
            squares[p][0] = fused(value, value, squares[p][0]);
        }
    add_lanes(squares, 1, &sum);
    return sum;
}

ALWAYS void scale_by(float *x, int64_t size, float factor) {
    for (int64_t i = 0; i < size; i += LANES) store_floats(x + i, load_floats(x + i, size - i) * factor, size - i);
}

/* Of x, without overflow. */
static float softplus(float x) {
    return (x > 0 ? x : 0) + log_of_more(exponential(all_lanes(x < 0 ? x : -x))[0]);
}

/* Some columns of a row after the convolution. */
ALWAYS void convolve(const struct recurring *now, int64_t row, int64_t column, int64_t size, float *to) {
    const struct recurrent *d = now->d;
    for (int64_t i = 0; i < size; i += LANES) {
        floats sum = {0};
        if (d->filter_bias) sum = load_floats(d->filter_bias + column + i, size - i);
        for (int64_t tap = 0; tap < d->reach; tap++) {
            const float *from = recurrent_columns(now, row - d->reach + 1 + tap, column) + i;
            sum = fused(load_floats(d->filters + tap * d->columns + column + i, size - i), load_floats(from, size - i),
                        sum);
        }
        store_floats(to + i, open_gate(sum, sum), size - i);
    }
}

/* The state of a head that a row changes: from the row on that is not sure, a copy of it. */
ALWAYS float *state_of(const struct recurring *now, int64_t head, int64_t row, float *state) {
    const int64_t size = now->d->key_size * now->d->value_size;
    if (row != now->sure) return state;
    float *copy = now->scratch + head * size;
    memcpy(copy, state, (size_t)size * 4);
    return copy;
}
