/* The kernels of rows.c, and the sum of mixture.c, of one level. */

/* y -= mean, in place; the sum of what becomes of its squares, when `sum` is that of y. */
static float centre(float *y, int64_t columns, float sum) {
    const floats mean = all_lanes(sum / (float)columns);
    floats squares[PARTS][TILE];
    UNROLL for (int p = 0; p < PARTS; p++) squares[p][0] = (floats){0};
    for (int64_t i = 0; i < columns; i += LANES_IN_ALL)
        UNROLL for (int p = 0; p < PARTS; p++) {
            const int64_t at = i + p * LANES, left = columns - at;
            if (left <= 0) continue;
            store_floats(y + at, load_floats(y + at, left) - mean, left);
            const floats value = load_floats(y + at, left); /* lanes beyond the row are 0 again */
            squares[p][0] = fused(value, value, squares[p][0]);
        }
    add_lanes(squares, 1, &sum);
    return sum;
}

ALWAYS void normalise_row(const struct norm *norm, const float *x, const float *skip, float *y, float *total) {
    const int64_t columns = norm->columns;
    float sum;
    floats added[PARTS][TILE];
    UNROLL for (int p = 0; p < PARTS; p++) added[p][0] = (floats){0};
    for (int64_t i = 0; i < columns; i += LANES_IN_ALL)
        UNROLL for (int p = 0; p < PARTS; p++) {
            const int64_t at = i + p * LANES, left = columns - at;
            if (left <= 0) continue;
            floats value = load_floats(x + at, left);
            if (skip) value = value * norm->factor + load_floats(skip + at, left);
            if (total) store_floats(total + at, value, left);
            store_floats(y + at, value, left);
            added[p][0] = norm->centred ? added[p][0] + value : fused(value, value, added[p][0]);
        }
    add_lanes(added, 1, &sum);
    if (norm->centred) sum = centre(y, columns, sum);
    const floats scale = 1 / __builtin_elementwise_sqrt(all_lanes(sum / (float)columns + norm->epsilon));
    for (int64_t i = 0; i < columns; i += LANES) {
        floats value = load_floats(y + i, columns - i) * scale * load_floats(norm->weight + i, columns - i);
        if (norm->bias) value += load_floats(norm->bias + i, columns - i);
        store_floats(y + i, value, columns - i);
    }
}

static void normalise(const struct norm *norm) {
    for (int64_t row = 0; row < norm->rows; row++) {
        const int64_t at = row * norm->columns;
        normalise_row(norm, norm->x + at, norm->skip ? norm->skip + at : NULL, norm->y + at,
                      norm->total ? norm->total + at : NULL);
    }
}

static void normalise_heads(const struct head_norms *norms) {
    float *y = norms->y;
    for (int64_t row = 0; row < norms->rows; row++)
        for (int part = 0; part < PARTS_OF_HEADS; part++) {
            const int64_t size = norms->size, heads = norms->heads[part];
            const float *x = norms->x + row * norms->width + norms->firsts[part];
            const struct norm own = {.weight = norms->gains[part], .columns = size, .epsilon = norms->epsilon};
            if (!own.weight) memcpy(y, x, (size_t)(heads * size) * sizeof *x);
            for (int64_t head = 0; own.weight && head < heads; head++)
                normalise_row(&own, x + head * size, NULL, y + head * size, NULL);
            y += heads * size;
        }
}

/* gate * sigmoid(z) */
ALWAYS floats open_gate(floats gate, floats z) {
    const floats e = exponential((floats)((ints)z | INT32_MIN)); /* of minus its magnitude */
    const floats bounded = choose(gate < -120.f, all_lanes(-120), gate);
    return choose(z < 0.f, bounded * e, gate) / (1 + e);
}

ALWAYS floats activate(floats gate, floats up, const enum activation activation, const struct gated *limits) {
    if (activation == SIGMOID) return open_gate(all_lanes(1), gate) * up;
    if (activation == SILU) {
        gate = choose(gate > limits->gate_limit, all_lanes(limits->gate_limit), gate);
        up = choose(up > limits->up_limit, all_lanes(limits->up_limit), up);
        up = choose(up < -limits->up_limit, all_lanes(-limits->up_limit), up);
        return open_gate(gate, gate) * up;
    }
    if (activation == GELU_TANH) {
        const floats cubed = gate * gate * gate * 0x1.6e4e26p-5f;
        return open_gate(gate, (gate + cubed) * 0x1.988454p0f) * up;
    }
    gate = choose(gate > 7.f, all_lanes(7), gate);
    up = choose(up > 7.f, all_lanes(7), up);
    up = choose(up < -7.f, all_lanes(-7), up);
    return open_gate(gate, gate * 0x1.b3b646p0f) * (up + 1);
}

