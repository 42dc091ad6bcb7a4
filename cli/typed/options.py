"""Options that several commands share, most of them of a session; those of a node are in `node_options`.

A table of what can be typed, in one place, so that an option is called and explained alike everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from enum import StrEnum
from typing import Annotated, NoReturn, TypeVar

import typer

from motley.cli.errors import CliError
from motley.cli.typed.durations import seconds
from motley.protocol import MAX_ADAPTER_RANK, MAX_ADAPTERS, MAX_QUEUE, MAX_SEQUENCES

ALL = "all"
"""What is typed in the place of a size: no limit."""
EFFORT = "reasoning_effort"
"""What the API calls how much a model thinks."""
MODELS_OWN = "as the model's makers say, else as OpenAI"
"""What is shown as the default of options by which tokens are chosen."""


class Quantisation(StrEnum):
    """How weights are held; stored: as the checkpoint has them, bit for bit, and its floats as int8.

    A CPU holds fp16 as fp32.
    """

    STORED = "stored"
    FP32 = "fp32"
    FP16 = "fp16"
    INT8 = "int8"
    INT4 = "int4"


class CacheFormat(StrEnum):
    """What keys and values are kept as in the KV caches."""

    FP32 = "fp32"
    FP16 = "fp16"
    INT8 = "int8"


class Experts(StrEnum):
    """Where a model's experts are: in the ranks' shares, or on nodes of their own."""

    AUTO = "auto"
    SLICED = "sliced"
    PARALLEL = "parallel"


class Device(StrEnum):
    """What a model is computed on: the processor, an NVIDIA GPU by CUDA, or a GPU of any make by WebGPU."""

    CPU = "cpu"
    CUDA = "cuda"
    WEBGPU = "webgpu"


class Activations(StrEnum):
    """What products on a graphics card of any make are computed in."""

    FP32 = "fp32"
    FP16 = "fp16"


ENGINES_ON = {
    Device.CPU: ("onnxruntime",),
    Device.CUDA: ("cuda", "onnxruntime-cuda", "onnxruntime-tensorrt-rtx", "tensorrt", "tensorrt-whole"),
    Device.WEBGPU: ("webgpu",),
}
"""The engines that compute on nothing but a device; the first is the one for whoever names the device alone."""


Choice = TypeVar("Choice", bound=StrEnum)


def one_of(kind: type[Choice]) -> Callable[[str], Choice]:
    """What reads an option that takes one of these words (typer's own calls a wrong one a "Value error")."""

    def parse(typed: str) -> Choice:
        try:
            return kind(typed)
        except ValueError:
            raise typer.BadParameter(f"{typed!r} is not one of {', '.join(map(repr, map(str, kind)))}.") from None

    return parse


Quant = Annotated[
    Quantisation,
    typer.Option(help="How weights are held.", parser=one_of(Quantisation), metavar="|".join(Quantisation)),
]
Quants = Annotated[
    list[str] | None,
    typer.Option(
        "--quant",
        metavar="HOW[@NODE]",
        help="How exactly the model is kept: int4 takes the least memory and time; int8, fp16 and fp32 take more, and"
        " are more exact; stored is as exact as its files, up to int8. With @NODE, as in int4@laptop, on that machine;"
        " may be repeated. Default: stored, or as it is loaded already.",
    ),
]
Engines = Annotated[
    list[str] | None,
    typer.Option(
        "--engine",
        metavar="ENGINE[@NODE]",
        help="What computes: onnxruntime is the processor, cuda an NVIDIA graphics card, webgpu a card of any make;"
        " auto is the card where that is faster and can do what is asked for, else the processor. With @NODE, as in"
        " cuda@gaming-pc, on that machine; may be repeated. Default: auto, or as it is loaded already.",
    ),
]
DeviceOption = Annotated[
    Device | None,
    typer.Option(
        "--device",
        parser=one_of(Device),
        metavar="|".join(Device),
        help="What computes: the processor (cpu), an NVIDIA graphics card (cuda), or one of any make (webgpu). With an"
        " --engine that can compute on several, as reference can: on which. Default: whatever is faster, or as it is"
        " loaded already.",
    ),
]
ActivationsOption = Annotated[
    Activations | None,
    typer.Option(
        "--activations",
        parser=one_of(Activations),
        metavar="|".join(Activations),
        help="What a graphics card of any make (webgpu) computes products in: fp16 holds floats in half of the memory,"
        " and is less exact. Default: fp32.",
    ),
]
WhatIf = Annotated[
    list[str] | None,
    typer.Option(metavar="DEVICE,LINK", help="As if this machine were there, too; may be repeated."),
]
AtOnce = Annotated[int, typer.Option(min=1, max=MAX_SEQUENCES, help="Requests that are answered at a time.")]
AsJson = Annotated[bool, typer.Option("--json", help="One line of JSON.")]
Context = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=2**31,
        help="Tokens that prompt and answer have together. Default: 4096, or what the model allows if that is less.",
    ),
]
CacheTokens = Annotated[
    int | None,
    typer.Option(
        min=1, max=2**31, help="Tokens that all requests together may have in the caches. Default: one context."
    ),
]
CacheNodeTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=2**31,
        help="Tokens more that may be kept in the memory of nodes with room to spare; --context may be as long as"
        " --cache-tokens, --cache-disk-tokens and these together. Of disks and nodes, what costs a step less is filled"
        " first, as measured. Default: none.",
    ),
]
CacheDiskTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=2**31,
        help="Tokens more that may be kept on every rank's disk; --context may be as long as --cache-tokens,"
        " --cache-node-tokens and these together. Default: none.",
    ),
]
CacheFormats = Annotated[
    CacheFormat | None,
    typer.Option(
        "--cache-format",
        help="What keys and values are kept as in the caches: fp16 takes half of fp32's memory, int8 a quarter."
        " Default: fp32.",
        parser=one_of(CacheFormat),
        metavar="|".join(CacheFormat),
    ),
]
DraftModel = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="A small model with the same tokenizer (folder, .gguf file or hub id) that guesses tokens on the first"
        " node; or own: the model's own head, which some have for it. No text changes. Default: none, or as it is"
        " loaded.",
    ),
]
DraftEngine = Annotated[
    str | None,
    typer.Option(metavar="ENGINE", help="What computes the draft model. Default: what computes the model there."),
]
Sequences = Annotated[
    int, typer.Option(min=1, max=MAX_SEQUENCES, help="Requests that are under way at a time; others wait.")
]
Queue = Annotated[int, typer.Option(min=0, max=MAX_QUEUE, help="Requests that may wait; more are refused.")]
Nodes = Annotated[
    str,
    typer.Option(
        metavar="[ENGINE@]NODE,...",
        help="Nodes that take part, one per rank; pc,webgpu@pc has one on pc's processor and one on its GPU. Default:"
        " all, the fastest first.",
    ),
]
Shares = Annotated[
    str,
    typer.Option(
        metavar="N,...",
        help="How much of the model each rank gets, relative to the others, such as 3,1. Default: by speed and memory.",
    ),
]
Stages = Annotated[
    str,
    typer.Option(
        metavar="N|N+N",
        help="In how many stages, of some layers each: over slow links rows then travel less. 1: every rank has a share"
        " of every layer. 2+1: a stage of the first two of --nodes, and one of the third. Default: what is quickest.",
    ),
]
Exact = Annotated[bool, typer.Option("--exact", help="The same bits on any number of ranks, beside any other request.")]
Recover = Annotated[
    bool,
    typer.Option("--recover/--no-recover", help="When a machine is lost, go on with those that are left, or end."),
]
Think = Annotated[
    bool | None,
    typer.Option(
        "--think/--no-think",
        help="Whether the model thinks before it answers, where its chat template knows of that.",
        show_default="as the template has it",
    ),
]
KeepPrefixes = Annotated[
    bool,
    typer.Option(
        "--keep-prefixes",
        help="Keep the caches on every rank's disk: the next start with the same model, nodes and options begins with"
        " the prompts that this one knew.",
    ),
]


