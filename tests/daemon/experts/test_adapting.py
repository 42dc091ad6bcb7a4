"""Adapters of experts on hosts: each row with its own, brought to whoever lacks it, by hosts alone and in groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from motley.daemon.adapters.reading import Adapter, expert_tensors
from motley.daemon.experts.factors import ExpertsAdapter, Factors, write_factors
from motley.daemon.experts.keys import keys_of
from motley.daemon.experts.wire import Answer, Call, Refusal, RefusalCode
from motley.plugins.adapted_engine import AdapterProduct
from motley.plugins.engine import F32
from motley.plugins.mixture import Compute, Sent, add_mixture, as_terms, deal
from motley.protocol import mesh_pb2 as pb
from tests.adapters.adapted import baked, random_adapter
from tests.daemon.experts.expert_server import Server, ServerThread, after, small_expert
from tests.daemon.experts.test_dispatch import CHOSEN, EXPERTS, LAYERS, STEPS, start, trunk
from tests.daemon.experts.test_group import group, ready, sliced
from tests.daemon.experts.test_host import (
    CASE,
    TrunkRank,
    a_call,
    assignment,
    close_to,
    every_expert,
    experts,
    made_of,
    right,
    started,
)

SLOTS = 2
ROWS = 5


def adapters_of(folder: Path, count: int) -> list[Adapter]:
    return [random_adapter(folder / str(seed), CASE.model, seed, experts=True) for seed in range(count)]


def name_of(adapter: Adapter) -> bytes:
    return bytes.fromhex(adapter.fingerprint)


def with_adapters(call: Call, adapters: Sequence[Adapter], own: Sequence[int]) -> Call:
    """A call whose rows have adapters, counted from 1; 0: none."""
    return replace(call, adapters=[name_of(each) for each in adapters], own=np.array(own, np.uint16))


def bring(trunk: TrunkRank, call: Call, adapters: Sequence[Adapter]) -> None:
    """Send a host what adapters add to the experts of a call."""
    tensors = {tensor: key for tensor, key in expert_tensors(CASE.model).items() if key[0] == call.layer}
    for part in call.parts:
        for adapter in adapters:
            products = {name: adapter.products[name] for name, key in tensors.items() if key[1] == part.expert}
            trunk.send(write_factors(Factors(name_of(adapter), call.layer, part.expert, products)))


def expected(call: Call, adapters: Sequence[Adapter], folder: Path) -> F32:
    """What experts make of a call that have its adapters in their weights."""
    made = [right(call, folder)]
    for adapter in adapters:
        with baked(CASE.folder, adapter) as opened:
            made.append(made_of(opened, call, folder / adapter.fingerprint))
    return np.stack([made[own][row] for row, own in enumerate(call.own)])


def lacks(answer: Answer | Refusal, call: Call) -> bool:
    """Whether an answer is that the host lacks something of a call's adapters, all of which is to be sent again."""
    return isinstance(answer, Refusal) and (answer.code, answer.parts) == (RefusalCode.NO_FACTORS, call.parts)


def an_order(order: pb.Assignment) -> pb.Assignment:
    order.adapters = SLOTS
    return order


async def test_a_host_computes_each_row_with_its_adapter_once_it_has_that(tmp_path: Path) -> None:
    first, second, third = adapters_of(tmp_path, 3)
    order = an_order(assignment(CASE, [every_expert(CASE.model)]))
    async with started(order, tmp_path / "cache") as host:
        await host.until("ready")
        with closing(TrunkRank(host)) as trunk:
            plain = a_call(1, 0, [(3, 2), (1, 3)])
            call = with_adapters(plain, [second, first], [0, 1, 2, 1, 0])
            assert lacks(trunk.ask(call), call)
            bring(trunk, replace(call, parts=call.parts[:1]), [first, second])
            bring(trunk, replace(call, parts=call.parts[1:]), [first])
            assert lacks(trunk.ask(call), call), "one of the experts lacks one of the adapters"
            bring(trunk, replace(call, parts=call.parts[1:]), [second])
            answer, without = trunk.ask(call), trunk.ask(plain)
            assert isinstance(answer, Answer)
            assert isinstance(without, Answer)
            assert close_to(answer.rows, expected(call, [second, first], tmp_path / "right"), 1e-5)
            np.testing.assert_array_equal(answer.rows[[0, 4]], without.rows[[0, 4]])
            single = with_adapters(a_call(2, 0, [(3, 1)]), [first], [1])
            alone = trunk.ask(single)
            assert isinstance(alone, Answer)
            assert close_to(alone.rows, expected(single, [first], tmp_path / "right"), 1e-5)
            bring(trunk, single, [third])  # in the place of the second, which was used longest ago
            other = with_adapters(single, [third], [1])
            answer = trunk.ask(other)
            assert isinstance(answer, Answer)
            assert close_to(answer.rows, expected(other, [third], tmp_path / "right"), 1e-5)
            kept = trunk.ask(single)
            assert isinstance(kept, Answer)
            np.testing.assert_array_equal(kept.rows, alone.rows)
            again = with_adapters(single, [second], [1])
            assert lacks(trunk.ask(again), again)
            for held in ([(0, 1)], [(0, 1), (0, 3)]):  # an expert that comes back has nothing any more
                host.send(host=experts(held))
                while list(keys_of((await host.until("hosted")).hosted)) != held:
                    pass
            assert lacks(trunk.ask(single), single)
            trunk.send(write_factors(Factors(name_of(first), 0, 3, {})))
            nothing = trunk.ask(single)
            assert isinstance(nothing, Answer)
            plainly = trunk.ask(a_call(2, 0, [(3, 1)]))
            assert isinstance(plainly, Answer)
            np.testing.assert_array_equal(nothing.rows, plainly.rows)


