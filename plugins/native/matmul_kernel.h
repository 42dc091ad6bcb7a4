/* The kernels of matmul.c, of one level. */
#define NEAR_BYTES (24 << 10) /* of activations: three quarters of any level-1 cache */
#define ROWS_TOGETHER 8       /* of weights, by one token */
#define PIECES 4              /* of a row: so many vectors have one in each four lanes */
#define IN_ORDER __asm__ volatile("" ::: "memory") /* loads moved up would fill the registers */

typedef int8_t lane_codes __attribute__((vector_size(LANES)));
typedef uint16_t pairs __attribute__((vector_size(4 * LANES)));
typedef int8_t half_codes __attribute__((vector_size(2 * LANES)));
typedef uint64_t short_pieces __attribute__((vector_size(2 * LANES)));

ALWAYS float load_float(const void *from) {
    float value;
    memcpy(&value, from, sizeof value);
    return value;
}

/* What the code differs by. */
struct kind {
    int bits;
    int words;  /* of four bytes, in a piece: 4 or 2 */
    int blocks; /* in a unit, at least 1 */
    int zeros;  /* whether each block has its own */
};

/* A row of weights, and what its lanes have of a unit. */
struct weights {
    const uint8_t *codes, *zeros;
    const float *scales;
    ints which; /* of the unit's blocks */
};

/* The piece that each lane has of a unit: see transpose. */
ALWAYS ints pieces_of_lanes(void) {
    ints pieces;
    UNROLL for (int lane = 0; lane < LANES; lane++) pieces[lane] = lane % 4 * (LANES / 4) + lane / 4;
    return pieces;
}

/* The sums of lanes in the order of their pieces. */
ALWAYS floats in_order(floats sums) {
    ints lanes;
    UNROLL for (int piece = 0; piece < LANES; piece++) lanes[piece] = piece % (LANES / 4) * 4 + piece / (LANES / 4);
    return permute(sums, lanes);
}

/* Which of its unit's blocks each lane belongs to. */
ALWAYS ints blocks_of_lanes(const struct plan *plan, const int words) {
    return pieces_of_lanes() * (4 * words) >> plan->block_shift;
}

/* Of vectors that have a piece in each four lanes, to vectors that have a word of each piece. */
ALWAYS void transpose(bytes v[PIECES]) {
    const bytes low = words_low(v[0], v[1]), high = words_high(v[0], v[1]);
    const bytes other_low = words_low(v[2], v[3]), other_high = words_high(v[2], v[3]);
    v[0] = pairs_low(low, other_low);
    v[1] = pairs_high(low, other_low);
    v[2] = pairs_low(high, other_high);
    v[3] = pairs_high(high, other_high);
}

/* The words of a unit's pieces; of bytes that are not among the `left` ones, 0. */
ALWAYS void load_pieces(const uint8_t *from, int64_t left, const int words, bytes v[PIECES]) {
    UNROLL for (int i = 0; i < PIECES; i++) {
        const int size = words * LANES;
        const int64_t own = left - i * size;
        v[i] = (bytes){0};
        if (words == PIECES) {
            if (own > 0) v[i] = (bytes)load_floats((const float *)(const void *)(from + i * size), own / 4);
        } else {
            short_pieces some = {0};
            if (own >= size) memcpy(&some, from + i * size, sizeof some);
            else if (own > 0) memcpy(&some, from + i * size, (size_t)own);
            v[i] = (bytes)__builtin_shufflevector(some, some, TWICE); /* the other half is never looked at */
        }
    }
    transpose(v);
}

/* Zero points of the unit that begins with `block`, by lane. */
ALWAYS ints load_zeros(const struct plan *plan, const struct weights *w, int64_t block, const int whole,
                       const struct kind k) {
    const int64_t first = block * k.bits / 8, left = plan->zero_bytes - first;
    const int size = (k.blocks * k.bits + 7) / 8;
    floats words = {0};
    if (whole) memcpy(&words, w->zeros + first, (size_t)size);
    else memcpy(&words, w->zeros + first, (size_t)(left < size ? left : size));
    const ints bit = w->which * k.bits + (int)(block * k.bits % 8);
    return (ints)((unsigneds)permute(words, bit >> 5) >> (unsigneds)(bit & 31)) & ((1 << k.bits) - 1);
}

/* Add a unit's part to the sums of a row of weights by `tokens` tokens. Of the last unit, which may not be `whole`, only
 * what there is is read. */
