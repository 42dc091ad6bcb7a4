/* The weighted sum over a layer's chosen experts, of few rows, in one call: threads share the work of all of them, stage
 * by stage, so that small experts cost little more than what is read of them.
 *
 * Products and gates are those of matmul.c and rows.c, to the bit. A row's sum begins with its base, or 0, and takes in
 * the order of the experts' numbers sum = sum + weight * result, where product and sum are each rounded.
 */
#include "mixture.h"

#include <string.h>

#include "library.h"
#include "pool.h"
#include "rounding.h"

#define WEIGHED 256 /* columns of a sum that a thread takes at a time */

/* What an expert makes of its rows: those of its pairs from `begin` on. */
struct group {
    struct plan first, last;
    int64_t begin;
};

/* A mixture under way. A pair is a row and an expert that it has chosen, by a weight that is not 0. Those of an expert
 * are together, in the order of the rows, and experts are in the order of their numbers. */
struct mixing {
    const struct mixture *m;
    struct plan first, last; /* as if one expert had all pairs */
    struct group *groups;    /* of the chosen experts */
    int64_t all;             /* rows and experts that they have chosen */
    int64_t pairs, count;    /* of groups */
    int32_t *next;           /* by expert: its next pair */
    int32_t *group, *row;    /* by pair */
    int32_t *found, *own;    /* by row: how many pairs, and which, [tokens, choices] */
    float *weights;          /* by pair */
    float *gate_up, *gated, *results;
};

/* The next part of some scratch; NULL if there is none yet, and it is only counted. */
static void *take(uint8_t *scratch, int64_t *used, int64_t bytes) {
    void *part = scratch ? scratch + *used : NULL;
    *used += up_to_multiple(bytes, LINE);
    return part;
}

/* Give a mixture its scratch; how much that is. */
static int64_t lay_out(struct mixing *now, const struct mixture *m, uint8_t *scratch) {
    const int64_t pairs = m->tokens * m->choices, most = pairs < m->experts ? pairs : m->experts;
    int64_t used = 0;
    *now = (struct mixing){.m = m, .all = pairs, .first = matmul_plan(m->first), .last = matmul_plan(m->last)};
    now->first.m.tokens = now->last.m.tokens = pairs;
    now->groups = take(scratch, &used, most * (int64_t)sizeof *now->groups);
    now->next = take(scratch, &used, m->experts * 4);
    now->group = take(scratch, &used, pairs * 4);
    now->row = take(scratch, &used, pairs * 4);
    now->found = take(scratch, &used, m->tokens * 4);
    now->own = take(scratch, &used, pairs * 4);
    now->weights = take(scratch, &used, pairs * 4);
    now->gate_up = now->first.m.y = take(scratch, &used, pairs * m->first->rows * 4);
    now->gated = take(scratch, &used, pairs * m->last->columns * 4);
    now->results = now->last.m.y = take(scratch, &used, pairs * m->last->rows * 4);
    now->first.activations = take(scratch, &used, matmul_scratch(&now->first));
    now->last.activations = take(scratch, &used, matmul_scratch(&now->last));
    matmul_cut(&now->first, most * m->first->rows, 1);
    matmul_cut(&now->last, most * m->last->rows, 1);
    return used;
}

/* An expert's product for `tokens` pairs from `begin` on. */
static struct plan of_group(const struct plan *all, const struct matmul *own, int64_t begin, int64_t tokens) {
    struct plan plan = *all;
    plan.m.codes = own->codes;
    plan.m.scales = own->scales;
    plan.m.zeros = own->zeros;
    plan.m.bias = own->bias;
    plan.m.tokens = tokens;
    plan.m.y += begin * own->rows;
    plan.activations += begin * plan.units * plan.token_unit;
    return plan;
}

