"""What engines share in taking spans: whether a step can be taken, which rows get logits, what a half has of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from motley.plugins.engine import F32, EngineError, RankGraph, Span
from motley.plugins.recurrent import MOST_GUESSES


def check_step(graph: RankGraph, hidden: F32, spans: Sequence[Span], most_rows: int, most_spans: int) -> None:
    """Make sure that an engine can take a step, see `motley.plugins.engine.Engine.step`.

    Args:
        most_rows: how many rows the engine takes.
        most_spans: how many spans it takes.

    Raises:
        EngineError: it cannot; the message says why.
    """
    rows = len(hidden)
    if not 1 <= rows <= most_rows or hidden.shape[1:] != (graph.entering,):
        raise EngineError(f"a step takes f32[1..{most_rows}, {graph.entering}], not f32{[*hidden.shape]}")
    if not 1 <= len(spans) <= most_spans:
        raise EngineError(f"a step takes 1 to {most_spans} spans, not {len(spans)}")
    if sum(span.rows for span in spans) != rows:
        raise EngineError(f"the spans have {sum(span.rows for span in spans)} rows, the step has {rows}")
    for span in spans:
        end = span.position + span.rows
        room = min(len(span.blocks) * graph.blocks.tokens, graph.context)
        if span.rows < 1 or span.position < 0 or end > room:
            raise EngineError(
                f"positions {span.position} to {end} do not fit a sequence with {len(span.blocks)} blocks of "
                f"{graph.blocks.tokens} tokens in a context of {graph.context}"
            )
        if graph.blocks.windowed and (span.windowed is None or len(span.windowed) * graph.blocks.tokens < end):
            raise EngineError(f"positions up to {end} have no blocks in layers with a window")
        if not 0 <= span.adapter <= graph.adapters:
            raise EngineError(f"an adapter in slot {span.adapter} was asked for; there are {graph.adapters} slots")
        if graph.states and not (
            0 <= span.slot < graph.blocks.slots and 0 <= span.guesses <= min(span.rows, MOST_GUESSES)
        ):
            raise EngineError(
                f"a sequence in slot {span.slot} with {span.guesses} guesses does not fit {graph.blocks.slots} slots of"
                f" recurrent states, which take {MOST_GUESSES} guesses at most"
            )
        if not 0 <= span.wanted <= span.rows:
            raise EngineError(f"logits of {span.wanted} rows were asked for; the span has {span.rows}")


def wanted_rows(spans: Sequence[Span]) -> list[int]:
    """The rows of a step that get logits: the last `Span.wanted` ones of each span."""
    ends = accumulate(span.rows for span in spans)
    return [row for span, end in zip(spans, ends, strict=True) for row in range(end - span.wanted, end)]


def spans_of(spans: Sequence[Span], rows: slice) -> list[tuple[int, Span]]:
    """The parts of spans that are among some rows of their step.

    Args:
        rows: with a start and a stop.

    Returns:
        Each part with the row, counted from the first of `rows`, at which it begins.
    """
    parts = []
    begin = 0
    for span in spans:
        first, end = max(begin, rows.start), min(begin + span.rows, rows.stop)
        if end - first == span.rows:
            parts.append((first - rows.start, span))
        elif first < end:
            wanted, guesses = (
                max(0, min(end - first, end - (begin + span.rows - last))) for last in (span.wanted, span.guesses)
            )
            position = span.position + first - begin
            part = span._replace(position=position, rows=end - first, wanted=wanted, guesses=guesses)
            parts.append((first - rows.start, part))
        begin += span.rows
    return parts
