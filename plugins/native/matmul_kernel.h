/* The kernels of matmul.c, of one level. */
#define PART_BYTES (4 * LANES)
#define NEAR_BYTES (16 << 10) /* of activations: half of any level-1 cache */
#define MOST_TILES 64         /* of a panel that is done in chunks */
#define IN_MEMORY(array) __asm__("" : "+m"(array))
#define IN_ORDER __asm__ volatile("" ::: "memory") /* loads moved up would fill the registers */

typedef float by_token __attribute__((vector_size(4 * TILE_TOKENS)));
typedef int8_t lane_codes __attribute__((vector_size(LANES)));
typedef uint16_t pairs __attribute__((vector_size(4 * LANES)));
typedef int8_t half_codes __attribute__((vector_size(2 * LANES)));

ALWAYS float load_float(const void *from) {
    float value;
    memcpy(&value, from, sizeof value);
    return value;
}

/* What the code differs by. */
struct kind {
    int bits;
    int stretches; /* in a unit */
    int blocks;    /* in a unit */
    int zeros;     /* whether each block has its own */
};

/* Where a unit's operands are; `apart`: how far those of the next row of weights. */
struct unit {
    const uint8_t *codes;
    const float *scales;
    const uint8_t *zeros, *values;
    int64_t codes_apart, scales_apart, zeros_apart;
    int zero_shift;
    struct reach ahead;
};

#define ZERO_BYTES(bits, blocks) (((bits) * (blocks) + 7) / 8) /* of a unit */

/* A unit's zero points by lane. */
ALWAYS ints load_zeros(const uint8_t *from, int shift, const struct kind k, ints which) {
    uint32_t word = 0;
    memcpy(&word, from, ZERO_BYTES(k.bits, k.blocks));
    unsigneds words = (word >> shift) - (unsigneds){0};
    return (ints)(words >> (unsigneds)(which * k.bits)) & ((1 << k.bits) - 1);
}

/* Add a unit's part to the sums of `rows` weight rows by `tokens` tokens. */
ALWAYS void add_unit(const struct unit *u, floats sums[], ints which, int prefetch, const int rows, const int tokens,
                     const struct kind k) {
    const int subs = 8 / k.bits; /* elements in a byte of codes */
    const int64_t token_unit = TOKEN_UNIT(subs, k.stretches);
    const int uniform = k.blocks == 1 && tokens == TILE_TOKENS;
    by_token products[TILE_ROWS]; /* of a uniform unit's scales */
    floats scale[TILE_ROWS];
    ints zero[TILE_ROWS];
    bytes codes[TILE_ROWS][8]; /* unpacked: of each stretch, the even elements, then the odd ones */
    if (uniform) {
        by_token scales_x = {0};
        UNROLL for (int t = 0; t < tokens; t++) scales_x[t] = load_float(u->values + t * token_unit);
        UNROLL for (int r = 0; r < rows; r++) products[r] = scales_x * u->scales[r * u->scales_apart];
        IN_MEMORY(products); /* from where a load puts one in all lanes */
    }
    UNROLL for (int r = 0; r < rows; r++) {
        if (!uniform) scale[r] = spread(u->scales + r * u->scales_apart, k.blocks, which);
        if (k.zeros) zero[r] = load_zeros(u->zeros + r * u->zeros_apart, u->zero_shift, k, which);
        UNROLL for (int s = 0; s < k.stretches; s++) {
            const uint8_t *from = u->codes + r * u->codes_apart + s * STRETCH;
            bytes packed = load_bytes(from);
            if (prefetch) {
                __builtin_prefetch(from + u->ahead.far, 0, 2);
                __builtin_prefetch(from + u->ahead.near, 0, 3);
            }
            codes[r][s * subs] = k.bits == 4 ? packed & 15 : packed;
            if (k.bits == 4) codes[r][s * subs + 1] = packed >> 4;
        }
    }
    UNROLL for (int t = 0; t < tokens; t++) {
        const uint8_t *values = u->values + t * token_unit;
        IN_ORDER;
        UNROLL for (int r = 0; r < rows; r++) {
            ints exact = (ints)load_bytes(values + 64);
            if (k.zeros) exact *= zero[r];
            exact = dots(k.bits, k.stretches * subs, exact, codes[r], values + 128);
            floats factor = uniform ? products[r][t] - (floats){0} : scale[r] * (floats)load_bytes(values);
            sums[t * rows + r] = fused(__builtin_convertvector(exact, floats), factor, sums[t * rows + r]);
        }
    }
}

