/* Norms and gates of rows. The arithmetic is the same to the bit for every level, and for a row beside any others:
 *
 * - Norm, of a row or of a head: lane i of 16 adds the squares of elements i, i + 16, ... by lane = fma(total, total, lane),
 *   starting from 0; lanes are added as the tree of matmul.c. With s = 1 / sqrt(sum / columns + epsilon), y = total * s *
 *   weight, plus bias. Of a centred one, lanes add elements first, and sum / columns is subtracted from each.
 * - Gate: gate * sigmoid(z) with e = exp(-|z|) (floats.h) is gate / (1 + e), for negative z gate * e / (1 + e), where
 *   a gate below -120 counts as -120 (e is 0 there).
 *   SILU: gate is at most its limit, up within its own; z = gate; y = gate * sigmoid(z) * up.
 *   GELU_TANH: z = 2 sqrt(2 / pi) (gate + 0.044715 gate^3), which is gelu by the approximation with tanh; y likewise.
 *   CLAMPED: gate is at most 7, up within -7 and 7, z = 1.702 gate; y = gate * sigmoid(z) * (up + 1).
 *   SIGMOID: z = gate; y = sigmoid(z) * up.
 * - Streams (motley/plugins/streams.py): sums are from the first on, of rows and columns of what mixes as of streams times
 *   their gates; l = logits * scale + base is rounded twice, and so is each term that is added.
 */
#include "library.h"

EXPORT void motley_norm(const struct norm *norm) { kernels->normalise(norm); }

EXPORT void motley_head_norms(const struct head_norms *norms) { kernels->normalise_heads(norms); }

EXPORT void motley_gated(const struct gated *gated) { kernels->gate(gated); }

EXPORT void motley_stream_gates(const struct stream_gates *gates) { kernels->gate_streams(gates); }

EXPORT void motley_streams(const struct streams *streams) {
    if (streams->own) kernels->write_streams(streams);
    else kernels->read_streams(streams);
}
