"""How things look in a terminal: tables, loading bars. Everything but results goes to stderr."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from motley.protocol import OWN_HEAD
from motley.protocol.wording import counted, short_bytes

NAMED = 5
"""Experts without a host that a message names at most."""
LINE_S = 10.0
"""Seconds between two lines on a rank that loads, where stderr is no terminal."""
SEVERAL = 1.05
"""So many tokens a step are told as more than one: guesses that are right now and then are not worth a word."""
UNWRAPPED = 10_000
"""Columns of a stream that is no terminal: whoever reads it wraps its lines, or searches them."""


def _width(stream: TextIO) -> int | None:
    """How many columns a stream has; None: as many as its terminal, or ``COLUMNS``, says."""
    return None if stream.isatty() or os.environ.get("COLUMNS") else UNWRAPPED


# Without `highlight`: Rich would colour the numbers in names of models and machines, and the ends of paths.
console = Console(stderr=True, width=_width(sys.stderr), highlight=False)
results = Console(width=_width(sys.stdout), highlight=False)


class LoadingBars:
    """One bar per rank (by number, or called otherwise), made when it first says something."""

    def __init__(self, progress: Progress, verb: str) -> None:
        self._progress = progress
        self._verb = verb
        self._tasks: dict[int | str, TaskID] = {}

    def advance_to(self, rank: int | str, done: int, total: int) -> None:
        """Show that `rank` has come to `done` of `total` bytes."""
        if rank not in self._tasks:
            self._tasks[rank] = self._progress.add_task(escape(_label(rank, self._verb)), total=total)
        self._progress.update(self._tasks[rank], completed=done, total=total)


class LoadingLines:
    """`LoadingBars` for what is no terminal: lines for each rank, at the beginning, the end and now and then."""

    def __init__(self, verb: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._verb = verb
        self._clock = clock
        self._said: dict[int | str, tuple[float, bool]] = {}
        """When each rank's last line was printed, and whether it was loaded then."""

    def advance_to(self, rank: int | str, done: int, total: int) -> None:
        """Say that `rank` has come to `done` of `total` bytes, if a line is due."""
        now, whole = self._clock(), done >= total
        since, was_whole = self._said.get(rank, (-math.inf, False))
        if (whole and was_whole) or (not whole and now - since < LINE_S):
            return
        self._said[rank] = now, whole
        console.print(escape(f"{_label(rank, self._verb)}: {short_bytes(done)} of {short_bytes(total)}"))


def _label(rank: int | str, verb: str) -> str:
    name = f"rank {rank}" if isinstance(rank, int) else rank
    return verb if verb != "loading" else f"{name} loading"


@contextmanager
def loading_bars(verb: str = "loading") -> Iterator[LoadingBars | LoadingLines]:
    """Bars on stderr while the context lasts, or lines where stderr is no terminal."""
    if not console.is_terminal:
        yield LoadingLines(verb)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield LoadingBars(progress, verb)


