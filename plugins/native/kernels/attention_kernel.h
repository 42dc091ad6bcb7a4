/* The kernels of attention.c, of one level. Tiles: TILE_ROWS heads by TILE_TOKENS positions, or vectors of values. */
#define HEADS_AT_ONCE 8
#define AHEAD 8192 /* bytes that what is cached is fetched ahead of its use, for the level-2 cache */
#define LEAST (-0x1.fffffep127f) /* where largest scores start: not infinite, as differences from them are taken */

/* Turn a head by the angles of a position, if there is a table, and multiply it by `scale` and by `gain`, if any. */
ALWAYS void turn(const struct table *table, int64_t position, const float *from, float *to, int64_t size, float scale,
                 const float *gain) {
    const int64_t turned = table ? table->turned : 0;
    const float *cos = table ? table->cos + position * turned : NULL;
    const float *sin = table ? table->sin + position * turned : NULL;
    for (int64_t i = 0; i < turned; i += LANES) {
        const int64_t left = turned - i;
        const floats c = load_floats(cos + i, left), s = load_floats(sin + i, left);
        const floats x = load_floats(from + i, left), y = load_floats(from + turned + i, left);
        store_floats(to + i, fused(-y, s, x * c) * scale, left);
        store_floats(to + turned + i, fused(y, c, x * s) * scale, left);
    }
    for (int64_t i = 2 * turned; i < size; i += LANES)
        store_floats(to + i, load_floats(from + i, size - i) * scale, size - i);
    if (!gain) return;
    for (int64_t i = 0; i < size; i += LANES)
        store_floats(to + i, load_floats(to + i, size - i) * load_floats(gain + i, size - i), size - i);
}

ALWAYS int64_t bytes_of(const int format) { return format == FP32 ? 4 : format == FP16 ? 2 : 1; }

/* `count` cached numbers, or as many as there are lanes; the lanes left are 0. */
ALWAYS floats load_cached(const uint8_t *from, int64_t count, const int format) {
    if (format == FP32) return load_floats((const float *)from, count);
    const size_t bytes = (size_t)((count < LANES ? count : LANES) * bytes_of(format));
    halves wide = {0};
    lane_codes codes = {0};
    if (format == FP16) {
        memcpy(&wide, from, bytes);
        return widen(wide);
    }
    memcpy(&codes, from, bytes);
    return __builtin_convertvector(codes, floats);
}

/* Cache a head, turned if there is a table and multiplied by `gain` if there is any, as number n of all tokens' heads; `scratch` is of 2 * wide floats. */
static void keep(const struct attention *a, const struct table *table, int64_t position, const float *head,
                 const float *gain, uint8_t *cache, float *scales, int64_t n, float *scratch) {
    const int64_t size = a->size, wide = (size + LANES_IN_ALL - 1) / LANES_IN_ALL * LANES_IN_ALL;
    uint8_t *to = cache + n * size * bytes_of(a->format);
    if (a->format == FP32) {
        turn(table, position, head, (float *)to, size, 1, gain);
        return;
    }
    turn(table, position, head, scratch, size, 1, gain);
    if (a->format == FP16) {
        for (int64_t i = 0; i < size; i += LANES) {
            const halves rounded = narrow(load_floats(scratch + i, size - i));
            memcpy(to + i * 2, &rounded, (size_t)(size - i < LANES ? size - i : LANES) * 2);
        }
    } else {
        int8_t *codes = (int8_t *)(scratch + wide);
        memset(codes, 0, (size_t)wide);
        for (int64_t i = size; i < wide; i++) scratch[i] = 0;
        scales[n] = quantise_block(scratch, (int)wide, codes);
        memcpy(to, codes, (size_t)size);
    }
}

/* Heads in a row of qkv. */
ALWAYS int64_t heads_of_row(const struct attention *a) { return a->heads + (a->keys_alone ? 1 : 2) * a->kv_heads; }

