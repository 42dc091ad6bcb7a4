/* The kernels of adapted.c, of one level. */

/* `count` elements of a matrix from the one numbered `at` on, or as many as there are lanes; the lanes left are 0. */
ALWAYS floats load_factors(const void *matrix, int64_t at, int64_t count, const int kind) {
    if (kind == FACTOR_FP32) return load_floats((const float *)matrix + at, count);
    halves bits = {0};
    const uint16_t *from = (const uint16_t *)matrix + at;
    if (count < LANES) memcpy(&bits, from, (size_t)count * 2);
    else memcpy(&bits, from, sizeof bits);
    if (kind == FACTOR_FP16) return widen(bits);
    return (floats)(__builtin_convertvector(bits, unsigneds) << 16);
}

/* Add the products of up to 16 elements, `left` of which are there, to the lanes of `rows` rows by `tokens` tokens. */
ALWAYS void add_elements(const struct small_product *s, floats lanes[PARTS][TILE], const float *const *x, int64_t row,
                         int64_t at, int64_t left, const int rows, const int tokens, const int kind) {
    UNROLL for (int p = 0; p < PARTS; p++) {
        const int64_t count = left - p * LANES;
        if (count <= 0) continue;
        floats values[TILE_TOKENS];
        UNROLL for (int t = 0; t < tokens; t++) values[t] = load_floats(x[t] + at + p * LANES, count);
        UNROLL for (int r = 0; r < rows; r++) {
            const floats own = load_factors(s->matrix, (row + r) * s->columns + at + p * LANES, count, kind);
            UNROLL for (int t = 0; t < tokens; t++)
                lanes[p][t * rows + r] = fused(own, values[t], lanes[p][t * rows + r]);
        }
    }
}

ALWAYS void small_tile(const struct small_product *s, int64_t row, int64_t token, const int rows, const int tokens,
                       const int kind) {
    const float *x[TILE_TOKENS];
    for (int t = 0; t < tokens; t++) x[t] = s->x + (s->x_rows ? s->x_rows[token + t] : token + t) * s->x_apart;
    const int64_t whole = s->columns / LANES_IN_ALL * LANES_IN_ALL;
    floats lanes[PARTS][TILE];
    UNROLL for (int p = 0; p < PARTS; p++)
        UNROLL for (int i = 0; i < rows * tokens; i++) lanes[p][i] = (floats){0};
    for (int64_t at = 0; at < whole; at += LANES_IN_ALL)
        add_elements(s, lanes, x, row, at, LANES_IN_ALL, rows, tokens, kind);
    if (whole < s->columns) add_elements(s, lanes, x, row, whole, s->columns - whole, rows, tokens, kind);
    float totals[TILE];
    add_lanes(lanes, rows * tokens, totals);
    for (int t = 0; t < tokens; t++) {
        float *y = s->y + (s->y_rows ? s->y_rows[token + t] : token + t) * s->y_apart + row;
        for (int r = 0; r < rows; r++) {
            const float total = totals[t * rows + r];
            if (!s->adds) y[r] = total;
            else if (total != 0.f) y[r] += total;
        }
    }
}

ALWAYS void small_rows(const struct small_product *s, const int kind) {
    for (int64_t token = 0, next; token < s->tokens; token = next) {
        const int many = s->tokens - token >= TILE_TOKENS;
        int64_t row = s->row;
        next = token + (many ? TILE_TOKENS : 1);
        for (; row + TILE_ROWS <= s->end; row += TILE_ROWS) {
            if (many) small_tile(s, row, token, TILE_ROWS, TILE_TOKENS, kind);
            else small_tile(s, row, token, TILE_ROWS, 1, kind);
        }
        for (; row < s->end; row++)
            for (int64_t t = token; t < next; t++) small_tile(s, row, t, 1, 1, kind);
    }
}

static void multiply_small(const struct small_product *s) {
    if (s->kind == FACTOR_FP16) small_rows(s, FACTOR_FP16);
    else if (s->kind == FACTOR_BF16) small_rows(s, FACTOR_BF16);
    else small_rows(s, FACTOR_FP32);
}
