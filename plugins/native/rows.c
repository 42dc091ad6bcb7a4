/* Norms and gates of rows. The arithmetic is the same to the bit for every level, and for a row beside any others:
 *
 * - Norm: lane i of 16 adds the squares of elements i, i + 16, ... by lane = fma(total, total, lane), starting from 0;
 *   lanes are added as the tree of matmul.c. With s = 1 / sqrt(sum / columns + epsilon), y = total * s * weight.
 * - Gate: with e = exp(-|gate|) (floats.h), silu = gate / (1 + e), for negative gates gate * e / (1 + e), where a
 *   gate below -120 counts as -120 (e is 0 there); y = silu * up.
 */
#include "library.h"

EXPORT void motley_norm(const struct norm *norm) { kernels->normalise(norm); }

EXPORT void motley_gated(const struct gated *gated) { kernels->gate(gated); }
