/* Which positions rows see: those that an indexer scores best.
 *
 * All index keys of a call's rows go to their blocks first, turned and rounded as keys are (attention.c); then rows that
 * see more positions than are chosen score all of these, and choose.
 *
 * The arithmetic. It is the same to the bit for every level and pool, however positions are cut in blocks, and
 * whichever rows and spans are computed together: the product of a turned query and a key is as that of attention.c,
 * of INT8 without the key's scale. Head by head a position's score becomes fma(weight, product or 0, score), from 0 on;
 * of INT8 it is multiplied by the key's scale in the end. Where each head chooses, that product is the score. A block of
 * positions has the largest score of those up to the row's own. Of equal scores the earlier one is chosen.
 *
 * Where keys are pooled, an element of a block's key is the sum of e * k by fma, position by position, divided by the sum
 * of e, with e = exp(gate - the block's largest gate) (floats.h), and k and gates as they are cached, but for those of the
 * block's last position, which are not rounded. A gate is that of a row plus `pooling`. Or an element is the sum of its
 * positions', in their order, divided by their number; then the key is normed as rows are (rows.c) and turned as the
 * first of them is. A head counts 1 then.
 */
#include "choosing.h"

#include "library.h"
#include "pool.h"
#include "rounding.h"

#include <string.h>

#define FAR (1 << 18) /* products from which threads share them */

/* Cut scratch, if it is not NULL, in what rows need: so many floats. */
static int64_t lay_out(struct choosing *now, float *scratch) {
    struct piece *piece = &now->piece;
    piece->wide = up_to_multiple(piece->a->size, LANES_IN_ALL);
    const int64_t queries = piece->rows * piece->a->heads * piece->wide;
    piece->q = scratch;
    now->totals = scratch ? scratch + queries : NULL;
    return queries + piece->rows * lists_of(now->c) * piece->stretches * SIGHT;
}

/* Make room for choosing; 0 if there is no memory. */
EXPORT int32_t motley_prepare_choice(const struct choice *c) {
    const struct attention *a = &c->attention;
    struct choosing largest = {.c = c, .piece = {.a = a, .rows = ABREAST, .stretches = divide_up(keys_of(c, a->context), SIGHT)}};
    return pool_reserve(a->pool, (size_t)lay_out(&largest, NULL) * sizeof(float));
}

