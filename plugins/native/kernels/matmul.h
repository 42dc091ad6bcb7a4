/* What a matmul is and how its operands lie: between matmul.c and the kernels. */
#ifndef MOTLEY_MATMUL_H
#define MOTLEY_MATMUL_H
#include <stdint.h>

/* Bytes of a unit of weights, by the words of a piece; and of a token's unit, by the vectors of its codes. */
#define UNIT_BYTES(lanes, words) (4 * (lanes) * (words))
#define TOKEN_UNIT(lanes, vectors) (4 * (lanes) * (2 + (vectors)))

enum { LANES_IN_ALL = 16, LARGEST_BLOCK = 256, MOST_PANEL = 64, MOST_STRETCHES = 128 };

#define FEW_TOKENS 4   /* which wait for the weights of a matmul rather than for its products */
#define MANY_TOKENS 16 /* for which the codes of a matmul are unpacked once */
#define LINE 64       /* bytes of a cache's */

/* SHARED with structs.py. y[tokens, rows] = x[tokens, columns] @ W[rows, columns].T + bias.
 * There may be several heads, each with such a W of its own, one after another as codes, scales, zeros and bias. Of a
 * token, head h reads x from `x_head` floats further on than the head before it, and writes y beside it. */
struct matmul {
    struct pool *pool;
    const uint8_t *codes;
    const float *scales;
    const uint8_t *zeros; /* or NULL */
    const float *bias;    /* or NULL */
    const float *x;
    float *y;
    int64_t rows, columns, tokens;
    int64_t heads;
    int64_t x_token, x_head; /* floats from one token's x to the next, and from one head's to the next */
    int32_t bits, block;
};

/* How many bytes ahead of their use weights are fetched into the level-2 and into the level-1 cache. 0 asks again for
 * what is in use, which costs next to nothing. */
struct reach {
    int64_t far, near;
};

/* Memory that is read soon. */
struct stretch {
    const uint8_t *begin, *end;
};

/* A matmul cut in units, and where its quantised activations lie: those of `tile` tokens lie together, unit by unit.
 * A unit is a piece of each lane that a vector of this level has. Of a token it is a scale (f32) and a first value of
 * the sum (i32) of each lane, and codes (i8): of each lane its first word, of each its second, and so on; for 4-bit
 * weights the even elements of all words come before the odd ones, as nibbles are unpacked. */
struct plan {
    struct matmul m;
    int64_t units;       /* in a row, an incomplete last one included */
    int64_t whole_units;
    int64_t blocks;      /* in a row */
    int64_t row_bytes;   /* of weight codes */
    int64_t zero_bytes;  /* in a row */
    int64_t token_unit;  /* bytes of a token's unit */
    int32_t words;       /* of four bytes, in a piece */
    int32_t unit_blocks; /* blocks in a unit, or 1 if they are longer */
    int32_t block_shift; /* a block has 2^block_shift bytes of codes */
    int64_t panel;       /* rows of weights that a thread takes at a time, at most MOST_PANEL */
    int64_t panels;      /* of a head */
    struct reach ahead;
    uint8_t *activations;
    int32_t fetched;            /* whether the panel's weights are in a cache, or on their way to one */
    const struct stretch *soon; /* what is fetched while a panel is computed, a few lines with each row and tile */
    int64_t soon_count, soon_lines;
};

/* A matmul of one head in parts, for who computes something beside it. Its scratch of so many bytes holds activations,
 * which are made by matmul_begin; then each panel, of a multiple of `even` rows, is computed by matmul_panel, while `soon`
 * is fetched. The pool is the caller's. matmul_begin has it cut by matmul_cut, as threads that share `rows` rows like it.
 */
struct plan matmul_plan(const struct matmul *m);
int64_t matmul_scratch(const struct plan *plan);
void matmul_cut(struct plan *plan, int64_t rows, int64_t even);
void matmul_begin(struct plan *plan, uint8_t *scratch, int64_t even);
void matmul_panel(const struct plan *plan, int64_t panel, const struct stretch *soon, int64_t count);

/* Where token's first unit lies; *width: tokens in its tile, so that its next unit is width * token_unit bytes on. */
static inline uint8_t *token_units(const struct plan *plan, int64_t token, int64_t tile, int64_t *width) {
    int64_t first = token / tile * tile, left = plan->m.tokens - first;
    *width = left < tile ? left : tile;
    return plan->activations + (first * plan->units + (token - first)) * plan->token_unit;
}
#endif
