/* Gated DeltaNet of recurrent.c, of one level. */
/* Change `count` vectors of a state's columns by a row, and find the result's; the last may be a part of one. All rows
 * of the state decay alike, but where each has one of `decays`. */
ALWAYS void change(float *state, int64_t keys, int64_t wide, int64_t left, const int count, const float *q,
                   const float *k, const float *v, float decay, const float *decays, float write, float *to) {
    floats found[ABREAST_VALUES], delta[ABREAST_VALUES];
    UNROLL for (int c = 0; c < count; c++) found[c] = (floats){0};
    for (int64_t i = 0; i < keys; i++) {
        const floats read = all_lanes(decays ? k[i] * decays[i] : k[i]);
        UNROLL for (int c = 0; c < count; c++)
            found[c] = fused(read, load_floats(state + i * wide + c * LANES, left - c * LANES), found[c]);
    }
    UNROLL for (int c = 0; c < count; c++) {
        const floats known = decays ? found[c] : found[c] * decay;
        delta[c] = (load_floats(v + c * LANES, left - c * LANES) - known) * write;
        found[c] = (floats){0};
    }
    for (int64_t i = 0; i < keys; i++)
        UNROLL for (int c = 0; c < count; c++) {
            float *at = state + i * wide + c * LANES;
            const floats kept = load_floats(at, left - c * LANES) * (decays ? decays[i] : decay);
            const floats now = fused(all_lanes(k[i]), delta[c], kept);
            store_floats(at, now, left - c * LANES);
            found[c] = fused(all_lanes(q[i]), now, found[c]);
        }
    UNROLL for (int c = 0; c < count; c++) store_floats(to + c * LANES, found[c], left - c * LANES);
}

/* Change all columns of a state by a row, and find the whole result. */
ALWAYS void change_all(float *state, int64_t keys, int64_t wide, const float *q, const float *k, const float *v,
                       float decay, const float *decays, float write, float *found) {
    for (int64_t i = 0; i < wide; i += ABREAST_VALUES * LANES) {
        const int64_t left = wide - i;
        if (left > (ABREAST_VALUES - 1) * LANES) {
            change(state + i, keys, wide, left, ABREAST_VALUES, q, k, v + i, decay, decays, write, found + i);
            continue;
        }
        for (int64_t at = i; at < wide; at += LANES)
            change(state + at, keys, wide, wide - at, 1, q, k, v + at, decay, decays, write, found + at);
    }
}

/* By how much each row of a state decays where there is a floor: exp(floor * s((speed + bias) * rate)). */
ALWAYS void floored_decays_of(const float *speed, const float *bias, float rate, float floor, int64_t count,
                              float *decay) {
    for (int64_t i = 0; i < count; i += LANES) {
        const floats sum = load_floats(speed + i, count - i) + load_floats(bias + i, count - i);
        store_floats(decay + i, exponential(open_gate(all_lanes(floor), sum * rate)), count - i);
    }
}

/* By how much each row of a state decays, from what says how fast: exp(-(rate * softplus(speed + bias))). */
ALWAYS void decays_of(const float *speed, const float *bias, float rate, int64_t count, float *decay) {
    float sums[WIDEST_HEAD], logs[WIDEST_HEAD];
    for (int64_t i = 0; i < count; i += LANES) {
        const floats sum = load_floats(speed + i, count - i) + load_floats(bias + i, count - i);
        store_floats(sums + i, sum, count - i);
        store_floats(logs + i, exponential(__builtin_elementwise_min(sum, -sum)), count - i);
    }
    for (int64_t i = 0; i < count; i++) logs[i] = (sums[i] > 0 ? sums[i] : 0) + log_of_more(logs[i]);
    for (int64_t i = 0; i < count; i += LANES)
        store_floats(decay + i, exponential(-(load_floats(logs + i, count - i) * rate)), count - i);
}

/* Change all columns of a state, of which each row decays by itself, by as many numbers of `speed`. It is apart, so
 * that the usual case is compiled as if it were alone. */
static __attribute__((noinline)) void change_by_rows(float *state, int64_t keys, int64_t wide, const float *q,
                                                     const float *k, const float *v, const float *speed,
                                                     const float *bias, float rate, float floor, float write,
                                                     float *found) {
    float decays[WIDEST_HEAD];
    if (floor != 0)
        floored_decays_of(speed, bias, rate, floor, keys, decays);
    else
        decays_of(speed, bias, rate, keys, decays);
    change_all(state, keys, wide, q, k, v, 0, decays, write, found);
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
        const float *gates = recurrent_gates(now, row), *speed = gates + values + head * d->decays;
        const float write = sigmoid_of(gates[head]) * d->written;
        if (d->decays > 1) {
            const float *bias = d->bias + head * d->decays;
            change_by_rows(state, keys, wide, q, k, v, speed, bias, d->rate[head], d->floor, write, found);
        } else {
            float decay;
            if (d->floor != 0)
                floored_decays_of(speed, d->bias + head, d->rate[head], d->floor, 1, &decay);
            else
                decay = exponential(all_lanes(-(d->rate[head] * softplus(*speed + d->bias[head]))))[0];
            change_all(state, keys, wide, q, k, v, decay, 0, write, found);
        }
        if (row < now->before) continue;
        const int squashed = d->squashed != 0;
        const float *z = recurrent_first(now, row) + d->first_columns + head * wide;
        float *y = d->y + (now->span->row + row - now->before) * d->width + head * wide;
        const float scale =
            1 / __builtin_elementwise_sqrt(all_lanes(squares_of(found, wide) / (float)wide + d->epsilon))[0];
        for (int64_t i = 0; i < wide; i += LANES) {
            const floats gate = load_floats(z + i, wide - i);
            const floats normed = load_floats(found + i, wide - i) * scale * load_floats(d->gain + i, wide - i);
            store_floats(y + i, normed * open_gate(squashed ? all_lanes(1) : gate, gate), wide - i);
        }
    }
}