ALWAYS void add_unit(const struct plan *plan, const struct weights *w, int64_t unit, const uint8_t *values,
                     floats sums[], const int whole, const int tokens, const struct kind k) {
    const int subs = 8 / k.bits, size = UNIT_BYTES(LANES, k.words); /* elements in a byte of codes; bytes in a unit */
    const int64_t at = unit * size, block = at >> plan->block_shift, left = whole ? size : plan->row_bytes - at;
    bytes packed[PIECES], codes[2 * PIECES]; /* unpacked: the even elements of words, then the odd ones */
    floats scale = {0};
    ints zero = {0};
    if (whole) memcpy(&scale, w->scales + block, (size_t)k.blocks * 4);
    else scale = load_floats(w->scales + block, plan->blocks - block);
    scale = permute(scale, w->which);
    if (k.zeros) zero = load_zeros(plan, w, block, whole, k);
    UNROLL for (int line = 0; line < size; line += 64) {
        if (!whole && line >= left) break;
        __builtin_prefetch(w->codes + at + line + plan->ahead.far, 0, 2);
        __builtin_prefetch(w->codes + at + line + plan->ahead.near, 0, 3);
    }
    load_pieces(w->codes + at, left, k.words, packed);
    UNROLL for (int i = 0; i < k.words; i++) {
        codes[i] = k.bits == 4 ? packed[i] & 15 : packed[i];
        if (k.bits == 4) codes[k.words + i] = packed[i] >> 4;
    }
    UNROLL for (int t = 0; t < tokens; t++) {
        const uint8_t *own = values + t * TOKEN_UNIT(LANES, k.words * subs);
        IN_ORDER;
        ints exact = (ints)load_bytes(own + 4 * LANES);
        if (k.zeros) exact *= zero;
        exact = dots(k.bits, k.words * subs, exact, codes, own + 8 * LANES);
        const floats factor = scale * (floats)load_bytes(own);
        sums[t] = fused(__builtin_convertvector(exact, floats), factor, sums[t]);
    }
}

ALWAYS struct weights weights_of(const struct plan *plan, int64_t row, ints which, const struct kind k) {
    const uint8_t *zeros = k.zeros ? plan->m.zeros + row * plan->zero_bytes : NULL;
    return (struct weights){plan->m.codes + row * plan->row_bytes, zeros, plan->m.scales + row * plan->blocks, which};
}

/* Add the units in [begin, end) to the sums of a row of weights by `tokens` tokens, which are `kept` between calls; after
 * the last unit they go to y. */
ALWAYS void tile(const struct plan *plan, int64_t row, int64_t token, int64_t begin, int64_t end,
                 floats kept[PARTS][MANY_TOKENS], ints which, const int tokens, const struct kind k) {
    const struct matmul *m = &plan->m;
    const struct weights w = weights_of(plan, row, which, k);
    int64_t width;
    const uint8_t *values = token_units(plan, token, MANY_TOKENS, &width);
    const int64_t apart = width * TOKEN_UNIT(LANES, k.words * 8 / k.bits);
    const int64_t whole = (end < plan->whole_units ? end : plan->whole_units) / PARTS * PARTS;
    floats all[PARTS][TILE];
    for (int p = 0; p < PARTS; p++)
        UNROLL for (int t = 0; t < tokens; t++) all[p][t] = begin ? kept[p][t] : (floats){0};
    for (int64_t unit = begin; unit < whole; unit += PARTS)
        UNROLL for (int p = 0; p < PARTS; p++)
            add_unit(plan, &w, unit + p, values + (unit + p) * apart, all[p], 1, tokens, k);
    if (end < plan->units) {
        for (int p = 0; p < PARTS; p++)
            UNROLL for (int t = 0; t < tokens; t++) kept[p][t] = all[p][t];
        return;
    }
    for (int64_t unit = whole; unit < plan->units; unit++)
        add_unit(plan, &w, unit, values + unit * apart, all[unit % PARTS], 0, tokens, k);
    float totals[TILE];
    for (int p = 0; p < PARTS; p++)
        UNROLL for (int t = 0; t < tokens; t++) all[p][t] = in_order(all[p][t]);
    add_lanes(all, tokens, totals);
    for (int t = 0; t < tokens; t++)
        m->y[(token + t) * m->heads * m->rows + row] = totals[t] + (m->bias ? m->bias[row] : 0.f);
}

/* At most ROWS_TOGETHER rows of weights by one token. Their lanes are added together: in short rows that is much of the
 * work. */
