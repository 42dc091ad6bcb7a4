"""Ranks of this process that compute with adapters, random adapters, and models whose weights have one in them."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from motley.daemon.adapters.cutting import cut_adapter
from motley.daemon.adapters.reading import Adapter, read_adapter
from motley.daemon.models.cutting.holding import FLOATS, Formats
from motley.daemon.models.cutting.share import Share
from motley.daemon.models.cutting.units import units
from motley.daemon.models.description.axes import W
from motley.daemon.models.description.model import Model
from motley.daemon.models.description.operations.experts import Experts
from motley.daemon.models.description.operations.rows import Linear
from motley.daemon.models.files import OpenModel, open_model
from motley.daemon.models.graph.rank_graph import Declared, build_rank_graph
from motley.daemon.rank.adapters.beginnings import Beginnings, beginnings
from motley.daemon.weights.places import Tensor
from motley.daemon.weights.quantise import ZERO_POINT, quantise, unpack
from motley.daemon.weights.spec import Encoding, Piece
from motley.daemon.weights.stored import Format
from motley.plugins.adapted_engine import AdapterProduct
from motley.plugins.engine import F32, EngineFactory, EngineOptions, Span
from tests.models.cases import LocalSession


def matrices(model: Model) -> list[W]:
    """The matrices of a model's layers that an adapter may add to, but for routers."""
    linear = [each for layer in model.layers for each in layer.operations if isinstance(each, Linear)]
    return [w for each in linear for w in each.ws if not w.stays_float]


def expert_matrices(model: Model) -> list[Tensor]:
    """The matrices of all routed experts."""
    return [
        Tensor(w.name, w.shape, w.parts).of(number)
        for each in model.operations
        if isinstance(each, Experts)
        for number in range(each.count)
        for one in each.body
        if isinstance(one, Linear)
        for w in one.ws
    ]


def head_of(model: Model) -> W:
    """The matrix of the head, which may be the embedding table."""
    (linear,) = (each for each in model.head if isinstance(each, Linear))
    return linear.ws[0]


def write_adapter(
    folder: Path,
    model: Model,
    seed: int,
    rank: int = 4,
    dtype: Any = np.float32,
    only: Collection[str] = (),
    change: Callable[[dict[str, Any]], None] = lambda tensors: None,
    head: bool = False,
    experts: bool = False,
    whole: Collection[str] = (),
    rows: bool = False,
    **config: Any,
) -> Path:
    """Write a random adapter of a model, in PEFT's format.

    Args:
        only: what the names of its modules end in; empty: all that there are.
        head: the head is adapted, too.
        experts: all routed experts are.
        whole: the modules in place of whose matrices it has others, of ``model.embed_tokens`` and ``lm_head``.
        rows: the rows that tokens begin with are added to.
        change: is called with the tensors before they are written.
        config: other keys of its config.
    """
    random = np.random.default_rng(seed)
    tensors = {}
    shapes = [(w.name.removesuffix(".weight"), w.shape) for w in matrices(model)]
    shapes += [("lm_head", head_of(model).shape)] * head
    if experts:
        shapes += [(each.name.removesuffix(".weight"), each.shape) for each in expert_matrices(model)]
    for module, (out, inner) in shapes:
        if not only or module.endswith(tuple(only)):
            a, b = random.normal(size=(rank, inner)) / inner**0.5, random.normal(size=(out, rank)) * 0.3
            tensors[f"base_model.model.{module}.lora_A.weight"] = a.astype(dtype)
            tensors[f"base_model.model.{module}.lora_B.weight"] = b.astype(dtype)
    if rows:
        vocabulary, width = model.embedding.shape
        module = model.embedding.name.removesuffix(".weight")
        a, b = random.normal(size=(rank, vocabulary)), random.normal(size=(width, rank)) * 0.3
        tensors[f"base_model.model.{module}.lora_embedding_A"] = a.astype(dtype)
        tensors[f"base_model.model.{module}.lora_embedding_B"] = b.astype(dtype)
    for module in whole:
        matrix = random.normal(size=model.embedding.shape) * (1.0 if module.startswith("model") else 0.1)
        tensors[f"base_model.model.{module}.weight"] = matrix.astype(dtype)
        config |= {"modules_to_save": [name.rpartition(".")[2] for name in whole]} | config
    change(tensors)
    targets = sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in tensors if ".lora_" in name})
    keys = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets} | config
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(keys))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def random_adapter(folder: Path, model: Model, seed: int, rank: int = 4, **more: Any) -> Adapter:
    """A random adapter of a model, which is written and read."""
    return read_adapter(write_adapter(folder, model, seed, rank, **more), model)


