/* Mamba2's state space of recurrent.c, of one level. */

/* Change `count` vectors of a state's columns by a row, and find the result's; the last may be a part of one. */
ALWAYS void scan(float *state, int64_t keys, int64_t wide, int64_t left, const int count, const float *b,
                 const float *c, const float *x, float decay, float step, float *to) {
    floats found[ABREAST_VALUES], written[ABREAST_VALUES];
    UNROLL for (int v = 0; v < count; v++) {
        written[v] = load_floats(x + v * LANES, left - v * LANES) * step;
        found[v] = (floats){0};
    }
    for (int64_t i = 0; i < keys; i++)
        UNROLL for (int v = 0; v < count; v++) {
            float *at = state + i * wide + v * LANES;
            const floats now = fused(all_lanes(b[i]), written[v], load_floats(at, left - v * LANES) * decay);
            store_floats(at, now, left - v * LANES);
            found[v] = fused(all_lanes(c[i]), now, found[v]);
        }
    UNROLL for (int v = 0; v < count; v++) store_floats(to + v * LANES, found[v], left - v * LANES);
}

/* All rows of a span, for one head. */
static void recur_state_space(const struct recurring *now, int64_t head) {
    const struct recurrent *d = now->d;
    const int64_t keys = d->key_size, wide = d->value_size, inputs = d->first_columns;
    float x[WIDEST_HEAD], b[WIDEST_HEAD], c[WIDEST_HEAD], found[WIDEST_HEAD];
    float *state = d->states + (now->span->slot * d->heads + head) * keys * wide;
    for (int64_t row = 0; row < now->before + now->span->rows; row++) {
        state = state_of(now, head, row, state);
        convolve(now, row, head * wide, wide, x);
        convolve(now, row, inputs + head / d->group * keys, keys, b);
        convolve(now, row, inputs + (d->heads / d->group + head / d->group) * keys, keys, c);
        float step = softplus(recurrent_gates(now, row)[head] + d->bias[head]);
        step = step < d->least ? d->least : step > d->most ? d->most : step;
        const float decay = exponential(all_lanes(-(d->rate[head] * step)))[0];
        for (int64_t i = 0; i < wide; i += ABREAST_VALUES * LANES) {
            const int64_t left = wide - i;
            if (left > (ABREAST_VALUES - 1) * LANES) {
                scan(state + i, keys, wide, left, ABREAST_VALUES, b, c, x + i, decay, step, found + i);
                continue;
            }
            for (int64_t at = i; at < wide; at += LANES)
                scan(state + at, keys, wide, wide - at, 1, b, c, x + at, decay, step, found + at);
        }
        if (row < now->before) continue;
        const float *z = recurrent_first(now, row) + inputs + head * wide;
        float *y = d->y + (now->span->row + row - now->before) * d->width + head * wide;
        for (int64_t i = 0; i < wide; i += LANES) {
            const floats gate = load_floats(z + i, wide - i);
            const floats sum =
                fused(all_lanes(d->gain[head]), load_floats(x + i, wide - i), load_floats(found + i, wide - i));
            store_floats(y + i, sum * open_gate(gate, gate), wide - i);
        }
    }
}
