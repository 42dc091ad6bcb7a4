"""From an assignment to a rank that can execute: open the model, declare, find or write the share, open the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

from motley.daemon.adapters.store import FOLDER as ADAPTERS
from motley.daemon.adapters.store import AdapterStore
from motley.daemon.caches.held_elsewhere import HeldElsewhere
from motley.daemon.experts.factors import ExpertsAdapter
from motley.daemon.loading.planned import open_planned
from motley.daemon.loading.progress import Progress, signs_of_life
from motley.daemon.machine.gpus import gpus
from motley.daemon.models.cutting.holding import has_floats
from motley.daemon.models.cutting.profile import activations
from motley.daemon.models.cutting.share import Share
from motley.daemon.models.cutting.stages import Stage, stages_of
from motley.daemon.models.description.hashed_rows import I64
from motley.daemon.models.files import OpenModel
from motley.daemon.models.graph.rank_graph import build_rank_graph
from motley.daemon.models.keys import ConfigError
from motley.daemon.rank.adapters.on_rank import RankAdapters
from motley.daemon.rank.blocks.far_file import FarFile
from motley.daemon.rank.blocks.kept_file import FOLDER, KeptFile, plan_key
from motley.daemon.rank.blocks.window_blocks import WindowBlocks
from motley.daemon.rank.executor import Embed, Executor
from motley.daemon.rank.gate import Gate, reference_answers
from motley.daemon.rank.guessing.handed_rows import HandedRows
from motley.daemon.rank.passage import Passage
from motley.daemon.rank.peers import Peers
from motley.daemon.rank.pooling import POOLINGS
from motley.daemon.weights.cache import ShareCache
from motley.plugins.adapted_engine import AdaptedEngine
from motley.plugins.adapters import no_adapters
from motley.plugins.engine import CACHE_FORMATS, F32, CacheBlocks, Engine, EngineError, EngineOptions
from motley.plugins.installed import abilities, load_engine, on_gpu
from motley.protocol import GPU_RESERVE
from motley.protocol import mesh_pb2 as pb
from motley.protocol.wording import human_bytes

MOST_BLOCKS = 2**31 - 1
"""Blocks have numbers of 32 bits with a sign."""
KEPT_PART = 5
"""Blocks that are kept on the disk may take a part of what shares may take there: so many times less; and so may
adapters that other nodes have sent."""
MEASURED = 64
"""Where far blocks are in several places, it is measured what a step takes that uses so many in one of them, or as many
as all have."""
ENGINE_S = 1800.0
"""An engine that is not made and examined after so many seconds hangs: from then on no sign of life is given."""


class GpuFull(Exception):
    """A rank's share does not fit the memory that is free on its GPU; the message says what is needed and free."""


@dataclass(frozen=True)
class LoadedRank:
    """A rank that can execute steps.

    Attributes:
        engine: the executor's.
        embed: gives the rows that a step begins with.
        words: of the vocabulary, those whose logits it computes; `words_per_unit` of them are a unit of a share.
        context: the longest sequence, in tokens.
        blocks: of its caches.
        same_tables: the shortest prompt with the same rotary tables as one of a length, see `RankGraph.same_tables`.
        share_bytes: of its weights, as they are stored.
        max_rows: the most tokens that a step may have.
        expert_width: elements of the rows that experts on other machines get and send back.
        vocabulary: tokens that the model knows.
        experts: what adapters in slots add to experts on hosts, by the slots.
        recurrent: its layers keep states of sequences, so that one can begin with what is in the caches only where
            these are remembered.
    """

    executor: Executor
    engine: Engine
    embed: Embed
    words: range
    words_per_unit: int
    blocks: CacheBlocks
    context: int
    same_tables: Callable[[int], int]
    share_bytes: int
    max_rows: int
    expert_width: int
    vocabulary: int
    experts: Mapping[int, ExpertsAdapter]
    recurrent: bool = False


