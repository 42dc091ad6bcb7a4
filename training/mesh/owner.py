"""The worker of whoever has the data: it deals examples to those that train, fetches their adapters, and merges them.

It may die at any time: what was dealt, and the adapters that have come, are in the job's folder.
"""

from __future__ import annotations

import json
import shutil
import time
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from math import exp
from pathlib import Path
from typing import Any

import numpy as np

from motley.training.adapters import CONFIG, WEIGHTS, merge
from motley.training.dealing import Trainer, deal_examples, need_bytes
from motley.training.errors import TrainingError
from motley.training.examples import Example
from motley.training.files import CURVE, written_whole
from motley.training.mesh.claim import claim
from motley.training.mesh.order import WorkerOrder
from motley.training.mesh.pipe import Pipe
from motley.training.mesh.talk import (
    STRETCH,
    NonsenseError,
    heard,
    losses_of,
    pack_examples,
    pack_files,
    report_of,
    say,
    size_of,
    unpack_files,
)
from motley.training.mesh.ticket import Ticket
from motley.training.settings import How
from motley.training.training import Data, config_digest, read_data
from motley.transport import Connected, Lost, Message, Messenger

LOOK_S = 0.5
DIAL_S = 30.0
AGAIN_S = 2.0
"""A worker that could not be reached is dialled again after this."""
WEIGH_S = 3600.0
"""A worker that weighs the merged adapter, and has said nothing for so long, is not waited for. It loads the model and
goes through what is held out once; its training did so twice, and learnt besides."""
DEALT = "dealt.json"


@dataclass
class _Peer:
    """A worker that trains.

    Attributes:
        address: where it is; empty: nowhere now.
        share: the examples that it learns, by number.
        away_since: since when there is no link to it; None: there is one.
        packed: its examples, as long as it fetches them.
        parcel: of its adapter, what has come.
        out: why it is left out; empty: it is not.
    """

    node: str
    address: str = ""
    share: range = range(0)
    dialling: bool = False
    again_at: float = 0.0
    away_since: float | None = None
    packed: bytes = b""
    parcel: bytearray = field(default_factory=bytearray)
    size: int = 0
    report: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    """Where its adapter is, once that has come."""
    out: str = ""

    @property
    def pending(self) -> bool:
        """Whether an adapter is still expected of it."""
        return bool(self.share) and self.folder is None and not self.out


def deal_and_merge(order: WorkerOrder, pipe: Pipe) -> None:
    """Do the owner's part of a job; ends with an adapter in the ticket's `out`.

    Raises:
        TrainingError: the model, the data, the folder or the disk is not as it must be, or nobody has trained.
    """
    ticket = order.ticket
    assert ticket is not None, "who leads has a ticket"
    adapter = ticket.out / "adapter"
    claim(ticket.out, order.job_folder)
    if adapter.exists():  # this worker has died after it was written
        shutil.rmtree(adapter)
    data = read_data(
        order.model_folder, ticket.data, ticket.settings, held_out=ticket.held_out, template=ticket.template
    )
    pipe.say(says=f"{len(data.learnt)} examples to learn, {len(data.evaluated)} held out; {data.cut} cut")
    pipe.say(listening=0)
    with closing(Messenger(order.membership, order.security, listener=None)) as messenger:
        owner = _Owner(order, ticket, data, pipe, messenger)
        owner.collect()
        missed = owner.merge(adapter)
        perplexity = owner.weigh(adapter)
        owner.dismiss()
    told = {"adapter": str(adapter), "perplexity": perplexity, "missed": missed, "how": ticket.how}
    told |= {"learnt": len(data.learnt), "held_out": len(data.evaluated), "cut": data.cut}
    pipe.say(done=json.dumps(told | {"unanswered": data.unanswered, "nodes": owner.reports}))


