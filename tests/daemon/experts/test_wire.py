"""What trunk ranks and expert hosts say to each other: it comes as it was, and nothing else is taken for it."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.daemon.experts.factors import ExpertsAdapter, Factors, read_factors, write_factors
from motley.daemon.experts.wire import (
    EXPERT_BYTES,
    HEADER_BYTES,
    NAME_BYTES,
    Answer,
    Call,
    ExpertWire,
    ExpertWireError,
    Kind,
    Part,
    Refusal,
    RefusalCode,
    kind_of,
)
from motley.plugins.adapted_engine import AdapterProduct
from motley.plugins.adapters import FACTOR_TYPES
from motley.transport import WireFormat

numbers = st.integers(0, 2**64 - 1)
layers = st.integers(0, 2**16 - 1)
formats = st.sampled_from(list(WireFormat))
widths = st.sampled_from([1, 40, 64, 65, 192])
experts = st.tuples(st.integers(0, 2**16 - 1), st.integers(0, 2**16 - 1))
"""Their numbers, and which piece of their rows."""
parts_of_a_call = st.dictionaries(experts, st.integers(1, 5), min_size=1, max_size=5).map(
    lambda rows: [Part(expert, count, piece) for (expert, piece), count in rows.items()]
)


def rows_of(parts: Sequence[Part], hidden: int, seed: int = 0) -> np.ndarray:
    shape = (sum(part.rows for part in parts), hidden)
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def as_it_travels(rows: np.ndarray, wire_format: WireFormat) -> np.ndarray:
    """Each row alone through the wire."""
    wire = ExpertWire(rows.shape[1], wire_format)
    read = [wire.read_call(b"".join(wire.write_call(Call(0, 0, 1, [Part(0, 1)], row[None])))) for row in rows]
    return np.concatenate([call.rows for call in read])


@given(widths, formats, st.integers(4096, 10**6))
def test_the_most_rows_of_a_message_fill_it(hidden: int, wire_format: WireFormat, size: int) -> None:
    wire = ExpertWire(hidden, wire_format)
    most = wire.most_rows(size)
    assert most % 2 == 0
    assert wire.message_bytes(1, most) <= size < wire.message_bytes(1, most + 2)


@given(numbers, layers, st.integers(1, 2**32 - 1), parts_of_a_call, widths, formats)
def test_a_call_comes_as_it_was(
    number: int, layer: int, reply_to: int, parts: list[Part], hidden: int, wire_format: WireFormat
) -> None:
    wire = ExpertWire(hidden, wire_format)
    rows = rows_of(parts, hidden)
    data = b"".join(wire.write_call(Call(number, layer, reply_to, parts, rows)))
    assert len(data) == wire.message_bytes(len(parts), len(rows))
    read = wire.read_call(data)
    assert (read.number, read.layer, read.reply_to, read.parts) == (number, layer, reply_to, parts)
    np.testing.assert_array_equal(read.rows, as_it_travels(rows, wire_format))


@given(numbers, layers, st.floats(0, 1e6, width=32), parts_of_a_call, widths, formats)
def test_an_answer_comes_as_it_was(
    number: int, layer: int, busy_s: float, parts: list[Part], hidden: int, wire_format: WireFormat
) -> None:
    wire = ExpertWire(hidden, wire_format)
    rows = rows_of(parts, hidden)
    read = wire.read_answer(b"".join(wire.write_answer(Answer(number, layer, busy_s, parts, rows))))
    assert isinstance(read, Answer)
    assert (read.number, read.layer, read.busy_s, read.parts) == (number, layer, busy_s, parts)
    np.testing.assert_array_equal(read.rows, as_it_travels(rows, wire_format))


@given(numbers, layers, st.integers(1, 2**32 - 1), parts_of_a_call, widths, formats, st.integers(1, 3))
def test_a_call_with_adapters_comes_as_it_was(
    number: int, layer: int, reply_to: int, parts: list[Part], hidden: int, wire_format: WireFormat, adapters: int
) -> None:
    wire, rows = ExpertWire(hidden, wire_format), rows_of(parts, hidden)
    names = [bytes([own]) * NAME_BYTES for own in range(adapters)]
    own = np.random.default_rng(number).integers(0, adapters + 1, len(rows)).astype(np.uint16)
    data = b"".join(wire.write_call(Call(number, layer, reply_to, parts, rows, names, own)))
    assert len(data) == wire.message_bytes(len(parts), len(rows), adapters)
    read = wire.read_call(memoryview(bytearray(data)))
    assert (read.number, read.layer, read.reply_to, read.parts, read.adapters) == (
        number,
        layer,
        reply_to,
        parts,
        names,
    )
    np.testing.assert_array_equal(read.own, own)
    np.testing.assert_array_equal(read.rows, as_it_travels(rows, wire_format))
    most = wire.most_rows(10**5, adapters)
    assert wire.message_bytes(1, most, adapters) <= 10**5 < wire.message_bytes(1, most + 4, adapters)


def test_a_call_whose_adapters_make_no_sense_is_refused() -> None:
    wire, parts = ExpertWire(4, WireFormat.FP32), [Part(1, 2)]
    for names, own in (([bytes(32)], [0, 2]), ([bytes(32)] * 2, [1, 2])):
        call = Call(7, 3, 1, parts, rows_of(parts, 4), names, np.array(own, np.uint16))
        data = b"".join(wire.write_call(call))
        with pytest.raises(ExpertWireError, match=r"rows of adapter 2 of \d, or one named twice"):
            wire.read_call(data)
        with pytest.raises(ExpertWireError, match="bytes"):
            wire.read_call(data[:-16])


matrices = st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(1, 4), st.sampled_from(FACTOR_TYPES))


@given(st.binary(min_size=32, max_size=32), layers, layers, st.dictionaries(st.text(max_size=9), matrices, max_size=3))
def test_what_an_adapter_adds_comes_as_it_was(
    name: bytes, layer: int, expert: int, shapes: dict[str, tuple[int, int, int, np.dtype]]
) -> None:
    products = {
        tensor: AdapterProduct(np.full((rank, columns), 0.5, dtype), np.full((rows, rank), 2, np.float32))
        for tensor, (rank, columns, rows, dtype) in shapes.items()
    }
    data = b"".join(write_factors(Factors(name, layer, expert, products)))
    assert kind_of(data) == Kind.FACTORS
    assert len(data) == ExpertsAdapter(name, {(layer, expert): products}).largest
    read = read_factors(memoryview(data))
    assert (read.adapter, read.layer, read.expert, list(read.products)) == (name, layer, expert, list(products))
    for tensor, product in products.items():
        for own, other in zip(read.products[tensor], product, strict=True):
            assert (own.dtype, own.tobytes(), own.shape) == (other.dtype, other.tobytes(), other.shape)
    with pytest.raises(ExpertWireError):
        read_factors(data + b"x")


@given(numbers, layers, st.sampled_from(RefusalCode), st.text(max_size=200), parts_of_a_call)
def test_a_refusal_comes_as_it_was(number: int, layer: int, code: RefusalCode, reason: str, parts: list[Part]) -> None:
    wire = ExpertWire(8, WireFormat.FP32)
    refusal = Refusal(number, layer, code, reason, parts if code is RefusalCode.NO_FACTORS else [])
    assert wire.read_answer(b"".join(wire.write_refusal(refusal))) == refusal


def test_traffic_is_the_rows_and_a_few_bytes_for_each_expert() -> None:
    assert ExpertWire(512, WireFormat.FP32).message_bytes(2, 3) == HEADER_BYTES + 2 * EXPERT_BYTES + 3 * 512 * 4
    assert ExpertWire(512, WireFormat.BF16).message_bytes(2, 3) == HEADER_BYTES + 2 * EXPERT_BYTES + 3 * 512 * 2
    assert ExpertWire(512, WireFormat.INT8).message_bytes(2, 3) == HEADER_BYTES + 2 * EXPERT_BYTES + 3 * 8 * 68


def test_rows_in_fp32_are_not_copied() -> None:
    wire = ExpertWire(64, WireFormat.FP32)
    rows = rows_of([Part(1, 2)], 64)
    _, payload = wire.write_call(Call(7, 3, 1, [Part(1, 2)], rows))
    assert np.shares_memory(np.frombuffer(payload, np.float32), rows)
    data = memoryview(bytearray(b"".join(wire.write_call(Call(7, 3, 1, [Part(1, 2)], rows)))))
    assert np.shares_memory(wire.read_call(data).rows, np.frombuffer(data, np.uint8))


def written(parts: list[Part], rows: int, *, hidden: int = 4) -> bytes:
    """A call of these parts with this many rows, whether they fit or not."""
    head = struct.pack("<BBHIQH2xI", 1, 0, 3, 1, 7, len(parts), hidden)
    records = b"".join(struct.pack("<HHI", part.expert, part.piece, part.rows) for part in parts)
    return head + records + bytes(rows * hidden * 4)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "a message of 0 bytes"),
        (bytes(HEADER_BYTES), "kind 0 in the place of a call"),
        (struct.pack("<BBHIQH2xI", 1, 0, 3, 0, 7, 1, 4), "whose answer nobody gets"),
        (written([Part(1, 2)], 3), "2 rows of 1 experts in 80 bytes"),
        (written([Part(1, 2)], 1), "2 rows of 1 experts in 48 bytes"),
        (written([Part(1, 2**32 - 1)], 1), "4294967295 rows of 1 experts"),
        (written([Part(1, 1), Part(1, 1)], 2), "named twice"),
        (written([Part(1, 0)], 0), "without rows"),
        (written([], 0), "announce 0 experts"),
        (written([Part(1, 1)], 1)[:30], "30 bytes announce 1 experts"),
        (written([Part(1, 1)], 1, hidden=5), "rows of 5 in fp32; here they are of 4 in fp32"),
        (struct.pack("<BBHIQH2xI", 1, 9, 3, 1, 7, 1, 4), "format 9"),
    ],
)
def test_what_is_no_call_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(ExpertWireError, match=why):
        ExpertWire(4, WireFormat.FP32).read_call(data)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (written([Part(1, 1)], 1), "kind 1 in the place of an answer"),
        (struct.pack("<BBHfQH2xI", 2, 0, 3, float("nan"), 7, 1, 4), "took nan s"),
        (struct.pack("<BBHfQH2xI", 2, 0, 3, -1.0, 7, 1, 4), "took -1.0 s"),
        (struct.pack("<BBHIQH2xI", 3, 77, 3, 0, 7, 0, 0), "unknown code 77"),
    ],
)
def test_what_is_no_answer_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(ExpertWireError, match=why):
        ExpertWire(4, WireFormat.FP32).read_answer(data)


@given(st.binary(max_size=200))
def test_no_bytes_do_more_than_be_refused(data: bytes) -> None:
    wire = ExpertWire(4, WireFormat.FP32)
    for read in (wire.read_call, wire.read_answer, read_factors):
        with contextlib.suppress(ExpertWireError):
            read(data)
