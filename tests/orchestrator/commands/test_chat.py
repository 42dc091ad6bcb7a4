"""`motley chat` in a terminal of its own: what a person types, sees and stops."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from motley.cli.commands.answering.chat import harmless
from motley.cli.conversation import Conversation
from motley.protocol.mesh_pb2 import Delta, Described, Failure, Generate, ModelProfile

from ..conftest import Mesh

CTRL_C = "\x03"
CTRL_D = "\x04"
DEADLINE_S = 60.0


def test_a_conversation_is_asked_by_roles_or_as_one_text_and_taken_back() -> None:
    talk = Conversation("Be brief.", [("Hi", "Hello"), ("Who?", "Me.\n")])
    assert [(each["role"], each["content"]) for each in talk.messages("Why?")] == [
        ("system", "Be brief."),
        *(("user", "Hi"), ("assistant", "Hello"), ("user", "Who?"), ("assistant", "Me.\n"), ("user", "Why?")),
    ]
    assert talk.text("Why?") == "Be brief.\nHiHello\nWho?Me.\nWhy?"
    assert talk.to_markdown().startswith("## System\n\nBe brief.\n\n## You\n\nHi\n\n## Model\n\nHello\n")
    assert json.loads(talk.to_json())["messages"] == talk.messages("")[:-1]
    assert (talk.take_back(), talk.take_back(), talk.take_back()) == ("Who?", "Hi", None)


def test_a_model_does_not_steer_the_terminal() -> None:
    assert harmless("é\x1b[2J\r\x07\n\tz") == "é[2J\n\tz"


if sys.platform != "win32":
    import pty

    class Terminal:
        """A command in a terminal, and what it has shown so far."""

        def __init__(self, process: asyncio.subprocess.Process, end: int) -> None:
            self.process = process
            self._end = end
            self._shown = ""
            self._grown = asyncio.Event()
            asyncio.get_running_loop().add_reader(end, self._read)

        def type(self, text: str) -> None:
            os.write(self._end, text.encode())

        async def breaks_off(self, text: str) -> None:
            """Press Ctrl-C where the chat reads a line, until a text is shown: an interrupt between the prompt and the
            reading itself has no effect before a key is pressed."""
            for _ in range(10):
                self.type(CTRL_C)
                with contextlib.suppress(AssertionError):
                    await self.shows(text, DEADLINE_S / 10)
                    return
            raise AssertionError(f"{text!r} was never shown")

        async def shows(self, text: str, seconds: float = DEADLINE_S) -> str:
            """Wait for a text to be shown behind what was waited for before; what comes up to it."""
            try:
                async with asyncio.timeout(seconds):
                    while text not in self._shown:
                        self._grown.clear()
                        await self._grown.wait()
            except TimeoutError:
                raise AssertionError(f"{text!r} was never shown, but {self._shown!r}") from None
            before, _, self._shown = self._shown.partition(text)
            return before

        async def ends(self) -> int:
            """Press Ctrl-D where the chat reads a line, as before the terminal would lose it; its exit status."""
            await self.shows("> ")
            self.type(CTRL_D)
            async with asyncio.timeout(DEADLINE_S):
                return await self.process.wait()

        def _read(self) -> None:
            try:
                self._shown += os.read(self._end, 65536).decode(errors="replace")
            except OSError:  # the command has ended
                asyncio.get_running_loop().remove_reader(self._end)
            self._grown.set()

    @asynccontextmanager
    async def chatting(mesh: Mesh, *arguments: str) -> AsyncIterator[Terminal]:
        ours, its = pty.openpty()
        environment = {**os.environ, "MOTLEY_URL": mesh.orchestrator.http_url, "TERM": "dumb", "COLUMNS": "200"}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", TAKE_THE_TERMINAL, *arguments),
            **dict.fromkeys(("stdin", "stdout", "stderr"), its),
            env=environment,
            start_new_session=True,
        )
        os.close(its)
        try:
            yield Terminal(process, ours)
        finally:
            asyncio.get_running_loop().remove_reader(ours)
            if process.returncode is None:
                process.kill()
            await process.wait()
            os.close(ours)

    TAKE_THE_TERMINAL = (
        "import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
        "sys.argv = ['motley', 'chat', *sys.argv[1:]];"
        "from motley.cli.main import main; main()"
    )
    """Ctrl-C in a terminal is for the processes of the session that has it."""

    async def endless(generate: Generate) -> AsyncIterator[Delta]:
        """An answer that nobody waits for to the end."""
        if "Hello" in generate.messages_json:  # the first question was answered shortly
            yield Delta(text="On and on", ids=[1])
            await asyncio.Event().wait()
        for text in ("Hello", ", ", "world"):
            yield Delta(text=text, ids=[1])
        yield Delta(finish="length", prompt_tokens=5, completion_tokens=3, prefill_s=0.25)

    @pytest.fixture
    async def chatty(mesh: Any, new_node: Any, profile: ModelProfile) -> Any:
        """A node with a model that knows roles."""
        profile.chats = True
        node = new_node()
        node.on_describe = lambda _: Described(profile=profile)
        node.answer = endless
        return await mesh.join(node)

    async def test_a_chat_goes_on_when_an_answer_is_stopped(mesh: Any, chatty: Any, tmp_path: Path) -> None:
        async with chatting(mesh, "bard", "--system", "Be brief.", "--no-think") as terminal:
            await terminal.shows("bard on pc. /help shows what you can do.")
            await terminal.shows("> ")
            terminal.type("Hi\n")
            await terminal.shows("Hello, world")
            await terminal.shows("3 tokens in")
            await terminal.shows("ended by the model's own limit")
            terminal.type("More \\\n")
            await terminal.shows("... ")
            terminal.type("of it\n")
            await terminal.shows("On and on")
            terminal.type(CTRL_C)
            await terminal.shows("(stopped)")
            await asyncio.wait_for(chatty.cancelled.get(), DEADLINE_S)
            terminal.type(f"/save {tmp_path / 'chat.json'}\n")
            await terminal.shows("2 answers written")
            terminal.type("/system Be long.\n/retry\n")
            await terminal.shows("On and on")
            terminal.type(CTRL_C)
            await terminal.shows("(stopped)")
            terminal.type("/model\n")
            await terminal.shows("bard (you talk to it)")
            terminal.type("/model nothing-like-it\n")
            await terminal.shows("serves a model named 'bard' already")  # so does the scripted node call every model
            terminal.type("/dance\n")
            await terminal.shows("there is no /dance; /help shows what there is")
            terminal.type("/clear\n/retry\n")
            await terminal.shows("nothing was asked yet")
            await terminal.shows("> ")
            await terminal.breaks_off("(Ctrl-D or /quit ends the chat)")
            assert await terminal.ends() == 0
        saved = json.loads((tmp_path / "chat.json").read_text("utf-8"))["messages"]
        said = [("user", "Hi"), ("assistant", "Hello, world"), ("user", "More \nof it"), ("assistant", "On and on")]
        assert [(each["role"], each["content"]) for each in saved] == [("system", "Be brief."), *said]
        assert {each.reasoning_effort for each in chatty.generated} == {"none"}
        asked = [json.loads(each.messages_json) for each in chatty.generated]
        assert [[each["content"] for each in messages] for messages in asked] == [
            ["Be brief.", "Hi"],
            ["Be brief.", "Hi", "Hello, world", "More \nof it"],
            ["Be long.", "Hi", "Hello, world", "More \nof it"],
        ]

    async def test_what_embeds_texts_is_refused(mesh: Any, new_node: Any) -> None:
        node = new_node()
        node.capabilities.engines[0].embeds = True
        await mesh.join(node)
        await mesh.serve(name="embedder", embeddings="mean")
        async with chatting(mesh, "embedder") as terminal:
            await terminal.shows(
                "embedder embeds texts, and does not answer: `motley run embedder TEXT --embeddings mean`"
            )
            assert await asyncio.wait_for(terminal.process.wait(), DEADLINE_S) == 1

    async def test_a_machine_that_is_lost_on_the_way_is_told_once(mesh: Any, chatty: Any, new_node: Any) -> None:
        other = await mesh.join(new_node("laptop"))
        await mesh.serve(nodes=["pc", "laptop"], shares=[1, 1])

        async def lose_the_other(generate: Generate) -> AsyncIterator[Delta]:
            if not chatty.generated[1:]:
                yield Delta(text="Hello", ids=[1])
                await other.leave()
                failed = Failure(code="peer_lost", message="rank 1 has gone", lost_rank=2)
                await chatty.event(chatty.commands[0], failed=failed)
                return
            yield Delta(text="!", ids=[2])
            yield Delta(finish="stop", prompt_tokens=5, completion_tokens=2)

        chatty.answer = lose_the_other
        lost = "lost on the way, and gone on without: node 'laptop' (rank 1) is lost"
        async with chatting(mesh, "bard") as terminal:
            await terminal.shows("bard on pc, laptop.")
            terminal.type("Hi\n")
            await terminal.shows(lost)
            await terminal.shows("2 tokens in")
            terminal.type("And?\n")
            assert lost not in await terminal.shows("2 tokens in")

    async def test_what_cannot_be_is_said_and_a_loaded_model_is_the_first_choice(mesh: Any, chatty: Any) -> None:
        async with chatting(mesh) as terminal:
            await terminal.shows("no model is loaded yet: name one, as in `motley chat")
            assert await terminal.process.wait() == 1
        await mesh.serve()
        async with chatting(mesh) as terminal:
            await terminal.shows("bard on pc.")
            terminal.type("/quit\n")
            assert await terminal.process.wait() == 0
