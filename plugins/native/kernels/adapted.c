/* What adapters make of the rows of a product: y += up @ (down @ x), or y = down @ x where they have a matrix in place
 * of the base's; of all that have rows in a step, alone or while the base's product is computed. The arithmetic is the
 * same to the bit for every level, pool and company, and for whatever else is in slots:
 *
 * - Down: lane i of 16 adds the products of elements i, i + 16, ... of a row of the matrix and of x by
 *   lane = fma(element, activation, lane), starting from 0; lanes are added as the tree of matmul.c.
 * - Where there is no up, that is y.
 * - Up: sum = fma(element, activation, sum), rank by rank, starting from 0. It is added to y if it is not 0: a zero
 *   changes no bit of y.
 *
 * FP16 and BF16 elements are widened first.
 *
 * Beside the base's product, the first half of its panels is computed with the downs, the second half with the ups of
 * both halves' columns; what they read is fetched while the base's panel before them is computed, so that many rows,
 * for which memory has time, hardly wait for it.
 */
#include "library.h"
#include "pool.h"
#include "rounding.h"

#include <stdatomic.h>

/* Panels of downs, and columns of y, that a thread takes at a time of what is computed alone. */
enum { ALONE_PANELS = 4, ALONE_COLUMNS = 512 };

enum { MOST_FETCHED = 256 << 10 }; /* that are fetched for a chunk: what a level-2 cache holds */

struct job {
    const struct adapted *a;
    struct adapted_piece *pieces; /* of each group and part for which there is something: all its columns of y */
    int64_t count;                /* of pieces */
    int64_t panels;               /* of all downs */
    int64_t firsts;               /* chunks that come first, which the others wait for */
    _Atomic int64_t *done;        /* of those */
    const struct plan *base;      /* of the product; NULL: it is there */
};

/* Find the pieces, and write them down unless they are still to be counted. What the downs make of each, [rows, rank], is
 * one after another; returns how many floats that is. */
static int64_t find_pieces(struct job *job, float *between) {
    const struct adapted *a = job->a;
    int64_t floats = 0;
    job->count = job->panels = 0;
    for (int64_t g = 0; g < a->step->count; g++) {
        const struct adapted_group *group = a->step->groups + g;
        for (int64_t p = 0; p < a->count; p++) {
            const struct adapted_part *part = a->parts + p;
            const struct factors *own = part->slots + group->slot;
            if (!own->rank) continue;
            if (job->pieces)
                job->pieces[job->count] = (struct adapted_piece){
                    .own = own,
                    .x = a->x,
                    .between = between + floats,
                    .y = a->y + part->first,
                    .rows = a->step->rows + group->first,
                    .tokens = group->count,
                    .columns = a->columns,
                    .y_apart = a->width,
                    .begin = part->first,
                    .end = part->first + part->width,
                };
            job->count++;
            if (!own->up) continue;
            job->panels += divide_up(own->rank, PANEL_ROWS);
            floats += group->count * own->rank;
        }
    }
    return floats;
}

typedef void visit(void *given, const struct adapted_piece *piece, int up);

/* Visit what the panels in [begin, end) of all downs are of. */
static void each_down(const struct job *job, int64_t begin, int64_t end, visit *visit, void *given) {
    for (int64_t i = 0, first = 0, after; i < job->count && first < end; i++, first = after) {
        const struct adapted_piece *whole = job->pieces + i;
        const int64_t rank = whole->own->rank;
        after = first + (whole->own->up ? divide_up(rank, PANEL_ROWS) : 0);
        if (after <= begin || after == first) continue;
        struct adapted_piece piece = *whole;
        piece.begin = begin > first ? (begin - first) * PANEL_ROWS : 0;
        piece.end = end < after ? (end - first) * PANEL_ROWS : rank;
        visit(given, &piece, 0);
    }
}

/* Visit what makes, or is added to, columns of y in [begin, end). */
static void each_up(const struct job *job, int64_t begin, int64_t end, visit *visit, void *given) {
    for (int64_t i = 0; i < job->count; i++) {
        const struct adapted_piece *whole = job->pieces + i;
        if (end <= whole->begin || whole->end <= begin) continue;
        struct adapted_piece piece = *whole;
        piece.begin = begin > whole->begin ? begin - whole->begin : 0;
        piece.end = (end < whole->end ? end : whole->end) - whole->begin;
        visit(given, &piece, piece.own->up != NULL);
    }
}

static void compute(void *given, const struct adapted_piece *piece, int up) {
    (void)given;
    if (up) kernels->adapt_up(piece);
    else kernels->adapt_down(piece);
}

static int64_t element_bytes(int32_t kind) { return kind == FACTOR_FP32 ? 4 : 2; }

/* What is read soon. */
struct reading {
    struct stretch all[MOST_STRETCHES];
    int64_t count, bytes;
};

