/* The kernel of delta.c, of one level. */
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

/* Some columns of q, k and v of a row after the convolution. */
ALWAYS void convolve(const struct recurring *now, int64_t row, int64_t column, int64_t size, float *to) {
    const struct delta *d = now->d;
    for (int64_t i = 0; i < size; i += LANES) {
        floats sum = {0};
        for (int64_t tap = 0; tap < d->reach; tap++) {
            const float *from = delta_row(now, row - d->reach + 1 + tap) + column + i;
            sum = fused(load_floats(d->filters + tap * d->columns + column + i, size - i), load_floats(from, size - i),
                        sum);
        }
        store_floats(to + i, open_gate(sum, sum), size - i);
    }
}

/* Change `count` vectors of a state's columns by a row, and find the result's; the last may be a part of one. */
ALWAYS void change(float *state, int64_t keys, int64_t wide, int64_t left, const int count, const float *q,
                   const float *k, const float *v, float decay, float write, float *to) {
    floats found[ABREAST_VALUES], delta[ABREAST_VALUES];
    UNROLL for (int c = 0; c < count; c++) found[c] = (floats){0};
    for (int64_t i = 0; i < keys; i++)
        UNROLL for (int c = 0; c < count; c++)
            found[c] = fused(all_lanes(k[i]), load_floats(state + i * wide + c * LANES, left - c * LANES), found[c]);
    UNROLL for (int c = 0; c < count; c++) {
        delta[c] = (load_floats(v + c * LANES, left - c * LANES) - found[c] * decay) * write;
        found[c] = (floats){0};
    }
    for (int64_t i = 0; i < keys; i++)
        UNROLL for (int c = 0; c < count; c++) {
            float *at = state + i * wide + c * LANES;
            const floats now = fused(all_lanes(k[i]), delta[c], load_floats(at, left - c * LANES) * decay);
            store_floats(at, now, left - c * LANES);
            found[c] = fused(all_lanes(q[i]), now, found[c]);
        }
    UNROLL for (int c = 0; c < count; c++) store_floats(to + c * LANES, found[c], left - c * LANES);
}

/* All rows of a span, for one value head. */
static void recur_rows(const struct recurring *now, int64_t head) {
    const struct delta *d = now->d;
    const int64_t keys = d->key_size, wide = d->value_size, values = d->keys * d->group;
    float q[WIDEST_HEAD], k[WIDEST_HEAD], v[WIDEST_HEAD], found[WIDEST_HEAD];
    float *state = d->states + (now->span->slot * values + head) * keys * wide;
    for (int64_t row = 0; row < now->before + now->span->rows; row++) {
        if (row == now->sure) {
            float *copy = now->scratch + head * keys * wide;
            memcpy(copy, state, (size_t)(keys * wide) * 4);
            state = copy;
        }
        convolve(now, row, head / d->group * keys, keys, q);
        convolve(now, row, (d->keys + head / d->group) * keys, keys, k);
        convolve(now, row, 2 * d->keys * keys + head * wide, wide, v);
        scale_by(q, keys, 1 / __builtin_elementwise_sqrt(all_lanes(squares_of(q, keys) + 1e-6f))[0]);
        scale_by(k, keys, 1 / __builtin_elementwise_sqrt(all_lanes(squares_of(k, keys) + 1e-6f))[0]);
        scale_by(q, keys, 1 / __builtin_elementwise_sqrt(all_lanes((float)keys))[0]);
        const float *gates = delta_gates(now, row), speed = gates[values + head] + d->bias[head];
        const float size = speed < 0 ? -speed : speed;
        const float soft = (speed > 0 ? speed : 0) + log_of_more(exponential(all_lanes(-size))[0]);
        const float decay = exponential(all_lanes(-(d->rate[head] * soft)))[0], write = sigmoid_of(gates[head]);
        for (int64_t i = 0; i < wide; i += ABREAST_VALUES * LANES) {
            const int64_t left = wide - i;
            if (left > (ABREAST_VALUES - 1) * LANES) {
                change(state + i, keys, wide, left, ABREAST_VALUES, q, k, v + i, decay, write, found + i);
                continue;
            }
            for (int64_t at = i; at < wide; at += LANES)
                change(state + at, keys, wide, wide - at, 1, q, k, v + at, decay, write, found + at);
        }
        if (row < now->before) continue;
        const float *z = d->qkvz + (now->span->row + row - now->before) * (d->columns + values * wide) + d->columns +
                         head * wide;
        float *y = d->y + (now->span->row + row - now->before) * values * wide + head * wide;
        const float scale =
            1 / __builtin_elementwise_sqrt(all_lanes(squares_of(found, wide) / (float)wide + d->epsilon))[0];
        for (int64_t i = 0; i < wide; i += LANES) {
            const floats gate = load_floats(z + i, wide - i);
            const floats normed = load_floats(found + i, wide - i) * scale * load_floats(d->gain + i, wide - i);
            store_floats(y + i, normed * open_gate(gate, gate), wide - i);
        }
    }
}
