"""A rank of a chain as a process of its own: its plan, one line of JSON, is its argument.

It prints the port at which it listens, reads a line with the addresses of all, and takes part in the training of one
model after the other. The leader prints a line of JSON, by family: the losses, whether tokens or labels were among the
bytes that it sent, and whether what it sent was heard at all.
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
from motley.training.chain.cut import cut
from motley.training.chain.leader import Leader, lead
from motley.training.chain.part import serve_part
from motley.training.examples import IGNORED, Example
from motley.training.memory.layers import decoder_layers
from motley.training.settings import Settings
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


def train(plan: dict[str, Any], family: str, epoch: int, listener: Listener, addresses: list[str]) -> dict[str, Any]:
    """Take part in a family's training; the leader's answer is what it has to tell."""
    rank, settings = plan["rank"], Settings(**plan["settings"])
    folder = Path(plan["folder"]) / family
    base = load_base(folder / "model")
    torch.manual_seed(settings.seed)
    model = with_adapters(base, settings.rank, settings.alpha, settings.dropout, settings.targets)
    parts = cut(len(decoder_layers(model)), plan["shares"])
    member = Membership("chain", epoch, rank, len(parts), b"a secret of these three", bytes(32))
    security = Tls(*(plan[name].encode() for name in ("certificate", "key", "authority")))
    sent = bytearray()
    with connect_mesh(
        listener, member, addresses, 60.0, security=security, wrap=lambda peer, stream: Heard(stream, sent)
    ) as chain:
        if rank:
            serve_part(chain, model, parts[rank], settings.weight_decay)
            return {}
        sent.clear()  # what measured the links
        examples = examples_of(plan["data"], plan["vocabulary"])
        leader = Leader(chain, model, parts, settings.weight_decay)
        points = lead(leader, model, examples, settings)
        leader.end()
    save_adapter(model, folder / "chain")
    data = bytes(sent)
    return {
        "losses": [point.loss for point in points],
        "shown": is_shown(examples, data),
        "heard": b'"end"' in data,
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
    families = plan["families"]
    told = {family: train(plan, family, epoch, listener, addresses) for epoch, family in enumerate(families)}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