/* The keys, turned, and the values of a span's rows go to its blocks. */
static void cache_rows(const struct attention *a, const struct span *span, const struct table *table, float *scratch) {
    for (int64_t r = 0; r < span->rows; r++) {
        const float *keys = a->qkv + ((span->row + r) * heads_of_row(a) + a->heads) * a->size;
        const float *values = keys + a->kv_heads * a->size;
        const int64_t position = span->position + r, block = span->blocks[position / a->tokens];
        for (int64_t h = 0; h < a->kv_heads; h++) {
            const int64_t n = (block * a->kv_heads + h) * a->tokens + position % a->tokens;
            keep(a, table, position, keys + h * a->size, a->k_gain, a->near.keys, a->near.key_scales, n, scratch);
            if (a->keys_alone) continue;
            keep(a, NULL, position, values + h * a->size, NULL, a->near.values, a->near.value_scales, n, scratch);
        }
    }
}

/* The rows' queries, turned, and the sinks of each. */
static void turn_queries(const struct piece *now) {
    const struct attention *a = now->a;
    for (int64_t r = 0; r < now->rows; r++) {
        const float scale = a->warmth ? a->scale * a->warmth[now->position + r] : a->scale;
        for (int64_t head = 0; head < a->heads; head++) {
            const int64_t query = (head / now->group * now->rows + r) * now->group + head % now->group;
            const float *from = a->qkv + ((now->row + r) * heads_of_row(a) + head) * a->size;
            float *q = now->q + query * now->wide;
            turn(now->table, now->position + r, from, q, a->size, scale, a->q_gain);
            for (int64_t i = a->size; i < now->wide; i++) q[i] = 0;
            if (a->sinks) now->sinks[query] = a->sinks[head];
        }
    }
}

/* Positions of a stretch that lie in one block. */
struct run {
    int64_t begin, end;                     /* counted from the first of the stretch */
    const uint8_t *keys, *values;           /* of `begin` */
    const float *key_scales, *value_scales; /* the same, of INT8 */
    int64_t ahead;                          /* bytes to what is fetched while one of them is used */
};

/* Where in a tier the key of a position is, in numbers of keys; the tier. */
ALWAYS int64_t place_of_key(const struct piece *now, int64_t kv_head, int64_t position, const struct tier **tier) {
    const struct attention *a = now->a;
    const int64_t block = now->blocks[position / a->tokens];
    *tier = block < a->near.count ? &a->near : &a->far;
    return ((block - (*tier)->first) * a->kv_heads + kv_head) * a->tokens + position % a->tokens;
}

/* How many positions are picked for a head of keys. */
ALWAYS int64_t count_picked(const struct piece *now, int64_t kv_head) {
    const int64_t *picked = now->picked + kv_head * now->a->choices;
    int64_t count = now->a->choices;
    while (picked[count - 1] < 0) count--;
    return count;
}

/* As cut_in_runs, of picked positions. */
static struct run *cut_picked(const struct piece *now, int64_t begin, int64_t kv_head, int64_t to, struct run *runs,
                              const int format) {
    enum { POSITIONS_AHEAD = 8 };
    const struct attention *a = now->a;
    const int64_t *picked = now->picked + kv_head * a->choices + begin;
    for (int64_t t = 0; t < to; t = runs++->end) {
        const struct tier *tier, *other;
        const int64_t at = place_of_key(now, kv_head, picked[t], &tier), left = a->tokens - picked[t] % a->tokens;
        const int64_t later = place_of_key(now, kv_head, picked[t + POSITIONS_AHEAD < to ? t + POSITIONS_AHEAD : to - 1], &other);
        int64_t end = t + 1;
        while (end < to && end - t < left && picked[end] == picked[t] + (end - t)) end++;
        *runs = (struct run){
            .begin = t,
            .end = end,
            .keys = tier->keys + at * a->size * bytes_of(format),
            .values = tier->values + at * a->size * bytes_of(format),
            .key_scales = format == INT8 ? tier->key_scales + at : NULL,
            .value_scales = format == INT8 ? tier->value_scales + at : NULL,
            .ahead = other == tier ? (later - at) * a->size * bytes_of(format) : 0,
        };
    }
    return runs;
}