/* Add the units in [begin, end) to the sums of `rows` weight rows by `tokens` tokens, which are `kept` between calls;
 * after the last unit they go to y. */
ALWAYS void tile(const struct plan *plan, int64_t row, int64_t token, int64_t begin, int64_t end,
                 floats kept[PARTS][TILE], const int rows, const int tokens, const struct kind k) {
    const struct matmul *m = &plan->m;
    int64_t width;
    const uint8_t *values = token_units(plan, token, TILE_TOKENS, &width);
    const int64_t values_apart = width * TOKEN_UNIT(8 / k.bits, k.stretches);
    const int64_t whole = end < plan->whole_units ? end : plan->whole_units;
    const uint8_t *zeros = k.zeros ? m->zeros + row * plan->zero_bytes : NULL;
    floats all[PARTS][TILE] = {0};
    if (begin) memcpy(all, kept, sizeof all);
    for (int p = 0; p < PARTS; p++) {
        ints which;
        memcpy(&which, plan->lane_block + p * LANES, sizeof which);
        struct unit u = {
            .codes = m->codes + row * plan->row_bytes + begin * k.stretches * STRETCH + p * PART_BYTES,
            .scales = m->scales + row * plan->blocks + begin * k.blocks,
            .values = values + begin * values_apart + p * PART_BYTES,
            .codes_apart = plan->row_bytes,
            .scales_apart = plan->blocks,
            .zeros_apart = plan->zero_bytes,
            .ahead = plan->ahead,
        };
        floats sums[TILE];
        memcpy(sums, all[p], sizeof sums);
        for (int64_t unit = begin; unit < whole; unit++) {
            if (k.zeros) {
                u.zeros = zeros + unit * k.blocks * k.bits / 8;
                u.zero_shift = (int)(unit * k.blocks * k.bits % 8);
            }
            add_unit(&u, sums, which, !p, rows, tokens, k);
            u.codes += k.stretches * STRETCH;
            u.scales += k.blocks;
            u.values += values_apart;
        }
        if (k.blocks > 1 && end > whole) { /* a copy, filled up: nothing is read beyond what there is */
            uint8_t codes[TILE_ROWS][STRETCH] = {0}, zero[TILE_ROWS][4] = {0};
            float scales[TILE_ROWS][MOST_BLOCKS] = {0};
            const int64_t done = whole * k.blocks, zeros_done = done * k.bits / 8;
            for (int r = 0; r < rows; r++) {
                memcpy(codes[r], m->codes + (row + r) * plan->row_bytes + whole * STRETCH, (size_t)plan->last_bytes);
                memcpy(scales[r], u.scales + r * u.scales_apart, (size_t)(plan->blocks - done) * 4);
                if (k.zeros)
                    memcpy(zero[r], zeros + r * plan->zero_bytes + zeros_done, (size_t)(plan->zero_bytes - zeros_done));
            }
            struct unit last = {codes[0] + p * PART_BYTES, scales[0], zero[0], u.values, STRETCH, MOST_BLOCKS, 4, 0, {0, 0}};
            add_unit(&last, sums, which, 0, rows, tokens, k);
        }
        memcpy(all[p], sums, sizeof sums);
    }
    if (end < plan->units) {
        memcpy(kept, all, sizeof all);
        return;
    }
    float totals[TILE];
    add_lanes(all, tokens * rows, totals);
    for (int t = 0; t < tokens; t++)
        for (int r = 0; r < rows; r++)
            m->y[(token + t) * m->heads * m->rows + row + r] = totals[t * rows + r] + (m->bias ? m->bias[row + r] : -0.f);
}

