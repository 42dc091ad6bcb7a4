/* Layers with recurrent states of sequences, read and changed row by row: gated DeltaNet, Mamba2's state space, and short
 * or dilated convolutions, whose state is the rows that they see. Threads share (span, head), or (span, some columns).
 *
 * The arithmetic. It is the same to the bit for every level and pool, however a sequence is cut in spans, and whichever
 * spans are computed together. s(x) is the sigmoid of rows.c.
 *
 * - A convolved element is the sum of filter * element over the rows that the convolution sees, by fma from its bias, or
 *   0, oldest row first; rows before a sequence's first are 0. Then x becomes x * s(x), but in a short convolution.
 * - softplus(x) = max(x, 0) + log1p(exp(-|x|)), the logarithm by a polynomial in double.
 *
 * Gated DeltaNet:
 * - A head of q or k is multiplied by 1 / sqrt(sum of its squares + 1e-6), the sum as that of a norm in rows.c; q by
 *   1 / sqrt(key_size) besides.
 * - With e = exp(-(rate * softplus(a + bias))): found = e * (the sum of k * state by fma, row by row of the state from
 *   0); state = fma(k, (v - found) * (s(b) * written), state * e); the result is the sum of q * state by fma, row by row.
 *   Where each row of the state has an e of its own, found is the sum of (k * e) * state. With a floor, e is
 *   exp(floor * s((a + bias) * rate)).
 * - y = result * (1 / sqrt(mean of its squares + epsilon)) * gain * (z * s(z)), or s(z) in place of the last.
 *
 * State space:
 * - step = softplus(dt + bias), within its bounds; e = exp(-(rate * step)); state = fma(b, x * step, state * e).
 * - y = fma(gain, x, the sum of c * state by fma, row by row) * (z * s(z)).
 *
 * Short convolution: y = c * the convolved products b * x.
 *
 * Dilated convolution: y is the convolved element, which sees each `dilation`-th of the rows.
 */
#include "library.h"
#include "pool.h"

#include <string.h>

static int64_t state_size(const struct recurrent *d) { return d->heads * d->key_size * d->value_size; }

/* Make room for one span's states; 0 if there is no memory. */
EXPORT int32_t motley_prepare_recurrent(const struct recurrent *d) {
    return pool_reserve(d->pool, (size_t)state_size(d) * sizeof(float));
}

static int fits(const struct recurrent *d, const struct recurrent_span *span) {
    return span->rows >= 1 && span->row >= 0 && span->row <= d->rows - span->rows && span->position >= 0 &&
           span->slot >= 0 && span->slot < d->slots && span->guesses >= 0 && span->guesses <= span->rows &&
           span->guesses <= d->most_guesses;
}

/* Whether a span begins its sequence, or goes on where the state stands or among the guesses behind it. */
static int goes_on(const struct recurrent *d, const struct recurrent_span *span) {
    const int64_t *mark = d->marks + 2 * span->slot, known = span->position - mark[0];
    return !span->position || (known >= 0 && known <= mark[1]);
}

static struct recurring begin(const struct recurrent *d, const struct recurrent_span *span, float *scratch) {
    int64_t *mark = d->marks + 2 * span->slot;
    if (!span->position) {
        const int64_t state = state_size(d), recent = (d->reach - 1) * d->columns;
        memset(d->states + span->slot * state, 0, (size_t)state * 4);
        memset(d->recent + span->slot * recent, 0, (size_t)recent * 4);
        mark[0] = mark[1] = 0;
    }
    const int64_t before = span->position - mark[0];
    /* A half of a span may begin with a guess: then what has been guessed before it stays one. */
    const int64_t sure = span->guesses < span->rows ? before + span->rows - span->guesses : 0;
    return (struct recurring){.d = d, .span = span, .before = before, .sure = sure, .scratch = scratch};
}

const float *recurrent_kept(const struct recurring *now, int64_t row) {
    const struct recurrent *d = now->d;
    const int64_t kept = d->reach - 1;
    if (row < 0) return d->recent + (now->span->slot * kept + kept + row) * d->columns;
    return d->guessed + (now->span->slot * d->most_guesses + row) * (d->columns + d->gate_columns);
}

const float *recurrent_first(const struct recurring *now, int64_t row) {
    return now->d->first + (now->span->row + row - now->before) * now->d->first_stride;
}

