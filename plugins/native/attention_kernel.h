/* The kernels of attention.c, of one level. Tiles: TILE_ROWS heads by TILE_TOKENS positions, or vectors of values. */
#define HEADS_AT_ONCE 8
#define AHEAD 8192 /* bytes that what is cached is fetched ahead of its use, for the level-2 cache */
#define LEAST (-0x1.fffffep127f) /* where largest scores start: not infinite, as differences from them are taken */

/* Turn a head by the angles of a position, and multiply it by `scale`. */
ALWAYS void turn(const struct attention *a, int64_t position, const float *from, float *to, float scale) {
    const int64_t turned = a->turned;
    const float *cos = a->cos + position * turned, *sin = a->sin + position * turned;
    for (int64_t i = 0; i < turned; i += LANES) {
        const int64_t left = turned - i;
        const floats c = load_floats(cos + i, left), s = load_floats(sin + i, left);
        const floats x = load_floats(from + i, left), y = load_floats(from + turned + i, left);
        store_floats(to + i, fused(-y, s, x * c) * scale, left);
        store_floats(to + turned + i, fused(y, c, x * s) * scale, left);
    }
    for (int64_t i = 2 * turned; i < a->size; i += LANES)
        store_floats(to + i, load_floats(from + i, a->size - i) * scale, a->size - i);
}

/* A row's key, turned, and value go to the caches. */
static void cache_row(const struct attention *a, int64_t row, int64_t position) {
    const float *keys = a->qkv + (row * (a->heads + 2 * a->kv_heads) + a->heads) * a->size;
    const float *values = keys + a->kv_heads * a->size;
    for (int64_t h = 0; h < a->kv_heads; h++) {
        const int64_t place = (h * a->capacity + position) * a->size;
        turn(a, position, keys + h * a->size, a->keys + place, 1);
        memcpy(a->values + place, values + h * a->size, (size_t)a->size * 4);
    }
}

/* The rows' queries, turned, and the sinks of each. */
static void turn_queries(const struct attending *now) {
    const struct attention *a = &now->a;
    for (int64_t r = 0; r < now->rows; r++)
        for (int64_t head = 0; head < a->heads; head++) {
            const int64_t query = (head / now->group * now->rows + r) * now->group + head % now->group;
            const float *from = a->qkv + ((now->row + r) * (a->heads + 2 * a->kv_heads) + head) * a->size;
            float *q = now->q + query * now->wide;
            turn(a, now->position + r, from, q, a->scale);
            for (int64_t i = a->size; i < now->wide; i++) q[i] = 0;
            if (a->sinks) now->sinks[query] = a->sinks[head];
        }
}

/* Add to sums the products of `left` dimensions, or as many as there are lanes. */
ALWAYS void score_lanes(const struct attending *now, const float *q, const float *keys, int64_t left, floats sums[],
                        const int prefetch, const int heads, const int positions) {
    floats k[TILE_TOKENS];
    UNROLL for (int t = 0; t < positions; t++) {
        const float *from = keys + t * now->a.size;
        k[t] = load_floats(from, left);
        if (prefetch) __builtin_prefetch((const char *)from + AHEAD, 0, 2);
    }
    UNROLL for (int h = 0; h < heads; h++) {
        const floats lanes = load_floats(q + h * now->wide, LANES);
        UNROLL for (int t = 0; t < positions; t++)
            sums[h * positions + t] = fused(lanes, k[t], sums[h * positions + t]);
    }
}

/* scores[heads, SIGHT] of some heads at some positions. */
ALWAYS void score(const struct attending *now, const float *q, const float *keys, float *scores, const int heads,
                  const int positions) {
    const int64_t size = now->a.size;
    floats all[PARTS][TILE];
    float totals[TILE];
    UNROLL for (int p = 0; p < PARTS; p++) {
        floats sums[TILE] = {0};
        int64_t i = p * LANES;
        for (; i + LANES <= size; i += LANES_IN_ALL)
            score_lanes(now, q + i, keys + i, LANES, sums, !p, heads, positions);
        if (i < size) score_lanes(now, q + i, keys + i, size - i, sums, 0, heads, positions);
        memcpy(all[p], sums, sizeof sums);
    }
    add_lanes(all, heads * positions, totals);
    for (int h = 0; h < heads; h++) memcpy(scores + h * SIGHT, totals + h * positions, (size_t)positions * 4);
}