@contextlib.contextmanager
def load_rank(
    assignment: pb.Assignment,
    rank: int,
    peers: Peers,
    *,
    models: Path | None,
    cache: ShareCache,
    threads: int,
    progress: Progress,
    holder: HeldElsewhere | None = None,
    handed: HandedRows | None = None,
) -> Iterator[LoadedRank]:
    """Load a rank's share, from the cache if it is there, and examine its engine; everything is freed when the context
    ends.

    Args:
        rank: its number; the assignment has the shares of all ranks.
        peers: what the engine's sums go through.
        models: the folder in which model names are looked up, if there is one.
        cache: where shares are kept.
        threads: that the engine computes with.
        progress: told how far the loading is; what it raises ends the loading.
        holder: has the far blocks of its caches that are not on this machine's disk; None: there are none.
        handed: takes what the model hands its own head, which guesses tokens; None: that does not.

    Raises:
        LoadError: the model's files differ from those that were planned for, or do not come.
        CheckpointError: they changed while they were read.
        ConfigError: the caches have no room for a sequence, or the model cannot be had like that.
        EngineError: the engine cannot have adapters, or not keep prefixes.
        DiskFull: there is no room on the disk for the cache blocks that are to be there, or to be kept there.
        GpuFull: its engine computes on a GPU that is too small or too busy.
        GateError: the engine computes wrongly.
        Exception: what `open_planned`, `build_rank_graph`, `PlannedModel.share` and the engine raise.
    """
    hands = handed is not None or assignment.model.ahead
    if assignment.keep_prefixes and not abilities(assignment.engine).keeps_prefixes:
        raise EngineError(
            f"engine {assignment.engine!r} cannot keep prefixes on a disk between starts; start the session without"
            " keeping them, or with another engine"
        )
    if assignment.adapters and not abilities(assignment.engine).takes_adapters:
        raise no_adapters(assignment.engine)
    if assignment.embeddings and not abilities(assignment.engine).embeds:
        raise EngineError(
            f"engine {assignment.engine!r} cannot embed texts; start the session with engine 'onnxruntime' on this node"
        )
    if hands and not abilities(assignment.engine).embeds:
        raise EngineError(
            f"engine {assignment.engine!r} cannot tell a model's own head what it needs to guess tokens; use another"
            " engine on this node, another draft model, or none"
        )
    if assignment.embeddings not in ("", *POOLINGS):
        known = ", ".join(POOLINGS)
        raise ConfigError(f"embeddings were planned as {assignment.embeddings!r}; this node knows {known}. Update it")
    model, blocks = assignment.model, cache_blocks(assignment)
    shares = [share_from_proto(share) for share in assignment.shares]
    if assignment.hosts and any(share.layers for share in shares):
        raise ConfigError("ranks cannot form stages where experts are on hosts; plan the session anew")
    with open_planned(assignment, models, cache, progress, assignment.shares[rank].quantisation) as planned:
        opened = planned.opened
        recurrent = any(layer.recurrences for layer in opened.model.layers)
        if recurrent and assignment.keep_prefixes:
            raise ConfigError(f"{planned.path}: no prefixes can be kept of a model with recurrent states")
        if recurrent:
            blocks = replace(blocks, snapshots=blocks.slots * assignment.snapshots)
        declared = build_rank_graph(
            opened.model,
            shares,
            rank,
            planned.quantisation,
            model.block,
            assignment.context,
            opened.stored,
            model.exact,
            experts_elsewhere=len(assignment.hosts) > 0,
            beside=planned.beside,
            blocks=replace(blocks, far=0),
            adapters=assignment.adapters,
            embeds=bool(assignment.embeddings),
            hands=hands,
        )
        if on_gpu(assignment.engine, assignment.engine_options):
            check_gpu_room(declared.share_bytes + declared.cache_bytes + 4 * activations(opened.model), gpus())
        floats = has_floats(opened.model, planned.quantisation)
        extra = dict(assignment.engine_options)
        options = EngineOptions(threads=threads, exact=model.exact, floats=floats, extra=extra)
        loaded = partial(progress, declared.share_bytes, declared.share_bytes)
        with contextlib.ExitStack() as stack:
            share_file = stack.enter_context(planned.share(cache, declared.weights, declared.share_bytes, progress))
            planned.end_loan([w.name for w in opened.model.tables_of(declared.stage.layers)], progress)
            graph = declared.bind(share_file)  # what is examined has near blocks alone
            far = None
            with signs_of_life(loaded, ENGINE_S):
                if blocks.on_disk:
                    far = FarFile(cache.folder, blocks, graph.caches)
                    stack.callback(far.close)
                ask_reference = partial(
                    reference_answers, graph, peers.rank, peers.size, load_engine("reference"), share_file.parent
                )
                expected = ask_reference()  # before the engine takes its memory
                gate = Gate(graph, peers)
                engine = load_engine(assignment.engine)(
                    replace(graph, blocks=blocks, far=far, holder=holder), gate, options
                )
                stack.callback(engine.close)
                kept = None
                if assignment.keep_prefixes:
                    key = plan_key(assignment, rank, share_file.parent.name)
                    kept = KeptFile(cache.folder / FOLDER, key, blocks, graph.caches, cache.limit // KEPT_PART)
                    stack.callback(kept.close)
                adapters = None
                if assignment.adapters:
                    adapters = RankAdapters(
                        cast(AdaptedEngine, engine),
                        opened.model,
                        declared,
                        rank,
                        assignment.adapters,
                        assignment.adapter_rank,
                        AdapterStore(cache.folder / ADAPTERS, cache.limit // KEPT_PART),
                        models,
                        assignment.expert_engine if assignment.hosts else None,
                    )
                    stack.callback(adapters.close)
                gate.open(engine, expected, partial(ask_reference, anew=True))
                places = [place for place in (far, holder) if place is not None]
                alike = min(blocks.on_disk, blocks.held, MEASURED)
                block_s = [place.block_s(alike) for place in places] if len(places) > 1 else []
            share_bytes = sum(place.weight.all_bytes for place in declared.weights)
            embed: Embed = partial(opened.rows, layers=declared.stage.layers)
            if peers.passage and not declared.stage.first:
                embed = _taking(peers.passage, opened, declared.stage.layers)
            executor = Executor(
                engine,
                blocks,
                graph.context,
                embed,
                declared.words,
                declared.words_per_unit,
                peers,
                places,
                kept,
                adapters,
                pass_on=peers.passage.give if peers.passage and not declared.stage.last else None,
                keeps_logits=peers.passage is not None,
                pooling=assignment.embeddings,
                handed=handed,
                block_s=block_s,
                recent=opened.model.recent,
            )
            yield LoadedRank(
                executor=executor,
                engine=engine,
                embed=embed,
                words=declared.words,
                words_per_unit=declared.words_per_unit,
                blocks=blocks,
                context=graph.context,
                same_tables=graph.same_tables,
                share_bytes=share_bytes,
                max_rows=options.max_rows,
                expert_width=opened.model.expert_width,
                vocabulary=opened.model.vocabulary,
                experts=adapters.experts if adapters else {},
                recurrent=recurrent,
            )


def check_gpu_room(needed: int, found: Sequence[pb.Gpu]) -> None:
    """Make sure that a rank's memory fits what is free on the first GPU, if the driver tells.

    Args:
        needed: bytes of weights, caches and activations.
        found: the GPUs of this machine as they are now, those that CUDA counts first in front.

    Raises:
        GpuFull: it does not.
    """
    if not found or needed + GPU_RESERVE <= found[0].free_bytes:
        return
    gpu = found[0]
    held = {user.pid: human_bytes(user.bytes) if user.bytes else "not told" for user in gpu.users}
    users = ", ".join(f"{user.name or 'a process'} ({user.pid}): {held[user.pid]}" for user in gpu.users)
    raise GpuFull(
        f"{gpu.name} has {human_bytes(gpu.free_bytes)} of {human_bytes(gpu.memory_bytes)} free; this rank needs"
        f" {human_bytes(needed)}, and {human_bytes(GPU_RESERVE)} must stay free."
        + (f" In use by {users}." if users else "")
        + " Close what uses the GPU, or give this node a smaller share"
    )


def cache_blocks(assignment: pb.Assignment) -> CacheBlocks:
    """Read the blocks of a rank's KV caches as the control plane has them.

    Raises:
        ConfigError: they have no room for the longest sequence, there are more than an engine can count, or nobody
            knows their format.
    """
    count, tokens, context = assignment.cache_blocks, assignment.cache_block_tokens, assignment.context
    far, held = assignment.far_blocks, 0
    if assignment.cache_holders:
        held = far - min(far, assignment.far_blocks_on_disk)
    if not count or (count + far) * tokens < max(1, context) or count + far > MOST_BLOCKS:
        more = f" and {far - held} on disk" if far > held else ""
        more += f" and {held} on another node" if held else ""
        raise ConfigError(
            f"KV caches of {count} blocks of {tokens} tokens{more} were planned for a context of {context}: they"
            f" must have room for it, in {MOST_BLOCKS} blocks at most. Plan the session anew"
        )
    windowed, window = assignment.windowed_blocks, assignment.window
    if windowed and (windowed > MOST_BLOCKS or windowed < WindowBlocks.needed(window, tokens)):
        raise ConfigError(
            f"{windowed} KV cache blocks of {tokens} tokens were planned for layers with a window of {window}: they"
            f" must have room for a row's, in {MOST_BLOCKS} blocks at most. Plan the session anew"
        )
    cache_format = assignment.model.cache_format or CACHE_FORMATS[0]
    if cache_format not in CACHE_FORMATS:
        known = ", ".join(CACHE_FORMATS)
        raise ConfigError(f"KV caches were planned as {cache_format!r}; this node knows {known}. Update its Motley")
    return CacheBlocks(count, tokens, cache_format, far, windowed, window, max(1, assignment.sequences), held=held)


def share_from_proto(share: pb.Share) -> Share:
    """Read a share as the control plane has it."""

    def units(stretch: pb.Range) -> range:
        return range(stretch.start, stretch.stop)

    layers = units(share.layers) if share.HasField("layers") else None
    return Share(share.attention_split, units(share.attention), units(share.mlp), units(share.vocabulary), layers)


def planned_stages(assignment: pb.Assignment) -> list[Stage]:
    """The stages that the ranks of an assignment form; whether the model has such layers is seen when it is opened.

    Raises:
        ShareError: they do not follow each other.
    """
    shares = [share_from_proto(share) for share in assignment.shares]
    whole = shares[-1].layers if shares else None
    return stages_of(shares, whole.stop if whole else 1)


def _taking(passage: Passage, opened: OpenModel, layers: range) -> Embed:
    """What enters a stage of these layers that is not the first: residuals, and rows that layers are given."""
    width = opened.model.layers[layers.start].x.axis.size

    def take(tokens: Sequence[int], recent: I64 | None = None, /) -> F32:
        return opened.with_hashed(passage.take(len(tokens), width), tokens, recent, layers)

    return take