class Pooling(StrEnum):
    """How a text's tokens become its embedding."""

    MEAN = "mean"
    LAST = "last"


Embedding = Annotated[
    Pooling | None,
    typer.Option(
        "--embeddings",
        parser=one_of(Pooling),
        metavar="|".join(Pooling),
        help="Embed texts in the place of answering: the mean over a text's tokens, or what the last one has.",
    ),
]
AdapterFolders = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="NAME[=FOLDER]",
        help="Answer with this LoRA adapter; with a folder (PEFT's format), a GGUF file or a hub id, the"
        " session gets to know it. May be repeated: the first one answers.",
    ),
]
Adapters = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=MAX_ADAPTERS,
        help="Adapters that there is room for at a time; more take turns. Default: none, or what --adapter needs.",
    ),
]
AdapterRank = Annotated[
    int | None,
    typer.Option(min=1, max=MAX_ADAPTER_RANK, help="The largest rank of them that there is room for. Default: 64."),
]


def duration(option: str, text: str) -> float:
    """The seconds that an option says.

    Raises:
        CliError: it is no duration.
    """
    try:
        return seconds(text)
    except ValueError as error:
        raise CliError(f"{option}: {error}") from None


def effort_of(think: bool | None) -> dict[str, str]:
    """What the API is asked for an answer with thoughts, or without any; None: nothing."""
    return {} if think is None else {EFFORT: "medium" if think else "none"}


