"""`motley chat`: a conversation with a model, in a terminal."""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from motley.cli.background import Background
from motley.cli.bundled import FIRST
from motley.cli.conversation import Conversation
from motley.cli.errors import EXIT_INTERRUPTED, CliError
from motley.cli.reaching.client import ApiKey, Client, Refused, Unreachable, Url
from motley.cli.reaching.loading import as_it_is_now, checked_request, for_daemons, load, nodes_told
from motley.cli.reaching.mesh_of_one import RUNS_ALONE, mesh_or_alone
from motley.cli.shown.show import console, limit_reached, lost_since
from motley.cli.typed.given import left_alone
from motley.cli.typed.options import (
    EFFORT,
    MODELS_OWN,
    Context,
    DeviceOption,
    Engines,
    Quantisation,
    Quants,
    Think,
    by_node,
    effort_of,
    on_device,
)
from motley.cli.typed.wanted import Wanted, stop_command
from motley.protocol.wording import counted, short_bytes

BACK_WITHIN_S = 120.0
"""An orchestrator that goes in the middle of an answer may be away for so long."""
HELP = """\
Type what you want to say; Enter sends it. A line that ends with \\ goes on in the next one.
Ctrl-C stops an answer, and the chat goes on. Ctrl-D ends the chat.

  /retry          have the last question answered once more
  /system TEXT    tell the model how to behave, in all that follows; without TEXT, no more
  /model NAME     talk to another model, which is loaded if need be; without NAME, see which are there
  /clear          forget what was said
  /save FILE      write what was said to a file, as text, or for other programs as FILE.json
  /help           this
  /quit           end the chat

A token is a piece of a word, three quarters of one in the mean."""


def register(app: typer.Typer) -> None:
    app.command(epilog="Examples: motley chat   motley chat ./Llama-3.2-1B-Instruct --system 'Be brief.'")(chat)


def chat(
    command: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            help="A model that is loaded, by its name; or one to load: a folder, a .gguf file, a short name such as"
            f" qwen3-0.6b, or a name at huggingface.co (owner/name). {FIRST} comes with Motley. Without it: the"
            " model that is loaded.",
            show_default=False,
        ),
    ] = "",
    system: Annotated[str, typer.Option(help="How the model is to behave.")] = "",
    quant: Quants = None,
    engine: Engines = None,
    device: DeviceOption = None,
    context: Context = None,
    think: Think = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Longest answer.", show_default="the model's own limit, or the context"),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=2.0, help="How freely it chooses its words; 0: never otherwise.", show_default=MODELS_OWN
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Leaves out unlikely words: 0.9 is usual, 1 leaves out none.", show_default=MODELS_OWN),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Equal seeds give equal answers.")] = None,
    url: Url = "",
    api_key: ApiKey = "",
) -> None:
    """Talk to a model. It is loaded first if need be; with no mesh at the default address, on this machine alone."""
    whole, quants = by_node("--quant", quant or (), [*Quantisation])
    everywhere, engines = by_node("--engine", engine or ())
    computing, settings = on_device(everywhere, device)

    def wanted(name: str) -> Wanted:
        request = checked_request(
            {
                "model": for_daemons(name),
                "quantisation": whole,
                "quantisations": quants,
                "engine": computing,
                "engines": engines,
                "engine_options": settings,
                "context": context,
            }
        )
        return Wanted(request, device=device, any_quantisation=whole is None, any_engine=everywhere is None)

    alone = RUNS_ALONE if model and left_alone(command, "url") and not (quants or engines) else ""
    sampling = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed, **effort_of(think)}
    if sys.platform != "win32":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_INTERRUPTED))
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  what `input` reads can be edited, and called back with the arrow keys
    try:
        with (
            Background() as background,
            _client(background, url, api_key, alone, model) as (client, lasting),
        ):
            Chat(background, client, wanted, sampling, Conversation(system), lasting).run(model)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


@contextlib.contextmanager
def _client(background: Background, url: str, api_key: str, alone: str, model: str) -> Iterator[tuple[Client, bool]]:
    """A mesh to talk to, and whether it lasts longer than this command; as `mesh_or_alone`."""
    stack = contextlib.AsyncExitStack()

    async def reach() -> tuple[Client, bool]:
        try:
            return await stack.enter_async_context(mesh_or_alone(url, api_key, alone, model))
        except Unreachable as error:
            instead = "; `motley chat MODEL` runs a model on this machine alone" if not url else ""
            raise Unreachable(f"{error}{instead}") from error

    try:
        yield background.wait(reach())
    finally:
        background.wait(stack.aclose())


