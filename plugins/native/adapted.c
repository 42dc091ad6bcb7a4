/* What adapters add to the rows of a product: y += up @ (down @ x), in two passes over the matrices of all that have
 * rows in a step. The arithmetic is the same to the bit for every level, pool and company, and for whatever else is in
 * slots:
 *
 * - A product of a row of a matrix and a row of activations: lane i of 16 adds the products of elements i, i + 16, ...
 *   by lane = fma(element, activation, lane), starting from 0; lanes are added as the tree of matmul.c. FP16 and BF16
 *   elements are widened first.
 * - The second pass adds each of its products to y, but for those that are 0: they change no bit of it.
 */
#include "library.h"
#include "pool.h"
#include "rounding.h"

enum { DOWN_ROWS = 8, UP_ROWS = 512 }; /* of a matrix, that a thread takes at a time */

struct pass {
    const struct adapted *a;
    float *between; /* what the first pass makes of each group and part: [rows of the group, rank] */
    int up;         /* whether it is the second one */
};

/* Compute a chunk of a pass; or, beyond the last one, nothing. Returns how many chunks there are before `chunk` ends the
 * search, and adds up what is needed between the passes. */
static int64_t pass_chunk(const struct pass *pass, int64_t chunk, int64_t *needed) {
    const struct adapted *a = pass->a;
    const int64_t size = pass->up ? UP_ROWS : DOWN_ROWS;
    int64_t chunks = 0, begin = 0;
    for (int64_t g = 0; g < a->step->count; g++) {
        const struct adapted_group *group = a->step->groups + g;
        for (int64_t p = 0; p < a->count; p++) {
            const struct adapted_part *part = a->parts + p;
            const struct factors *own = part->slots + group->slot;
            if (!own->rank) continue;
            const int64_t height = pass->up ? part->width : own->rank, row = (chunk - chunks) * size;
            if (chunk >= chunks && row < height) {
                const int64_t *rows = a->step->rows + group->first;
                float *between = pass->between + begin;
                struct small_product product = {
                    .matrix = pass->up ? own->up : own->down,
                    .columns = pass->up ? own->rank : a->columns,
                    .row = row,
                    .end = row + size < height ? row + size : height,
                    .x = pass->up ? between : a->x,
                    .y = pass->up ? a->y + part->first : between,
                    .x_apart = pass->up ? own->rank : a->columns,
                    .y_apart = pass->up ? a->width : own->rank,
                    .x_rows = pass->up ? NULL : rows,
                    .y_rows = pass->up ? rows : NULL,
                    .tokens = group->count,
                    .kind = pass->up ? own->up_kind : own->down_kind,
                    .adds = pass->up,
                };
                kernels->multiply_small(&product);
                return chunks;
            }
            chunks += divide_up(height, size);
            begin += group->count * own->rank;
        }
    }
    *needed = begin;
    return chunks;
}

static void work(const void *job, int64_t chunk) {
    int64_t needed;
    pass_chunk(job, chunk, &needed);
}

/* Add what the adapters of a step's rows make of them. Returns -1, or -2 if there is no memory, or the number of a group
 * that has a row which is not there. */
EXPORT int64_t motley_adapted(const struct adapted *a) {
    for (int64_t g = 0; g < a->step->count; g++)
        for (int64_t i = 0; i < a->step->groups[g].count; i++) {
            const int64_t row = a->step->rows[a->step->groups[g].first + i];
            if (row < 0 || row >= a->tokens) return g;
        }
    struct pass down = {a, NULL, 0}, up = {a, NULL, 1};
    int64_t needed;
    const int64_t downs = pass_chunk(&down, INT64_MAX / UP_ROWS, &needed);
    const int64_t ups = pass_chunk(&up, INT64_MAX / UP_ROWS, &needed);
    if (!downs) return -1;
    if (!pool_reserve(a->pool, (size_t)needed * sizeof(float))) return -2;
    down.between = up.between = (float *)pool_enter(a->pool);
    pool_run(a->pool, work, &down, downs);
    pool_run(a->pool, work, &up, ups);
    pool_leave(a->pool);
    return -1;
}
