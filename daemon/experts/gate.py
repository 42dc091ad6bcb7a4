"""Before a host answers for an expert, its engine must compute what the reference makes of a few rows of noise."""

from __future__ import annotations

from contextlib import closing

from motley.daemon.loading.answers import Answers, GateError, difference, fingerprint, kept_answers, noise
from motley.plugins.expert_engine import Expert, ExpertEngine, ExpertGraph

EXPERT_ROWS = (1, 5)
"""How many rows an expert is given, in turn: one and several are different kernels."""


def examine_expert(expert: Expert, graph: ExpertGraph, reference: ExpertEngine) -> None:
    """Make sure that an expert, opened from `graph`, computes what the reference makes of it.

    The reference's answers are kept beside the share file, as a rank's are.

    Raises:
        GateError: it does not.
    """

    def ask_reference(anew: bool) -> Answers:
        return kept_answers(
            graph.proto, lambda: _reference_expert_answers(graph, reference), graph.share_file.parent, anew
        )

    answers = _expert_answers(expert, graph)
    wrong = difference(answers, ask_reference(False))
    if wrong:
        wrong = difference(answers, ask_reference(True))
    if wrong:
        raise GateError(wrong)


def _reference_expert_answers(graph: ExpertGraph, reference: ExpertEngine) -> Answers:
    with closing(reference.open(graph)) as expert:
        return _expert_answers(expert, graph)


def _expert_answers(expert: Expert, graph: ExpertGraph) -> Answers:
    name = graph.proto.graph.name
    return {
        f"{name} of {rows} rows": fingerprint(expert(noise(f"{name} {rows}", (rows, graph.hidden))))
        for rows in EXPERT_ROWS
    }