async def test_a_group_computes_rows_with_their_adapters(tmp_path: Path) -> None:
    adapters = adapters_of(tmp_path, 2)
    order = an_order(sliced(every_expert(CASE.model)))
    async with group(order, tmp_path / "cache", (1, 3)) as workers:
        await ready(workers)
        with closing(TrunkRank(workers[-1])) as trunk:
            call = with_adapters(a_call(1, 0, [(3, 2), (1, 3)]), adapters, [0, 1, 2, 1, 0])
            assert lacks(trunk.ask(call), call)
            bring(trunk, call, adapters)
            answer = trunk.ask(call)
            assert isinstance(answer, Answer)
            assert close_to(answer.rows, expected(call, adapters, tmp_path / "right"), 1e-5)


ADDED = {1: 0.25, 2: -0.5}
"""What adapters in slots add to each element of the hosts of `expert_server`, in one layer."""
ADAPTED_LAYER = 1


def adding(x: F32, step: int, layer: int, compute: Compute) -> F32:
    """A layer of nothing but experts whose rows have adapters of some slots, one of which adds nothing to experts."""
    random = np.random.default_rng((step, layer))
    chosen = np.stack([random.permutation(EXPERTS)[:CHOSEN] for _ in x])
    slots = random.integers(0, 4, len(x)).astype(np.int32)
    total = x.copy()
    add_mixture([total], x, np.ones(chosen.shape, np.float32), deal(chosen, slots), as_terms(compute))
    return np.tanh(total)


def here(layer: int) -> Compute:
    def compute(x: F32, sent: Sequence[Sent]) -> Iterable[F32]:
        for own in sent:
            slots = [] if own.slots is None or layer != ADAPTED_LAYER else own.slots.tolist()
            added = np.array([ADDED.get(slot, 0) for slot in slots] or [0], np.float32)
            yield small_expert(layer, own.expert, x[own.rows]) + added[:, None]

    return compute


@pytest.mark.parametrize("size", [1, 2])
def test_hosts_that_forget_and_die_are_brought_what_they_lack(size: int) -> None:
    """Whoever forgets all after each answer lacks something in each call; the other host dies in the middle."""
    servers = [ServerThread(Server(0, size, 2, forgets=True)), ServerThread(Server(1, size, 2, leaves=after(5)))]
    adapters = {
        slot: ExpertsAdapter(
            bytes([slot]) * 32,
            {
                (ADAPTED_LAYER, expert): {
                    "all": AdapterProduct(np.full((1, 1), own, np.float32), np.ones((1, 1), "f4"))
                }
                for expert in range(EXPERTS)
            },
        )
        for slot, own in ADDED.items()
    }
    with trunk(size, servers, adapters=adapters) as ranks:

        def work(rank: int) -> F32:
            x = start(ROWS)
            for step in range(STEPS):
                for layer in range(LAYERS):
                    x = adding(x, step, layer, ranks.dispatchers[rank].experts(layer))
            return x

        results = ranks.together(work)
    alone = start(ROWS)
    for step in range(STEPS):
        for layer in range(LAYERS):
            alone = adding(alone, step, layer, here(layer))
    for result in results:
        np.testing.assert_array_equal(result, alone)
    assert servers[0].server.lacked > 1
    whose = [call for server in servers for call in server.server.calls if call.adapters]
    assert {name for call in whose for name in call.adapters} == {each.name for each in adapters.values()}


async def test_a_group_that_cannot_have_an_adapter_refuses_calls_with_it_and_answers_others(tmp_path: Path) -> None:
    """One that is too large for a member, say: it must not end the member, and the group with it."""
    adapters = adapters_of(tmp_path, 1)
    order = sliced(every_expert(CASE.model))  # which has no slots for adapters
    async with group(order, tmp_path / "cache", (1, 3)) as workers:
        await ready(workers)
        with closing(TrunkRank(workers[-1])) as trunk:
            plain = a_call(1, 0, [(3, 2), (1, 3)])
            call = with_adapters(plain, adapters, [0, 1, 1, 1, 0])
            for _ in range(2):
                bring(trunk, call, adapters)
                assert lacks(trunk.ask(call), call)
            assert isinstance(trunk.ask(plain), Answer)
