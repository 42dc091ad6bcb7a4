/* What a matmul is and how its operands lie: between matmul.c and the kernels. */
#ifndef MOTLEY_MATMUL_H
#define MOTLEY_MATMUL_H
#include <stdint.h>

/* Bytes of a token's unit. */
#define TOKEN_UNIT(subs, stretches) (2 * 4 * LANES_IN_ALL + (subs) * (stretches) * STRETCH)

enum { STRETCH = 64, LANES_IN_ALL = 16, MOST_BLOCKS = 8, LARGEST_BLOCK = 256 };

/* SHARED with library.py. y[tokens, rows] = x[tokens, columns] @ W[rows, columns].T + bias.
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

/* A matmul cut in units, and where its quantised activations lie: those of `tile` tokens lie together, unit by unit.
 * A unit of a token is 16 scales (f32, by lane), 16 first values of the sums (i32, by lane), and its codes (i8); for
 * 4-bit weights the even elements of a stretch come before its odd ones, as nibbles are unpacked. */
struct plan {
    struct matmul m;
    int64_t units;          /* in a row, an incomplete last one included */
    int64_t whole_units;
    int64_t blocks;         /* in a row */
    int64_t row_bytes;      /* of weight codes */
    int64_t zero_bytes;     /* in a row */
    int64_t token_unit;     /* bytes of a token's unit */
    int32_t stretches;      /* in a unit */
    int32_t unit_blocks;    /* blocks in a whole unit */
    int32_t last_bytes;     /* of codes in an incomplete last unit, or 0 */
    int32_t lane_block[LANES_IN_ALL]; /* which of its unit's blocks a lane belongs to */
    int64_t panel;          /* rows of weights that a thread takes at a time */
    int64_t panels;         /* of a head */
    struct reach ahead;
    uint8_t *activations;
};

/* Where token's first unit lies; *width: tokens in its tile, so that its next unit is width * token_unit bytes on. */
static inline uint8_t *token_units(const struct plan *plan, int64_t token, int64_t tile, int64_t *width) {
    int64_t first = token / tile * tile, left = plan->m.tokens - first;
    *width = left < tile ? left : tile;
    return plan->activations + (first * plan->units + (token - first)) * plan->token_unit;
}
#endif