@contextmanager
def counting_bar(what: str, clock: Callable[[], float] = time.monotonic) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr while the context lasts, told how many of how many are done; or, without a terminal, lines: at
    once, now and then, and at the end."""
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task(what, total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total)
        return
    said = -math.inf

    def say(done: int, total: int) -> None:
        nonlocal said
        if done == total or clock() - said >= LINE_S:
            said = clock()
            console.print(f"{what}: {done} of {total}")

    yield say


@contextmanager
def what_goes_on(clock: Callable[[], float] = time.monotonic) -> Iterator[Callable[[str], None]]:
    """Says on stderr what goes on while the context lasts, as it is told: in one line of a terminal, or without one in
    lines, at once and now and then."""
    if console.is_terminal:
        with console.status("") as status:
            yield lambda what: status.update(escape(what))
        return
    said = -math.inf

    def say(what: str) -> None:
        nonlocal said
        if clock() - said >= LINE_S:
            said = clock()
            console.print(escape(what))

    yield say


def ago(seconds: float) -> str:
    """``42 s ago``, ``3 min ago``, ``2 h ago``."""
    unit, size = next(((unit, size) for unit, size in (("h", 3600), ("min", 60)) if seconds >= size), ("s", 1))
    return f"{int(seconds / size)} {unit} ago"


def percentages(fractions: Sequence[float]) -> list[str]:
    """Fractions as whole percentages, rounded so that they keep their sum: ``["34 %", "33 %", "33 %"]``."""
    down = [int(100 * fraction) for fraction in fractions]
    losses = sorted(range(len(down)), key=lambda index: down[index] - 100 * fractions[index])
    up = losses[: round(100 * sum(fractions)) - sum(down)]
    return [f"{whole + (index in up)} %" for index, whole in enumerate(down)]


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> RenderableType:
    """A plain table; columns after the first are numbers or short words and stand to the right.

    The title is a line above it, and not as narrow as the table.
    """
    made = Table(header_style="bold")
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        made.add_row(*map(escape, row))
    return Group(Text(title, style="bold"), made) if title else made


def worker_name(worker: dict[str, Any]) -> str:
    """``pc (rank 0)``, or ``pc (experts)`` for its host of a session's experts: a rank or host as the API tells it."""
    role = f"rank {worker['rank']}"
    if "host" in worker:
        role = "experts"
    elif "of_rank" in worker:
        role = f"caches of rank {worker['of_rank']}"
    return f"{worker['node']} ({role})"


def of_layers(layers: Sequence[int] | None) -> str:
    """``, layers 0-11``, to follow a share: the first and the end of those that it is of; empty: it is of all."""
    if layers is None:
        return ""
    first, end = layers
    return f", layer {first}" if end - first == 1 else f", layers {first}-{end - 1}"


def session_table(session: dict[str, Any]) -> RenderableType:
    """A session's ranks: what each has, and where the time of a step goes; then the nodes that have its experts."""
    ranks, hosts = session["ranks"], [host for host in session["hosts"] if host["state"] != "gone"]
    shares = percentages([rank["share"]["fraction"] for rank in ranks] + [host["fraction"] for host in hosts])
    rows = []
    for rank, share in zip(ranks, shares, strict=False):
        timing, weights = rank["timing"], short_bytes(rank["share"]["weight_bytes"])
        parts = [f"{timing[part]:.2f}" for part in ("compute_ms", "wire_ms", "wait_ms")] if timing else ["-"] * 3
        own = share + of_layers(rank["share"]["layers"])
        rows.append([worker_name(rank) + _unlike(session, rank), rank["state"], own, weights, *parts])
    for host, share in zip(hosts, shares[len(ranks) :], strict=True):
        held = [share, short_bytes(host["weight_bytes"]), counted(host["experts"], "expert")]
        rows.append([worker_name(host), host["state"], *held, "", ""])
    for holder in session["cache_holders"]:
        rows.append([worker_name(holder), holder["state"], "", short_bytes(holder["bytes"]), "", "", ""])
    columns = ["node", "state", "share", "weights", "compute", "wire", "wait ms"]
    exact = ", exact" if session["exact"] else ""
    more = session["cache_tokens"] != session["context"]
    caches = f", {session['cache_tokens']} tokens in caches" if more else ""
    caches += f", {session['cache_disk_tokens']} on disk" if session["cache_disk_tokens"] else ""
    caches += f", {session['cache_node_tokens']} on other nodes" if session["cache_node_tokens"] else ""
    kept = f", caches in {session['cache_format']}" if session["cache_format"] != "fp32" else ""
    kept += ", prefixes kept on disk" if session["keep_prefixes"] else ""
    kept += f", for embeddings ({session['embeddings']})" if session["embeddings"] else ""
    drafts = "its own head" if session["draft_model"] == OWN_HEAD else Path(session["draft_model"]).name
    guessing = f", {drafts} guesses tokens" if session["draft_model"] else ""
    context = f"context {session['context']}{caches}{kept}{guessing}"
    title = f"{session['name']}: {_held(session)}{_products(session)}{exact}, {context}, {session['state']}"
    return table(columns, rows, title=title)


