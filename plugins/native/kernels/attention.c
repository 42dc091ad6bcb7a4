/* Attention of tokens to cached keys and values, among them their own; each sees those up to its own place.
 *
 * What is cached lies in blocks of `tokens` positions each; a span's rows are tokens of one sequence and say which
 * blocks it has. All keys and values of a call's rows go to their blocks first, then all rows attend: a few rows of a
 * span at a time (a piece), as many pieces together as there is room for. Threads share (piece, stretch, kv head).
 *
 * The arithmetic. It is the same to the bit for every level and pool, however positions are cut in blocks, and
 * whichever rows and spans are computed together:
 *
 * - Of a pair (a, b) that turns, a becomes fma(-b, sin, a * cos) and b fma(b, cos, a * sin). q is then multiplied by
 *   the scale (times its position's warmth), and both by their gains, where there are any.
 * - Keys, turned, and values are cached as they are, or as FP16, each rounded to nearest, half to even; or as INT8: a
 *   head of a token has a scale and codes as a token's block in matmul.c (the scale is M / 127, with M the largest
 *   magnitude; a code x * (127 / M), rounded to nearest, half to even). What follows is computed in float32, with k and
 *   v the cached numbers, FP16 widened; of INT8 the codes.
 * - A score is the sum of q * k: lane i of 16 adds dimensions i, i + 16, ... by lane = fma(q, k, lane), starting from
 *   0; lanes are added as the tree of matmul.c. Of INT8 it is then multiplied by the key's scale.
 * - Positions are cut in stretches of SIGHT, from position 0 on. In each, e = exp(score - the largest that is seen)
 *   (floats.h), 0 where a position is not seen; lane i of 16 sums those of positions i, i + 16, ..., and the tree sums
 *   the lanes; a dimension is the sum of e * v by fma, position by position, where of INT8 e is first multiplied by the
 *   value's scale.
 *   Where a block lies, near or far, changes nothing.
 * - Where positions are chosen, and fewer than a row could see, these are cut in stretches instead, as if they were all
 *   that there are.
 * - These three are the stretch's summary. It may be computed elsewhere, for rows that come after the stretch, from what
 *   is cached there; it is asked for with the queries, and told. Where it was computed does not change a bit.
 * - Stretch by stretch, both sums are weighed with exp(the stretch's largest score - the largest of all) and summed by
 *   fma; a result is its dimension's sum * (1 / the sum of exponentials).
 */
#include "library.h"
#include "pool.h"
#include "rounding.h"

#include <string.h>

#define FAR (1 << 18)  /* products of scores from which threads share them */
#define ROOM (1 << 20) /* floats of scratch for pieces, or more if one alone needs more */
#define MOST_ROOM (1 << 26) /* floats that the rows of one piece should not exceed together */
#define MOST_PIECES 64 /* together */

/* Give a part of scratch its place behind `floats` others, or only count it while there is no scratch. */
static int64_t place(float **part, int64_t count, float *scratch, int64_t floats) {
    if (scratch) *part = scratch + floats;
    return floats + up_to_multiple(count, LANES_IN_ALL);
}