class Baked:
    """A model's weights with an adapter in them (`motley.daemon.weights.stored.Source`)."""

    def __init__(self, source: Any, adapter: Adapter, held: Formats) -> None:
        """`held`: what the base's matrices are rounded to before the adapter is added."""
        self._source = source
        self._adapter = adapter
        self._held = held

    def read(self, piece: Piece) -> F32:
        if piece.columns is None:
            values: F32 = self._source.read(piece)
            return values
        height, width = self._source.shape(piece.tensor)
        whole: npt.NDArray[np.floating[Any]] = self._source.read(Piece(piece.tensor, range(height), range(width)))
        if (instead := self._adapter.whole.get(piece.tensor)) is not None:
            rows, columns = (slice(own.start, own.stop) for own in piece.ranges)
            return np.ascontiguousarray(instead[rows, columns], np.float32)
        held = self._held.get(piece.tensor, FLOATS)
        if not held.encoding.float_bytes:
            whole = rounded(whole.astype(np.float32), held)
        if product := self._adapter.products.get(piece.tensor):
            whole = whole + product.up.astype(np.float64) @ product.down.astype(np.float64)
        rows, columns = (slice(own.start, own.stop) for own in piece.ranges)
        return np.ascontiguousarray(whole[rows, columns], np.float32)

    def rows(self, name: str, ids: Sequence[int]) -> F32:
        own = self._adapter.embedding
        rows: F32 = self._source.rows(name, ids).astype(np.float32)
        if own is None or "embed_tokens." not in name:
            return rows
        if isinstance(own, AdapterProduct):
            return rows + (own.up.astype(np.float64) @ own.down[:, ids]).T.astype(np.float32)
        return own[ids].astype(np.float32)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


def rounded(values: F32, held: Format) -> F32:
    """A matrix, rounded to codes."""
    codes, scales = quantise(values, held.block, held.encoding)
    if held.encoding is Encoding.INT4:
        codes = unpack(codes)
    blocks = codes.reshape(len(values), -1, held.block).astype(np.float32) - ZERO_POINT[held.encoding]
    return (blocks * scales[..., None]).reshape(values.shape)


@contextmanager
def baked(folder: Path, adapter: Adapter, encoding: str = "fp32") -> Iterator[OpenModel]:
    """A model with an adapter in its weights; these are floats."""
    with open_model(folder) as opened:
        source: Any = Baked(opened.source, adapter, units(opened.model, encoding, 32).held)
        yield OpenModel(opened.model, source, opened.stored)


class AdaptedSession(LocalSession):
    """A model on ranks of this process, with slots for adapters."""

    def __init__(
        self,
        model: Path | OpenModel,
        factory: EngineFactory | Sequence[EngineFactory],
        shares: Sequence[Share],
        folder: Path,
        quantisation: str = "fp32",
        *,
        slots: int = 1,
        options: EngineOptions | None = None,
        exact: bool = False,
        hands: bool = False,
    ) -> None:
        self.declared: list[Declared] = []
        self._embeddings: dict[int, Beginnings | None] = {}
        """Of the adapters in slots."""

        def declare(*of: Any, **more: Any) -> Declared:
            self.declared.append(build_rank_graph(*of, **more, adapters=slots, hands=hands))
            return self.declared[-1]

        super().__init__(model, factory, shares, folder, quantisation, options=options, exact=exact, declare=declare)

    def load(self, slot: int, adapter: Adapter) -> None:
        """Put an adapter in a slot of every rank."""
        for engine, declared in zip(self.engines, self.declared, strict=True):
            prepared = engine.prepare_adapter(*cut_adapter(adapter, declared.adapted))  # type: ignore[attr-defined]
            engine.load_adapter(slot, prepared)  # type: ignore[attr-defined]
        self._embeddings[slot] = beginnings(adapter.embedding)

    def rows(self, spans: Sequence[Span], tokens: Sequence[int]) -> F32:
        hidden = super().rows(spans, tokens)
        begin = 0
        for span in spans:
            own = slice(begin, begin + span.rows)
            if (embedding := self._embeddings.get(span.adapter)) is not None:
                embedding.change(hidden[own], tokens[own])
            begin += span.rows
        return hidden

    def unload(self, slot: int) -> None:
        """Forget an adapter on every rank."""
        for engine in self.engines:
            engine.unload_adapter(slot)  # type: ignore[attr-defined]

    def adapted(
        self, tokens: Sequence[int], slot: int, position: int = 0, sequence: int = 0, halved: bool = False
    ) -> F32:
        """f32[T, V]: the logits of all of some tokens with the adapter in a slot; 0: with none."""
        span = self.sequences.span(sequence, position, len(tokens), len(tokens))
        return self.run([span._replace(adapter=slot)], tokens, halved)