class _Owner:
    def __init__(self, order: WorkerOrder, ticket: Ticket, data: Data, pipe: Pipe, messenger: Messenger) -> None:
        self._order, self._ticket, self._data, self._pipe, self._messenger = order, ticket, data, pipe, messenger
        self._digest = config_digest(order.model_folder)
        self._peers: dict[int, _Peer] = {}
        mixed = np.random.default_rng([ticket.settings.seed, 1 << 33]).permutation(len(data.learnt))
        self._learnt: list[Example] = [data.learnt[index] for index in mixed]
        self._weighing = b""
        self._weighed_at = 0.0
        """When who weighs has last said something."""
        self._loss: float | None = None

    @property
    def reports(self) -> dict[str, Any]:
        """By node: how many examples it learnt, and what it has told of its training; or why it was left out."""
        return {
            peer.node: {"left_out": peer.out} if peer.out else {"examples": len(peer.share), **peer.report}
            for peer in self._peers.values()
        }

    def collect(self) -> None:
        """Deal the data, and wait for all adapters.

        Raises:
            TrainingError: nobody is left, or has the memory.
        """
        while not self._peers or any(peer.pending for peer in self._peers.values()):
            self._go_on()
        if not any(peer.folder for peer in self._peers.values()):
            told = "; ".join(f"{peer.node}: {peer.out}" for peer in self._peers.values())
            raise TrainingError(f"no node has trained: {told}")

    def merge(self, adapter: Path) -> float:
        """Merge the adapters, and return what the merged one misses of a change at most, see `merge`.

        Raises:
            TrainingError: they do not fit each other, or the disk is full.
        """
        made = [peer for peer in self._peers.values() if peer.folder is not None]
        folders = [peer.folder / "adapter" for peer in made if peer.folder is not None]
        weights = () if self._ticket.how is How.LOSS else [len(peer.share) for peer in made]
        adapter.parent.mkdir(parents=True, exist_ok=True)
        return merge(folders, self._ticket.how, adapter, weights=weights, seed=self._ticket.settings.seed)

    def weigh(self, adapter: Path) -> tuple[float, float] | None:
        """Have a worker evaluate the merged adapter: the perplexity of what is held out before and after; None: nobody
        can any more, or does within `WEIGH_S`, or nothing is held out."""
        measured = [peer.report["held_out"] for peer in self._peers.values() if peer.report.get("held_out")]
        keeper = next((member for member, peer in self._peers.items() if self._is_there(member, peer)), None)
        if not measured or keeper is None:
            return None
        self._weighing = pack_files([adapter / CONFIG, adapter / WEIGHTS])
        self._weighed_at = time.monotonic()
        say(self._messenger, keeper, {"do": "weigh", "size": len(self._weighing)})
        while self._loss is None and self._is_there(keeper, self._peers[keeper]):
            if time.monotonic() - self._weighed_at > WEIGH_S:
                silent = f"{self._peers[keeper].node} has said nothing for {WEIGH_S:.0f} s"
                self._pipe.say(says=f"how good the merged adapter is stays unknown: {silent}")
                break
            self._go_on()
        return None if self._loss is None else (exp(measured[0][0]), exp(self._loss))

    def dismiss(self) -> None:
        """End the workers that are still there."""
        for member in self._messenger.connected:
            say(self._messenger, member, {"do": "end"})

    def _is_there(self, member: int, peer: _Peer) -> bool:
        return peer.folder is not None and not peer.out and member in self._messenger.connected

    def _go_on(self) -> None:
        """Hear the daemon and the workers for a moment, and dial those that are away."""
        for told in self._pipe.told():
            self._place(told["peers"])
        for event in self._messenger.receive(LOOK_S):
            peer = self._peers[event.peer]
            match event:
                case Connected():
                    peer.dialling, peer.away_since = False, None
                case Lost():
                    peer.dialling, peer.again_at = False, time.monotonic() + AGAIN_S
                    peer.away_since = peer.away_since or time.monotonic()
                case Message(member, data):
                    self._hear_of(member, peer, data)
        self._dial()

    def _place(self, told: list[dict[str, Any]]) -> None:
        """Note where the workers are; the first time, deal the examples."""
        first = not self._peers
        for each in told:
            peer = self._peers.setdefault(each["member"], _Peer(each["node"]))
            if each["address"] != peer.address:
                self._messenger.drop(each["member"], "it begins anew")
                peer.address, peer.dialling, peer.again_at = each["address"], False, 0.0
                peer.away_since, peer.out = time.monotonic(), ""  # it is another worker, which may be reached
            if each["left_out"] and peer.folder is None and not peer.out:
                peer.out = each["left_out"]
        if first:
            self._deal(told)

    def _deal(self, told: list[dict[str, Any]]) -> None:
        file = self._order.folder / DEALT
        if file.is_file():
            dealt = {name: range(*ends) for name, ends in json.loads(file.read_bytes()).items()}
        else:
            able = [Trainer(each["node"], each["memory_bytes"], each["speed"]) for each in told if not each["left_out"]]
            need = need_bytes(self._order.model_folder, [*self._learnt, *self._data.evaluated], self._ticket.settings)
            dealt = deal_examples(len(self._learnt), able, need)
            for each in able:
                if each.name not in dealt:
                    lacks = each.free_bytes < need
                    memory = f"training takes {need} bytes of memory, and it gives {each.free_bytes}"
                    why = memory if lacks else "by its speed, its part of the data is less than one"
                    self._pipe.say(says=f"{each.name} gets no examples: {why}")
            with written_whole(file) as partial:
                partial.write_text(json.dumps({name: [own.start, own.stop] for name, own in dealt.items()}))
        for member, peer in self._peers.items():
            peer.share = dealt.get(peer.node, range(0))
            kept = self._order.folder / "nodes" / str(member)
            if (kept / "report.json").is_file():
                peer.folder, peer.report = kept, json.loads((kept / "report.json").read_bytes())
            elif peer.share:
                self._pipe.say(says=f"{peer.node} learns {len(peer.share)} of {len(self._learnt)} examples")

    def _dial(self) -> None:
        """Dial those that are to be reached; do without those that were away too long."""
        now = time.monotonic()
        for member, peer in self._peers.items():
            if peer.out or not peer.address or member in self._messenger.connected or peer.dialling:
                continue
            if peer.pending and peer.away_since is not None and now - peer.away_since > self._ticket.patience_s:
                peer.out = f"the data's owner could not reach it at {peer.address} for {self._ticket.patience_s:.0f} s"
                self._pipe.say(says=f"{peer.node} is left out: {peer.out}")
            elif now >= peer.again_at and peer.folder is None:
                peer.dialling = True
                self._messenger.connect(member, peer.address, DIAL_S)

    def _hear_of(self, member: int, peer: _Peer, data: memoryview) -> None:
        """Do what a worker wants; go on without it, if that is nonsense: the others are not to suffer from it."""
        if peer.out:
            return
        try:
            self._hear(member, peer, *heard(data))
        except (NonsenseError, KeyError, TypeError, ValueError) as error:
            if peer.folder is not None:  # what it was there for has come
                self._messenger.drop(member, "it has sent what it must not")
                return
            peer.out, peer.parcel = f"it has sent what it must not: {type(error).__name__}: {error}", bytearray()
            self._pipe.say(says=f"{peer.node} is left out: {peer.out}")
            say(self._messenger, member, {"do": "leave", "why": peer.out})

    def _hear(self, member: int, peer: _Peer, told: dict[str, Any], body: bytes) -> None:
        match told["do"]:
            case "hello":
                self._greet(member, peer, told)
            case "want":
                at = size_of(told["at"])
                self._weighed_at = time.monotonic()
                data = self._weighing or self._data_for(peer)
                say(self._messenger, member, {"do": "data", "at": at}, memoryview(data)[at : at + STRETCH])
                if at + STRETCH >= len(data):
                    peer.packed = b""
            case "made" if peer.pending:
                peer.report, peer.size, peer.parcel = report_of(told), size_of(told["size"]), bytearray()
                say(self._messenger, member, {"do": "want", "at": 0})
            case "data" if peer.pending and told["at"] == len(peer.parcel):
                if not body or len(peer.parcel) + len(body) > peer.size:
                    raise NonsenseError(f"{len(body)} bytes after {len(peer.parcel)} of {peer.size}")
                peer.parcel += body
                if len(peer.parcel) < peer.size:
                    say(self._messenger, member, {"do": "want", "at": len(peer.parcel)})
                else:
                    self._keep(member, peer)
            case "weighed" if self._weighing:
                (self._loss,) = losses_of([told["loss"]])

    def _greet(self, member: int, peer: _Peer, told: dict[str, Any]) -> None:
        if told["model"] != self._digest:
            peer.out = f"its files of {self._order.model!r} are others than those of the data's owner"
            say(self._messenger, member, {"do": "leave", "why": peer.out})
        elif not peer.share:
            say(self._messenger, member, {"do": "leave", "why": "it has too little memory for a share of the examples"})
        elif peer.folder is not None:
            say(self._messenger, member, {"do": "end"})
        elif not told["busy"] and not told["planned"]:
            settings = replace(self._ticket.settings, steps=self._steps(peer))
            plan = {"settings": asdict(settings), "keep_every": self._ticket.keep_every, "learnt": len(peer.share)}
            say(self._messenger, member, {"do": "plan", "size": len(self._data_for(peer)), **plan})

    def _steps(self, peer: _Peer) -> int:
        """A node's steps: in the mean over the nodes those of the settings, for each as many as it has examples."""
        shares = [len(each.share) for each in self._peers.values() if each.share]
        return max(1, round(self._ticket.settings.steps * len(peer.share) * len(shares) / sum(shares)))

    def _data_for(self, peer: _Peer) -> bytes:
        if not peer.packed:
            learnt = self._learnt[peer.share.start : peer.share.stop]
            peer.packed = pack_examples([*learnt, *self._data.evaluated])
        return peer.packed

    def _keep(self, member: int, peer: _Peer) -> None:
        """Write down an adapter that has come; its worker may end, unless it is the last, which is to evaluate."""
        place = self._order.folder / "nodes" / str(member)
        names = (CONFIG, WEIGHTS, CURVE)
        files = unpack_files(bytes(peer.parcel), names)
        if missing := [name for name in names if name not in files]:
            raise NonsenseError(f"what has come lacks {', '.join(missing)}")
        with written_whole(place) as partial:
            (partial / "adapter").mkdir(parents=True)
            for name, content in files.items():
                (partial / (name if name == CURVE else f"adapter/{name}")).write_bytes(content)
            (partial / "report.json").write_text(json.dumps(peer.report), encoding="utf-8")
        peer.folder, peer.parcel = place, bytearray()
        self._pipe.say(says=f"the adapter of {peer.node} has come")
        if any(each.pending for each in self._peers.values()):
            say(self._messenger, member, {"do": "end"})