static void note(void *given, const struct adapted_piece *piece, int up) {
    struct reading *reading = given;
    const struct factors *own = piece->own;
    const int64_t apart = up ? own->rank * element_bytes(own->up_kind)
                             : up_to_multiple(piece->columns, PANEL_STRETCH) * element_bytes(own->down_kind);
    const int64_t all = up ? PANEL_COLUMNS : PANEL_ROWS, begin = piece->begin / all * all;
    const int64_t end = up ? up_to_multiple(piece->end, all) : piece->end, bytes = (end - begin) * apart;
    if (reading->count == MOST_STRETCHES || reading->bytes + bytes > MOST_FETCHED) return;
    const uint8_t *from = (const uint8_t *)(up ? own->up : own->down) + begin * apart;
    reading->all[reading->count++] = (struct stretch){from, from + bytes};
    reading->bytes += bytes;
}

/* The panels of downs of one of the first chunks. */
static void each_of_first(const struct job *job, int64_t chunk, visit *visit, void *given) {
    const int64_t of = job->firsts ? job->firsts : 1;
    each_down(job, job->panels * chunk / of, job->panels * (chunk + 1) / of, visit, given);
}

/* Chunks are claimed in their order, so those that one of the second pass waits for are being computed. */
static void work_alone(const void *given, int64_t chunk) {
    const struct job *job = given;
    if (chunk < job->firsts) {
        each_of_first(job, chunk, compute, NULL);
        atomic_fetch_add_explicit(job->done, 1, memory_order_release);
    } else {
        const int64_t begin = (chunk - job->firsts) * ALONE_COLUMNS;
        pool_await(job->done, job->firsts);
        each_up(job, begin, begin + ALONE_COLUMNS, compute, NULL);
    }
}

/* The columns of a panel of the base's product. */
static void each_of_panel(const struct job *job, int64_t panel, visit *visit, void *given) {
    const int64_t begin = panel * job->base->panel, end = begin + job->base->panel;
    each_up(job, begin, end < job->a->width ? end : job->a->width, visit, given);
}

/* As work_alone. Of a single panel, all is computed with that. */
static void work_beside(const void *given, int64_t panel) {
    const struct job *job = given;
    const int first = panel < job->firsts, last = !first;
    const int64_t other = panel - job->firsts; /* whose ups are computed as well */
    struct reading reading;
    reading.count = reading.bytes = 0;
    if (first || !job->firsts) each_of_first(job, panel, note, &reading);
    if (last) each_of_panel(job, panel, note, &reading);
    if (last && other < job->firsts) each_of_panel(job, other, note, &reading);
    matmul_panel(job->base, panel, reading.all, reading.count);
    if (first || !job->firsts) each_of_first(job, panel, compute, NULL);
    if (first) {
        atomic_fetch_add_explicit(job->done, 1, memory_order_release);
        return;
    }
    pool_await(job->done, job->firsts);
    each_of_panel(job, panel, compute, NULL);
    if (other < job->firsts) each_of_panel(job, other, compute, NULL);
}

/* The number of a group that has a row which is not there, or -1. */
static int64_t misfit(const struct adapted *a) {
    for (int64_t g = 0; g < a->step->count; g++)
        for (int64_t i = 0; i < a->step->groups[g].count; i++) {
            const int64_t row = a->step->rows[a->step->groups[g].first + i];
            if (row < 0 || row >= a->tokens) return g;
        }
    return -1;
}

/* Add what the adapters of a step's rows make of them, to y, or to what `base` makes of x, which is computed then. Returns
 * -1, or -2 if there is no memory, or the number of a group that has a row which is not there. */
EXPORT int64_t motley_adapted(const struct adapted *a, const struct matmul *base) {
    const int64_t wrong = misfit(a);
    if (wrong >= 0) return wrong;
    _Atomic int64_t done = 0;
    struct job job = {.a = a, .done = &done};
    const int64_t floats = find_pieces(&job, NULL);
    if (!job.count) {
        if (base) motley_matmul(base);
        return -1;
    }
    struct plan plan;
    int64_t activations = 0;
    if (base) {
        plan = matmul_plan(base);
        activations = matmul_scratch(&plan);
    }
    const int64_t pieces = up_to_multiple(activations, LINE);
    const int64_t between = pieces + up_to_multiple(job.count * (int64_t)sizeof(struct adapted_piece), LINE);
    if (!pool_reserve(a->pool, (size_t)(between + floats * (int64_t)sizeof(float)))) return -2;
    uint8_t *scratch = pool_enter(a->pool);
    job.pieces = (struct adapted_piece *)(void *)(scratch + pieces);
    find_pieces(&job, (float *)(void *)(scratch + between));
    if (base) {
        matmul_begin(&plan, scratch, LANES_IN_ALL);
        job.base = &plan;
        job.firsts = plan.panels / 2;
        pool_run(a->pool, work_beside, &job, plan.panels);
    } else {
        job.firsts = divide_up(job.panels, ALONE_PANELS);
        pool_run(a->pool, work_alone, &job, job.firsts + divide_up(a->width, ALONE_COLUMNS));
    }
    pool_leave(a->pool);
    return -1;
}