ALWAYS void gate_rows(const struct gated *gated, const enum activation activation) {
    const int64_t columns = gated->columns;
    for (int64_t row = 0; row < gated->rows; row++) {
        const float *gates = gated->gate + row * gated->gate_stride, *ups = gated->up + row * gated->up_stride;
        float *y = gated->y + row * columns;
        for (int64_t i = 0; i < columns; i += LANES) {
            const floats gate = load_floats(gates + i, columns - i), up = load_floats(ups + i, columns - i);
            store_floats(y + i, activate(gate, up, activation, gated), columns - i);
        }
    }
}

static void gate(const struct gated *gated) {
    if (gated->activation == GELU_TANH) gate_rows(gated, GELU_TANH);
    else if (gated->activation == CLAMPED) gate_rows(gated, CLAMPED);
    else if (gated->activation == SIGMOID) gate_rows(gated, SIGMOID);
    else gate_rows(gated, SILU);
}

/* Rows of S numbers each are divided by their sums plus epsilon (`step` 1), or columns by theirs (`step` S). */
ALWAYS void divide_by_sums(float *mix, const int64_t count, const int64_t row, const int64_t step, const float epsilon) {
    for (int64_t n = 0; n < count; n++) {
        float sum = 0;
        for (int64_t i = 0; i < count; i++) sum += mix[n * row + i * step];
        for (int64_t i = 0; i < count; i++) mix[n * row + i * step] /= sum + epsilon;
    }
}

static void mix_streams(const struct stream_gates *g, float *mix) {
    const int64_t count = g->streams;
    for (int64_t row = 0; row < count; row++) {
        float *own = mix + row * count, largest = own[0];
        for (int64_t i = 1; i < count; i++) largest = own[i] > largest ? own[i] : largest;
        for (int64_t i = 0; i < count; i += LANES)
            store_floats(own + i, exponential(load_floats(own + i, count - i) - largest), count - i);
        float sum = 0;
        for (int64_t i = 0; i < count; i++) sum += own[i];
        for (int64_t i = 0; i < count; i++) own[i] = own[i] / sum + g->epsilon;
    }
    for (int32_t round = 0; round < g->rounds; round++) {
        if (round) divide_by_sums(mix, count, count, 1, g->epsilon);
        divide_by_sums(mix, count, 1, count, g->epsilon);
    }
}

static void gate_streams(const struct stream_gates *g) {
    const int64_t count = g->streams;
    for (int64_t row = 0; row < g->rows; row++) {
        const float *logits = g->logits + row * g->columns;
        float *y = g->y + row * g->columns;
        for (int64_t part = 0, first = 0; first < g->columns; first += count, part += part < 2)
            for (int64_t i = 0; i < count; i += LANES) {
                const int64_t at = first + i, left = count - i;
                const floats raw = load_floats(logits + at, left) * g->scale[part] + load_floats(g->base + at, left);
                const floats opened = open_gate(all_lanes(1), raw);
                const floats made = part == 0   ? opened + g->epsilon
                                    : part == 1 ? opened * g->written + g->least
                                                : raw;
                store_floats(y + at, made, left);
            }
        if (g->rounds) mix_streams(g, y + 2 * count);
    }
}

static void read_streams(const struct streams *s) {
    for (int64_t row = 0; row < s->rows; row++) {
        const float *x = s->x + row * s->streams * s->columns, *gates = s->gates + row * s->gates_stride;
        for (int64_t i = 0; i < s->columns; i += LANES) {
            floats sum = {0};
            for (int64_t n = 0; n < s->streams; n++)
                sum += load_floats(x + n * s->columns + i, s->columns - i) * gates[n];
            store_floats(s->y + row * s->columns + i, sum, s->columns - i);
        }
    }
}

static void write_streams(const struct streams *s) {
    const int64_t count = s->streams, columns = s->columns;
    for (int64_t row = 0; row < s->rows; row++) {
        const float *x = s->x + row * count * columns, *gates = s->gates + row * s->gates_stride + count;
        const float *mix = gates + count, *own = s->own + row * columns;
        float *y = s->y + row * count * columns;
        for (int64_t i = 0; i < columns; i += LANES) {
            const floats made = load_floats(own + i, columns - i);
            floats streams[MOST_STREAMS];
            for (int64_t n = 0; n < count; n++) streams[n] = load_floats(x + n * columns + i, columns - i);
            for (int64_t n = 0; n < count; n++) {
                floats sum = s->mixes ? (floats){0} : streams[n];
                for (int64_t from = 0; s->mixes && from < count; from++) sum += streams[from] * mix[from * count + n];
                store_floats(y + n * columns + i, sum + made * gates[n], columns - i);
            }
        }
    }
}

static void mix(const struct weighing *w) {
    for (int64_t i = w->from; i < w->end; i += LANES) {
        floats sum = w->base ? load_floats(w->base + i, w->end - i) : (floats){0};
        for (int64_t n = 0; n < w->count; n++) {
            const int64_t row = w->which[n];
            sum += w->weights[row] * load_floats(w->rows + row * w->columns + i, w->end - i);
        }
        store_floats(w->y + i, sum, w->end - i);
    }
}