ALWAYS void rows_by_token(const struct plan *plan, int64_t row, int64_t count, int64_t token, ints which,
                          const struct kind k) {
    const struct matmul *m = &plan->m;
    int64_t width;
    const uint8_t *values = token_units(plan, token, MANY_TOKENS, &width);
    const int64_t apart = width * TOKEN_UNIT(LANES, k.words * 8 / k.bits), whole = plan->whole_units / PARTS * PARTS;
    floats all[PARTS][TILE] = {0};
    float totals[TILE];
    for (int64_t n = 0; n < count; n++) {
        const struct weights w = weights_of(plan, row + n, which, k);
        floats sums[PARTS][1];
        UNROLL for (int p = 0; p < PARTS; p++) sums[p][0] = (floats){0};
        for (int64_t unit = 0; unit < whole; unit += PARTS)
            UNROLL for (int p = 0; p < PARTS; p++)
                add_unit(plan, &w, unit + p, values + (unit + p) * apart, sums[p], 1, 1, k);
        for (int64_t unit = whole; unit < plan->units; unit++)
            add_unit(plan, &w, unit, values + unit * apart, sums[unit % PARTS], 0, 1, k);
        UNROLL for (int p = 0; p < PARTS; p++) all[p][n] = in_order(sums[p][0]);
    }
    add_lanes(all, ROWS_TOGETHER, totals);
    for (int64_t n = 0; n < count; n++)
        m->y[token * m->heads * m->rows + row + n] = totals[n] + (m->bias ? m->bias[row + n] : 0.f);
}

/* The next lines of what is read soon: `from` is in the first of the stretches that are left. */
struct fetching {
    const struct stretch *stretch, *end;
    const uint8_t *from;
};
ALWAYS void fetch_soon(struct fetching *f, int64_t lines) {
    for (; lines > 0 && f->stretch < f->end; lines--) {
        __builtin_prefetch(f->from, 0, 2);
        f->from += LINE;
        if (f->from >= f->stretch->end && ++f->stretch < f->end) f->from = f->stretch->begin;
    }
}

/* A panel of weight rows by all tokens: the panel stays in a cache, a tile's chunk of units in a nearer one. */
ALWAYS void panel(const struct plan *plan, int64_t row, int64_t end, const struct kind k) {
    const ints which = blocks_of_lanes(plan, k.words);
    const int64_t most = NEAR_BYTES / (MANY_TOKENS * plan->token_unit) / PARTS * PARTS;
    floats kept[MOST_PANEL][PARTS][MANY_TOKENS];
    struct fetching soon = {plan->soon, plan->soon + plan->soon_count, plan->soon_count ? plan->soon->begin : NULL};
    for (int64_t token = 0, next; token < plan->m.tokens; token = next) {
        const int64_t left = plan->m.tokens - token;
        const int tokens = left >= MANY_TOKENS ? MANY_TOKENS : left >= 4 ? 4 : left >= 2 ? 2 : 1;
        next = token + tokens;
        for (int64_t n = row; n < end && tokens == 1; n += ROWS_TOGETHER) {
            const int64_t count = end - n < ROWS_TOGETHER ? end - n : ROWS_TOGETHER;
            fetch_soon(&soon, count * plan->soon_lines);
            rows_by_token(plan, n, count, token, which, k);
        }
        for (int64_t begin = 0, stop; begin < plan->units && tokens > 1; begin = stop) {
            stop = begin + most < plan->units ? begin + most : plan->units;
            for (int64_t n = row; n < end; n++) {
                if (!begin) fetch_soon(&soon, plan->soon_lines);
                if (tokens == MANY_TOKENS) tile(plan, n, token, begin, stop, kept[n - row], which, MANY_TOKENS, k);
                else if (tokens == 4) tile(plan, n, token, begin, stop, kept[n - row], which, 4, k);
                else tile(plan, n, token, begin, stop, kept[n - row], which, 2, k);
            }
        }
    }
}

static void multiply(const struct plan *plan, int64_t row, int64_t end) {
    const int zeros = plan->m.zeros != NULL;
#ifdef SMALL
    panel(plan, row, end, (struct kind){plan->m.bits, plan->words, plan->unit_blocks, zeros});
#else
#define KIND(b, w, u)                                                                            \
    if (plan->m.bits == b && plan->words == w && plan->unit_blocks == ((u) ? (u) : 1)) {          \
        if (zeros) panel(plan, row, end, (struct kind){b, w, (u) ? (u) : 1, 1});                  \
        else panel(plan, row, end, (struct kind){b, w, (u) ? (u) : 1, 0});                        \
        return;                                                                                  \
    }
    KIND(4, 2, LANES)
    KIND(4, 4, LANES)
    KIND(4, 4, LANES / 2)
    KIND(4, 4, LANES / 4)
    KIND(4, 4, LANES / 8)
    KIND(8, 4, LANES)
    KIND(8, 4, LANES / 2)
    KIND(8, 4, LANES / 4)
    KIND(8, 4, LANES / 8)
    KIND(8, 4, LANES / 16)
#undef KIND
#endif
}

