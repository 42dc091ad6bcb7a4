"""Residual streams: how a block reads several of them, and writes to them (hyper-connections).

A row of S streams of D elements each is f32[S D], stream after stream. Blocks read a mix of the streams and make D
elements, of which each stream gets some.

``motley.StreamGates`` and its kin. Of logits f32[T, N], a scale f32[P] and a base f32[N] they make gates f32[T, N]; N
has P parts, each of which has its own scale: ``l = logits * scale + base``.

1. ``StreamGates`` (P = 1, N = S): how much of each stream is read, ``sigmoid(l) + epsilon``.
2. ``StreamGatesToWrite`` (P = 2, N = 2 S): behind that, how much each stream gets of what the block makes,
   ``written * sigmoid(l) + least``.
3. ``StreamGatesToMix`` (P = 3, N = 2 S + S S): behind that, how much of stream j each stream k keeps or gets,
   M[j, k], row by row: M is ``softmax(l)`` of each row, plus epsilon. Its columns, then `rounds` - 1 times its rows and
   its columns, are divided by their sums plus epsilon, so that in the end all rows and columns add up to nearly 1
   (Sinkhorn and Knopp; Xie et al. 2025, https://arxiv.org/abs/2512.24880).

The attributes are streams (S), epsilon, written, least and rounds.

``motley.ReadStreams``: of streams f32[T, S D] and gates f32[T, N], or f32[S] for all rows, it makes the sum of the
streams, each times its gate, f32[T, D].

``motley.WriteStreams``: of streams f32[T, S D], gates f32[T, N], or f32[N] for all rows, and, if a block has made
anything, rows f32[T, D], it makes streams f32[T, S D]: stream k is that stream, or with P = 3 the sum of all streams j
times M[j, k], plus the rows times what it gets of them.

The attributes of both are streams (S).

``motley.MatchStreams``: of queries and keys f32[T, S D] and rows f32[T, D] it makes streams f32[T, S D]: stream k is
the rows times ``sigmoid(sign(m) * sqrt(max(abs(m), LEAST_MATCH)))``, where m is the product of its query and its key
times scale. The attributes are streams (S) and scale.
"""

from __future__ import annotations

MOST_STREAMS = 8
"""Of a model; stated in native/kernels/rows.h and cuda/device/nodes.cu too."""

STREAM_GATES = ("StreamGates", "StreamGatesToWrite", "StreamGatesToMix")
"""By their parts, one more each."""
READ_STREAMS, WRITE_STREAMS, MATCH_STREAMS = "ReadStreams", "WriteStreams", "MatchStreams"
STREAM_OPERATORS = (*STREAM_GATES, READ_STREAMS, WRITE_STREAMS)
LEAST_MATCH = 1e-6
"""Stated in cuda/device/nodes.cu too."""
