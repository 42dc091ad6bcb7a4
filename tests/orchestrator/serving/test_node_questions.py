"""Questions to nodes: an answer, a loss or a silence ends each; another's answer is none."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from motley.orchestrator.serving.node_questions import NodeQuestions, Unanswered
from motley.protocol.mesh_pb2 import OrchestratorMessage


def a_node(number: str, lost: str = "") -> Any:
    return SimpleNamespace(id=number, lost=lost, alive=not lost)


async def test_a_question_ends_by_its_answer_a_loss_or_a_silence() -> None:
    sent: list[str] = []
    control = cast(Any, SimpleNamespace(send=lambda node, message: sent.append(node)))
    questions = NodeQuestions[str](control)
    one, other, gone = a_node("1"), a_node("2"), a_node("3", "its connection ended")

    async def ask(node: Any, number: str, seconds: float = 60.0) -> str:
        return await questions.ask(node, number, OrchestratorMessage(), seconds)

    answered, lost = asyncio.create_task(ask(one, "a")), asyncio.create_task(ask(other, "b"))
    await asyncio.sleep(0)
    questions.on_answer(other, "a", "not asked")
    questions.on_answer(one, "c", "of nothing")
    questions.on_answer(one, "a", "here")
    questions.on_answer(one, "a", "again")
    other.lost = "its connection ended"
    questions.on_lost(other)
    assert await answered == "here"
    with pytest.raises(Unanswered, match="is lost: its connection ended"):
        await lost
    with pytest.raises(Unanswered, match="has not answered within 0 s"):
        await ask(one, "d", 0.01)
    with pytest.raises(Unanswered, match="is lost: its connection ended"):
        await ask(gone, "e")
    assert sent == ["1", "2", "1"], "who is gone is not asked"
