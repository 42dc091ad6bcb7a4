"""What a person wants of a model that is to be loaded, held against a session that has it loaded already."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from motley.cli.errors import CliError
from motley.cli.options import Experts, Quantisation
from motley.protocol.wording import counted


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A model and how it should be loaded.

    Attributes:
        quant, engine: of all nodes that are not named in the next two; None: as it is loaded, or the usual one.
        quants, engines: of single nodes, by their names.
        context: tokens that prompt and answer have together; None: as it is loaded, or the usual number.
        nodes: one per rank; empty: whichever there are.
        shares: one per rank, relative to each other; empty: the planner's choice.
        exact: whether it shall compute the same bits on any number of ranks.
        experts: where its experts shall be.
        replicas: nodes that have each expert, at least.
        trunk: ranks of the rest of the model, where experts are on nodes of their own.
    """

    model: str
    quant: str | None
    quants: Mapping[str, str]
    engine: str | None
    engines: Mapping[str, str]
    context: int | None
    nodes: Sequence[str]
    shares: Sequence[float]
    exact: bool
    experts: Experts
    replicas: int
    trunk: int

    @property
    def body(self) -> dict[str, Any]:
        """The body of the request for such a session."""
        return {
            "model": self.model,
            "quantisation": self.quant or Quantisation.STORED,
            "exact": self.exact,
            "experts": self.experts,
            "replicas": self.replicas,
            "trunk": self.trunk,
            "quantisations": dict(self.quants),
            "engines": dict(self.engines),
            **({"engine": self.engine} if self.engine else {}),
            **({"context": self.context} if self.context else {}),
            **({"nodes": list(self.nodes)} if self.nodes else {}),
            **({"shares": list(self.shares)} if self.shares else {}),
        }

    def check(self, session: dict[str, Any]) -> None:
        """Refuse a session that was loaded otherwise.

        Raises:
            CliError: which option it is not loaded by, and what to do.
        """
        layout, replicas, planned = session["experts"], session["replicas"], bool(session["ranks"])
        if planned and layout is None:
            for option, meant in (
                ("--experts", self.experts is Experts.PARALLEL),
                ("--replicas", self.replicas > 1),
                ("--trunk", self.trunk > 1),
            ):
                if meant:
                    raise CliError(f"{self.model!r} has no experts, which {option} is about; leave it out")
        ranks = len(session["ranks"]) or self.trunk  # not known while it is in planning
        placed = self.experts in (Experts.AUTO, layout or Experts.SLICED)

        def unlike_on(wanted: Mapping[str, str], kind: str) -> list[str]:
            loaded = {node: session[f"{kind}s"].get(node, session[kind]) for node in wanted}
            return [f"{own} on {node}" for node, own in loaded.items() if own != wanted[node]]

        used = {name for worker in session["ranks"] + session["hosts"] for name in nodes_of(worker)}
        elsewhere = planned and list(self.nodes) not in ([], session["nodes"]) and set(self.nodes) != used
        length = session["context"]
        quants, engines = unlike_on(self.quants, "quantisation"), unlike_on(self.engines, "engine")
        for option, unlike, how in (
            ("--quant", self.quant not in (None, session["quantisation"]), f"as {session['quantisation']}"),
            ("--quant", bool(quants), f"as {', '.join(quants)}"),
            ("--engine", self.engine not in (None, session["engine"]), f"by {session['engine']}"),
            ("--engine", bool(engines), f"by {', '.join(engines)}"),
            ("--context", planned and self.context not in (None, length), f"for {length} tokens"),
            ("--nodes", elsewhere, f"on {', '.join(sorted(used))}"),
            ("--shares", list(self.shares) not in ([], session["shares"]), "in other shares"),
            ("--exact", self.exact and not session["exact"], "without exact sums"),
            ("--experts", planned and not placed, f"with experts {layout}"),
            ("--replicas", self.replicas > replicas, f"with {counted(replicas, 'replica')} of every expert"),
            ("--trunk", self.trunk not in (1, ranks), f"on {counted(ranks, 'rank')}"),
        ):
            if unlike:
                name = session["name"] or session["id"]
                raise CliError(
                    f"session {name!r} has {self.model!r} loaded {how}: leave out {option}, or close it first with"
                    f" `{stop_command(session)}`"
                )


def stop_command(session: dict[str, Any]) -> str:
    """The command that closes a session, for a shell; one still in planning has no name."""
    return f"motley stop {shlex.quote(session['name'] or session['id'])}"


def start_command(session: dict[str, Any]) -> str:
    """The command that starts a session anew as it was, for a shell; but for `block`, `wire` and `threads`, which only
    the API knows."""
    from motley.orchestrator.sessions import SessionRequest

    words = ["motley", "run", session["model"], "PROMPT"]
    for option, kind, default in (
        ("--quant", "quantisation", SessionRequest.quantisation),
        ("--engine", "engine", SessionRequest.engine),
    ):
        whole = [session[kind]] if session[kind] != default else []
        for value in whole + [f"{own}@{node}" for node, own in session[f"{kind}s"].items()]:
            words += [option, value]
    for option, value in (
        ("--context", session["context"]),
        ("--nodes", ",".join(session["nodes"])),
        ("--shares", ",".join(f"{share:g}" for share in session["shares"])),
        ("--experts", session["experts"]),
        ("--replicas", session["replicas"] if session["replicas"] > 1 else 0),
        ("--trunk", len(session["ranks"]) if session["hosts"] and len(session["ranks"]) > 1 else 0),
    ):
        words += [option, str(value)] if value else []
    return shlex.join(words + (["--exact"] if session["exact"] else []))


def nodes_of(worker: dict[str, Any]) -> list[str]:
    """The nodes of a rank or an expert host."""
    return [member["node"] for member in worker.get("group") or [worker]]
