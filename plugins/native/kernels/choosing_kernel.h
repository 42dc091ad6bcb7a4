/* The kernels of choosing.c, of one level. */
#include "rounding.h"

/* From element i on, as many as there are lanes, `left` of them: those of a cached row. */
ALWAYS floats cached_index(const struct attention *a, const struct span *span, int64_t position, int64_t i, int64_t left,
                           const int format) {
    const struct piece whole = {.a = a, .blocks = span->blocks};
    const struct tier *tier;
    const int64_t at = place_of_key(&whole, 0, position, &tier);
    const floats numbers = load_cached(tier->keys + (at * a->size + i) * bytes_of(format), left, format);
    return format == INT8 ? numbers * tier->key_scales[at] : numbers;
}

/* The row of the last position of a block: its pooled key, and zeros. */
ALWAYS void pool_index_as(const struct choice *c, const struct span *span, int64_t position, const float *last, float *row,
                          const int format) {
    const struct attention *a = &c->attention;
    const int64_t size = query_size(c), first = position + 1 - c->block;
    memset(row + size, 0, (size_t)size * 4);
    for (int64_t i = 0; i < size; i += LANES) {
        const int64_t left = size - i;
        floats gate = load_floats(last + size + i, left) + load_floats(c->pooling + (c->block - 1) * size + i, left);
        floats most = gate, total = {0}, key = {0};
        for (int64_t n = 0; n < c->block - 1; n++) {
            gate = cached_index(a, span, first + n, size + i, left, format) + load_floats(c->pooling + n * size + i, left);
            most = choose(gate > most, gate, most);
        }
        for (int64_t n = 0; n < c->block; n++) {
            const int is_last = n == c->block - 1;
            const floats own = load_floats(last + size + i, left), k = load_floats(last + i, left);
            gate = is_last ? own : cached_index(a, span, first + n, size + i, left, format);
            const floats e = exponential(gate + load_floats(c->pooling + n * size + i, left) - most);
            key = fused(e, is_last ? k : cached_index(a, span, first + n, i, left, format), key);
            total += e;
        }
        store_floats(row + i, key / total, left);
    }
}

/* The key of a block, of which `last` is the last row: the mean, normed, and turned as the first position is. */
ALWAYS void average_index_as(const struct choice *c, const struct span *span, const struct table *table, int64_t position,
                             const float *last, float *row, const int format) {
    const int64_t size = c->attention.size, first = position + 1 - c->block;
    for (int64_t i = 0; i < size; i += LANES) {
        const int64_t left = size - i;
        floats sum = cached_index(&c->attention, span, first, i, left, format);
        for (int64_t n = 1; n < c->block - 1; n++) sum += cached_index(&c->attention, span, first + n, i, left, format);
        store_floats(row + i, (sum + load_floats(last + i, left)) / (float)c->block, left);
    }
    const struct norm norm = {.weight = c->gain, .columns = size, .epsilon = c->epsilon};
    normalise_row(&norm, row, NULL, row, NULL);
    turn(table, first, row, row, size, 1, NULL);
}

/* The index keys of a span's rows, turned, go to its blocks; where blocks have keys, those of blocks that end too. */
static void cache_index(const struct choice *c, const struct span *span, const struct table *table, float *scratch) {
    const struct attention *a = &c->attention;
    float *pooled = scratch + 2 * up_to_multiple(a->size, LANES_IN_ALL);
    for (int64_t r = 0; r < span->rows; r++) {
        const int64_t position = span->position + r;
        const int64_t n = span->blocks[position / a->tokens] * a->tokens + position % a->tokens;
        const float *row = c->k + (span->row + r) * a->size;
        if (c->pooling && (position + 1) % c->block == 0) {
            switch (a->format) {
                case FP32: pool_index_as(c, span, position, row, pooled, FP32); break;
                case FP16: pool_index_as(c, span, position, row, pooled, FP16); break;
                case INT8: pool_index_as(c, span, position, row, pooled, INT8); break;
            }
            row = pooled;
        }
        if (c->gain && (position + 1) % c->block == 0) {
            switch (a->format) {
                case FP32: average_index_as(c, span, table, position, row, pooled, FP32); break;
                case FP16: average_index_as(c, span, table, position, row, pooled, FP16); break;
                case INT8: average_index_as(c, span, table, position, row, pooled, INT8); break;
            }
            row = pooled;
        }
        keep(a, c->gain ? NULL : table, position, row, NULL, a->near.keys, a->near.key_scales, n, scratch);
    }
}

