"""Random models of real shapes: speed and memory do not depend on what the weights say.

The folder holds what a Hugging Face folder holds: ``config.json``, ``model.safetensors`` (in shards, if large) and
a byte-level tokenizer, so that text goes in and comes out. Weights are Gaussian: 16 random bits pick one of 65536
quantiles from a table, which is as fast as the disk. Matrices that write to the residual are scaled by
``1 / sqrt(2 * layers)``, so that activations stay finite at any depth.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod, sqrt
from pathlib import Path
from statistics import NormalDist
from tempfile import TemporaryDirectory
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from motley.daemon.models.description.axes import Kind
from motley.daemon.models.description.model import Model, expected_shapes, tensors
from motley.daemon.models.description.operations import weights_of
from motley.daemon.models.description.operations.attention import Attend
from motley.daemon.models.description.operations.rows import Linear, Norm
from motley.daemon.models.families import AHEAD
from motley.daemon.models.keys import ConfigError, Keys
from motley.daemon.models.reading import describe
from motley.daemon.weights.cache import default_folder
from motley.daemon.weights.places import FLAT, WHOLE

Table = npt.NDArray[Any]

_SIGMA = 0.02
_SHARD = 5_000_000_000
"""The most bytes in one weight file."""
_CHUNK = 1 << 20
"""Weights generated at a time."""
HYBRID = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
"""Families of which some tensors lie in larger ones, which are written."""
_ONE_AHEAD = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Keys of a config that say, by a 1, that there is a head which predicts a token further ahead: then it is written."""
_DTYPES = {"float16": ("F16", np.dtype("<f2")), "bfloat16": ("BF16", np.dtype(ml_dtypes.bfloat16))}


class SynthError(Exception):
    """The model cannot be written; the message says what is wrong with the configuration or the folder."""


@dataclass(frozen=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]
    sigma: float = _SIGMA
    mean: float = 0.0


def synthesise(
    config: dict[str, Any],
    out: Path,
    dtype: str = "float16",
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
    *,
    force: bool = False,
) -> None:
    """Write a model of this shape with random weights; the same arguments give the same files.

    Args:
        config: as in ``config.json``, of a family that Motley runs.
        progress: is called with the bytes of weights written so far, and all of them.
        force: write into a folder that is not empty, replacing the model in it.

    Raises:
        SynthError: `config` describes no model that can be run, the folder is not empty, or the disk lacks the
            space or cannot be written.
    """
    if dtype not in _DTYPES:
        raise SynthError(f"dtype {dtype!r} is not one of {', '.join(_DTYPES)}")
    weights = _tensors(config)
    tokenizer = _tokenizer(config)
    total = sum(2 * prod(tensor.shape) for tensor in weights)
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())) and not force:
            raise SynthError(f"{out} exists and is not an empty folder; choose another, or empty it")
        out.mkdir(parents=True, exist_ok=True)
        _remove_model(out)
        free = shutil.disk_usage(out).free
        if free < total:
            raise SynthError(f"{out}: the model takes {total / 1e9:.2f} GB and {free / 1e9:.2f} GB are free")
        try:
            _write_weights(out, weights, dtype, np.random.Generator(np.random.SFC64(seed)), total, progress)
            for name, text in tokenizer.items():
                (out / name).write_text(text, encoding="utf-8")
            described = json.dumps(config | {"torch_dtype": dtype}, indent=2)
            (out / "config.json").write_text(described, encoding="utf-8")
        except BaseException:
            _remove_model(out)
            raise
    except OSError as error:
        raise SynthError(f"{out}: cannot write the model: {error.strerror or error}") from error


@contextmanager
def temporary_model(config: dict[str, Any], name: str) -> Iterator[Path]:
    """A folder `name` with a model of this shape and random weights, for as long as the context lasts.

    Raises:
        SynthError: as `synthesise`.
    """
    default_folder().mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="random-", dir=default_folder()) as place:
        synthesise(config, Path(place) / name)
        yield Path(place) / name


def _remove_model(folder: Path) -> None:
    for pattern in ("config.json", "*.safetensors", "*.safetensors.index.json"):
        for file in folder.glob(pattern):
            file.unlink()


def _tensors(config: dict[str, Any]) -> list[_Tensor]:
    """The weights of a model, as its description has them: fused ones apart, and by their usual names, but for `HYBRID`
    families, whose tensors are written as they are published."""
    keys = Keys(Path("config.json"), config)
    has_head = config.get("model_type") in AHEAD and 1 in map(config.get, _ONE_AHEAD)
    try:
        models = [describe(keys), *([describe(keys, ahead=True)] if has_head else [])]
    except ConfigError as error:
        raise SynthError(str(error)) from error
    to_residual = _SIGMA / sqrt(2 * len(models[0].layers))
    made = _hybrid if config.get("model_type") in HYBRID else _usual
    return [*{tensor.name: tensor for model in models for tensor in made(model, to_residual)}.values()]


