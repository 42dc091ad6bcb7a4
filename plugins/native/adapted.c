/* What adapters make of the rows of a product: y += up @ (down @ x), or y = down @ x where they have a matrix in place
 * of the base's; in two passes over the matrices of all that have rows in a step. The arithmetic is the same to the bit
 * for every level, pool and company, and for whatever else is in slots:
 *
 * - Down: lane i of 16 adds the products of elements i, i + 16, ... of a row of the matrix and of x by
 *   lane = fma(element, activation, lane), starting from 0; lanes are added as the tree of matmul.c.
 * - Where there is no up, that is y.
 * - Up: sum = fma(element, activation, sum), rank by rank, starting from 0. It is added to y if it is not 0: a zero
 *   changes no bit of y.
 *
 * FP16 and BF16 elements are widened first.
 */
#include "library.h"
#include "pool.h"
#include "rounding.h"

#include <stdatomic.h>

/* Of a pass's results, that a thread takes at a time: whole panels. */
enum { DOWN_COLUMNS = 8, WHOLE_COLUMNS = 64, UP_COLUMNS = 1024 };

#define BEYOND ((int64_t)1 << 40) /* all chunks */

struct job {
    const struct adapted *a;
    float *between;         /* what the first pass makes of each group and part, one after another: [rows, rank] */
    int64_t downs;          /* chunks of the first pass, which come first */
    _Atomic int64_t *done; /* of those */
};

/* Compute a chunk of a pass; beyond the last one, nothing. Returns how many chunks were counted, all of them in that
 * case, and says in *needed how much there is between the passes. */
static int64_t pass_chunk(const struct job *job, int up, int64_t chunk, int64_t *needed) {
    const struct adapted *a = job->a;
    int64_t chunks = 0;
    *needed = 0;
    for (int64_t g = 0; g < a->step->count; g++) {
        const struct adapted_group *group = a->step->groups + g;
        for (int64_t p = 0; p < a->count; p++) {
            const struct adapted_part *part = a->parts + p;
            const struct factors *own = part->slots + group->slot;
            if (!own->rank || (up && !own->up)) continue;
            const int64_t size = up ? UP_COLUMNS : own->up ? DOWN_COLUMNS : WHOLE_COLUMNS;
            const int64_t all = up ? part->width : own->rank, begin = (chunk - chunks) * size;
            if (chunk >= chunks && begin < all) {
                const struct adapted_piece piece = {
                    .own = own,
                    .x = a->x,
                    .between = job->between + *needed,
                    .y = a->y + part->first,
                    .rows = a->step->rows + group->first,
                    .tokens = group->count,
                    .columns = a->columns,
                    .y_apart = a->width,
                    .begin = begin,
                    .end = begin + size < all ? begin + size : all,
                };
                if (up) kernels->adapt_up(&piece);
                else kernels->adapt_down(&piece);
                return chunks;
            }
            chunks += divide_up(all, size);
            if (own->up) *needed += group->count * own->rank;
        }
    }
    return chunks;
}

/* Chunks are claimed in their order, so those that one of the second pass waits for are being computed. */
static void work(const void *given, int64_t chunk) {
    const struct job *job = given;
    int64_t needed;
    if (chunk < job->downs) {
        pass_chunk(job, 0, chunk, &needed);
        atomic_fetch_add_explicit(job->done, 1, memory_order_release);
    } else {
        pool_await(job->done, job->downs);
        pass_chunk(job, 1, chunk - job->downs, &needed);
    }
}

/* Add what the adapters of a step's rows make of them. Returns -1, or -2 if there is no memory, or the number of a group
 * that has a row which is not there. */
EXPORT int64_t motley_adapted(const struct adapted *a) {
    for (int64_t g = 0; g < a->step->count; g++)
        for (int64_t i = 0; i < a->step->groups[g].count; i++) {
            const int64_t row = a->step->rows[a->step->groups[g].first + i];
            if (row < 0 || row >= a->tokens) return g;
        }
    _Atomic int64_t done = 0;
    struct job job = {a, NULL, 0, &done};
    int64_t needed;
    job.downs = pass_chunk(&job, 0, BEYOND, &needed);
    const int64_t ups = pass_chunk(&job, 1, BEYOND, &needed);
    if (!job.downs) return -1;
    if (!pool_reserve(a->pool, (size_t)needed * sizeof(float))) return -2;
    job.between = (float *)pool_enter(a->pool);
    pool_run(a->pool, work, &job, job.downs + ups);
    pool_leave(a->pool);
    return -1;
}
