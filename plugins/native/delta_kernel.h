/* Gated DeltaNet of recurrent.c, of one level. */
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
static void recur_delta(const struct recurring *now, int64_t head) {
    const struct recurrent *d = now->d;
    const int64_t keys = d->key_size, wide = d->value_size, values = d->heads;
    float q[WIDEST_HEAD], k[WIDEST_HEAD], v[WIDEST_HEAD], found[WIDEST_HEAD];
    float *state = d->states + (now->span->slot * values + head) * keys * wide;
    for (int64_t row = 0; row < now->before + now->span->rows; row++) {
        state = state_of(now, head, row, state);
        convolve(now, row, head / d->group * keys, keys, q);
        convolve(now, row, (values / d->group + head / d->group) * keys, keys, k);
        convolve(now, row, 2 * values / d->group * keys + head * wide, wide, v);
        scale_by(q, keys, 1 / __builtin_elementwise_sqrt(all_lanes(squares_of(q, keys) + 1e-6f))[0]);
        scale_by(k, keys, 1 / __builtin_elementwise_sqrt(all_lanes(squares_of(k, keys) + 1e-6f))[0]);
        scale_by(q, keys, 1 / __builtin_elementwise_sqrt(all_lanes((float)keys))[0]);
        const float *gates = recurrent_gates(now, row), soft = softplus(gates[values + head] + d->bias[head]);
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
        const float *z = recurrent_first(now, row) + d->first_columns + head * wide;
        float *y = d->y + (now->span->row + row - now->before) * d->width + head * wide;
        const float scale =
            1 / __builtin_elementwise_sqrt(all_lanes(squares_of(found, wide) / (float)wide + d->epsilon))[0];
        for (int64_t i = 0; i < wide; i += LANES) {
            const floats gate = load_floats(z + i, wide - i);
            const floats normed = load_floats(found + i, wide - i) * scale * load_floats(d->gain + i, wide - i);
            store_floats(y + i, normed * open_gate(gate, gate), wide - i);
        }
    }
}