/* cap * tanh(score / cap), in place; with e = exp(-2 |x|), tanh |x| = (1 - e) / (1 + e). */
ALWAYS void cap_scores(float *scores, int64_t count, float cap) {
    for (int64_t i = 0; i < count; i += LANES) {
        const floats here = load_floats(scores + i, LANES), x = here / cap;
        const floats e = exponential((floats)((ints)x | INT32_MIN) * 2), bounded = (1 - e) / (1 + e);
        store_floats(scores + i, (floats)((ints)bounded | ((ints)x & INT32_MIN)) * cap, LANES);
    }
}

/* Scores to exponentials, in place; their sum and the largest score. */
ALWAYS void exponentiate(float *scores, int64_t count, float *largest, float *sum) {
    floats most = all_lanes(LEAST), lanes[PARTS][TILE];
    for (int64_t i = count; i % LANES_IN_ALL; i++) scores[i] = -__builtin_inff();
    for (int64_t i = 0; i < count; i += LANES) {
        const floats here = load_floats(scores + i, LANES);
        most = choose(here > most, here, most);
    }
    *largest = LEAST;
    UNROLL for (int lane = 0; lane < LANES; lane++) *largest = most[lane] > *largest ? most[lane] : *largest;
    UNROLL for (int p = 0; p < PARTS; p++) lanes[p][0] = (floats){0};
    for (int64_t i = 0; i < count; i += LANES_IN_ALL)
        UNROLL for (int p = 0; p < PARTS; p++) {
            const floats e = exponential(load_floats(scores + i + p * LANES, LANES) - *largest);
            store_floats(scores + i + p * LANES, e, LANES);
            lanes[p][0] += e;
        }
    add_lanes(lanes, 1, sum);
}

/* Values of `positions` from dimension i on, weighed: `vectors` of them, the last of `left` floats. */
ALWAYS void weigh(const struct attending *now, const float *weights, const float *values, int64_t positions,
                  int64_t left, float *sight, const int heads, const int vectors) {
    floats sums[TILE] = {0};
    for (int64_t t = 0; t < positions; t++) {
        floats v[TILE_TOKENS];
        UNROLL for (int j = 0; j < vectors; j++) {
            const float *from = values + t * now->a.size + j * LANES;
            v[j] = load_floats(from, left);
            if (j * LANES % LANES_IN_ALL == 0) __builtin_prefetch((const char *)from + AHEAD, 0, 2);
        }
        UNROLL for (int h = 0; h < heads; h++)
            UNROLL for (int j = 0; j < vectors; j++)
                sums[h * vectors + j] = fused(all_lanes(weights[h * SIGHT + t]), v[j], sums[h * vectors + j]);
    }
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int j = 0; j < vectors; j++)
            store_floats(sight + h * now->wide + j * LANES, sums[h * vectors + j], LANES);
}

/* Do `work` with `count` heads, constant numbers of them at a time: work(n) is for those from h on. */
#define FOR_HEADS(count, h, work)                                             \
    for (int64_t h = 0, n; h < (count); h += n) {                             \
        n = (count) - h >= TILE_ROWS ? TILE_ROWS : (count) - h >= 2 ? 2 : 1;  \
        if (n == TILE_ROWS) work(TILE_ROWS);                                  \
        else if (n == 2) work(2);                                             \
        else work(1);                                                         \
    }