const float *recurrent_columns(const struct recurring *now, int64_t row, int64_t column) {
    const struct recurrent *d = now->d;
    if (row < now->before) return recurrent_kept(now, row) + column;
    if (column < d->first_columns) return recurrent_first(now, row) + column;
    const int64_t others = d->columns - d->first_columns;
    return d->second + (now->span->row + row - now->before) * others + column - d->first_columns;
}

const float *recurrent_gates(const struct recurring *now, int64_t row) {
    if (row < now->before) return recurrent_kept(now, row) + now->d->columns;
    return now->d->gates + (now->span->row + row - now->before) * now->d->gate_columns;
}

/* Copy what the convolution sees of a row. */
static void copy_columns(const struct recurring *now, int64_t row, float *to) {
    const struct recurrent *d = now->d;
    const int64_t first = d->first_columns;
    if (row < now->before) {
        memmove(to, recurrent_kept(now, row), (size_t)d->columns * 4);
        return;
    }
    const float *from = recurrent_first(now, row);
    if (d->kind == SHORT_CONVOLUTION) {
        for (int64_t i = 0; i < first; i++) to[i] = from[i] * from[2 * first + i];
        return;
    }
    memcpy(to, from, (size_t)first * 4);
    if (d->columns > first) memcpy(to + first, recurrent_columns(now, row, first), (size_t)(d->columns - first) * 4);
}

/* Note, once all heads are done, which rows the next span's convolution sees, and which may have to be computed again. */
static void end(const struct recurring *now) {
    const struct recurrent *d = now->d;
    const struct recurrent_span *span = now->span;
    const int64_t kept = d->reach - 1, wide = d->columns + d->gate_columns;
    float *guessed = d->guessed + span->slot * d->most_guesses * wide;
    float *recent = d->recent + span->slot * kept * d->columns;
    for (int64_t i = 0; i < kept; i++) /* ascending: a row is read before it is overwritten */
        copy_columns(now, now->sure - kept + i, recent + i * d->columns);
    int64_t count = 0;
    for (int64_t row = now->sure; row < now->before + span->rows && count < d->most_guesses; row++, count++) {
        float *to = guessed + count * wide;
        if (row < now->before) continue; /* the first ones, where they are already */
        copy_columns(now, row, to);
        if (d->gate_columns) memcpy(to + d->columns, recurrent_gates(now, row), (size_t)d->gate_columns * 4);
    }
    d->marks[2 * span->slot] = span->position - now->before + now->sure;
    d->marks[2 * span->slot + 1] = count;
}

static int64_t jobs(const struct recurrent *d) {
    return d->kind >= SHORT_CONVOLUTION ? (d->columns + COLUMNS_OF_JOB - 1) / COLUMNS_OF_JOB : d->heads;
}

static void recur(const void *job, int64_t chunk) {
    const struct recurring *all = job;
    const struct recurrent *d = all->d;
    const int64_t each = jobs(d);
    const struct recurring *now = all + chunk / each;
    switch (d->kind) {
        case GATED_DELTA: kernels->recur_delta(now, chunk % each); break;
        case STATE_SPACE: kernels->recur_state_space(now, chunk % each); break;
        case SHORT_CONVOLUTION: kernels->recur_convolution(now, chunk % each); break;
        default: kernels->recur_dilated(now, chunk % each);
    }
}

enum { TOGETHER = 64 }; /* spans */

/* Compute all spans. The number of a span that does not fit or go on, then nothing is written; -1: all do. */
EXPORT int32_t motley_recurrent(const struct recurrent *d) {
    const struct recurrent_spans *spans = d->spans;
    int64_t covered = 0;
    for (int64_t n = 0; n < spans->count; n++)
        if (!fits(d, spans->all + n) || !goes_on(d, spans->all + n)) return (int32_t)n;
    float *scratch = (float *)pool_enter(d->pool);
    for (int64_t n = 0; n < spans->count;) {
        struct recurring all[TOGETHER];
        int64_t count = 0;
        do { /* one with guesses needs the scratch for itself */
            all[count++] = begin(d, spans->all + n++, scratch);
        } while (n < spans->count && count < TOGETHER && !all[count - 1].span->guesses && !spans->all[n].guesses);
        pool_run(d->pool, recur, all, count * jobs(d));
        for (int64_t i = 0; i < count; i++) end(all + i);
        covered = all[count - 1].span->row + all[count - 1].span->rows;
    }
    for (; covered && covered < d->rows; covered++) /* the last row once more */
        memcpy(d->y + covered * d->width, d->y + (covered - 1) * d->width, (size_t)d->width * 4);
    pool_leave(d->pool);
    return -1;
}
