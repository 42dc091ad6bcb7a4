/* The kernels of one level: included once by each, after it has defined what its processor does in its own way.
 *
 *   LANES                             of the 16, how many fit its vectors
 *   HALVES                            HALVES_16, _8 or _4, by LANES
 *   TILE_ROWS, TILE_TOKENS            rows and columns of sums that fit its registers, at least 2
 *   TWICE                             as indices: each of so many numbers of eight bytes as fit half a vector, twice
 *   ints dots(bits, count, ints sum, const bytes *codes, const uint8_t *values)
 *                                     adds to each lane the products of its bytes in `count` vectors of codes, at most
 *                                     eight (unsigned, of that many bits), and as many of values (i8)
 *   bytes words_low(a, b), words_high, pairs_low, pairs_high
 *                                     of each four lanes of a and b: the first of both by turns, lane by lane, or the
 *                                     last ones; likewise by pairs of lanes
 *   floats fused(floats a, floats b, floats c)
 *                                     a * b + c, rounded once
 *   floats permute(floats few, ints which)
 *                                     of the lanes of a vector the one that each lane names
 *   floats widen(halves x), halves narrow(floats x)
 *                                     FP16 numbers to floats and back, rounded to nearest, half to even
 *   floats load_first(const float *from, int count), void store_first(float *to, floats value, int count)
 *                                     of the first lanes only, less than LANES; the others are loaded as 0
 */
#define PARTS (LANES_IN_ALL / LANES)
#define TILE (TILE_ROWS * TILE_TOKENS > MANY_TOKENS ? TILE_ROWS * TILE_TOKENS : MANY_TOKENS) /* sums at most */

#include "floats.h"
#include "matmul_kernel.h"
#include "rows_kernel.h"
#include "adapted_kernel.h"
#include "attention_kernel.h"
#include "choosing_kernel.h"
#include "recurrent_kernel.h"
#include "delta_kernel.h"
#include "state_space_kernel.h"
#include "convolution_kernel.h"
#include "codes_kernel.h"
#include "sampling_kernel.h"

#define KERNELS {LANES,     quantise,     multiply, normalise, normalise_heads,   gate,              gate_streams, read_streams, \
                 write_streams, mix, adapt_down, adapt_up,  cache_rows,   turn_queries, attend, combine,          cache_index, turn_index, score_index, encode,            contend,    add_masses, \
                 recur_delta, recur_state_space, recur_convolution, recur_dilated}