/* A number that is larger where a float is. */
static uint32_t ordered(float x) {
    uint32_t bits;
    x += 0.f; /* of -0, 0 */
    memcpy(&bits, &x, sizeof bits);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/* Choose the best `count` of more positions, digit by digit of what the least of them must be. */
static void choose_best(const float *scores, int64_t positions, int64_t count, int64_t *chosen) {
    enum { DIGIT = 11, BINS = 1 << DIGIT };
    static const int shifts[] = {32 - DIGIT, 32 - 2 * DIGIT, 0};
    uint32_t least = 0, known = 0;
    int64_t left = count; /* of those equal to the least, as far as it is known */
    for (int pass = 0; pass < 3; pass++) {
        const int shift = shifts[pass];
        const uint32_t digit = pass < 2 ? BINS - 1 : (1u << (32 - 2 * DIGIT)) - 1;
        int32_t bins[BINS] = {0};
        for (int64_t i = 0; i < positions; i++) {
            const uint32_t score = ordered(scores[i]);
            if ((score & known) == least) bins[score >> shift & digit]++;
        }
        uint32_t bin = digit;
        for (; bins[bin] < left; bin--) left -= bins[bin];
        least |= bin << shift;
        known |= digit << shift;
    }
    for (int64_t i = 0; i < positions; i++) {
        const uint32_t score = ordered(scores[i]);
        if (score > least || (score == least && left-- > 0)) *chosen++ = i;
    }
}

static void score(const void *job, int64_t stretch) { kernels->score_index(job, stretch); }

/* From the scores of positions to those of blocks, in place; how many blocks there are. */
static int64_t score_blocks(const struct choice *c, float *scores, int64_t positions) {
    if (pools(c)) return keys_of(c, positions);
    const int64_t blocks = divide_up(positions, c->block);
    for (int64_t b = 0; b < blocks; b++) {
        float best = scores[b * c->block];
        for (int64_t i = b * c->block + 1; i < positions && i < (b + 1) * c->block; i++)
            if (scores[i] > best) best = scores[i];
        scores[b] = b < blocks - c->latest ? best : __builtin_inff();
    }
    return blocks;
}

/* From chosen ones of so many blocks to their positions up to a row's own, in place, and those behind all blocks. */
static void spread(const struct choice *c, int64_t blocks, int64_t positions, int64_t *chosen) {
    const int64_t most = c->count / c->block;
    for (int64_t n = most - 1; n >= 0; n--) {
        const int64_t first = chosen[n] * c->block;
        for (int64_t i = 0; i < c->block; i++) chosen[n * c->block + i] = first + i < positions ? first + i : -1;
    }
    for (int64_t i = most * c->block, next = blocks * c->block; i < c->count; i++, next++)
        chosen[i] = next < positions ? next : -1;
}

static void choose_of_list(const void *job, int64_t list) {
    const struct choosing *now = job;
    const struct choice *c = now->c;
    const int64_t lists = lists_of(c), positions = now->piece.position + list / lists + 1;
    int64_t *chosen = c->chosen + (now->piece.row * lists + list) * c->copies * c->count;
    float *scores = now->totals + list * now->piece.stretches * SIGHT;
    const int64_t blocks = score_blocks(c, scores, positions);
    choose_best(scores, blocks, c->count / c->block, chosen);
    spread(c, blocks, positions, chosen);
    for (int64_t n = 1; n < c->copies; n++) memcpy(chosen + n * c->count, chosen, (size_t)c->count * sizeof *chosen);
}

/* Do work(now, chunk) for all chunks, on several threads if it is enough for them. */
static void share(const struct choosing *now, void (*work)(const void *, int64_t), int64_t chunks) {
    const struct attention *a = now->piece.a;
    if (now->piece.rows * a->heads * a->size * now->piece.stretches * SIGHT >= FAR) pool_run(a->pool, work, now, chunks);
    else
        for (int64_t chunk = 0; chunk < chunks; chunk++) work(now, chunk);
}

/* Have all positions chosen by rows of a span that see no more than may be; how many rows these are. */
static int64_t choose_all(const struct choice *c, const struct span *span) {
    int64_t row = 0;
    for (; row < span->rows && span->position + row < c->count; row++) {
        const int64_t lists = lists_of(c) * c->copies;
        int64_t *chosen = c->chosen + (span->row + row) * lists * c->count;
        for (int64_t list = 0; list < lists; list++, chosen += c->count)
            for (int64_t i = 0; i < c->count; i++) chosen[i] = i <= span->position + row ? i : -1;
    }
    return row;
}

/* Choose, where motley_prepare_choice has made room. The number of a span that does not fit, then nothing is written;
 * -1: all do. */
EXPORT int32_t motley_choose(const struct choice *c) {
    const struct attention *a = &c->attention;
    for (int64_t n = 0; n < a->spans->count; n++)
        if (!attention_fits(a, n)) return (int32_t)n;
    float *scratch = (float *)pool_enter(a->pool);
    for (int64_t n = 0; n < a->spans->count; n++)
        kernels->cache_index(c, a->spans->all + n, attention_table(a, n), scratch);
    for (int64_t n = 0; n < a->spans->count; n++) {
        const struct span *span = a->spans->all + n;
        for (int64_t done = choose_all(c, span); done < span->rows; done += ABREAST) {
            const int64_t rows = span->rows - done < ABREAST ? span->rows - done : ABREAST, position = span->position + done;
            struct choosing now = {
                .c = c,
                .piece = {
                    .a = a,
                    .table = attention_table(a, n),
                    .blocks = span->blocks,
                    .last = (position + rows - 1) / a->tokens,
                    .row = span->row + done,
                    .rows = rows,
                    .position = position,
                    .stretches = divide_up(keys_of(c, position + rows), SIGHT),
                },
            };
            lay_out(&now, scratch);
            kernels->turn_index(&now);
            share(&now, score, now.piece.stretches);
            share(&now, choose_of_list, rows * lists_of(c));
        }
    }
    pool_leave(a->pool);
    return -1;
}
