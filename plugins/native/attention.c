/* One token's attention to cached keys and values, which are read once.
 *
 * The arithmetic. It is the same to the bit for every level and pool:
 *
 * - Of a pair (a, b) that turns, a becomes fma(-b, sin, a * cos) and b fma(b, cos, a * sin). q is then multiplied by
 *   the scale.
 * - A score is the sum of q * k: lane i of 16 adds dimensions i, i + 16, ... by lane = fma(q, k, lane), starting from
 *   0; lanes are added as the tree of matmul.c.
 * - Positions that are seen are cut in stretches of SIGHT, from the first on. In each, e = exp(score - the largest)
 *   (floats.h); lane i of 16 sums those of positions i, i + 16, ..., and the tree sums the lanes; a dimension is
 *   the sum of e * v by fma, position by position.
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

/* Cut the positions that are seen in stretches, and scratch, if it is not NULL, in what they need: so many floats. */
static int64_t lay_out(struct attending *now, int64_t seen, float *scratch) {
    const int64_t heads = now->a.heads;
    int64_t floats = 0;
    now->group = heads / now->a.kv_heads;
    now->wide = up_to_multiple(now->a.size, LANES_IN_ALL);
    now->stretches = divide_up(seen, SIGHT);
    floats = place(&now->q, heads * now->wide, scratch, floats);
    floats = place(&now->sights, now->stretches * heads * now->wide, scratch, floats);
    floats = place(&now->largest, now->stretches * heads, scratch, floats);
    return place(&now->sums, now->stretches * heads, scratch, floats);
}

/* Make room for an attention; 0 if there is no memory. */
EXPORT int32_t motley_prepare_attention(const struct attention *a) {
    struct attending now = {.a = *a};
    const int64_t most = a->window && a->window < a->capacity ? a->window : a->capacity;
    return pool_reserve(a->pool, (size_t)lay_out(&now, most, NULL) * sizeof(float));
}

static void attend(const void *job, int64_t chunk) {
    const struct attending *now = job;
    kernels->attend(now, chunk % now->stretches, chunk / now->stretches);
}

/* Compute an attention for which motley_prepare_attention has made room; 0 if its position has no place. */
EXPORT int32_t motley_attention(const struct attention *a) {
    struct attending now = {.a = *a, .position = *a->position};
    if (now.position < 0 || now.position >= a->capacity || (a->turned && now.position >= a->places)) return 0;
    now.first = a->window && a->window <= now.position ? now.position - a->window + 1 : 0;
    const int64_t seen = now.position + 1 - now.first;
    lay_out(&now, seen, (float *)pool_enter(a->pool));
    const int64_t chunks = now.stretches * a->kv_heads;
    kernels->take_token(&now);
    if (a->heads * a->size * seen >= FAR) pool_run(a->pool, attend, &now, chunks);
    else
        for (int64_t chunk = 0; chunk < chunks; chunk++) attend(&now, chunk);
    kernels->combine(&now);
    pool_leave(a->pool);
    return 1;
}
