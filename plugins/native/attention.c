/* Attention of consecutive tokens to cached keys and values, among them their own; each sees those up to its own place.
 *
 * The arithmetic. It is the same to the bit for every level and pool, and whichever rows are computed together:
 *
 * - Of a pair (a, b) that turns, a becomes fma(-b, sin, a * cos) and b fma(b, cos, a * sin). q is then multiplied by
 *   the scale.
 * - A score is the sum of q * k: lane i of 16 adds dimensions i, i + 16, ... by lane = fma(q, k, lane), starting from
 *   0; lanes are added as the tree of matmul.c.
 * - Positions are cut in stretches of SIGHT. In each, e = exp(score - the largest that is seen) (floats.h), 0 where a
 *   position is not seen; lane i of 16 sums those of positions i, i + 16, ..., and the tree sums the lanes; a dimension
 *   is the sum of e * v by fma, position by position.
 * - Stretch by stretch, both sums are weighed with exp(the stretch's largest score - the largest of all) and summed by
 *   fma; a result is its dimension's sum * (1 / the sum of exponentials).
 */
#include "library.h"
#include "pool.h"
#include "rounding.h"

#define FAR (1 << 18) /* products of scores from which threads share them */

/* Give a part of scratch its place behind `floats` others, or only count it while there is no scratch. */
static int64_t place(float **part, int64_t count, float *scratch, int64_t floats) {
    if (scratch) *part = scratch + floats;
    return floats + count;
}

/* Cut scratch, if it is not NULL, in what so many rows and stretches need: so many floats. */
static int64_t lay_out(struct attending *now, int64_t rows, int64_t stretches, float *scratch) {
    const int64_t queries = rows * now->a.heads;
    int64_t floats = 0;
    now->rows = rows;
    now->stretches = stretches;
    now->group = now->a.heads / now->a.kv_heads;
    now->wide = up_to_multiple(now->a.size, LANES_IN_ALL);
    floats = place(&now->q, queries * now->wide, scratch, floats);
    floats = place(&now->sights, stretches * queries * now->wide, scratch, floats);
    floats = place(&now->sinks, queries, scratch, floats);
    floats = place(&now->largest, stretches * queries, scratch, floats);
    return place(&now->sums, stretches * queries, scratch, floats);
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Make room for an attention; 0 if there is no memory. */
EXPORT int32_t motley_prepare_attention(const struct attention *a) {
    struct attending now = {.a = *a};
    const int64_t rows = least(a->rows, ABREAST);
    int64_t most = divide_up(a->capacity, SIGHT);
    if (a->window) most = least(most, divide_up(a->window + rows - 1, SIGHT) + 1);
    return pool_reserve(a->pool, (size_t)lay_out(&now, rows, most, NULL) * sizeof(float));
}

static void attend(const void *job, int64_t chunk) {
    const struct attending *now = job;
    kernels->attend(now, chunk % now->stretches, chunk / now->stretches);
}

static void combine(const void *job, int64_t chunk) { kernels->combine(job, chunk); }

/* Do work(now, chunk) for all chunks, on several threads if it is enough for them. */
static void share(const struct attending *now, void (*work)(const void *, int64_t), int64_t chunks) {
    if (now->rows * now->a.heads * now->a.size * now->stretches * SIGHT >= FAR) pool_run(now->a.pool, work, now, chunks);
    else
        for (int64_t chunk = 0; chunk < chunks; chunk++) work(now, chunk);
}

/* Compute an attention for which motley_prepare_attention has made room; 0 if a position has no place. */
EXPORT int32_t motley_attention(const struct attention *a) {
    struct attending now = {.a = *a};
    const int64_t begin = *a->position, end = begin + a->rows;
    if (begin < 0 || end > a->capacity || (a->turned && end > a->places)) return 0;
    float *scratch = (float *)pool_enter(a->pool);
    for (int64_t row = 0; row < a->rows; row++) kernels->cache_row(a, row, begin + row);
    for (now.row = 0; now.row < a->rows; now.row += ABREAST) {
        const int64_t rows = least(a->rows - now.row, ABREAST);
        now.position = begin + now.row;
        now.first = a->window && a->window <= now.position ? (now.position - a->window + 1) / SIGHT : 0;
        lay_out(&now, rows, divide_up(now.position + rows, SIGHT) - now.first, scratch);
        kernels->turn_queries(&now);
        share(&now, attend, now.stretches * a->kv_heads);
        share(&now, combine, divide_up(rows * a->heads, LANES_IN_ALL));
    }
    pool_leave(a->pool);
    return 1;
}
