/* Matmuls of float32 activations by 4- and 8-bit weights, which are read once, where they are.
 *
 * The arithmetic. It is the same to the bit for every level (kind of processor), pool and number of tokens (rows of x):
 *
 * - A row of weights is the sequence of its codes' bytes; 4-bit elements 2i and 2i+1 are the low and the high nibble of
 *   byte i. It is cut in pieces of 16 bytes, or of 8 where blocks have only so many. Lane i of 16 has pieces i, i + 16,
 *   i + 32 and so on.
 * - Activations are quantised by token and block: with M the largest magnitude, the scale is M / 127 and an element is
 *   x * (127 / M), rounded to the nearest integer, half to even. If M is below 2^-100 all are zero; if any is not
 *   finite the scale is NaN, and so are the token's results.
 * - In each piece, the sum of (code - zero point) * activation is an exact integer n (|n| < 2^24), and its
 *   lane = fma(float(n), scale of the weights * scale of the activations, lane), starting from 0, piece by piece.
 * - Lanes are added as a tree: i and i + 8, then i and i + 4, i and i + 2, i and i + 1; then comes the bias, or 0.
 */
#include "library.h"
#include "pool.h"
#include "rounding.h"

#define PANEL_BYTES (256 << 10) /* of weight codes: a part of a level-2 cache */

static struct reach reaches[] = {{8192, 0}, {8192, 0}}; /* of 4 and of 8 bits */

/* From now on, matmuls of so many bits fetch so far ahead, in all of the process. */
EXPORT void motley_set_reach(int32_t bits, int32_t far, int32_t near) {
    reaches[bits / 8] = (struct reach){far, near};
}

struct plan matmul_plan(const struct matmul *m) {
    struct plan plan = {.m = *m};
    const int32_t subs = 8 / m->bits, block_bytes = m->block / subs;
    plan.words = block_bytes < 16 ? 2 : 4;
    const int32_t unit_bytes = UNIT_BYTES(kernels->lanes, plan.words);
    plan.blocks = m->columns / m->block;
    plan.row_bytes = plan.blocks * block_bytes;
    plan.zero_bytes = divide_up(plan.blocks, subs);
    plan.units = divide_up(plan.row_bytes, unit_bytes);
    plan.whole_units = plan.row_bytes / unit_bytes;
    plan.unit_blocks = unit_bytes > block_bytes ? unit_bytes / block_bytes : 1;
    plan.block_shift = __builtin_ctz((unsigned)block_bytes);
    plan.token_unit = TOKEN_UNIT(kernels->lanes, plan.words * subs);
    plan.ahead = reaches[m->bits / 8];
    return plan;
}

/* Bytes of the activations of a head. */
static int64_t activation_bytes(const struct plan *plan) { return plan->m.tokens * plan->units * plan->token_unit; }

int64_t matmul_scratch(const struct plan *plan) { return plan->m.heads * activation_bytes(plan); }

/* Make room for a matmul's activations; 0 if there is no memory. */
EXPORT int32_t motley_prepare(const struct matmul *m) {
    struct plan plan = matmul_plan(m);
    return pool_reserve(m->pool, (size_t)matmul_scratch(&plan));
}

/* The matmul of one head. */
static struct plan of_head(const struct plan *plan, int64_t head) {
    struct plan own = *plan;
    const int64_t row = head * plan->m.rows;
    own.m.codes += row * plan->row_bytes;
    own.m.scales += row * plan->blocks;
    if (own.m.zeros) own.m.zeros += row * plan->zero_bytes;
    if (own.m.bias) own.m.bias += row;
    own.m.x += head * plan->m.x_head;
    own.m.y += row;
    own.activations += head * activation_bytes(plan);
    return own;
}

static void quantise_token(const void *job, int64_t chunk) {
    const struct plan *all = job, own = of_head(all, chunk / all->m.tokens);
    kernels->quantise(&own, chunk % all->m.tokens);
}

/* The weights of the panel that this thread probably takes after `chunk`: threads take turns, more or less. */
static int64_t next_panel(const struct plan *all, int64_t chunk, struct stretch to[2]) {
    const int64_t next = chunk + pool_threads(all->m.pool);
    if (next >= all->m.heads * all->panels) return 0;
    const int64_t row = next % all->panels * all->panel, left = all->m.rows - row;
    const int64_t first = next / all->panels * all->m.rows + row, count = left < all->panel ? left : all->panel;
    const uint8_t *codes = all->m.codes + first * all->row_bytes;
    const uint8_t *scales = (const uint8_t *)(all->m.scales + first * all->blocks);
    to[0] = (struct stretch){codes, codes + count * all->row_bytes};
    to[1] = (struct stretch){scales, scales + count * all->blocks * (int64_t)sizeof(float)};
    return 2;
}

/* Many tokens read weights in an order that no processor foresees, so each panel fetches the next one, as it lies in
 * memory. A few tokens, which wait for memory, read them as they lie. */
void matmul_panel(const struct plan *all, int64_t chunk, const struct stretch *soon, int64_t count) {
    struct plan own = of_head(all, chunk / all->panels);
    struct stretch stretches[2 + MOST_STRETCHES];
    const int64_t row = chunk % all->panels * all->panel, end = row + all->panel < own.m.rows ? row + all->panel : own.m.rows;
    int64_t lines = 0;
    own.soon_count = own.m.tokens > FEW_TOKENS ? next_panel(all, chunk, stretches) : 0;
    for (int64_t i = 0; i < count; i++) stretches[own.soon_count++] = soon[i];
    for (int64_t i = 0; i < own.soon_count; i++) lines += divide_up(stretches[i].end - stretches[i].begin, LINE);
    own.soon = stretches;
    own.soon_lines = divide_up(lines, (end - row) * divide_up(own.m.tokens, MANY_TOKENS));
    own.fetched = own.m.tokens > FEW_TOKENS && chunk >= pool_threads(own.m.pool);
    kernels->multiply(&own, row, end);
}

static void multiply_panel(const void *job, int64_t chunk) { matmul_panel(job, chunk, NULL, 0); }

void matmul_cut(struct plan *plan, int64_t rows, int64_t even) {
    int64_t panel = PANEL_BYTES / plan->row_bytes;
    const int64_t threads = pool_threads(plan->m.pool), fair = divide_up(rows, 4 * threads);
    if (threads > 1 && panel > fair) panel = fair;
    panel = up_to_multiple(panel < 1 ? 1 : panel, even);
    plan->panel = panel < MOST_PANEL ? panel : MOST_PANEL;
    plan->panels = divide_up(plan->m.rows, plan->panel);
}

void matmul_begin(struct plan *plan, uint8_t *scratch, int64_t even) {
    const struct matmul *m = &plan->m;
    plan->activations = scratch;
    matmul_cut(plan, m->heads * m->rows, even);
    pool_run(m->pool, quantise_token, plan, m->heads * m->tokens);
}

/* Compute a matmul for which motley_prepare has made room. */
EXPORT void motley_matmul(const struct matmul *m) {
    struct plan plan = matmul_plan(m);
    matmul_begin(&plan, pool_enter(m->pool), 1);
    pool_run(m->pool, multiply_panel, &plan, m->heads * plan.panels);
    pool_leave(m->pool);
}
