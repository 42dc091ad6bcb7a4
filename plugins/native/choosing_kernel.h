/* The kernels of choosing.c, of one level. */

/* The index keys of a span's rows, turned, go to its blocks. */
static void cache_index(const struct choice *c, const struct span *span, const struct table *table, float *scratch) {
    const struct attention *a = &c->attention;
    for (int64_t r = 0; r < span->rows; r++) {
        const int64_t position = span->position + r;
        const int64_t n = span->blocks[position / a->tokens] * a->tokens + position % a->tokens;
        keep(a, table, position, c->k + (span->row + r) * a->size, NULL, a->near.keys, a->near.key_scales, n, scratch);
    }
}

static void turn_index(const struct choosing *now) {
    const struct attention *a = &now->c->attention;
    const struct piece *piece = &now->piece;
    for (int64_t n = 0; n < piece->rows * a->heads; n++) {
        float *q = piece->q + n * piece->wide;
        const float *from = now->c->q + (piece->row * a->heads + n) * a->size;
        turn(piece->table, piece->position + n / a->heads, from, q, a->size, 1, NULL);
        for (int64_t i = a->size; i < piece->wide; i++) q[i] = 0;
    }
}

/* What some heads of a row score at the positions of a stretch that lie in these runs, added up; of INT8 without scales. */
static void add_scores(float *totals, const float *weights, float scores[][SIGHT], int64_t heads, int64_t to) {
    for (int64_t h = 0; h < heads; h++)
        for (int64_t t = 0; t < to; t += LANES) {
            const floats score = load_floats(scores[h] + t, LANES), found = choose(score > 0, score, all_lanes(0));
            const floats total = fused(all_lanes(weights[h]), found, load_floats(totals + t, LANES));
            store_floats(totals + t, total, LANES);
        }
}

ALWAYS void score_index_as(const struct choosing *now, int64_t stretch, const int format) {
    const struct attention *a = &now->c->attention;
    const struct piece *piece = &now->piece;
    const int64_t begin = stretch * SIGHT, left = piece->position + piece->rows - begin, to = left < SIGHT ? left : SIGHT;
    struct run runs[SIGHT];
    const struct run *end = cut_in_runs(piece, begin, 0, 0, to, runs, format);
    const int64_t lists = lists_of(now->c), apart = piece->stretches * SIGHT;
    for (int64_t row = 0; row < piece->rows; row++) {
        const float *weights = now->c->weights ? now->c->weights + (piece->row + row) * a->heads : NULL;
        float *totals = now->totals + (row * lists * piece->stretches + stretch) * SIGHT;
        float scores[HEADS_AT_ONCE][SIGHT] = {0};
        for (int64_t list = 0; list < lists; list++) memset(totals + list * apart, 0, SIGHT * sizeof(float));
        for (int64_t head = 0; head < a->heads; head += HEADS_AT_ONCE) {
            const int64_t count = a->heads - head < HEADS_AT_ONCE ? a->heads - head : HEADS_AT_ONCE;
            score_runs(piece, piece->q + (row * a->heads + head) * piece->wide, runs, end, count, scores, format);
            if (weights) add_scores(totals, weights + head, scores, count, to);
            for (int64_t h = 0; !weights && h < count; h++)
                memcpy(totals + (head + h) * apart, scores[h], (size_t)to * sizeof(float));
        }
        for (int64_t list = 0; format == INT8 && list < lists; list++)
            for (const struct run *run = runs; run < end; run++)
                multiply_by_scales(totals + list * apart, run, run->key_scales);
    }
}

/* The scores of the positions of a stretch, up to the last row's own. */
static void score_index(const struct choosing *now, int64_t stretch) {
    switch (now->c->attention.format) {
        case FP32: score_index_as(now, stretch, FP32); break;
        case FP16: score_index_as(now, stretch, FP16); break;
        case INT8: score_index_as(now, stretch, INT8); break;
    }
}