def devices_told(session: dict[str, Any]) -> list[str]:
    """What each of a session's nodes with a GPU computes on, and why, where nobody has said, a line for each rank; and
    that settings are of no use, as no rank has the engine that they are of."""
    told = [f"{rank['node']} {rank['chosen']}" for rank in session["ranks"] if rank["chosen"]]
    settings = ", ".join(f"{name} {value}" for name, value in session["engine_options"].items())
    if settings and session["ranks"] and not _ranks_with_settings(session):
        told.append(f"no rank computes by {session['engine']}, so {settings} changes nothing")
    return told


def without_part(told: dict[str, Any]) -> list[str]:
    """A line for each node that was to take part in a session or a plan, as the API tells it, and does not; none where
    the orchestrator is of a version that does not tell."""
    return [f"{each['node']} takes no part: {each['why']}" for each in told.get("no_part", ())]


def losses(session: dict[str, Any]) -> str:
    """What machines a session has lost and goes on without, or why it is planned anew now; empty: nothing."""
    if session["interrupted_by"]:
        waits = "paused until a plan fits" if session["state"] == "paused" else "requests wait for another plan"
        return f"{waits}: {session['interrupted_by']}"
    if session["failure"]:
        return ""
    told = []
    if session["losses"]:
        times, last = counted(len(session["losses"]), "time"), session["losses"][-1]["message"]
        told.append(f"it has lost a machine or a process {times} and gone on, the last time: {last}")
    if missed := session["missed_nodes"]:
        told.append(f"it was asked for on {', '.join(session['nodes'])}, and goes on without {' and '.join(missed)}")
    return "; ".join(told)


