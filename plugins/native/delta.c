/* Gated DeltaNet: recurrent states of sequences, read and changed row by row. Threads share (span, value head).
 *
 * The arithmetic. It is the same to the bit for every level and pool, however a sequence is cut in spans, and whichever
 * spans are computed together. s(x) is the sigmoid of rows.c.
 *
 * - An element of q, k or v is the sum of filter * element over the rows that the convolution sees, by fma from 0,
 *   oldest row first; rows before a sequence's first are 0. Then x becomes x * s(x).
 * - A head of q or k is multiplied by 1 / sqrt(sum of its squares + 1e-6), the sum as that of a norm in rows.c; q by
 *   1 / sqrt(key_size) besides.
 * - With e = exp(-(rate * softplus(a + bias))) and softplus(x) = max(x, 0) + log1p(exp(-|x|)), the logarithm by a
 *   polynomial in double: found = e * (the sum of k * state by fma, row by row of the state from 0);
 *   state = fma(k, (v - found) * s(b), state * e); the result is the sum of q * state by fma, row by row.
 * - y = result * (1 / sqrt(mean of its squares + epsilon)) * gain * (z * s(z)).
 */
#include "library.h"
#include "pool.h"

#include <string.h>

/* Make room for one span's states; 0 if there is no memory. */
EXPORT int32_t motley_prepare_delta(const struct delta *d) {
    return pool_reserve(d->pool, (size_t)(d->keys * d->group * d->key_size * d->value_size) * sizeof(float));
}

static int fits(const struct delta *d, const struct delta_span *span) {
    return span->rows >= 1 && span->row >= 0 && span->row <= d->rows - span->rows && span->position >= 0 &&
           span->slot >= 0 && span->slot < d->slots && span->guesses >= 0 && span->guesses <= span->rows &&
           span->guesses <= d->most_guesses;
}

static struct recurring begin(const struct delta *d, const struct delta_span *span, float *scratch) {
    int64_t *mark = d->marks + 2 * span->slot;
    const int64_t known = span->position - mark[0];
    if (!span->position) {
        const int64_t state = d->keys * d->group * d->key_size * d->value_size, recent = (d->reach - 1) * d->columns;
        memset(d->states + span->slot * state, 0, (size_t)state * 4);
        memset(d->recent + span->slot * recent, 0, (size_t)recent * 4);
        mark[1] = 0;
    }
    const int64_t before = known > 0 && known <= mark[1] ? known : 0;
    /* A half of a span may begin with a guess: then what has been guessed before it stays one. */
    const int64_t sure = span->guesses < span->rows ? before + span->rows - span->guesses : 0;
    return (struct recurring){.d = d, .span = span, .before = before, .sure = sure, .scratch = scratch};
}

const float *delta_row(const struct recurring *now, int64_t row) {
    const struct delta *d = now->d;
    const int64_t kept = d->reach - 1, values = d->keys * d->group;
    if (row < 0) return d->recent + (now->span->slot * kept + kept + row) * d->columns;
    if (row < now->before)
        return d->guessed + (now->span->slot * d->most_guesses + row) * (d->columns + 2 * values);
    return d->qkvz + (now->span->row + row - now->before) * (d->columns + values * d->value_size);
}

const float *delta_gates(const struct recurring *now, int64_t row) {
    const int64_t values = now->d->keys * now->d->group;
    if (row < now->before) return delta_row(now, row) + now->d->columns;
    return now->d->ba + (now->span->row + row - now->before) * 2 * values;
}

/* Note, once all heads are done, which rows the next span's convolution sees, and which may have to be computed again. */
static void end(const struct recurring *now) {
    const struct delta *d = now->d;
    const struct delta_span *span = now->span;
    const int64_t kept = d->reach - 1, wide = d->columns + 2 * d->keys * d->group;
    float *guessed = d->guessed + span->slot * d->most_guesses * wide;
    float *recent = d->recent + span->slot * kept * d->columns;
    for (int64_t i = 0; i < kept; i++) /* ascending: a row is read before it is overwritten */
        memmove(recent + i * d->columns, delta_row(now, now->sure - kept + i), (size_t)d->columns * 4);
    int64_t count = 0;
    for (int64_t row = now->sure; row < now->before + span->rows && count < d->most_guesses; row++, count++) {
        float *to = guessed + count * wide;
        const float *gates = delta_gates(now, row);
        if (row < now->before) continue; /* the first ones, where they are already */
        memcpy(to, delta_row(now, row), (size_t)d->columns * 4);
        memcpy(to + d->columns, gates, (size_t)(wide - d->columns) * 4);
    }
    d->marks[2 * span->slot] = span->position - now->before + now->sure;
    d->marks[2 * span->slot + 1] = count;
}

static void recur(const void *job, int64_t chunk) {
    const struct recurring *all = job;
    const int64_t values = all->d->keys * all->d->group;
    kernels->recur(all + chunk / values, chunk % values);
}

enum { TOGETHER = 64 }; /* spans */

/* Compute all spans. The number of a span that does not fit, then nothing is written; -1: all do. */
EXPORT int32_t motley_delta(const struct delta *d) {
    const struct delta_spans *spans = d->spans;
    const int64_t values = d->keys * d->group, width = values * d->value_size;
    int64_t covered = 0;
    for (int64_t n = 0; n < spans->count; n++)
        if (!fits(d, spans->all + n)) return (int32_t)n;
    float *scratch = (float *)pool_enter(d->pool);
    for (int64_t n = 0; n < spans->count;) {
        struct recurring all[TOGETHER];
        int64_t count = 0;
        do { /* one with guesses needs the scratch for itself */
            all[count++] = begin(d, spans->all + n++, scratch);
        } while (n < spans->count && count < TOGETHER && !all[count - 1].span->guesses && !spans->all[n].guesses);
        pool_run(d->pool, recur, all, count * values);
        for (int64_t i = 0; i < count; i++) end(all + i);
        covered = all[count - 1].span->row + all[count - 1].span->rows;
    }
    for (; covered && covered < d->rows; covered++) /* the last row once more */
        memcpy(d->y + covered * width, d->y + (covered - 1) * width, (size_t)width * 4);
    pool_leave(d->pool);
    return -1;
}