/* `count` values to codes; their scale. */
ALWAYS float quantise_block(const float *x, int count, int8_t *codes) {
    unsigneds magnitudes = {0};
    for (int i = 0; i < count; i += LANES) {
        unsigneds bits;
        memcpy(&bits, x + i, sizeof bits);
        bits &= 0x7fffffff; /* floats without a sign are ordered as integers, NaN last */
        magnitudes = __builtin_elementwise_max(magnitudes, bits);
    }
    const uint32_t largest = __builtin_reduce_max(magnitudes);
    const float most = load_float(&largest);
    if (largest >= 0x7f800000) return __builtin_nanf("");
    if (most < 0x1p-100f) return 0;
    const float inverse = 127 / most;
    for (int i = 0; i < count; i += LANES) {
        floats values;
        memcpy(&values, x + i, sizeof values);
        values = values * inverse + 0x1.8p23f; /* to even, as the last bit is now worth 1 */
        const lane_codes whole = __builtin_convertvector((ints)values, lane_codes);
        memcpy(codes + i, &whole, sizeof whole);
    }
    return most / 127;
}

/* Of codes, twice `count` of them, the even ones and then the odd ones. */
ALWAYS void part_pairs(const int8_t *codes, const int count, int8_t *to) {
    for (int i = 0; i < count; i += 2 * LANES) {
        pairs both;
        memcpy(&both, codes + 2 * i, sizeof both);
        const half_codes even = __builtin_convertvector(both, half_codes);
        const half_codes odd = __builtin_convertvector(both >> 8, half_codes);
        memcpy(to + i, &even, sizeof even);
        memcpy(to + count + i, &odd, sizeof odd);
    }
}

/* A unit of a token, of its codes and of the scales of its blocks. */
ALWAYS void store_unit(const struct plan *plan, const int8_t *codes, floats scales, uint8_t *to, const int bits,
                       const int words) {
    enum { MOST = 2 * UNIT_BYTES(LANES, PIECES) };
    const int subs = 8 / bits, size = UNIT_BYTES(LANES, words);
    int8_t apart[MOST];
    bytes ones[PIECES];
    ints sums = {0};
    if (bits == 4) part_pairs(codes, size, apart);
    UNROLL for (int i = 0; i < PIECES; i++) ones[i] = (bytes){0} + 1;
    UNROLL for (int sub = 0; sub < subs; sub++) {
        bytes own[PIECES];
        load_pieces((const uint8_t *)(bits == 4 ? apart + sub * size : codes), size, words, own);
        uint8_t *place = to + 8 * LANES + sub * size;
        UNROLL for (int i = 0; i < words; i++) memcpy(place + i * 4 * LANES, own + i, sizeof own[i]);
        sums = dots(4, words, sums, ones, place);
    }
    sums *= plan->m.zeros ? -1 : -(1 << (bits - 1));
    scales = permute(scales, blocks_of_lanes(plan, words));
    memcpy(to, &scales, sizeof scales);
    memcpy(to + 4 * LANES, &sums, sizeof sums);
}

/* Several blocks at a time that are a unit, or a block of several units. */
ALWAYS void quantise_token(const struct plan *plan, int64_t token, const int bits, const int words) {
    enum { MOST = 2 * UNIT_BYTES(LANES, PIECES) > LARGEST_BLOCK ? 2 * UNIT_BYTES(LANES, PIECES) : LARGEST_BLOCK };
    const struct matmul *m = &plan->m;
    const int elements = UNIT_BYTES(LANES, words) * 8 / bits, run = elements > m->block ? elements : m->block;
    int64_t width;
    uint8_t *to = token_units(plan, token, MANY_TOKENS, &width);
    const float *x = m->x + token * m->x_token;
    for (int64_t column = 0; column < m->columns; column += run) {
        int8_t codes[MOST] = {0};
        floats scales = {0};
        for (int i = 0; i < run && column + i < m->columns; i += m->block)
            scales[i / m->block] = quantise_block(x + column + i, m->block, codes + i);
        for (int i = 0; i < run && column + i < m->columns; i += elements, to += width * plan->token_unit)
            store_unit(plan, codes + i, scales, to, bits, words);
    }
}

static void quantise(const struct plan *plan, int64_t token) {
    if (plan->m.bits == 8) quantise_token(plan, token, 8, 4);
    else if (plan->words == 4) quantise_token(plan, token, 4, 4);
    else quantise_token(plan, token, 4, 2);
}