/* Cut scratch, if it is not NULL, in what a piece needs: so many floats. */
static int64_t lay_out(struct piece *now, float *scratch) {
    const int64_t queries = now->rows * now->a->heads;
    int64_t floats = 0;
    now->group = now->a->heads / now->a->kv_heads;
    now->wide = up_to_multiple(now->a->size, LANES_IN_ALL);
    floats = place(&now->q, queries * now->wide, scratch, floats);
    floats = place(&now->sights, now->stretches * queries * now->wide, scratch, floats);
    floats = place(&now->sinks, queries, scratch, floats);
    floats = place(&now->largest, now->stretches * queries, scratch, floats);
    return place(&now->sums, now->stretches * queries, scratch, floats);
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* The most positions that a row sees, but for windows. */
static int64_t most_seen(const struct attention *a) { return a->chosen ? least(a->context, a->choices) : a->context; }

/* Rows of a span that attend at a time: fewer where many wide heads see far, so that their sums need no more room. */
static int64_t abreast(const struct attention *a) {
    const int64_t seen = least(a->context, a->window ? a->window + ABREAST + SIGHT : most_seen(a));
    const int64_t rows = MOST_ROOM / (a->heads * a->size * divide_up(seen, SIGHT));
    return rows < 1 ? 1 : least(rows, ABREAST);
}

/* Floats of scratch that an attention may use. */
static int64_t room(const struct attention *a) {
    struct piece largest = {.a = a, .rows = least(a->rows, abreast(a)), .stretches = divide_up(most_seen(a), SIGHT)};
    if (a->window)
        largest.stretches = least(largest.stretches, divide_up(a->window + largest.rows - 1, SIGHT) + 1);
    const int64_t alone = lay_out(&largest, NULL);
    return alone > ROOM ? alone : ROOM;
}

/* Make room for an attention; 0 if there is no memory. */
EXPORT int32_t motley_prepare_attention(const struct attention *a) {
    return pool_reserve(a->pool, (size_t)room(a) * sizeof(float));
}

const struct table *attention_table(const struct attention *a, int64_t n) {
    return a->turned ? a->spans->tables + n * a->spans->ropes + a->rope : NULL;
}

/* Where in what is told of a span a stretch is; -1: it is not among it. */
static int64_t place_away(const struct span *span, int64_t stretch) {
    int64_t begin = 0, end = span->away_count;
    while (begin < end) {
        const int64_t middle = (begin + end) / 2;
        if (span->away[middle] == stretch) return middle;
        if (span->away[middle] < stretch)
            begin = middle + 1;
        else
            end = middle;
    }
    return -1;
}

/* Whether what is chosen for each head of a row is ascending positions up to its own, one at least, and then -1. */
static int can_pick(const struct attention *a, int64_t row, int64_t position) {
    const int64_t *picked = a->chosen + row * a->kv_heads * a->choices;
    for (int64_t head = 0; head < a->kv_heads; head++, picked += a->choices) {
        int64_t count = 0;
        for (int64_t least = 0; count < a->choices && picked[count] >= least; count++) least = picked[count] + 1;
        if (!count || picked[count - 1] > position) return 0;
        for (; count < a->choices; count++)
            if (picked[count] != -1) return 0;
    }
    return 1;
}

/* Whether there are the rows, the blocks and the angles of span n, and what is told of it, and chosen, can be;
 * blocks that its rows go to are near. */
int attention_fits(const struct attention *a, int64_t n) {
    const struct span *span = a->spans->all + n;
    const struct table *table = attention_table(a, n);
    if (span->row < 0 || span->rows < 1 || span->row > a->rows - span->rows) return 0;
    if (span->position < 0 || span->position > a->context - span->rows) return 0;
    const int64_t end = span->position + span->rows;
    if (divide_up(end, a->tokens) > span->count) return 0;
    if (table && (table->turned != a->turned || end > table->places)) return 0;
    for (int64_t i = 0; i < span->away_count; i++)
        if (span->away[i] < (i ? span->away[i - 1] + 1 : 0) || (span->away[i] + 1) * SIGHT > span->position) return 0;
    const int64_t first = first_seen(a, span->position);
    for (int64_t b = first / a->tokens; b * a->tokens < end; b++) {
        const int64_t from = b * a->tokens > first ? b * a->tokens : first, to = least(end, (b + 1) * a->tokens);
        int here = 0;
        for (int64_t s = from / SIGHT; s * SIGHT < to; s++) here |= place_away(span, s) < 0;
        const int is_read_only = (b + 1) * a->tokens <= span->position;
        const int64_t count = a->near.count + (is_read_only ? a->far.count : 0);
        if (here && (span->blocks[b] < 0 || span->blocks[b] >= count)) return 0;
    }
    for (int64_t r = 0; a->chosen && r < span->rows; r++)
        if (span->position + r >= a->choices && !can_pick(a, span->row + r, span->position + r)) return 0;
    return 1;
}

static struct piece cut(const struct attention *a, int64_t n, int64_t done) {
    const struct span *span = a->spans->all + n;
    const int64_t position = span->position + done, first = first_seen(a, position) / SIGHT;
    const int picks = a->chosen && position >= a->choices; /* rows before have pieces of their own */
    int64_t rows = picks ? 1 : least(span->rows - done, abreast(a));
    if (a->chosen && !picks) rows = least(rows, a->choices - position);
    return (struct piece){
        .a = a,
        .table = attention_table(a, n),
        .blocks = span->blocks,
        .last = (position + rows - 1) / a->tokens,
        .row = span->row + done,
        .rows = rows,
        .position = position,
        .first = first,
        .stretches = picks ? divide_up(a->choices, SIGHT) : divide_up(position + rows, SIGHT) - first,
        .picked = picks ? a->chosen + (span->row + done) * a->kv_heads * a->choices : NULL,
        .span = span->away_count ? span : NULL,
        .done = done,
    };
}

/* Pieces that are computed together. */
struct together {
    struct piece pieces[MOST_PIECES];
    int64_t count;
    int64_t floats;   /* of scratch that they take */
    int64_t products; /* of their scores */
    int awaited;      /* what is told is there */
};

static int64_t attend_chunks(const struct piece *now) { return now->stretches * now->a->kv_heads; }

static int64_t combine_chunks(const struct piece *now) { return divide_up(now->rows * now->a->heads, LANES_IN_ALL); }

static void attend(const void *job, int64_t chunk) {
    const struct piece *now = ((const struct together *)job)->pieces;
    for (; chunk >= attend_chunks(now); now++) chunk -= attend_chunks(now);
    const int64_t stretch = chunk % now->stretches;
    if (now->span && place_away(now->span, now->first + stretch) >= 0) return;
    kernels->attend(now, stretch, chunk / now->stretches);
}

/* The number in a piece of the query of a row's head. */
static int64_t query_of(const struct piece *now, int64_t row, int64_t head) {
    return (head / now->group * now->rows + row) * now->group + head % now->group;
}

/* Take the summaries that are told of a piece's span. */
static void take_told(const struct piece *now) {
    const int64_t queries = now->rows * now->a->heads, size = now->a->size;
    for (int64_t i = 0; i < now->span->away_count; i++) {
        const int64_t stretch = now->span->away[i] - now->first;
        if (stretch < 0) continue; /* before the window */
        const float *told = now->span->told + (i * now->span->rows + now->done) * now->a->heads * (size + 2);
        for (int64_t row = 0; row < now->rows; row++)
            for (int64_t head = 0; head < now->a->heads; head++, told += size + 2) {
                const int64_t at = stretch * queries + query_of(now, row, head);
                float *sight = now->sights + at * now->wide;
                memcpy(sight, told, (size_t)size * 4);
                memset(sight + size, 0, (size_t)(now->wide - size) * 4);
                now->largest[at] = told[size];
                now->sums[at] = told[size + 1];
            }
    }
}

static void combine(const void *job, int64_t chunk) {
    const struct piece *now = ((const struct together *)job)->pieces;
    for (; chunk >= combine_chunks(now); now++) chunk -= combine_chunks(now);
    kernels->combine(now, chunk);
}

/* Do work(all, chunk) for all chunks, on several threads if it is enough for them. */
static void share(const struct together *all, void (*work)(const void *, int64_t), int64_t chunks) {
    if (all->products >= FAR) pool_run(all->pieces->a->pool, work, all, chunks);
    else
        for (int64_t chunk = 0; chunk < chunks; chunk++) work(all, chunk);
}

/* Compute all pieces; then there are none. */
static void finish(struct together *all) {
    int64_t attending = 0, combining = 0;
    for (int64_t n = 0; n < all->count; n++) {
        kernels->turn_queries(all->pieces + n);
        attending += attend_chunks(all->pieces + n);
        combining += combine_chunks(all->pieces + n);
    }
    share(all, attend, attending);
    for (int64_t n = 0; n < all->count; n++) {
        const struct piece *piece = all->pieces + n;
        if (!piece->span) continue;
        if (!all->awaited && piece->a->await_told) piece->a->await_told();
        all->awaited = 1;
        take_told(piece);
    }
    share(all, combine, combining);
    all->count = all->floats = all->products = 0;
}

/* Compute an attention for which motley_prepare_attention has made room. The number of a span that does not fit, then
 * nothing is written; -1: all do. */
EXPORT int32_t motley_attention(const struct attention *a) {
    const struct spans *spans = a->spans;
    struct together all;
    all.count = all.floats = all.products = all.awaited = 0;
    for (int64_t n = 0; n < spans->count; n++)
        if (!attention_fits(a, n)) return (int32_t)n;
    const int64_t most = room(a);
    float *scratch = (float *)pool_enter(a->pool);
    for (int64_t n = 0; n < spans->count; n++) kernels->cache_rows(a, spans->all + n, attention_table(a, n), scratch);
    for (int64_t n = 0; n < spans->count; n++)
        for (int64_t done = 0; done < spans->all[n].rows;) {
            struct piece piece = cut(a, n, done);
            done += piece.rows;
            const int64_t floats = lay_out(&piece, NULL);
            if (all.count == MOST_PIECES || all.floats + floats > most) finish(&all);
            lay_out(&piece, scratch + all.floats);
            all.pieces[all.count++] = piece;
            all.floats += floats;
            all.products += piece.rows * a->heads * a->size * piece.stretches * SIGHT;
        }
    if (all.count) finish(&all);
    pool_leave(a->pool);
    return -1;
}

/* The queries [rows, heads, size] of span n, turned and scaled, for a question about it. As motley_attention, n if the
 * span does not fit. */
EXPORT int32_t motley_queries(const struct attention *a, int64_t n, float *queries) {
    const struct span *span = a->spans->all + n;
    if (!attention_fits(a, n)) return (int32_t)n;
    float *scratch = (float *)pool_enter(a->pool);
    for (int64_t row = 0; row < span->rows; row++) {
        struct piece piece = {
            .a = a, .table = attention_table(a, n), .row = span->row + row, .rows = 1, .position = span->position + row};
        lay_out(&piece, scratch);
        kernels->turn_queries(&piece);
        for (int64_t head = 0; head < a->heads; head++, queries += a->size)
            memcpy(queries, piece.q + head * piece.wide, (size_t)a->size * 4);
    }
    pool_leave(a->pool);
    return -1;
}

/* The rows of a question from `done` on that attend together, to `count` of its stretches from number `from` on. */
static struct piece ask(const struct question *asked, int64_t done, int64_t from, int64_t count) {
    return (struct piece){
        .a = asked->a,
        .blocks = asked->blocks,
        .last = asked->block_count - 1,
        .rows = least(asked->rows - done, ABREAST),
        .position = asked->position + done,
        .chosen = asked->stretches + from,
        .stretches = count,
    };
}

/* Floats of scratch that a question may use. */
static int64_t room_to_answer(const struct question *asked) {
    struct piece least_piece = ask(asked, 0, 0, 1);
    const int64_t alone = lay_out(&least_piece, NULL);
    return alone > ROOM ? alone : ROOM;
}

static void put_queries(const struct piece *now, const float *queries) {
    const int64_t size = now->a->size;
    for (int64_t row = 0; row < now->rows; row++)
        for (int64_t head = 0; head < now->a->heads; head++, queries += size) {
            float *q = now->q + query_of(now, row, head) * now->wide;
            memcpy(q, queries, (size_t)size * 4);
            memset(q + size, 0, (size_t)(now->wide - size) * 4);
        }
}

static void tell(const struct piece *now, int64_t stretch, float *told) {
    const int64_t queries = now->rows * now->a->heads, size = now->a->size;
    for (int64_t row = 0; row < now->rows; row++)
        for (int64_t head = 0; head < now->a->heads; head++, told += size + 2) {
            const int64_t at = stretch * queries + query_of(now, row, head);
            memcpy(told, now->sights + at * now->wide, (size_t)size * 4);
            told[size] = now->largest[at];
            told[size + 1] = now->sums[at];
        }
}

/* Whether the stretches are there, and come before the rows. */
static int can_answer(const struct question *asked) {
    const struct attention *a = asked->a;
    if (asked->rows < 1 || asked->position < 0) return 0;
    for (int64_t i = 0; i < asked->count; i++) {
        const int64_t stretch = asked->stretches[i], begin = stretch * SIGHT, end = begin + SIGHT;
        if (stretch < (i ? asked->stretches[i - 1] + 1 : 0) || end > asked->position) return 0;
        if (divide_up(end, a->tokens) > asked->block_count) return 0;
        for (int64_t b = begin / a->tokens; b * a->tokens < end; b++)
            if (asked->blocks[b] < 0 || asked->blocks[b] >= a->near.count) return 0;
    }
    return 1;
}

/* Compute summaries; 0: they are there, 1: the question does not fit, 2: there is no memory. Then nothing is written. */
EXPORT int32_t motley_answer(const struct question *asked) {
    const struct attention *a = asked->a;
    if (!can_answer(asked)) return 1;
    const int64_t most = room_to_answer(asked);
    if (!pool_reserve(a->pool, (size_t)most * sizeof(float))) return 2;
    float *scratch = (float *)pool_enter(a->pool);
    for (int64_t done = 0; done < asked->rows; done += ABREAST)
        for (int64_t from = 0; from < asked->count;) {
            struct together all = {.count = 1, .pieces = {ask(asked, done, from, asked->count - from)}};
            struct piece *piece = all.pieces;
            while (lay_out(piece, NULL) > most) piece->stretches = divide_up(piece->stretches, 2);
            lay_out(piece, scratch);
            put_queries(piece, asked->queries + done * a->heads * a->size);
            all.products = piece->rows * a->heads * a->size * piece->stretches * SIGHT;
            share(&all, attend, attend_chunks(piece));
            for (int64_t i = 0; i < piece->stretches; i++)
                tell(piece, i, asked->summaries + ((from + i) * asked->rows + done) * a->heads * (a->size + 2));
            from += piece->stretches;
        }
    pool_leave(a->pool);
    return 0;
}