def by_node(option: str, typed: Sequence[str], choices: Collection[str] = ()) -> tuple[str | None, dict[str, str]]:
    """What an option says for all nodes, and for single ones: ``int8 fp16@pc`` is ``int8`` and ``{"pc": "fp16"}``.

    Raises:
        typer.BadParameter: it says something twice, or what is none of the choices.
    """

    def refuse(why: str) -> NoReturn:
        raise typer.BadParameter(f"{why}.", param_hint=repr(option))

    whole: str | None = None
    single: dict[str, str] = {}
    for each in typed:
        value, at, node = each.partition("@")
        if not value or (at and not node):
            refuse(f"{each!r} is no value, and no VALUE@NODE")
        if choices and value not in choices:
            refuse(f"{value!r} is not one of {', '.join(map(repr, map(str, choices)))}")
        if node in single or (not at and whole is not None):
            refuse(f"it is given twice for {f'node {node!r}' if at else 'all nodes'}")
        if at:
            single[node] = value
        else:
            whole = value
    return whole, single


def on_device(
    engine: str | None, device: Device | None, activations: Activations | None = None
) -> tuple[str | None, dict[str, str]]:
    """The engine that ``--engine`` and ``--device`` mean together, None if neither says any, and its settings.

    Raises:
        CliError: the engine does not compute on the device, or not in one type or another.
    """
    if activations is not None:
        engine, settings = on_device(engine, device)
        if engine not in ENGINES_ON[Device.WEBGPU]:
            raise CliError(
                "--activations is of engine 'webgpu': give --device webgpu, too, and say which machines beside it"
                " compute on their processors (--nodes onnxruntime@NODE,...); or leave it out"
            )
        return engine, {**settings, "activations": str(activations)}
    if device is None:
        return engine, {}
    if engine is None:
        return ENGINES_ON[device][0], {}
    if engine in ENGINES_ON[device]:
        return engine, {}
    for other, engines in ENGINES_ON.items():
        if engine in engines:
            raise CliError(f"--device {device}: engine {engine!r} computes on {other}; leave out --device or --engine")
    return engine, {"device": str(device)}


def parse_shares(text: str, ranks: int | None = None) -> list[float]:
    """Read ``3,2,1``.

    Raises:
        CliError: it is no such list, or not one for each of `ranks`.
    """
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError:
        raise CliError(f"--shares wants numbers like 3,2,1, not {text!r}") from None
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not any(weights):
        raise CliError(f"--shares wants non-negative numbers that are not all zero, not {text!r}")
    if ranks is not None and len(weights) != ranks:
        raise CliError(f"--shares names {len(weights)} shares for {ranks} ranks")
    return weights


def parse_stages(text: str) -> int | list[int]:
    """Read ``2``, or ``2+1``.

    Raises:
        CliError: it is neither.
    """
    try:
        ranks = [int(part) for part in text.split("+")]
    except ValueError:
        ranks = []
    if not ranks or min(ranks) < 1:
        raise CliError(f"--stages wants a number like 2, or the ranks of every stage like 2+1, not {text!r}")
    return ranks if len(ranks) > 1 else ranks[0]


def parse_nodes(text: str) -> list[str]:
    """Read ``gaming-pc,laptop``.

    Raises:
        CliError: a name is blank.
    """
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise CliError(f"--nodes wants names like gaming-pc,laptop, not {text!r}")
    return names


def size(option: str, typed: str) -> int:
    """The bytes that an option says.

    Raises:
        CliError: it is no size.
    """
    from motley.cli.typed.sizes import parse_size

    try:
        return parse_size(typed)
    except ValueError as error:
        raise CliError(f"{option}: {error}") from None


def parse_counts(option: str, text: str, at_most: int | None = None) -> list[int]:
    """Read ``1,2``: whole numbers from 1 on.

    Raises:
        CliError: it is no such list.
    """
    try:
        counts = [int(count) for count in text.split(",")]
    except ValueError:
        raise CliError(f"{option} wants whole numbers like 1,2, not {text!r}") from None
    if any(count < 1 or count > (at_most or count) for count in counts):
        limit = f"from 1 to {at_most}" if at_most else "from 1 on"
        raise CliError(f"{option} wants numbers {limit}, not {text!r}")
    return counts


def parse_link(text: str) -> str:
    """Check a network to emulate; "" for ``none``.

    Raises:
        CliError: it is no link.
    """
    from motley.bench.meshes.emulator import LinkSpec

    if text == "none":
        return ""
    try:
        LinkSpec.parse(text)
    except ValueError as error:
        raise CliError(f"--link: {error}") from None
    return text