/* Cut the positions [from, to) of the stretch that begins at a position in runs; where they end. */
static struct run *cut_in_runs(const struct piece *now, int64_t begin, int64_t kv_head, int64_t from, int64_t to,
                               struct run *runs, const int format) {
    const struct attention *a = now->a;
    const int64_t bytes = a->tokens * a->size * bytes_of(format); /* of a head in a block */
    const int64_t steps = a->tokens < SIGHT ? (AHEAD + bytes - 1) / bytes : 0;
    for (int64_t t = from; t < to; t = runs++->end) {
        const int64_t n = (begin + t) / a->tokens, place = (begin + t) % a->tokens, block = now->blocks[n];
        const struct tier *tier = block < a->near.count ? &a->near : &a->far;
        const int64_t at = ((block - tier->first) * a->kv_heads + kv_head) * a->tokens + place;
        const int64_t wanted = now->blocks[n + steps < now->last ? n + steps : now->last];
        const int64_t next = wanted - tier->first < tier->count && wanted >= tier->first ? wanted : block;
        *runs = (struct run){
            .begin = t,
            .end = to - t < a->tokens - place ? to : t + a->tokens - place,
            .keys = tier->keys + at * a->size * bytes_of(format),
            .values = tier->values + at * a->size * bytes_of(format),
            .key_scales = format == INT8 ? tier->key_scales + at : NULL,
            .value_scales = format == INT8 ? tier->value_scales + at : NULL,
            .ahead = steps ? (next - block) * a->kv_heads * bytes : AHEAD,
        };
        if (format != INT8 || !steps) continue;
        const int64_t ahead = at + (next - block) * a->kv_heads * a->tokens;
        for (int64_t i = ahead; i < ahead + runs->end - t; i += 16) { /* a line of scales at a time */
            __builtin_prefetch(tier->key_scales + i, 0, 2);
            __builtin_prefetch(tier->value_scales + i, 0, 2);
        }
    }
    return runs;
}

/* Add to sums the products of dimensions from i on: `left` of them, or as many as there are lanes. */
ALWAYS void score_lanes(const struct piece *now, const float *q, const uint8_t *keys, int64_t i, int64_t ahead,
                        int64_t left, floats sums[], const int prefetch, const int heads, const int positions,
                        const int format) {
    floats k[TILE_TOKENS];
    UNROLL for (int t = 0; t < positions; t++) {
        const uint8_t *from = keys + (t * now->a->size + i) * bytes_of(format);
        k[t] = load_cached(from, left, format);
        if (prefetch && i * bytes_of(format) % 64 == 0) __builtin_prefetch(from + ahead, 0, 2);
    }
    UNROLL for (int h = 0; h < heads; h++) {
        const floats lanes = load_floats(q + h * now->wide + i, LANES);
        UNROLL for (int t = 0; t < positions; t++)
            sums[h * positions + t] = fused(lanes, k[t], sums[h * positions + t]);
    }
}

/* scores[heads, SIGHT] of some heads at some positions; what is `ahead` bytes is fetched. */
ALWAYS void score(const struct piece *now, const float *q, const uint8_t *keys, int64_t ahead, float *scores,
                  const int heads, const int positions, const int format) {
    const int64_t size = now->a->size;
    floats all[PARTS][TILE];
    float totals[TILE];
    UNROLL for (int p = 0; p < PARTS; p++) {
        floats sums[TILE] = {0};
        int64_t i = p * LANES;
        for (; i + LANES <= size; i += LANES_IN_ALL)
            score_lanes(now, q, keys, i, ahead, LANES, sums, !p, heads, positions, format);
        if (i < size) score_lanes(now, q, keys, i, ahead, size - i, sums, 0, heads, positions, format);
        memcpy(all[p], sums, sizeof sums);
    }
    add_lanes(all, heads * positions, totals);
    for (int h = 0; h < heads; h++) memcpy(scores + h * SIGHT, totals + h * positions, (size_t)positions * 4);
}

/* Multiply numbers of the positions of a run by their scales. */
ALWAYS void multiply_by_scales(float *numbers, const struct run *run, const float *scales) {
    for (int64_t t = run->begin; t < run->end; t += LANES) {
        const int64_t left = run->end - t;
        store_floats(numbers + t, load_floats(numbers + t, left) * load_floats(scales + (t - run->begin), left), left);
    }
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

/* The values of some runs from dimension i on, weighed: `vectors` of them, the last of `left` numbers. */
ALWAYS void weigh(const struct piece *now, const float *weights, const struct run *runs, const struct run *end,
                  int64_t i, int64_t left, float *sight, const int heads, const int vectors, const int format) {
    const int64_t bytes = bytes_of(format), apart = now->a->size * bytes;
    floats sums[TILE] = {0};
    for (const struct run *run = runs; run < end; run++) {
        const uint8_t *values = run->values + i * bytes;
        for (int64_t t = run->begin; t < run->end; t++, values += apart) {
            floats v[TILE_TOKENS];
            UNROLL for (int j = 0; j < vectors; j++) {
                const uint8_t *from = values + j * LANES * bytes;
                v[j] = load_cached(from, left, format);
                if (j * LANES * bytes % 64 == 0) __builtin_prefetch(from + run->ahead, 0, 2);
            }
            UNROLL for (int h = 0; h < heads; h++)
                UNROLL for (int j = 0; j < vectors; j++)
                    sums[h * vectors + j] = fused(all_lanes(weights[h * SIGHT + t]), v[j], sums[h * vectors + j]);
        }
    }
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int j = 0; j < vectors; j++)
            store_floats(sight + (h * now->wide + i) + j * LANES, sums[h * vectors + j], LANES);
}

