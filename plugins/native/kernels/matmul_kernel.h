/* The kernels of matmul.c, of one level. */
#define NEAR_BYTES (24 << 10) /* of activations: three quarters of any level-1 cache */
#define PIECES 4              /* of a row: so many vectors have one in each four lanes */
#define IN_ORDER __asm__ volatile("" ::: "memory") /* loads moved up would fill the registers */
#define UNPACKED_ROWS (LANES == 16 ? 2 : 1) /* rows of weights whose codes of a unit fit the registers */

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

/* What lanes have of a unit of a row of weights: the even elements of words, then the odd ones, unpacked. */
struct unpacked {
    bytes codes[2 * PIECES];
    floats scale;
    ints zero;
};

/* Of the last unit, which may not be `whole`, only what there is is read. With `fetch`, what is further on is fetched. */
ALWAYS struct unpacked unpack(const struct plan *plan, const struct weights *w, int64_t unit, const int fetch, const int whole,
                              const struct kind k) {
    const int size = UNIT_BYTES(LANES, k.words); /* bytes in a unit */
    const int64_t at = unit * size, block = at >> plan->block_shift, left = whole ? size : plan->row_bytes - at;
    struct unpacked own;
    bytes packed[PIECES];
    floats scale = {0};
    if (whole) memcpy(&scale, w->scales + block, (size_t)k.blocks * 4);
    else scale = load_floats(w->scales + block, plan->blocks - block);
    own.scale = permute(scale, w->which);
    if (k.zeros) own.zero = load_zeros(plan, w, block, whole, k);
    if (fetch)
        UNROLL for (int line = 0; line < size; line += LINE) {
            if (!whole && line >= left) break;
            __builtin_prefetch(w->codes + at + line + plan->ahead.far, 0, 2);
            __builtin_prefetch(w->codes + at + line + plan->ahead.near, 0, 3);
        }
    load_pieces(w->codes + at, left, k.words, packed);
    UNROLL for (int i = 0; i < k.words; i++) {
        own.codes[i] = k.bits == 4 ? packed[i] & 15 : packed[i];
        if (k.bits == 4) own.codes[k.words + i] = packed[i] >> 4;
    }
    return own;
}

/* Add a unit of a token's `values` to the sum of a row of weights. */
ALWAYS floats add_unit(const struct unpacked *row, const uint8_t *values, floats sum, const struct kind k) {
    ints exact = (ints)load_bytes(values + 4 * LANES);
    if (k.zeros) exact *= row->zero;
    exact = dots(k.bits, k.words * 8 / k.bits, exact, row->codes, values + 8 * LANES);
    return fused(__builtin_convertvector(exact, floats), row->scale * (floats)load_bytes(values), sum);
}

ALWAYS struct weights weights_of(const struct plan *plan, int64_t row, ints which, const struct kind k) {
    const uint8_t *zeros = k.zeros ? plan->m.zeros + row * plan->zero_bytes : NULL;
    return (struct weights){plan->m.codes + row * plan->row_bytes, zeros, plan->m.scales + row * plan->blocks, which};
}

/* Add the units in [begin, end) to the sums of a few `rows` of weights by `tokens` tokens; weights come from memory with
 * the first tokens, and from a cache later. */
ALWAYS void tile(const struct plan *plan, int64_t row, int64_t token, int tokens, int64_t begin, int64_t end,
                 floats sums[][PARTS][MANY_TOKENS], ints which, const int fetch, const int rows, const struct kind k) {
    const int token_unit = TOKEN_UNIT(LANES, k.words * 8 / k.bits);
    int64_t width;
    const uint8_t *values = token_units(plan, token, MANY_TOKENS, &width) + begin * tokens * token_unit;
    struct weights w[UNPACKED_ROWS];
    UNROLL for (int n = 0; n < rows; n++) {
        w[n] = weights_of(plan, row + n, which, k);
        for (int i = 0; i < PARTS * MANY_TOKENS && !begin; i++) {
            IN_ORDER; /* a call of memset takes longer */
            sums[n][0][i] = (floats){0};
        }
    }
    for (int64_t unit = begin; unit < end; unit++) {
        const int whole = unit < plan->whole_units;
        struct unpacked own[UNPACKED_ROWS];
        if (whole) UNROLL for (int n = 0; n < rows; n++) own[n] = unpack(plan, w + n, unit, fetch, 1, k);
        else UNROLL for (int n = 0; n < rows; n++) own[n] = unpack(plan, w + n, unit, fetch, 0, k);
        for (int t = 0; t < tokens; t++, values += token_unit) {
            floats next[UNPACKED_ROWS]; /* none is stored before all are known: then they share what they read */
            UNROLL for (int n = 0; n < rows; n++)
                next[n] = add_unit(own + n, values, sums[n][unit % PARTS][t], k);
            UNROLL for (int n = 0; n < rows; n++) sums[n][unit % PARTS][t] = next[n];
        }
    }
}