/* Some queries that share keys and values at the positions of a stretch. */
static void attend_queries(const struct attending *now, int64_t stretch, int64_t kv_head, int64_t query, int64_t count) {
    const struct attention *a = &now->a;
    const int64_t size = a->size, group = now->group, begin = (now->first + stretch) * SIGHT;
    int64_t seen[HEADS_AT_ONCE][2], from = SIGHT, to = 0; /* positions of the stretch, by query, and by any of them */
    for (int64_t h = 0; h < count; h++) {
        const int64_t position = now->position + (query + h) / group % now->rows;
        const int64_t first = a->window && a->window <= position ? position - a->window + 1 : 0;
        seen[h][0] = first > begin ? first - begin : 0;
        seen[h][1] = position - begin < SIGHT ? position - begin + 1 : SIGHT;
        if (seen[h][0] < from) from = seen[h][0];
        if (seen[h][1] > to) to = seen[h][1];
    }
    if (to <= from) to = from = 0; /* none sees any */
    const float *keys = a->keys + (kv_head * a->capacity + begin) * size, *q = now->q + query * now->wide;
    const float *values = a->values + (kv_head * a->capacity + begin) * size;
    const int64_t summary = stretch * now->rows * a->heads + query;
    float scores[HEADS_AT_ONCE][SIGHT], *sight = now->sights + summary * now->wide;
    int64_t t = from, i = 0;
#define SCORE_TILE(n) score(now, q + h * now->wide, keys + t * size, scores[h] + t, n, TILE_TOKENS)
#define SCORE_ONE(n) score(now, q + h * now->wide, keys + t * size, scores[h] + t, n, 1)
    for (; t + TILE_TOKENS <= to; t += TILE_TOKENS) FOR_HEADS(count, h, SCORE_TILE)
    for (; t < to; t++) FOR_HEADS(count, h, SCORE_ONE)
    for (int64_t h = 0; h < count; h++) {
        for (t = 0; t < from; t++) scores[h][t] = 0;
        if (a->soft_cap != 0) cap_scores(scores[h], to, a->soft_cap);
        for (t = 0; t < seen[h][0] && t < to; t++) scores[h][t] = -__builtin_inff();
        for (t = seen[h][1] > 0 ? seen[h][1] : 0; t < to; t++) scores[h][t] = -__builtin_inff();
        exponentiate(scores[h], to, now->largest + summary + h, now->sums + summary + h);
    }
#define WEIGH_TILE(n) \
    weigh(now, scores[h] + from, values + from * size + i, to - from, LANES, sight + h * now->wide + i, n, TILE_TOKENS)
#define WEIGH_ONE(n) \
    weigh(now, scores[h] + from, values + from * size + i, to - from, size - i, sight + h * now->wide + i, n, 1)
    for (; i + TILE_TOKENS * LANES <= size; i += TILE_TOKENS * LANES) FOR_HEADS(count, h, WEIGH_TILE)
    for (; i < size; i += LANES) FOR_HEADS(count, h, WEIGH_ONE)
}

static void attend(const struct attending *now, int64_t stretch, int64_t kv_head) {
    const int64_t queries = now->rows * now->group, begin = kv_head * queries, end = begin + queries;
    for (int64_t query = begin; query < end; query += HEADS_AT_ONCE)
        attend_queries(now, stretch, kv_head, query, end - query < HEADS_AT_ONCE ? end - query : HEADS_AT_ONCE);
}

/* The results of the queries from chunk * LANES_IN_ALL on, as many. */
static void combine(const struct attending *now, int64_t chunk) {
    const int64_t queries = now->rows * now->a.heads, size = now->a.size, group = now->group;
    const int64_t begin = chunk * LANES_IN_ALL;
    const int64_t end = queries - begin < LANES_IN_ALL ? queries : begin + LANES_IN_ALL;
    for (int64_t n = begin; n < end; n += LANES) {
        const int64_t left = end - n;
        const floats sinks = now->a.sinks ? load_floats(now->sinks + n, left) : all_lanes(0);
        floats most = now->a.sinks ? sinks : all_lanes(LEAST), sum = {0};
        for (int64_t s = 0; s < now->stretches; s++) {
            const floats here = load_floats(now->largest + s * queries + n, left);
            most = choose(here > most, here, most);
        }
        if (now->a.sinks) sum = exponential(sinks - most);
        for (int64_t s = 0; s < now->stretches; s++) {
            const floats weight = exponential(load_floats(now->largest + s * queries + n, left) - most);
            store_floats(now->largest + s * queries + n, weight, left);
            sum = fused(weight, load_floats(now->sums + s * queries + n, left), sum);
        }
        store_floats(now->sums + n, 1 / sum, left);
    }
    for (int64_t n = begin; n < end; n++) {
        const int64_t row = now->row + n / group % now->rows, head = n / (group * now->rows) * group + n % group;
        float *y = now->a.y + (row * now->a.heads + head) * size;
        for (int64_t i = 0; i < size; i += LANES) {
            floats sum = {0};
            for (int64_t s = 0; s < now->stretches; s++) {
                const int64_t at = s * queries + n;
                sum = fused(all_lanes(now->largest[at]), load_floats(now->sights + at * now->wide + i, LANES), sum);
            }
            store_floats(y + i, sum * now->sums[n], size - i);
        }
    }
}