/* Find out who computes what; -1, or the first place in `chosen` that names no expert. */
static int64_t deal(struct mixing *now) {
    const struct mixture *m = now->m;
    memset(now->next, 0, (size_t)m->experts * sizeof *now->next);
    memset(now->found, 0, (size_t)m->tokens * sizeof *now->found);
    for (int64_t i = 0; i < now->all; i++) {
        if (m->chosen[i] < 0 || m->chosen[i] >= m->experts) return i;
        if (m->weights[i] == 0) continue;
        now->next[m->chosen[i]]++;
        now->pairs++;
    }
    for (int64_t expert = 0, begin = 0; expert < m->experts; expert++) {
        const int64_t rows = now->next[expert];
        now->next[expert] = (int32_t)begin;
        if (!rows) continue;
        for (int64_t pair = begin; pair < begin + rows; pair++) now->group[pair] = (int32_t)now->count;
        now->groups[now->count++] = (struct group){of_group(&now->first, m->first + expert, begin, rows),
                                                   of_group(&now->last, m->last + expert, begin, rows), begin};
        begin += rows;
    }
    for (int64_t i = 0; i < now->all; i++) {
        if (m->weights[i] == 0) continue;
        const int32_t pair = now->next[m->chosen[i]]++;
        now->row[pair] = (int32_t)(i / m->choices);
        now->weights[pair] = m->weights[i];
    }
    for (int32_t pair = 0; pair < now->pairs; pair++) {
        const int32_t row = now->row[pair];
        now->own[row * m->choices + now->found[row]++] = pair;
    }
    return -1;
}

/* Quantise what a product makes of a pair from. */
static void quantise(const struct plan *plan, const float *x, int64_t token) {
    struct plan own = *plan;
    own.m.x = x;
    own.m.x_token = 0;
    kernels->quantise(&own, token);
}

static void enter_pair(const void *job, int64_t pair) {
    const struct mixing *now = job;
    const struct group *group = now->groups + now->group[pair];
    quantise(&group->first, now->m->x + now->row[pair] * group->first.m.columns, pair - group->begin);
}

static void gate_pair(const void *job, int64_t pair) {
    const struct mixing *now = job;
    const struct group *group = now->groups + now->group[pair];
    const int64_t columns = group->last.m.columns;
    const float *gate = now->gate_up + pair * 2 * columns;
    float *y = now->gated + pair * columns;
    const struct gated gated = {
        gate, gate + columns, y, 1, columns, 2 * columns, 2 * columns, now->m->activation, now->m->gate_limit, now->m->up_limit,
    };
    kernels->gate(&gated);
    quantise(&group->last, y, pair - group->begin);
}

static void multiply_first(const void *job, int64_t chunk) {
    const struct mixing *now = job;
    const struct plan *plan = &now->groups[chunk / now->first.panels].first;
    matmul_panel(plan, chunk % plan->panels, NULL, 0);
}

static void multiply_last(const void *job, int64_t chunk) {
    const struct mixing *now = job;
    const struct plan *plan = &now->groups[chunk / now->last.panels].last;
    matmul_panel(plan, chunk % plan->panels, NULL, 0);
}

static void weigh_part(const void *job, int64_t chunk) {
    const struct mixing *now = job;
    const struct mixture *m = now->m;
    const int64_t columns = m->last->rows, parts = divide_up(columns, WEIGHED), row = chunk / parts;
    const int64_t from = chunk % parts * WEIGHED, end = from + WEIGHED;
    const struct weighing weighing = {
        .base = m->base ? m->base + row * columns : NULL,
        .rows = now->results,
        .weights = now->weights,
        .which = now->own + row * m->choices,
        .y = m->total + row * columns,
        .count = now->found[row],
        .columns = columns,
        .from = from,
        .end = end < columns ? end : columns,
    };
    kernels->mix(&weighing);
}

/* Make room for a mixture; 0 if there is no memory. */
EXPORT int32_t motley_prepare_mixture(const struct mixture *m) {
    struct mixing now;
    return pool_reserve(m->pool, (size_t)lay_out(&now, m, NULL));
}

/* Compute a mixture for which motley_prepare_mixture has made room. -1, or the first place in `chosen` that names no
 * expert: then nothing is computed. */
EXPORT int64_t motley_mixture(const struct mixture *m) {
    struct mixing now;
    lay_out(&now, m, pool_enter(m->pool));
    const int64_t misfit = deal(&now);
    if (misfit < 0) {
        pool_run(m->pool, enter_pair, &now, now.pairs);
        pool_run(m->pool, multiply_first, &now, now.count * now.first.panels);
        pool_run(m->pool, gate_pair, &now, now.pairs);
        pool_run(m->pool, multiply_last, &now, now.count * now.last.panels);
        pool_run(m->pool, weigh_part, &now, m->tokens * divide_up(m->last->rows, WEIGHED));
    }
    pool_leave(m->pool);
    return misfit;
}