/* Do `work` with `count` heads, constant numbers of them at a time: work(n) is for those from h on. */
#define FOR_HEADS(count, h, format, work)                                                                            \
    for (int64_t h = 0, n; h < (count); h += n) {                                                                    \
        const int64_t left = (count) - h;                                                                            \
        n = left >= MANY_HEADS && (format) != FP32 ? MANY_HEADS : left >= TILE_ROWS ? TILE_ROWS : left >= 2 ? 2 : 1; \
        if (n == MANY_HEADS) work(MANY_HEADS);                                                                       \
        else if (n == TILE_ROWS) work(TILE_ROWS);                                                                    \
        else if (n == 2) work(2);                                                                                    \
        else work(1);                                                                                                \
    }

/* With so many heads, half the positions or vectors of values fit the registers, and each is widened for more heads.
 * Floats are not widened, and memory gives them faster if a position's are read together. */
#define MANY_HEADS (2 * TILE_ROWS)
#define WIDTH(heads) ((heads) == MANY_HEADS ? TILE_TOKENS / 2 : TILE_TOKENS)

/* scores[count, SIGHT] of some queries at the positions of some runs. */
ALWAYS void score_runs(const struct piece *now, const float *q, const struct run *runs, const struct run *end,
                       int64_t count, float scores[][SIGHT], const int format) {
    const int64_t apart = now->a->size * bytes_of(format);
    for (const struct run *run = runs; run < end; run++) {
        const uint8_t *keys = run->keys;
        int64_t t = run->begin;
#define SCORE_TILE(n)                                               \
    for (int64_t part = 0; part < TILE_TOKENS; part += WIDTH(n))    \
        score(now, q + h * now->wide, keys + part * apart, run->ahead, scores[h] + t + part, n, WIDTH(n), format)
#define SCORE_ONE(n) score(now, q + h * now->wide, keys, run->ahead, scores[h] + t, n, 1, format)
        for (; t + TILE_TOKENS <= run->end; t += TILE_TOKENS, keys += TILE_TOKENS * apart)
            FOR_HEADS(count, h, format, SCORE_TILE)
        for (; t < run->end; t++, keys += apart) FOR_HEADS(count, h, format, SCORE_ONE)
    }
}

