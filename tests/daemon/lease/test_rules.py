"""When a device is taken back by itself: what lasts counts, and nothing that somebody has not asked for."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.daemon.lease.file import LeaseFile
from motley.daemon.lease.lease import Holder, Lease
from motley.daemon.lease.rules import CALM_S, LASTS_S, Rules, Seen, YieldTo
from motley.daemon.machine.others import OthersOnProcessor, family, has_full_screen, others_on_gpu
from motley.daemon.node.settings import NodeSettings
from motley.daemon.node.workers import leasing
from motley.daemon.node.workers.ranks import Ranks
from motley.daemon.weights.cache import ShareCache
from motley.protocol import mesh_pb2 as pb


def test_what_is_typed() -> None:
    assert YieldTo.parse("gpu, full-screen,cpu=50%") == YieldTo(True, True, 0.5)
    assert not YieldTo.parse("")
    for wrong in ("gpus", "cpu", "cpu=0", "cpu=101", "cpu=half"):
        with pytest.raises(ValueError, match="is none of gpu, full-screen and cpu=PERCENT"):
            YieldTo.parse(f"gpu,{wrong}")


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=30))
def test_what_lasts_counts(times: list[tuple[bool, int]]) -> None:
    """Whether somebody is on the GPU, and for how many seconds: it is taken after a while, and given after a longer."""
    rules, now, held, since = Rules(YieldTo(gpu=True)), 0, False, 0
    before = False
    for is_used, lasts in times:
        if is_used != before:
            since = now
        for second in range(now, now + lasts):
            wanted = rules.wanted(Seen(on_gpu="blender" if is_used else "", full_screen=True, cpu=1.0), second)
            if is_used != held and second - since >= (LASTS_S if is_used else CALM_S):
                held = is_used
            assert wanted == (("gpu:0", "blender on the GPU") if held else None)
        now, before = now + lasts, is_used


def test_two_devices_are_the_whole_machine() -> None:
    rules = Rules(YieldTo(True, True, 0.5))
    for seen, device in (
        (Seen(cpu=0.5), None),
        (Seen(cpu=0.6), "cpu"),
        (Seen(cpu=0.6, on_gpu="game"), "all"),
        (Seen(full_screen=True), "all"),
    ):
        rules = Rules(YieldTo(True, True, 0.5))
        rules.wanted(seen, 0)
        told = rules.wanted(seen, LASTS_S)
        assert (told and told[0]) == device


def test_a_rule_takes_what_nobody_has_and_gives_its_own_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = 1.0
    monkeypatch.setattr(OthersOnProcessor, "part", lambda *_: load)
    monkeypatch.setattr("motley.daemon.lease.rules.LASTS_S", 0.0)
    monkeypatch.setattr("motley.daemon.lease.rules.CALM_S", 0.0)
    settings = NodeSettings("pc", "127.0.0.1", pb.Capabilities(), None, ShareCache(tmp_path), 1)
    file = LeaseFile(tmp_path / "lease.json")
    own = leasing.Leasing("pc", Ranks(settings, lambda *_: None), file, yield_to=YieldTo(cpu=0.5))

    def seen() -> Lease | None:
        own._lease, own._trouble = own._read()
        own.obey_rules()
        return file.read()

    lease = seen()
    assert lease is not None
    assert (lease.holder.name, lease.device) == ("the rule of node pc", "cpu")
    assert lease.reason == "other programs on more than 50% of the processor"
    assert seen() == lease, "it lasts"
    file.take(lease.model_copy(update={"granted_at": time.time() - 7190}), 7200)
    assert (renewed := seen()) is not None
    assert renewed.granted_at > lease.granted_at
    load = 0.0
    assert seen() is None
    now = time.time()
    game = Lease(holder=Holder(name="game"), granted_at=now, expires_at=now + 60)
    file.take(game, 60)
    assert seen() == game
    load = 1.0
    assert seen() == game, "somebody else's is left alone"


def test_this_machine_can_be_asked() -> None:
    own = family()
    assert not others_on_gpu(own), "this machine has no GPU, or nobody on it"
    assert not has_full_screen()
    watch = OthersOnProcessor()
    assert watch.part(own) == 0
    until = time.monotonic() + 0.1
    while time.monotonic() < until:
        pass
    assert 0 <= watch.part(own) <= 1
