"""Several residual streams in the place of one: how blocks read them and write to them."""

from __future__ import annotations

from dataclasses import dataclass

from motley.daemon.models.description.axes import Value, W


@dataclass(frozen=True)
class StreamGates:
    """How a block reads residual streams, and perhaps writes to them and mixes them: f32[T, N] -> f32[T, N].

    ``motley.StreamGates`` and its kin in `motley.plugins.streams` state the mathematics.

    Attributes:
        logits: S numbers for each row where streams are read, 2 S where they are written to as well, and 2 S + S S
            where they are also mixed.
        scale: f32[1 to 3], what the logits of each of these parts are multiplied by.
        base: f32[N], added to them then.
        streams: S.
        epsilon: added to what is read, and where streams are mixed.
        written: how much of what a block makes a stream gets at most, besides `least`.
        least: what every stream gets of it.
        rounds: how often rows and columns of what mixes streams are divided by their sums.
    """

    logits: Value
    y: Value
    scale: W
    base: W
    streams: int
    epsilon: float
    written: float = 0.0
    least: float = 0.0
    rounds: int = 0


@dataclass(frozen=True)
class ReadStreams:
    """f32[T, S D] -> f32[T, D]: the sum of residual streams, each times its gate: one for each row, or for all."""

    x: Value
    gates: Value | tuple[float, ...]
    y: Value


@dataclass(frozen=True)
class WriteStreams:
    """f32[T, S D] -> f32[T, S D]: residual streams after a block, mixed if gates say so, each with its part of what the
    block has made, `rows` f32[T, D].

    Attributes:
        gates: of each row, see `StreamGates`; or S numbers: how much of `rows` each stream gets, in all rows.
    """

    x: Value
    gates: Value | tuple[float, ...]
    rows: Value
    y: Value


@dataclass(frozen=True)
class MatchStreams:
    """Rows as residual streams, each of which has as much of them as its query fits its key: f32[T, S D] twice and
    f32[T, D] -> f32[T, S D].

    ``motley.MatchStreams`` in `motley.plugins.streams` states the mathematics.
    """

    queries: Value
    keys: Value
    rows: Value
    y: Value