class Chat:
    """A conversation in a terminal: reads lines, and does what they say."""

    def __init__(
        self,
        background: Background,
        client: Client,
        wanted: Callable[[str], Wanted],
        sampling: dict[str, Any],
        conversation: Conversation,
        lasting: bool,
    ) -> None:
        """
        Args:
            wanted: how a model is to be loaded.
            sampling: how answers are chosen, as the API has it.
            lasting: the mesh goes on when this command ends.
        """
        self._background = background
        self._client = client
        self._wanted = wanted
        self._sampling = sampling
        self._conversation = conversation
        self._lasting = lasting
        self._session: dict[str, Any] = {}
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: console.print(HELP, markup=False),
            "/model": self._choose,
            "/system": self._instruct,
            "/retry": self._retry,
            "/clear": self._clear,
            "/save": self._save,
        }

    def run(self, model: str) -> None:
        """Talk until the person ends it.

        Raises:
            CliError: there is no such model, or it cannot be loaded.
            KeyboardInterrupt: the person wants no model after all.
        """
        self._use(model or self._loaded())
        while (line := _line()) is not None:
            word, _, rest = line.strip().partition(" ")
            if word in ("/quit", "/exit"):
                return
            if not word:
                continue
            try:
                if act := self._commands.get(word):
                    act(rest.strip())
                elif word.startswith("/") and word[1:].isalpha():
                    raise CliError(f"there is no {word}; /help shows what there is")
                else:
                    self._ask(line)
            except KeyboardInterrupt:
                console.print("[dim](stopped)[/]")
            except CliError as error:
                console.print(f"[red]{escape(str(error))}[/]", soft_wrap=True)

    def _loaded(self) -> str:
        """The model to begin with if none is named.

        Raises:
            CliError: none is loaded.
        """
        names = self._names()
        if not names:
            raise CliError(
                "no model is loaded yet: name one, as in `motley chat ./Llama-3.2-1B-Instruct`"
                " (`motley models fit` says which well-known ones fit these machines); to try it,"
                f" `motley chat {FIRST}` runs a tiny one that comes with Motley"
            )
        return names[0]

    def _names(self) -> list[str]:
        sessions = self._background.wait(self._client.sessions())
        answering = [session for session in sessions if not session["embeddings"]]
        return [session["name"] for session in answering if session["state"] in ("ready", "recovering")]

    def _use(self, model: str) -> None:
        """Talk to this model from now on."""
        with console.status(f"looking for {escape(model)}") as status:
            parts: dict[str, tuple[int, int]] = {}

            def show(part: str, done: int, total: int) -> None:
                parts[part] = done, total
                have, whole = (sum(each[at] for each in parts.values()) for at in (0, 1))
                status.update(f"loading {escape(model)}: {short_bytes(have)} of {short_bytes(whole)}")

            wanted = self._wanted(model)
            loading = load(self._client, wanted, show, lasting=self._lasting, forecast=_forecast)
            session = self._background.wait(loading)
        if pooling := session["embeddings"]:
            raise CliError(
                f"{session['name']} embeds texts, and does not answer: `motley run {shlex.quote(session['name'])} TEXT"
                f" --embeddings {pooling}` embeds one; to talk to it, `{stop_command(session)}` first"
            )
        self._session = session
        where = nodes_told(self._session)
        console.print(f"[bold]{escape(self._session['name'])}[/] on {where}. /help shows what you can do.")
        if not self._session["chats"]:
            console.print("[dim]It was not trained to chat: it continues the text that you begin.[/]")

    def _choose(self, model: str) -> None:
        if model:
            self._use(model)
            return
        for name in self._names():
            here = " (you talk to it)" if name == self._session["name"] else ""
            console.print(f"  {name}{here}", markup=False)
        console.print("[dim]/model and another name, or a folder, loads that one[/]")

    def _instruct(self, text: str) -> None:
        self._conversation.system = text
        console.print(f"[dim]{'It will be told so from now on.' if text else 'It is told nothing before you.'}[/]")

    def _retry(self, _: str) -> None:
        if (question := self._conversation.take_back()) is None:
            raise CliError("nothing was asked yet")
        self._ask(question)

    def _clear(self, _: str) -> None:
        self._conversation.turns.clear()
        console.print("[dim]What was said is forgotten.[/]")

    def _save(self, name: str) -> None:
        if not name:
            raise CliError("say where, as in /save chat.md")
        file = Path(name).expanduser()
        text = self._conversation.to_json() if file.suffix == ".json" else self._conversation.to_markdown()
        try:
            with file.open("x", encoding="utf-8") as opened:
                opened.write(text)
        except FileExistsError:
            raise CliError(f"{file} is there already: choose another name") from None
        except OSError as error:
            raise CliError(f"{file} cannot be written: {error.strerror or error}") from error
        console.print(f"[dim]{counted(len(self._conversation.turns), 'answer')} written to {escape(str(file))}[/]")

    def _ask(self, question: str) -> None:
        """Have a question answered; what there is of an answer that is stopped, or breaks off, counts as said."""
        said: list[str] = []
        began = time.monotonic()
        try:
            usage, finish = self._background.wait(self._stream(question, said))
        except Refused as refusal:
            if refusal.code != "context_length_exceeded":
                raise
            long = f"this chat is longer than the {self._session['context']} tokens that the model can look back on"
            raise CliError(f"{long}: /clear begins anew; `motley chat --context` gives it more") from refusal
        finally:
            if answer := "".join(said):
                if not answer.endswith("\n"):
                    print(flush=True)
                self._conversation.turns.append((question, answer))
        before, self._session = self._session, self._background.wait(as_it_is_now(self._client, self._session))
        if lost := lost_since(before, self._session):
            console.print(f"[yellow]{escape(lost)}[/]", soft_wrap=True)
        cut = finish == "length" and self._sampling["max_tokens"] is None
        ended = f"; ended by {limit_reached(usage, self._session['context'])}" if cut else ""
        tokens = counted(usage.get("completion_tokens", 0), "token")
        console.print(f"[dim]{tokens} in {time.monotonic() - began:.1f} s{ended}[/]")

    async def _stream(self, question: str, said: list[str]) -> tuple[dict[str, int], str]:
        """Print an answer as it comes, and note it in `said`; its usage, and why it ended."""
        chats, conversation = self._session["chats"], self._conversation
        asked = {"messages": conversation.messages(question)} if chats else {"prompt": conversation.text(question)}
        body = {"model": self._session["name"], **asked, "stream_options": {"include_usage": True}}
        body |= {name: value for name, value in self._sampling.items() if value is not None or name == "max_tokens"}
        if not chats:
            body.pop(EFFORT, None)  # what is no chat has no template to tell
        path = "/v1/chat/completions" if chats else "/v1/completions"
        usage: dict[str, int] = {}
        finish, thinking = "", False
        async for event in self._client.stream(path, body, back_within_s=BACK_WITHIN_S):
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                finish = choice.get("finish_reason") or finish
                thought = choice.get("delta", {}).get("reasoning_content") or ""
                piece = choice["text"] if not chats else choice["delta"].get("content") or ""
                if thought:
                    console.out(harmless(thought), style="dim", end="")
                elif thinking and piece:
                    console.print("\n")
                thinking = bool(thought) or (thinking and not piece)
                print(harmless(piece), end="", flush=True)
                said.append(piece)
        return usage, finish


def _line() -> str | None:
    r"""What the person types next, with the lines that follow one that ends with \; None: it was the end."""
    lines: list[str] = []
    while True:
        try:
            line = input("... " if lines else "> ")
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            console.print("\n[dim](Ctrl-D or /quit ends the chat)[/]")
            lines.clear()
            continue
        if not line.endswith("\\"):
            return "\n".join([*lines, line])
        lines.append(line.removesuffix("\\"))


def _forecast(session: dict[str, Any]) -> str:
    rate = 1e3 / session["forecast"]["ms_per_token"]
    return f"it should say about {rate:.0f} tokens a second, on {nodes_told(session)}"


def harmless(text: str) -> str:
    """A text without the characters that steer a terminal, which a model may say, too."""
    return "".join(each for each in text if each.isprintable() or each in "\n\t")