/* Some queries that share keys and values at the positions of a stretch. */
ALWAYS void attend_queries(const struct piece *now, int64_t stretch, int64_t kv_head, int64_t query, int64_t count,
                           const int format) {
    const struct attention *a = now->a;
    const int64_t size = a->size, group = now->group;
    const int64_t begin = (now->chosen ? now->chosen[stretch] : now->first + stretch) * SIGHT;
    const int64_t picked = now->picked ? count_picked(now, kv_head) : 0;
    int64_t seen[HEADS_AT_ONCE][2], from = SIGHT, to = 0; /* positions of the stretch, by query, and by any of them */
    for (int64_t h = 0; h < count; h++) {
        const int64_t position = now->position + (query + h) / group % now->rows;
        const int64_t first = first_seen(a, position);
        const int64_t last = now->picked ? picked - 1 : position;
        seen[h][0] = first > begin ? first - begin : 0;
        seen[h][1] = last - begin < SIGHT ? last - begin + 1 : SIGHT;
        if (seen[h][0] < from) from = seen[h][0];
        if (seen[h][1] > to) to = seen[h][1];
    }
    if (to <= from) to = from = 0; /* none sees any */
    struct run runs[SIGHT];
    const struct run *end = now->picked ? cut_picked(now, begin, kv_head, to, runs, format)
                                        : cut_in_runs(now, begin, kv_head, from, to, runs, format);
    const int64_t summary = stretch * now->rows * a->heads + query;
    float scores[HEADS_AT_ONCE][SIGHT], *sight = now->sights + summary * now->wide;
    score_runs(now, now->q + query * now->wide, runs, end, count, scores, format);
    if (format == INT8)
        for (const struct run *run = runs; run < end; run++)
            for (int64_t h = 0; h < count; h++) multiply_by_scales(scores[h], run, run->key_scales);
    for (int64_t h = 0; h < count; h++) {
        for (int64_t t = 0; t < from; t++) scores[h][t] = 0;
        if (a->soft_cap != 0) cap_scores(scores[h], to, a->soft_cap);
        for (int64_t t = 0; t < seen[h][0] && t < to; t++) scores[h][t] = -__builtin_inff();
        for (int64_t t = seen[h][1] > 0 ? seen[h][1] : 0; t < to; t++) scores[h][t] = -__builtin_inff();
        exponentiate(scores[h], to, now->largest + summary + h, now->sums + summary + h);
        if (format == INT8)
            for (const struct run *run = runs; run < end; run++) multiply_by_scales(scores[h], run, run->value_scales);
    }
    int64_t i = 0;
#define WEIGH_TILE(n)                                               \
    for (int64_t part = 0; part < TILE_TOKENS; part += WIDTH(n))    \
        weigh(now, scores[h], runs, end, i + part * LANES, LANES, sight + h * now->wide, n, WIDTH(n), format)
#define WEIGH_ONE(n) weigh(now, scores[h], runs, end, i, size - i, sight + h * now->wide, n, 1, format)
    for (; i + TILE_TOKENS * LANES <= size; i += TILE_TOKENS * LANES) FOR_HEADS(count, h, format, WEIGH_TILE)
    for (; i < size; i += LANES) FOR_HEADS(count, h, format, WEIGH_ONE)
}

ALWAYS void attend_as(const struct piece *now, int64_t stretch, int64_t kv_head, const int format) {
    const int64_t queries = now->rows * now->group, begin = kv_head * queries, end = begin + queries;
    for (int64_t query = begin; query < end; query += HEADS_AT_ONCE)
        attend_queries(now, stretch, kv_head, query, end - query < HEADS_AT_ONCE ? end - query : HEADS_AT_ONCE, format);
}

static void attend(const struct piece *now, int64_t stretch, int64_t kv_head) {
    switch (now->a->format) {
        case FP32: attend_as(now, stretch, kv_head, FP32); break;
        case FP16: attend_as(now, stretch, kv_head, FP16); break;
        case INT8: attend_as(now, stretch, kv_head, INT8); break;
    }
}

/* The results of the queries from chunk * LANES_IN_ALL on, as many. */
static void combine(const struct piece *now, int64_t chunk) {
    const int64_t queries = now->rows * now->a->heads, size = now->a->size, group = now->group;
    const int64_t begin = chunk * LANES_IN_ALL;
    const int64_t end = queries - begin < LANES_IN_ALL ? queries : begin + LANES_IN_ALL;
    for (int64_t n = begin; n < end; n += LANES) {
        const int64_t left = end - n;
        const floats sinks = now->a->sinks ? load_floats(now->sinks + n, left) : all_lanes(0);
        floats most = now->a->sinks ? sinks : all_lanes(LEAST), sum = {0};
        for (int64_t s = 0; s < now->stretches; s++) {
            const floats here = load_floats(now->largest + s * queries + n, left);
            most = choose(here > most, here, most);
        }
        if (now->a->sinks) sum = exponential(sinks - most);
        for (int64_t s = 0; s < now->stretches; s++) {
            const floats weight = exponential(load_floats(now->largest + s * queries + n, left) - most);
            store_floats(now->largest + s * queries + n, weight, left);
            sum = fused(weight, load_floats(now->sums + s * queries + n, left), sum);
        }
        store_floats(now->sums + n, 1 / sum, left);
    }
    for (int64_t n = begin; n < end; n++) {
        const int64_t row = now->row + n / group % now->rows, head = n / (group * now->rows) * group + n % group;
        float *y = now->a->y + (row * now->a->heads + head) * size;
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
