"""The message with what an adapter adds to one expert, by which a trunk rank brings it to the hosts that it asks.

A host that lacks it refuses a call, and gets it with the same call once more. So hosts that come, go, or get other
experts need not be told of adapters, and have of each what they are asked for. All little-endian::

    factors  kind  0   layer  expert  count  name of the adapter
             u8    u8  u16    u16     u16    32 bytes
    product  A's type  B's type  length of the name  rank  columns  rows  name, in UTF-8, then A and B
             u8        u8        u16                 u32   u32      u32

`count` may be 0: the adapter adds nothing to this expert. Names are those of the model's tensors.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from motley.daemon.experts.keys import ExpertKey
from motley.daemon.experts.wire import NAME_BYTES, Buffer, ExpertWireError, Kind
from motley.plugins.adapted_engine import AdapterProduct, Factor
from motley.plugins.adapters import FACTOR_TYPES

_HEAD = struct.Struct(f"<BxHHH{NAME_BYTES}s")
_PRODUCT = struct.Struct("<BBHIII")

Products = Mapping[str, AdapterProduct]
"""What is added to products, by the names of the model's tensors."""


@dataclass(frozen=True)
class ExpertsAdapter:
    """What an adapter adds to experts that are on hosts.

    Attributes:
        name: its fingerprint.
        products: by expert; nothing is added to others.
    """

    name: bytes
    products: Mapping[ExpertKey, Products]

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return sum(map(_bytes_of, self.products.values()))

    @property
    def largest(self) -> int:
        """Bytes of the longest message about one of its experts."""
        each = (
            _bytes_of(own) + sum(_PRODUCT.size + len(tensor.encode()) for tensor in own)
            for own in self.products.values()
        )
        return _HEAD.size + max(each, default=0)


@dataclass(frozen=True)
class Factors:
    """What an adapter adds to one expert."""

    adapter: bytes
    layer: int
    expert: int
    products: Products


def write_factors(factors: Factors) -> list[Buffer]:
    """The bytes of a message, in parts that follow each other."""
    parts: list[Buffer] = [
        _HEAD.pack(Kind.FACTORS, factors.layer, factors.expert, len(factors.products), factors.adapter)
    ]
    for tensor, (down, up) in factors.products.items():
        name, types = tensor.encode(), (FACTOR_TYPES.index(each.dtype) for each in (down, up))
        parts.append(_PRODUCT.pack(*types, len(name), *down.shape, len(up)) + name)
        parts += [np.ascontiguousarray(each).view(np.uint8).data.cast("B") for each in (down, up) if each.size]
    return parts


def read_factors(data: Buffer) -> Factors:
    """Read a message. Matrices are copies, which are aligned.

    Raises:
        ExpertWireError: it is none.
    """
    view = memoryview(data).cast("B")
    try:
        _, layer, expert, count, adapter = _HEAD.unpack_from(view)
        at = _HEAD.size
        products: dict[str, AdapterProduct] = {}
        for _ in range(count):
            of_down, of_up, length, rank, columns, rows = _PRODUCT.unpack_from(view, at)
            at += _PRODUCT.size
            name, at = bytes(view[at : at + length]).decode(), at + length
            down, at = _matrix(view, at, of_down, (rank, columns))
            up, at = _matrix(view, at, of_up, (rows, rank))
            products[name] = AdapterProduct(down, up)
    except (struct.error, ValueError, IndexError) as error:
        raise ExpertWireError(f"{len(view)} bytes are no matrices of an adapter: {error}") from error
    if at != len(view) or len(products) < count:
        raise ExpertWireError(f"{len(view)} bytes have {count} products of an adapter in {at}, or one twice")
    return Factors(adapter, layer, expert, products)


def _matrix(view: memoryview, at: int, kind: int, shape: tuple[int, int]) -> tuple[Factor, int]:
    """A matrix at a place, and the place after it."""
    dtype = FACTOR_TYPES[kind]
    end = at + math.prod(shape) * dtype.itemsize
    if end > len(view):
        raise ValueError(f"a matrix of {shape} ends at {end}")
    return np.frombuffer(bytearray(view[at:end]), dtype).reshape(shape), end


def _bytes_of(products: Products) -> int:
    return sum(each.nbytes for product in products.values() for each in product)