def _usual(model: Model, to_residual: float) -> list[_Tensor]:
    """The weights of a model, or of its head, as the description has them.

    Norms of queries and keys make scores of about 1, as training does, also where attention scales them by nothing
    (Gemma 4): else each row would see a single position, and hang on its least rounding.
    """
    means: dict[str, float] = {}
    sigmas: dict[str, float] = {}
    attending = [each for each in model.operations if isinstance(each, Attend)]
    sharpness = {x.name: round(sqrt(each.heads.size) * each.scale, 6) for each in attending for x in (each.q, each.k)}
    for each in model.operations:
        for w in weights_of(each):
            if isinstance(each, Norm):
                means[w.name] = sharpness.get(each.y.name, 1.0) ** -0.5 - each.offset
            elif w.in_ is None and not isinstance(each, Linear):
                means[w.name] = 1.0  # the gains of other norms, numbers that something is multiplied by
            elif isinstance(each, Linear) and w.out.kind is Kind.HIDDEN:
                sigmas |= dict.fromkeys((w.name, w.bias), to_residual)
    experts = re.compile(r"\.experts\.\d+\.")  # as the description calls them all
    return [
        _Tensor(name, shape, sigmas.get(general, _SIGMA), means.get(general, 0.0))
        for name, shape in expected_shapes(model).items()
        for general in [experts.sub(".experts.{expert}.", name)]
    ]


def _hybrid(model: Model, to_residual: float) -> list[_Tensor]:
    """The weights of a model of a `HYBRID` family; those that lie in a larger tensor as this, but for experts'."""
    made: dict[str, _Tensor] = {}
    for tensor in tensors(model):
        name, shape = tensor.name, tensor.shape
        if tensor.parts and ".experts." not in name:
            name, shape = tensor.parts[0].tensor, tensor.parts[0].shape
            begins = next(filter(name.startswith, model.spelled), "")
            name = model.spelled.get(begins, "") + name.removeprefix(begins)
        elif model.spelled and tensor.parts:
            name = next(part.tensor for part in tensor.parts if part.shape == shape and "[" not in part.tensor)
        if name.endswith(FLAT):
            name, shape = name.removesuffix(FLAT), (shape[0], 1, *shape[1:])
        name = name.removesuffix(WHOLE)
        writes = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
        one = name.endswith("linear_attn.norm.weight")  # other norms are stored less 1
        made.setdefault(name, _Tensor(name, shape, to_residual if writes else _SIGMA, float(one)))
    return list(made.values())


def _write_weights(
    out: Path,
    tensors: list[_Tensor],
    dtype: str,
    random: np.random.Generator,
    total: int,
    progress: Callable[[int, int], None] | None,
) -> None:
    shards = _shards(tensors)
    names = [
        "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        for number in range(1, len(shards) + 1)
    ]
    spelling, numpy_dtype = _DTYPES[dtype]
    quantiles = np.array([NormalDist().inv_cdf((index + 0.5) / 65536) for index in range(65536)])
    tables: dict[tuple[float, float], Table] = {}
    done = 0
    for name, shard in zip(names, shards, strict=True):
        with (out / name).open("wb") as file:
            file.write(_header(shard, spelling))
            for tensor in shard:
                key = tensor.mean, tensor.sigma
                if key not in tables:
                    tables[key] = (tensor.mean + tensor.sigma * quantiles).astype(numpy_dtype)
                for chunk in _random_values(tables[key], prod(tensor.shape), random):
                    file.write(chunk.data.cast("B") if dtype == "float16" else chunk.view(np.uint16).data)
                    done += chunk.nbytes
                    if progress:
                        progress(done, total)
    if len(shards) > 1:
        weight_map = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def _shards(tensors: list[_Tensor]) -> list[list[_Tensor]]:
    """The tensors in files of at most `_SHARD` bytes (or one tensor, if that is larger)."""
    shards: list[list[_Tensor]] = [[]]
    room = _SHARD
    for tensor in tensors:
        size = 2 * prod(tensor.shape)
        if size > room and shards[-1]:
            shards.append([])
            room = _SHARD
        shards[-1].append(tensor)
        room -= size
    return shards


def _header(tensors: list[_Tensor], dtype: str) -> bytes:
    """The start of a safetensors file, padded so that the data is aligned to 8 bytes."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + 2 * prod(tensor.shape)
        entries[tensor.name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _random_values(table: Table, count: int, random: np.random.Generator) -> Iterator[Table]:
    """`count` values picked from `table` (65536 of them), in chunks."""
    for start in range(0, count, _CHUNK):
        size = min(_CHUNK, count - start)
        picks = random.integers(0, 1 << 64, -(-size // 4), np.uint64).view(np.uint16)
        yield table.take(picks[:size])


_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def _tokenizer(config: dict[str, Any]) -> dict[str, str]:
    """A byte-level tokenizer of the model's vocabulary: files and what is in them.

    256 tokens are the bytes; the others are words that no text is made of (``~1234``), but the model may say them.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special: dict[int, str] = {}
    for name, key in (("<s>", "bos_token_id"), ("</s>", "eos_token_id")):
        given = config.get(key)
        for number, token in enumerate(given if isinstance(given, list) else [] if given is None else [given]):
            special.setdefault(token, name if not number else f"{name}{number}")
    size = config["vocab_size"]
    if any(type(token) is not int or not 0 <= token < size for token in special) or size < 256 + len(special):
        raise SynthError(
            f"config: vocab_size {size} should hold 256 bytes and bos_token_id and eos_token_id {sorted(special)}"
        )
    plain = [token for token in range(size) if token not in special]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: token for token, text in special.items()}
    vocabulary |= dict(zip(alphabet, plain, strict=False))
    vocabulary |= {f"~{token}": token for token in plain[len(alphabet) :]}

    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special.values()))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.get("max_position_embeddings"),
        "clean_up_tokenization_spaces": False,
        "chat_template": _TEMPLATE,
    }
    settings |= {f"{key}_token": text for key, text in (("bos", "<s>"), ("eos", "</s>")) if text in special.values()}
    return {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": json.dumps(settings, indent=2)}
