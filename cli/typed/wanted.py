"""What a person wants of a model that is to be loaded, held against a session that has it loaded already."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from motley.cli.errors import CliError
from motley.cli.typed.options import ENGINES_ON, Device
from motley.protocol import QUEUE, SEQUENCES
from motley.protocol.wording import counted

if TYPE_CHECKING:
    from motley.orchestrator.session_request import SessionRequest

OPTIONS = {"quantisation": "--quant", "quantisations": "--quant", "engines": "--engine", "engine_options": "--device"}
"""The option for a field of a request, where they are not called alike."""

LIMITS = {"sequences": SEQUENCES, "queue": QUEUE}
"""Fields that say how many requests a session takes, with what they are unless somebody asks otherwise."""


def option_of(field: str) -> str:
    """The option for a field of a request."""
    return OPTIONS.get(field, f"--{field.replace('_', '-')}")


@dataclass(frozen=True)
class Wanted:
    """A model and how it should be loaded.

    Attributes:
        request: what the orchestrator is asked for.
        device: what it should be computed on; None: that does not matter.
        any_quantisation: if the model is loaded already, its quantisation does not matter, but on nodes for which the
            request names one.
        any_engine: the same of its engine.
        any_cache_format: the same of what its caches are kept as.
        any_adapters: the same of how many adapters it has room for.
        chats: it is to be talked to, so that it needs a chat template.
    """

    request: SessionRequest
    device: Device | None = None
    any_quantisation: bool = True
    any_engine: bool = True
    any_cache_format: bool = True
    any_adapters: bool = True
    chats: bool = False

    def check(self, session: dict[str, Any]) -> None:
        """Refuse a session that was loaded otherwise.

        Raises:
            CliError: which option it is not loaded by, and what to do.
        """
        from motley.orchestrator.session_request import AUTO, Place, SessionRequest

        request = self.request
        layout, replicas, planned = session["experts"], session["replicas"], bool(session["ranks"])
        if planned and layout is None and request.wants_parallel:
            asked = option_of(request.asking_for_parallel[0])
            raise CliError(f"{request.model!r} has no experts, which {asked} is about; leave it out")
        ranks = len(session["ranks"]) or request.trunk  # not known while it is in planning
        placed = request.experts in ("auto", layout or "sliced")

        def unlike_on(wanted: Mapping[str, str], kind: str) -> list[str]:
            loaded = {node: session[f"{kind}s"].get(node, session[kind]) for node in wanted}
            return [f"{own} on {node}" for node, own in loaded.items() if own != wanted[node]]

        def unlike_all(field: str, any_will_do: bool) -> bool:
            return not any_will_do and getattr(request, field) != session[field]

        def unlike_limit(field: str) -> bool:
            return getattr(request, field) not in (LIMITS[field], session[field])

        def other_draft(field: str) -> bool:
            return getattr(request, field) not in ("", session[field])

        used = {name for worker in session["ranks"] + session["hosts"] for name in nodes_of(worker)}
        used |= {each["node"] for each in session.get("no_part", ())}
        ranks_at = {Place(rank["node"], rank["engine"]) for rank in session["ranks"]}
        others = {place for place in request.places if place.engine} - ranks_at
        nodes_differ = bool(others) or {place.node for place in request.places} != used
        elsewhere = planned and list(request.nodes) not in ([], session["nodes"]) and nodes_differ
        length, held, kept = session["context"], session["cache_tokens"], session["cache_format"]
        drafts = session["draft_model"]
        on_disk, on_nodes = session["cache_disk_tokens"], session["cache_node_tokens"]
        computing = _engines_of(session)
        chosen = planned or session["engine"] != AUTO
        device = session["engine_options"].get("device") or _device_of(computing[-1])
        products = session["engine_options"].get("activations", "fp32")
        products_differ = request.engine_options.get("activations", products) != products
        quants, engines = unlike_on(request.quantisations, "quantisation"), unlike_on(request.engines, "engine")
        for named, unlike, how in (
            ("--quant", unlike_all("quantisation", self.any_quantisation), f"as {session['quantisation']}"),
            ("--quant", bool(quants), f"as {', '.join(quants)}"),
            ("--engine", chosen and not self.any_engine and request.engine not in computing, f"by {computing[-1]}"),
            ("--engine", bool(engines), f"by {', '.join(engines)}"),
            ("--device", chosen and self.device not in (None, device), f"on device {device}"),
            ("--activations", products_differ, f"with products in {products}"),
            ("--context", planned and request.context not in (0, length), f"for {length} tokens"),
            ("--cache-tokens", planned and request.cache_tokens not in (0, held), f"with caches of {held} tokens"),
            (
                "--cache-disk-tokens",
                planned and bool(request.cache_disk_tokens) and request.cache_disk_tokens != on_disk,
                f"with {on_disk} tokens on disk",
            ),
            (
                "--cache-node-tokens",
                planned and bool(request.cache_node_tokens) and request.cache_node_tokens != on_nodes,
                f"with {on_nodes} tokens on other nodes",
            ),
            ("--cache-format", unlike_all("cache_format", self.any_cache_format), f"with caches in {kept}"),
            (
                "--draft-model",
                other_draft("draft_model"),
                f"with {f'draft model {drafts}' if drafts else 'no draft model'}",
            ),
            (
                "--draft-engine",
                other_draft("draft_engine"),
                f"with a draft model by {session['draft_engine'] or 'its own'}",
            ),
            ("--sequences", unlike_limit("sequences"), f"for {counted(session['sequences'], 'request')} at a time"),
            ("--queue", unlike_limit("queue"), f"for {counted(session['queue'], 'request')} that may wait"),
            ("--nodes", elsewhere, f"on {', '.join(sorted(used))}"),
            ("--shares", list(request.shares) not in ([], session["shares"]), "in other shares"),
            ("--stages", planned and not _staged_so(request.stages, session), "in other stages"),
            ("--exact", request.exact and not session["exact"], "without exact sums"),
            ("--no-recover", not request.recover and session["recover"], "so that it goes on when a machine is lost"),
            (
                "--keep-prefixes",
                request.keep_prefixes and not session["keep_prefixes"],
                "without keeping its prefixes on disks",
            ),
            (
                "--embeddings",
                request.embeddings not in ("", session["embeddings"]),
                f"for embeddings ({session['embeddings']})" if session["embeddings"] else "to answer",
            ),
            (
                "--adapters",
                not self.any_adapters and request.adapters > session["adapters"],
                f"with room for {counted(session['adapters'], 'adapter')}",
            ),
            (
                "--adapter-rank",
                request.adapter_rank not in (SessionRequest.adapter_rank, session["adapter_rank"]),
                f"with room for adapters of rank {session['adapter_rank']}",
            ),
            ("--experts", planned and not placed, f"with experts {layout}"),
            ("--replicas", request.replicas > replicas, f"with {counted(replicas, 'replica')} of every expert"),
            ("--trunk", request.trunk not in (1, ranks), f"on {counted(ranks, 'rank')}"),
        ):
            if unlike:
                name = session["name"] or session["id"]
                raise CliError(
                    f"session {name!r} has {request.model!r} loaded {how}: leave out {named}, or close it first with"
                    f" `{stop_command(session)}` and run this again"
                )


def _staged_so(stages: int | tuple[int, ...], session: dict[str, Any]) -> bool:
    """Whether the ranks of a session form stages as they are asked for, or it was asked for so: without nodes that were
    lost it may be otherwise for a while."""
    asked = session["stages"]
    layers = [rank["share"]["layers"] for rank in session["ranks"]]
    ranks = [len([*alike]) for _, alike in groupby(layers)]
    return stages in (0, len(ranks), tuple(ranks), tuple(asked) if isinstance(asked, list) else asked)


def _engines_of(session: dict[str, Any]) -> list[str]:
    """What a session is computed by, but on nodes that have engines of their own: the engine that was asked for and, if
    that is ``auto`` and has come to one alone, that one, too."""
    from motley.orchestrator.session_request import AUTO

    own = {rank["engine"] for rank in session["ranks"] if rank["node"] not in session["engines"]}
    return list(dict.fromkeys([session["engine"], *(own if session["engine"] == AUTO and len(own) == 1 else ())]))


def _device_of(engine: str) -> str:
    """What an engine computes on."""
    from motley.orchestrator.session_request import AUTO

    found = (str(device) for device, engines in ENGINES_ON.items() if engine in engines)
    return "several devices" if engine == AUTO else next(found, str(Device.CPU))


def stop_command(session: dict[str, Any]) -> str:
    """The command that closes a session, for a shell; one still in planning has no name."""
    return f"motley stop {shlex.quote(session['name'] or session['id'])}"


def nodes_of(worker: dict[str, Any]) -> list[str]:
    """The nodes of a rank or an expert host."""
    return [member["node"] for member in worker.get("group") or [worker]]
