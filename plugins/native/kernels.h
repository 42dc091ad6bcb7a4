/* The kernels of one level: included once by each, after it has defined what its processor does in its own way.
 *
 *   LANES                             of the 16, how many fit its vectors
 *   HALVES                            HALVES_16, _8 or _4, by LANES
 *   TILE_ROWS, TILE_TOKENS            weight rows and tokens whose sums fit its registers, at least 2
 *   ints dots(bits, count, ints sum, const bytes *codes, const uint8_t *values)
 *                                     adds to each lane the products of its bytes in `count` vectors of codes
 *                                     (unsigned, of that many bits) and as many of values (i8), STRETCH apart
 *   floats fused(floats a, floats b, floats c)
 *                                     a * b + c, rounded once
 *   floats spread(const float *from, int count, ints which)
 *                                     of `count` (at most 8) floats the one that each lane names
 *   floats widen(halves x), halves narrow(floats x)
 *                                     FP16 numbers to floats and back, rounded to nearest, half to even
 *   floats load_first(const float *from, int count), void store_first(float *to, floats value, int count)
 *                                     of the first lanes only, less than LANES; the others are loaded as 0
 */
#define PARTS (LANES_IN_ALL / LANES)
#define TILE (TILE_ROWS * TILE_TOKENS)

#include "floats.h"
#include "matmul_kernel.h"
#include "rows_kernel.h"
#include "adapted_kernel.h"
#include "attention_kernel.h"
#include "recurrent_kernel.h"
#include "delta_kernel.h"
#include "state_space_kernel.h"
#include "convolution_kernel.h"
#include "codes_kernel.h"

#define KERNELS {TILE_ROWS, TILE_TOKENS, quantise,   multiply,     normalise, gate, \
                 adapt_down, adapt_up,    cache_rows, turn_queries, attend,    combine, encode, recur_delta, \
                 recur_state_space, recur_convolution}