static void turn_index(const struct choosing *now) {
    const struct attention *a = &now->c->attention;
    const struct piece *piece = &now->piece;
    for (int64_t n = 0; n < piece->rows * a->heads; n++) {
        float *q = piece->q + n * piece->wide;
        const int64_t size = query_size(now->c);
        const float *from = now->c->q + (piece->row * a->heads + n) * size;
        turn(piece->table, piece->position + n / a->heads, from, q, size, 1, NULL);
        for (int64_t i = size; i < piece->wide; i++) q[i] = 0;
    }
}

/* As cut_in_runs, of the rows with the keys of some blocks. */
static struct run *cut_in_blocks(const struct choosing *now, int64_t begin, int64_t to, struct run *runs, const int format) {
    const struct attention *a = &now->c->attention;
    for (int64_t t = 0; t < to; t++) {
        const struct tier *tier;
        const int64_t at = place_of_key(&now->piece, 0, (begin + t + 1) * now->c->block - 1, &tier);
        *runs++ = (struct run){
            .begin = t,
            .end = t + 1,
            .keys = tier->keys + at * a->size * bytes_of(format),
            .key_scales = format == INT8 ? tier->key_scales + at : NULL,
        };
    }
    return runs;
}

/* What some heads of a row score at the positions of a stretch that lie in these runs, added up; of INT8 without scales.
 * Without weights all count 1. */
static void add_scores(float *totals, const float *weights, float scores[][SIGHT], int64_t heads, int64_t to) {
    for (int64_t h = 0; h < heads; h++)
        for (int64_t t = 0; t < to; t += LANES) {
            const floats score = load_floats(scores[h] + t, LANES), found = choose(score > 0, score, all_lanes(0));
            const floats total = fused(all_lanes(weights ? weights[h] : 1), found, load_floats(totals + t, LANES));
            store_floats(totals + t, total, LANES);
        }
}

ALWAYS void score_index_as(const struct choosing *now, int64_t stretch, const int format) {
    const struct attention *a = &now->c->attention;
    const struct piece *piece = &now->piece;
    const int64_t begin = stretch * SIGHT, left = keys_of(now->c, piece->position + piece->rows) - begin;
    const int64_t to = left < SIGHT ? left : SIGHT;
    struct run runs[SIGHT];
    const struct run *end = pools(now->c) ? cut_in_blocks(now, begin, to, runs, format)
                                            : cut_in_runs(piece, begin, 0, 0, to, runs, format);
    const int64_t lists = lists_of(now->c), apart = piece->stretches * SIGHT;
    for (int64_t row = 0; row < piece->rows; row++) {
        const float *weights = now->c->weights ? now->c->weights + (piece->row + row) * a->heads : NULL;
        const int together = weights || now->c->gain;
        float *totals = now->totals + (row * lists * piece->stretches + stretch) * SIGHT;
        float scores[HEADS_AT_ONCE][SIGHT] = {0};
        for (int64_t list = 0; list < lists; list++) memset(totals + list * apart, 0, SIGHT * sizeof(float));
        for (int64_t head = 0; head < a->heads; head += HEADS_AT_ONCE) {
            const int64_t count = a->heads - head < HEADS_AT_ONCE ? a->heads - head : HEADS_AT_ONCE;
            score_runs(piece, piece->q + (row * a->heads + head) * piece->wide, runs, end, count, scores, format);
            if (together) add_scores(totals, weights ? weights + head : NULL, scores, count, to);
            for (int64_t h = 0; !together && h < count; h++)
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
