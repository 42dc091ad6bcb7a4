"""What crosses between the parts of a chain: nested values with tensors in them, as bytes over Motley's transport.

Nothing that is received can run code: a message is JSON, and the tensors' bytes behind it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from motley.training.errors import TrainingError
from motley.transport import MAX_MESSAGE

DEADLINE_S = 3600.0
"""How long a rank may take for its part. One that is dead is found by the transport's beats, in seconds."""
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.complex64,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
    )
}


class Chain(Protocol):
    """What a rank of a chain needs of its transport: ranks are numbered along the chain, the leader is rank 0."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def send(self, data: bytes | memoryview, to: int, /) -> None:
        """Send a message to a rank."""

    def recv(self, source: int, timeout: float, /) -> bytes | bytearray | memoryview:
        """The next message of a rank, which may take so many seconds."""

    def flush(self) -> None:
        """Wait until what was sent is on its way."""


class InOrder:
    """The ranks of a mesh, numbered along a chain: a `Chain`, whose leader may change."""

    def __init__(self, mesh: Chain, order: Sequence[int]) -> None:
        """
        Args:
            order: the rank in the mesh of each rank of the chain.
        """
        self._mesh, self._order = mesh, list(order)
        self.rank, self.size = self._order.index(mesh.rank), len(order)

    def follow(self, leader: int) -> None:
        """From now on another rank of the mesh is rank 0 of the chain."""
        self._order[0] = leader

    def send(self, data: bytes | memoryview, to: int, /) -> None:
        self._mesh.send(data, self._order[to])

    def recv(self, source: int, timeout: float, /) -> bytes | bytearray | memoryview:
        return self._mesh.recv(self._order[source], timeout)

    def flush(self) -> None:
        self._mesh.flush()


def pack(value: Any) -> bytes:
    """Write down None, truth values, numbers, texts, tensors, and lists, tuples and dictionaries of these.

    A tensor that is there several times travels once.

    Raises:
        TrainingError: something else is among them.
    """
    tensors: dict[int, Tensor] = {}

    def describe(each: Any) -> Any:
        if each is None or isinstance(each, bool | int | float | str):
            return each
        if isinstance(each, Tensor):
            tensors.setdefault(id(each), each)
            return {"tensor": list(tensors).index(id(each))}
        if isinstance(each, tuple | list):
            return {type(each).__name__: [describe(inner) for inner in each]}
        if isinstance(each, dict) and all(isinstance(key, str) for key in each):
            return {"dict": {key: describe(inner) for key, inner in each.items()}}
        kind = type(each).__name__
        raise TrainingError(f"this model hands its layers a {kind}, which cannot cross to another machine")

    described = describe(value)
    kept = [tensor.detach().contiguous() for tensor in tensors.values()]
    shapes = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in kept]
    head = json.dumps([described, shapes]).encode()
    data = [tensor.flatten().view(torch.uint8).numpy().tobytes() for tensor in kept]
    return b"".join([len(head).to_bytes(8, "little"), head, *data])


def unpack(data: bytes) -> Any:
    """The value that `pack` has written down.

    Raises:
        TrainingError: it is none.
    """
    try:
        length = int.from_bytes(data[:8], "little")
        described, shapes = json.loads(data[8 : 8 + length])
        tensors, at = [], 8 + length
        for name, shape in shapes:
            dtype = _DTYPES[name]
            size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            values = np.frombuffer(data, np.uint8, size, at).copy()
            tensors.append(torch.from_numpy(values).view(dtype).reshape(shape))
            at += size
        return _value(described, tensors)
    except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
        raise TrainingError(f"a rank of the chain sent what is no message: {error}") from error


def _value(described: Any, tensors: list[Tensor]) -> Any:
    if not isinstance(described, dict):
        return described
    ((kind, inner),) = described.items()
    if kind == "tensor":
        return tensors[inner]
    if kind == "dict":
        return {key: _value(each, tensors) for key, each in inner.items()}
    values = [_value(each, tensors) for each in inner]
    return tuple(values) if kind == "tuple" else values


def send(chain: Chain, value: Any, to: int) -> None:
    """Send a value of any size to a rank, which must `receive` it; does not wait for that.

    Raises:
        motley.transport.TransportError: a rank is gone.
    """
    data = memoryview(pack(value))
    chain.send(len(data).to_bytes(8, "little"), to)
    for begin in range(0, len(data), MAX_MESSAGE):
        chain.send(data[begin : begin + MAX_MESSAGE], to)


def receive(chain: Chain, source: int) -> Any:
    """The next value that a rank sends.

    Raises:
        motley.transport.TransportError: a rank is gone, or silent for `DEADLINE_S`.
        TrainingError: it sent something else.
    """
    length = int.from_bytes(chain.recv(source, DEADLINE_S), "little")
    pieces = [chain.recv(source, DEADLINE_S) for _ in range(0, length, MAX_MESSAGE)]
    return unpack(b"".join(pieces))