/* A panel of weight rows by all tokens: the panel stays in a cache, a tile's chunk of units in a nearer one. */
ALWAYS void panel(const struct plan *plan, int64_t row, int64_t end, const struct kind k) {
    const int64_t chunk = NEAR_BYTES / (TILE_TOKENS * TOKEN_UNIT(8 / k.bits, k.stretches));
    floats kept[MOST_TILES][PARTS][TILE];
    for (int64_t token = 0, next; token < plan->m.tokens; token = next) {
        const int64_t left = plan->m.tokens - token;
        const int tokens = left >= TILE_TOKENS ? TILE_TOKENS : left >= 2 ? 2 : 1;
        const int64_t tiled = tokens == 1 ? row : end - (end - row) % TILE_ROWS; /* rows before this one */
        next = token + tokens;
        for (int64_t begin = 0, stop; begin < plan->units; begin = stop) {
            stop = begin + chunk < plan->units && plan->panel <= MOST_TILES * TILE_ROWS ? begin + chunk : plan->units;
            for (int64_t n = row, i = 0; n < tiled; n += TILE_ROWS, i++) {
                if (tokens == TILE_TOKENS) tile(plan, n, token, begin, stop, kept[i], TILE_ROWS, TILE_TOKENS, k);
                else tile(plan, n, token, begin, stop, kept[i], TILE_ROWS, 2, k);
            }
        }
        for (int64_t n = tiled; n < end; n++)
            for (int64_t t = token; t < next; t++) tile(plan, n, t, 0, plan->units, NULL, 1, 1, k);
    }
}

static void multiply(const struct plan *plan, int64_t row, int64_t end) {
    const struct kind is = {plan->m.bits, plan->stretches, plan->unit_blocks, plan->m.zeros != NULL};
#define KIND(b, s, u)                                                          \
    if (is.bits == b && is.stretches == s && is.blocks == u) {                \
        if (is.zeros) panel(plan, row, end, (struct kind){b, s, u, 1});        \
        else panel(plan, row, end, (struct kind){b, s, u, 0});                 \
    }
    KIND(4, 1, 8)
    KIND(4, 1, 4)
    KIND(4, 1, 2)
    KIND(4, 1, 1)
    KIND(4, 2, 1)
    KIND(8, 1, 4)
    KIND(8, 1, 2)
    KIND(8, 1, 1)
    KIND(8, 2, 1)
    KIND(8, 4, 1)
#undef KIND
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

/* Of two stretches of codes, the even ones and then the odd ones. */
ALWAYS void part_pairs(const int8_t *codes, int8_t *to) {
    for (int i = 0; i < STRETCH; i += 2 * LANES) {
        pairs both;
        memcpy(&both, codes + 2 * i, sizeof both);
        const half_codes even = __builtin_convertvector(both, half_codes);
        const half_codes odd = __builtin_convertvector(both >> 8, half_codes);
        memcpy(to + i, &even, sizeof even);
        memcpy(to + STRETCH + i, &odd, sizeof odd);
    }
}

ALWAYS void quantise_token(const struct plan *plan, int64_t token, const int bits) {
    const struct matmul *m = &plan->m;
    const int subs = 8 / bits;
    int64_t width;
    uint8_t *units = token_units(plan, token, TILE_TOKENS, &width);
    const float *x = m->x + token * m->x_token;
    for (int64_t unit = 0; unit < plan->units; unit++, units += width * plan->token_unit) {
        int8_t codes[LARGEST_BLOCK] = {0};
        float scales[MOST_BLOCKS] = {0};
        ints sums[PARTS] = {0};
        const bytes ones = (bytes){0} + 1;
        int64_t first = unit * plan->unit_blocks, left = plan->blocks - first;
        for (int b = 0; b < plan->unit_blocks && b < left; b++)
            scales[b] = quantise_block(x + (first + b) * m->block, m->block, codes + b * m->block);
        int8_t *to = (int8_t *)units + 128;
        for (int s = 0; s < plan->stretches; s++, to += subs * STRETCH) {
            if (bits == 4) part_pairs(codes + s * subs * STRETCH, to);
            else memcpy(to, codes + s * STRETCH, STRETCH);
            for (int sub = 0; sub < subs; sub++)
                for (int p = 0; p < PARTS; p++)
                    sums[p] = dots(4, 1, sums[p], &ones, (const uint8_t *)to + sub * STRETCH + p * PART_BYTES);
        }
        UNROLL for (int p = 0; p < PARTS; p++) {
            ints which;
            memcpy(&which, plan->lane_block + p * LANES, sizeof which);
            const floats scale = spread(scales, MOST_BLOCKS, which);
            memcpy(units + p * PART_BYTES, &scale, sizeof scale);
            sums[p] *= m->zeros ? -1 : -(1 << (bits - 1));
        }
        memcpy(units + 64, sums, sizeof sums);
    }
}

static void quantise(const struct plan *plan, int64_t token) {
    if (plan->m.bits == 4) quantise_token(plan, token, 4);
    else quantise_token(plan, token, 8);
}
