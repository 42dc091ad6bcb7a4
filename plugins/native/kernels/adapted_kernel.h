/* The kernels of adapted.c, of one level. */

enum { AHEAD = 4096 }; /* bytes, that a matrix is fetched before it is used: a piece is read from its beginning to its end */

ALWAYS int64_t factor_bytes(const int kind) { return kind == FACTOR_FP32 ? 4 : 2; }

/* A vector of elements of a matrix from the one numbered `at` on, `count` or as many as there are lanes; those left are 0. */
ALWAYS floats load_factors(const void *matrix, int64_t at, int64_t count, const int kind) {
    if (kind == FACTOR_FP32) return load_floats((const float *)matrix + at, count);
    halves bits = {0};
    if (count < LANES) memcpy(&bits, (const uint16_t *)matrix + at, (size_t)count * sizeof(uint16_t));
    else memcpy(&bits, (const uint16_t *)matrix + at, sizeof bits);
    if (kind == FACTOR_FP16) return widen(bits);
    return (floats)(__builtin_convertvector(bits, unsigneds) << 16);
}

/* Fetch what comes AHEAD of `count` elements, unless that is beyond a piece. */
ALWAYS void fetch(const void *matrix, int64_t at, const int count, int64_t end, const int kind) {
    const int64_t first = at * factor_bytes(kind) + AHEAD, left = end * factor_bytes(kind) - first;
    if (left > 0)
        UNROLL for (int line = 0; line < count * factor_bytes(kind); line += 64)
            __builtin_prefetch((const uint8_t *)matrix + first + line);
}

#define ADAPTED_VECTORS 2 /* of columns of y, by TILE_TOKENS tokens */
#define PANEL_VECTORS (PANEL_COLUMNS / LANES)
#define MORE_VECTORS \
    (ADAPTED_VECTORS * TILE_TOKENS < PANEL_VECTORS ? ADAPTED_VECTORS * TILE_TOKENS : PANEL_VECTORS) /* by one token */

/* Add the products of 16 elements, `left` of which are there, to the lanes of `rows` rows of the matrix, which begin at
 * element `at` of it, by `tokens` rows of x. */
ALWAYS void add_elements(const void *down, int64_t at, floats lanes[PARTS][TILE], const float *const *x, int64_t column,
                         int64_t left, const int rows, const int tokens, const int kind) {
    UNROLL for (int p = 0; p < PARTS; p++) {
        const int64_t count = left - p * LANES;
        if (count <= 0) continue;
        floats values[TILE_TOKENS];
        UNROLL for (int t = 0; t < tokens; t++) values[t] = load_floats(x[t] + column + p * LANES, count);
        UNROLL for (int r = 0; r < rows; r++) {
            const floats own = load_factors(down, at + r * LANES_IN_ALL + p * LANES, LANES, kind);
            UNROLL for (int t = 0; t < tokens; t++)
                lanes[p][t * rows + r] = fused(own, values[t], lanes[p][t * rows + r]);
        }
    }
}

ALWAYS void down_tile(const struct adapted_piece *s, int64_t row, int64_t token, const int rows, const int tokens,
                      const int kind) {
    const int64_t whole = s->columns / LANES_IN_ALL * LANES_IN_ALL, first = row / PANEL_ROWS * PANEL_ROWS;
    const int64_t apart = (s->columns + LANES_IN_ALL - 1) / LANES_IN_ALL * LANES_IN_ALL;
    const int64_t height = s->own->rank - first < PANEL_ROWS ? s->own->rank - first : PANEL_ROWS;
    const void *down = s->own->down;
    const float *x[TILE_TOKENS];
    for (int t = 0; t < tokens; t++) x[t] = s->x + s->rows[token + t] * s->columns;
    floats lanes[PARTS][TILE];
    UNROLL for (int p = 0; p < PARTS; p++)
        UNROLL for (int i = 0; i < rows * tokens; i++) lanes[p][i] = (floats){0};
    int64_t at = first * apart + (row - first) * LANES_IN_ALL;
    for (int64_t column = 0; column < whole; column += LANES_IN_ALL, at += height * LANES_IN_ALL) {
        fetch(down, at, rows * LANES_IN_ALL, s->end * apart, kind);
        add_elements(down, at, lanes, x, column, LANES_IN_ALL, rows, tokens, kind);
    }
    if (whole < s->columns) add_elements(down, at, lanes, x, whole, s->columns - whole, rows, tokens, kind);
    float totals[TILE];
    add_lanes(lanes, rows * tokens, totals);
    for (int t = 0; t < tokens; t++) {
        float *to = s->own->up ? s->between + (token + t) * s->own->rank : s->y + s->rows[token + t] * s->y_apart;
        for (int r = 0; r < rows; r++) to[row + r] = totals[t * rows + r];
    }
}

