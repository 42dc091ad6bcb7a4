"""A rank of a chain as a process of its own: its plan, one line of JSON, is its argument.

It prints the port at which it listens, reads a line with the addresses of all, and takes part in the training of one
model after the other. It prints a line of JSON, by case, with what it has to tell as an owner of data: the losses,
whether tokens or labels were among the bytes that it sent, and whether what it sent was heard at all.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from motley.training.base import load_base, save_adapter, with_adapters
from motley.training.chain.crossing import InOrder
from motley.training.chain.cut import cut
from motley.training.chain.leader import Leader, Record, lead
from motley.training.chain.owners import Owners
from motley.training.chain.part import serve_part
from motley.training.examples import IGNORED, Example
from motley.training.files import Point
from motley.training.memory.layers import decoder_layers
from motley.training.settings import Settings
from motley.training.training import mean_loss
from motley.transport import Listener, Membership, Tls, connect_mesh


class Heard:
    """A stream that keeps what is sent through it, before it is encrypted."""

    def __init__(self, stream: Any, kept: bytearray) -> None:
        self._stream, self._kept = stream, kept

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def send(self, data: memoryview) -> int:
        sent: int = self._stream.send(data)
        self._kept += data[:sent]
        return sent


def examples_of(seed: int, vocabulary: int) -> list[Example]:
    """Random texts of which a third is learnt; the same for whoever asks with the same seed."""
    rng = np.random.default_rng(seed)
    made = []
    for length in rng.integers(12, 24, 8):
        tokens = rng.integers(0, vocabulary, length)
        labels = np.append(np.where(rng.random(length - 1) < 0.3, tokens[1:], IGNORED), IGNORED)
        made.append(Example(tokens, labels))
    return made


def train(plan: dict[str, Any], case: str, epoch: int, listener: Listener, addresses: list[str]) -> dict[str, Any]:
    """Take part in the training of a case: a family, and after a dash, perhaps, how ranks 0 and 1 own data ("turn",
    "once"), or "last": rank 0 has the last layer, too. What owners have to tell is the answer."""
    rank, settings = plan["rank"], Settings(**plan["settings"])
    family, _, how = case.partition("-")
    folder = Path(plan["folder"]) / family
    base = load_base(folder / "model")
    torch.manual_seed(settings.seed)
    model = with_adapters(base, settings.rank, settings.alpha, settings.dropout, settings.targets)
    owners, layers = [0, 1] if how in ("turn", "once") else [0], len(decoder_layers(model))
    parts = cut(layers - 1, plan["shares"]) if how == "last" else cut(layers, plan["shares"][: 4 - len(owners)])
    order = [rank if rank in owners else 0, *range(len(owners), 3)]
    member = Membership("chain", epoch, rank, 3, b"a secret of these three", bytes(32))
    security = Tls(*(plan[name].encode() for name in ("certificate", "key", "authority")))
    sent = bytearray()
    with connect_mesh(
        listener, member, addresses, 60.0, security=security, wrap=lambda peer, stream: Heard(stream, sent)
    ) as mesh:
        chain = InOrder(mesh, order)
        if rank not in owners:
            serve_part(chain, model, parts[chain.rank], settings.weight_decay)
            return {}
        sent.clear()  # what measured the links
        examples = examples_of(plan["data"] + rank, plan["vocabulary"])
        leader = Leader(chain, model, parts, settings.weight_decay)
        points: list[Point] = []
        kept: list[int] = []
        evaluate = None if rank else lambda: mean_loss(model, examples[:2], 2)
        record = Record(points.append, lambda done, state: kept.append(done), keep_every=3, evaluate=evaluate)
        together = Owners(mesh, owners, leader, model)
        if how == "turn":
            together.lead_in_turn(examples, settings, 1, record)
        elif how == "once":
            together.lead_at_once(examples, settings, record)
        else:
            lead(leader, model, examples, settings, record)
        if rank == 0:
            leader.end()
            save_adapter(model, folder / f"chain{how}")
            for other in owners[1:]:
                mesh.send(b"the end", other)
            mesh.flush()
        else:
            mesh.recv(0, 60.0)
    data = bytes(sent)
    return {
        "losses": [point.loss for point in points],
        "held_out": points[-1].held_out,
        "kept": kept,
        "evaluated": [point.step for point in points if point.held_out is not None],
        "shown": is_shown(examples, data),
        "heard": b'"forward"' in data,
    }


def is_shown(examples: Sequence[Example], data: bytes, every: int = 1) -> bool:
    """Whether any four tokens or labels of some examples that follow each other are among some bytes.

    Args:
        every: of so many such fours, one is looked for.
    """
    runs = (
        values[at : at + 4]
        for example in examples
        for values in (example.tokens, example.labels)
        for at in range(0, len(values) - 4, every)
        if (values[at : at + 4] != IGNORED).any()
    )
    kinds = (np.int64, np.int32, np.uint16, np.float32)
    return any(
        json.dumps(run.tolist())[1:-1].encode() in data or any(run.astype(kind).tobytes() in data for kind in kinds)
        for run in runs
    )


def main() -> None:
    plan = json.loads(sys.argv[1])
    listener = Listener("127.0.0.1")
    print(listener.port, flush=True)
    addresses = json.loads(sys.stdin.readline())
    told = {case: train(plan, case, epoch, listener, addresses) for epoch, case in enumerate(plan["cases"])}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