/* The results of `count` rows of weights, at most LANES, by one token. */
ALWAYS void finish(const struct plan *plan, int64_t row, int64_t count, int64_t token, floats sums[PARTS][LANES]) {
    const struct matmul *m = &plan->m;
    const floats bias = m->bias ? load_floats(m->bias + row, count) : (floats){0};
    store_floats(m->y + token * m->heads * m->rows + row, add_pieces(sums) + bias, count);
}

/* At most LANES rows of weights, one after another as they lie in memory, by a few tokens, whose sums are in registers. */
ALWAYS void rows_by_few(const struct plan *plan, int64_t row, int64_t count, int64_t token, ints which, const int tokens,
                        const struct kind k) {
    const int token_unit = TOKEN_UNIT(LANES, k.words * 8 / k.bits);
    int64_t width;
    const uint8_t *values = token_units(plan, token, MANY_TOKENS, &width);
    const int64_t apart = width * token_unit, whole = plan->whole_units / PARTS * PARTS;
    floats all[FEW_TOKENS][PARTS][LANES];
    for (int64_t n = 0; n < count; n++) {
        const struct weights w = weights_of(plan, row + n, which, k);
        floats sums[PARTS][FEW_TOKENS];
        for (int p = 0; p < PARTS; p++)
            UNROLL for (int t = 0; t < tokens; t++) sums[p][t] = (floats){0};
        for (int64_t unit = 0; unit < whole; unit += PARTS)
            UNROLL for (int p = 0; p < PARTS; p++) {
                const struct unpacked own = unpack(plan, &w, unit + p, 1, 1, k);
                const uint8_t *from = values + (unit + p) * apart;
                UNROLL for (int t = 0; t < tokens; t++) {
                    IN_ORDER;
                    sums[p][t] = add_unit(&own, from + t * token_unit, sums[p][t], k);
                }
            }
        for (int64_t unit = whole; unit < plan->units; unit++) {
            const struct unpacked own = unpack(plan, &w, unit, 1, 0, k);
            floats *sum = sums[unit % PARTS];
            UNROLL for (int t = 0; t < tokens; t++) sum[t] = add_unit(&own, values + unit * apart + t * token_unit, sum[t], k);
        }
        for (int p = 0; p < PARTS; p++)
            UNROLL for (int t = 0; t < tokens; t++) all[t][p][n] = sums[p][t];
    }
    for (int64_t n = count; n < LANES; n++)
        for (int p = 0; p < PARTS; p++)
            UNROLL for (int t = 0; t < tokens; t++) all[t][p][n] = (floats){0};
    UNROLL for (int t = 0; t < tokens; t++) finish(plan, row, count, token + t, all[t]);
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
    floats sums[MOST_PANEL][PARTS][MANY_TOKENS];
    struct fetching soon = {plan->soon, plan->soon + plan->soon_count, plan->soon_count ? plan->soon->begin : NULL};
    for (int64_t token = 0, next; token < plan->m.tokens; token = next) {
        const int64_t left = plan->m.tokens - token;
        const int tokens = left >= MANY_TOKENS ? MANY_TOKENS : (int)left;
        next = token + tokens;
        if (tokens <= FEW_TOKENS) {
            for (int64_t n = row; n < end; n += LANES) {
                const int64_t count = end - n < LANES ? end - n : LANES;
                fetch_soon(&soon, count * plan->soon_lines);
                switch (tokens) {
                    case 1: rows_by_few(plan, n, count, token, which, 1, k); break;
                    case 2: rows_by_few(plan, n, count, token, which, 2, k); break;
                    case 3: rows_by_few(plan, n, count, token, which, 3, k); break;
                    default: rows_by_few(plan, n, count, token, which, FEW_TOKENS, k);
                }
            }
            continue;
        }
        const int64_t most = NEAR_BYTES / (tokens * plan->token_unit) / PARTS * PARTS;
        const int64_t lines = (plan->soon_lines * most + plan->units - 1) / plan->units;
        const int fetch = !token && !plan->fetched; /* then rows are read one after another, too */
        for (int64_t begin = 0, stop; begin < plan->units; begin = stop) {
            stop = begin + most < plan->units ? begin + most : plan->units;
            for (int64_t n = row, rows; n < end; n += rows) {
                rows = fetch || end - n < UNPACKED_ROWS ? 1 : UNPACKED_ROWS;
                fetch_soon(&soon, rows * lines);
                if (fetch) tile(plan, n, token, tokens, begin, stop, sums + (n - row), which, 1, 1, k);
                else if (rows == 1) tile(plan, n, token, tokens, begin, stop, sums + (n - row), which, 0, 1, k);
                else tile(plan, n, token, tokens, begin, stop, sums + (n - row), which, 0, UNPACKED_ROWS, k);
            }
        }
        for (int64_t n = row; n < end; n += LANES) {
            const int64_t count = end - n < LANES ? end - n : LANES;
            for (int t = 0; t < tokens; t++) {
                floats all[PARTS][LANES];
                for (int i = 0; i < LANES; i++)
                    UNROLL for (int p = 0; p < PARTS; p++) all[p][i] = sums[n - row + (i < count ? i : 0)][p][t];
                finish(plan, n, count, token + t, all);
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