/* A lone row of x by whole panels, which are then read in their order; several by as many rows as there is room for. */
ALWAYS void down_rows(const struct adapted_piece *s, const int kind) {
    for (int64_t token = 0, next; token < s->tokens; token = next) {
        const int many = s->tokens - token >= TILE_TOKENS, step = many ? TILE_ROWS : PANEL_ROWS;
        next = token + (many ? TILE_TOKENS : 1);
        for (int64_t row = s->begin, after; row < s->end; row = after) {
            after = row % step || row + step > s->end ? row + 1 : row + step;
            if (after == row + 1)
                for (int64_t t = token; t < next; t++) down_tile(s, row, t, 1, 1, kind);
            else if (many) down_tile(s, row, token, TILE_ROWS, TILE_TOKENS, kind);
            else down_tile(s, row, token, PANEL_ROWS, 1, kind);
        }
    }
}

static void adapt_down(const struct adapted_piece *s) {
    if (s->own->down_kind == FACTOR_FP16) down_rows(s, FACTOR_FP16);
    else if (s->own->down_kind == FACTOR_BF16) down_rows(s, FACTOR_BF16);
    else down_rows(s, FACTOR_FP32);
}

/* Add to `vectors` vectors of columns of one panel, the last of which has `last` columns, of `tokens` rows of y. */
ALWAYS void up_tile(const struct adapted_piece *s, int64_t column, int64_t token, int64_t last, const int vectors,
                    const int tokens, const int kind) {
    const int64_t rank = s->own->rank, first = column / PANEL_COLUMNS * PANEL_COLUMNS;
    const void *up = s->own->up;
    floats sums[TILE_TOKENS * ADAPTED_VECTORS > MORE_VECTORS ? TILE_TOKENS * ADAPTED_VECTORS : MORE_VECTORS];
    UNROLL for (int i = 0; i < vectors * tokens; i++) sums[i] = (floats){0};
    int64_t at = first * rank + column - first;
    for (int64_t r = 0; r < rank; r++, at += PANEL_COLUMNS) {
        fetch(up, at, vectors * LANES, s->end * rank, kind);
        floats values[TILE_TOKENS];
        UNROLL for (int t = 0; t < tokens; t++) values[t] = all_lanes(s->between[(token + t) * rank + r]);
        UNROLL for (int v = 0; v < vectors; v++) {
            const floats own = load_factors(up, at + v * LANES, v < vectors - 1 ? LANES : last, kind);
            UNROLL for (int t = 0; t < tokens; t++) sums[t * vectors + v] = fused(own, values[t], sums[t * vectors + v]);
        }
    }
    UNROLL for (int t = 0; t < tokens; t++) {
        float *y = s->y + s->rows[token + t] * s->y_apart + column;
        UNROLL for (int v = 0; v < vectors; v++, y += LANES) {
            const int64_t count = v < vectors - 1 ? LANES : last;
            const floats sum = sums[t * vectors + v], before = load_floats(y, count);
            store_floats(y, choose(sum == 0.f, before, before + sum), count);
        }
    }
}

/* Columns of one panel. */
ALWAYS void up_panel(const struct adapted_piece *s, int64_t column, int64_t end, const int kind) {
    for (int64_t token = 0, next; token < s->tokens; token = next) {
        const int many = s->tokens - token >= TILE_TOKENS;
        int64_t own = column;
        next = token + (many ? TILE_TOKENS : 1);
        if (many)
            for (; own + ADAPTED_VECTORS * LANES <= end; own += ADAPTED_VECTORS * LANES)
                up_tile(s, own, token, LANES, ADAPTED_VECTORS, TILE_TOKENS, kind);
        else
            for (; own + MORE_VECTORS * LANES <= end; own += MORE_VECTORS * LANES)
                up_tile(s, own, token, LANES, MORE_VECTORS, 1, kind);
        for (; own < end; own += LANES)
            for (int64_t t = token; t < next; t++) up_tile(s, own, t, end - own < LANES ? end - own : LANES, 1, 1, kind);
    }
}

ALWAYS void up_rows(const struct adapted_piece *s, const int kind) {
    for (int64_t column = s->begin, next; column < s->end; column = next) {
        next = (column / PANEL_COLUMNS + 1) * PANEL_COLUMNS;
        up_panel(s, column, next < s->end ? next : s->end, kind);
    }
}

static void adapt_up(const struct adapted_piece *s) {
    if (s->own->up_kind == FACTOR_FP16) up_rows(s, FACTOR_FP16);
    else if (s->own->up_kind == FACTOR_BF16) up_rows(s, FACTOR_BF16);
    else up_rows(s, FACTOR_FP32);
}