def set_aside(nodes: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each of a mesh's nodes that plans leave out for a while, as it comes and goes; none if all do."""
    alive = [node for node in nodes if node["state"] == "alive"]
    aside = [node for node in alive if node["aside_s"]]
    return [
        f"{node['name']} comes and goes: plans leave it out for {node['aside_s'] / 60:.0f} min more, unless `motley run"
        " --nodes` names it"
        for node in aside
        if len(aside) < len(alive)
    ]


def show_set_aside(nodes: Sequence[dict[str, Any]]) -> None:
    """Print who of a mesh's nodes is left out of plans for a while."""
    for aside in set_aside(nodes):
        results.print(f"[yellow]{escape(aside)}[/]", soft_wrap=True)


def limit_reached(usage: dict[str, Any], context: int) -> str:
    """What has ended an answer that was not told how long it may be, though it would have gone on."""
    if usage.get("prompt_tokens", 0) + usage.get("completion_tokens", 0) >= context:
        return "the context, which is full"
    return "the model's own limit; --max-tokens asks for more"


def lost_since(before: dict[str, Any], now: dict[str, Any]) -> str:
    """What a session has lost and gone on without, between two looks at it; empty: nothing."""
    lost = [each["message"] for each in now["losses"] if each["epoch"] >= before["epoch"]]
    return f"lost on the way, and gone on without: {'; '.join(lost)}" if lost else ""


def waiting(session: dict[str, Any]) -> str:
    """What requests wait for: experts that no host has; empty if there are none."""
    names = session["waiting_for"]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"no host has {', '.join(names[:NAMED])}{more}: requests that need it wait" if names else ""


def activity(session: dict[str, Any]) -> str:
    """What a session does, in a line: ``2 requests under way, 1 waiting; 12 of 64 blocks in use...``; empty if nobody
    has asked it anything yet."""
    told = session["activity"]
    if told is None:
        return ""
    tiers = ", then ".join(map(_far_tier, told["far_tiers"]))
    if told["far_blocks"] and not tiers:  # a rank 0 of an older version does not tell where they are
        tiers = f"{told['far_blocks_used']} of {told['far_blocks']}"
    disk = f"; far blocks in use: {tiers}" if tiers else ""
    disk += f"; {told['blocks_on_disk']} kept on disk for the next start" if told["blocks_on_disk"] else ""
    disk += f" ({told['trouble']})" if told["trouble"] else ""
    windows = told["windowed_blocks"]
    windowed = f"; layers with a window: {told['windowed_blocks_used']} of {windows} blocks in use" if windows else ""
    guesses = f"; {told['accepted_drafts']} of {told['tried_drafts']} guesses accepted" if told["tried_drafts"] else ""
    return (
        f"{counted(told['active'], 'request')} under way, {told['waiting']} waiting;"
        f" {told['blocks_used']} of {told['blocks']} blocks in use, {told['blocks_kept']} kept;"
        f" {told['cached_tokens']} of {told['prompt_tokens']} prompt tokens found in caches{guesses}{windowed}{disk}"
    )


def _far_tier(tier: dict[str, Any]) -> str:
    """Far blocks in one place: ``3 of 6 on disk (0.02 ms of a step for each)``."""
    place = {"disk": "on disk", "nodes": "on other nodes"}[tier["place"]]
    cost = f" ({tier['block_ms']:.2g} ms of a step for each)" if tier["block_ms"] else ""
    return f"{tier['blocks_used']} of {tier['blocks']} {place}{cost}"


def forecast_line(forecast: dict[str, float]) -> str:
    """A forecast in a line: ``about 21.3 ms per token (compute 18.0, wire 2.1, wait 1.2), the first after 0.4 s, of a
    prompt of 512``."""
    first_s, prompt = forecast["ttft_ms"] / 1e3, forecast.get("prompt_tokens")  # older orchestrators do not tell it
    of_prompt = f", of a prompt of {prompt}" if prompt else ""
    return (
        f"about {forecast['ms_per_token']:.1f} ms per token (compute {forecast['compute_ms']:.1f}, wire"
        f" {forecast['wire_ms']:.1f}, wait {forecast['wait_ms']:.1f}), the first after {first_s:.1f} s{of_prompt}"
    )


def forecast_beside(session: dict[str, Any]) -> str:
    """What a session's token was forecast to take, beside what a step takes, and a token if a step gives several; empty
    if it was not forecast."""
    forecast, step_ms, tokens = session["forecast"], session["measured_ms_per_step"], session["tokens_per_step"]
    if forecast is None:
        return ""
    measured = f"{step_ms:.1f} ms a step" if step_ms else "nothing yet"
    if step_ms and tokens >= SEVERAL:
        guessed = f"{tokens:.2f} tokens with those that were guessed"
        measured += f", which gives {guessed}: {session['measured_ms_per_token']:.1f} ms per token"
    return f"forecast: {forecast_line(forecast)}; measured: {measured}"


def _unlike(session: dict[str, Any], rank: dict[str, Any]) -> str:
    """Tell a rank's engine and quantisation, where those of ranks differ."""
    differ = len({(one["engine"], one["quantisation"]) for one in session["ranks"]}) > 1
    return f" ({rank['engine']}, {rank['quantisation']})" if differ else ""


def _ranks_with_settings(session: dict[str, Any]) -> list[dict[str, Any]]:
    """The ranks for whose engine a session's settings are."""
    return [rank for rank in session["ranks"] if rank["engine"] == session["engine"]]


def _products(session: dict[str, Any]) -> str:
    """``, products in fp16``, and on which nodes if not on all, to follow how matrices are held; empty: as usual."""
    products, ranks = session["engine_options"].get("activations", "fp32"), _ranks_with_settings(session)
    if products == "fp32" or not ranks:
        return ""
    everywhere = len(ranks) == len(session["ranks"])
    return f", products in {products}" + ("" if everywhere else f" on {', '.join(rank['node'] for rank in ranks)}")


def _held(session: dict[str, Any]) -> str:
    """How a session holds the model's matrices: what was asked for and, if that says little, what it came to."""
    quantisation: str = session["quantisation"]
    if session["quantisations"] and session["ranks"]:
        hosts = {quantisation} if session["hosts"] else set[str]()
        return " and ".join(sorted({rank["quantisation"] for rank in session["ranks"]} | hosts))
    return f"stored ({session['matrices']})" if quantisation == "stored" else quantisation
