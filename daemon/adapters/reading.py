"""Adapters, in PEFT's format or in a GGUF file: low-rank matrices for some of a model's, checked against it.

What an adapter adds to the product with a matrix W is ``scale * B @ A``. Every tensor of its file must be a matrix of
one of the model's, of the right shape, and every matrix that its config promises must be there: an adapter of another
model, or half a one, would change texts without a word.

A model's description has matrices by themselves that files may keep in one, say queries, keys and values. An adapter
has one A for all of them then, and its B is cut as the base's rows are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from hashlib import sha256
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from motley.daemon.adapters.config import CONFIG, Said, Sides, read_config
from motley.daemon.adapters.gguf_adapter import GGUF, gguf_adapter, read_adapter_header
from motley.daemon.adapters.peft_tensors import peft_tensors
from motley.daemon.adapters.stacked_experts import experts_apart
from motley.daemon.adapters.whole_tables import Tables, whole_tables
from motley.daemon.models.description.axes import W
from motley.daemon.models.description.model import HEAD, Model
from motley.daemon.models.description.operations.experts import Experts
from motley.daemon.models.description.operations.rows import HeadLinear, Linear
from motley.daemon.weights.checkpoints.checkpoint import CheckpointError, refuse_all
from motley.daemon.weights.places import Tensor
from motley.daemon.weights.spec import Piece
from motley.plugins.adapted_engine import AdapterProduct, Factor

WEIGHTS = "adapter_model.safetensors"
PIECE_BYTES = 8 << 20
"""Of a file that are read at once."""
_WEIGHT = ".weight"
_ROWS = "rows"
"""What products call what is added to the rows that tokens begin with; no tensor of a model is called so."""


@dataclass(frozen=True)
class Adapter:
    """An adapter of a model.

    Attributes:
        fingerprint: hex SHA-256 of its config and its matrices; equal where both are equal to the byte.
        products: what it adds to the products with the model's matrices, by the names of their tensors.
        whole: what is multiplied with in place of the head's matrix, [N, K], by the name of its tensor.
        embedding: [vocabulary, D], the rows that tokens begin with in place of the model's; or what is added to these,
            as if tokens were multiplied with them: its down is [R, vocabulary], its up [D, R]; None: nothing.
    """

    fingerprint: str
    products: Mapping[str, AdapterProduct]
    whole: Mapping[str, Factor] = field(default_factory=dict)
    embedding: Factor | AdapterProduct | None = None

    @cached_property
    def bytes(self) -> int:
        """How much memory its matrices take, if a rank has all of them."""
        arrays = {id(factor): factor.nbytes for product in self._low_rank for factor in product}
        tables = [*self.whole.values()]
        if isinstance(self.embedding, np.ndarray):
            tables.append(self.embedding)
        return sum(arrays.values()) + sum(each.nbytes for each in tables)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that its matrices have, the smallest one first."""
        return tuple(sorted({len(product.down) for product in self._low_rank}))

    @property
    def _low_rank(self) -> list[AdapterProduct]:
        own = [self.embedding] if isinstance(self.embedding, AdapterProduct) else []
        return [*self.products.values(), *own]


class _Unlike(CheckpointError):
    """Matrices are of a matrix of another shape."""


@dataclass(frozen=True)
class _Place:
    """A matrix of the model, as the rows of what a module of the base multiplies with."""

    tensor: str
    columns: int
    rows: slice | npt.NDArray[np.int64]
    height: int
    """Rows of all that the module multiplies with."""
    kind: str = ""
    """What the names of its A and B begin with."""


def read_adapter(
    place: Path, model: Model, alive: Callable[[], None] = lambda: None, most: int | None = None
) -> Adapter:
    """Read an adapter of a model.

    Args:
        place: a folder in PEFT's format, or a GGUF file.
        alive: is called after each piece that the disk has given.
        most: bytes that its files may have; None: any number.

    Raises:
        ConfigError: its config cannot be read, or asks for something that is not computed here.
        CheckpointError: its file is broken, is too large, or does not fit the model or the config; the message names
            the tensors.
    """
    gguf = place.suffix == GGUF
    file = place if gguf else place / WEIGHTS
    config = None if gguf else read_config(place / CONFIG)
    header = read_adapter_header(file) if gguf else None  # before all of what may be a model is read
    try:
        told = (place / CONFIG).read_bytes() if config else b""
        content = _content(file, alive, None if most is None else most - len(told))
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be read: {error.strerror or error}") from error
    if header:
        tables = Tables()
        products = _products(file, *gguf_adapter(file, header, content, model), model)
    elif config:
        sides, given = peft_tensors(file, content)
        tables = whole_tables(file, given, config, model, partial(_own_name, model))
        sides = experts_apart(file, sides, config.parameters, model, partial(_own_name, model))
        tied = [HEAD.removesuffix(_WEIGHT)] if config.tied and model.tied else []  # with embeddings that are adapted
        products = _products(file, sides, config, model, tied)
    digest = sha256(len(told).to_bytes(8, "little") + told)
    digest.update(content.data)
    return Adapter(digest.hexdigest(), *_together(file, products, tables, model))


def _together(
    file: Path, products: dict[str, AdapterProduct], tables: Tables, model: Model
) -> tuple[Mapping[str, AdapterProduct], Mapping[str, Factor], Factor | AdapterProduct | None]:
    """What is added to products, what is in place of the head's matrix, and what tokens begin with.

    Raises:
        CheckpointError: a table is replaced, and added to besides.
    """
    rows, head = products.pop(_ROWS, None), dict(tables.head)
    if twice := products.keys() & head.keys():
        raise CheckpointError(f"{file}: the head has a whole matrix, and LoRA's for {min(twice)!r} besides")
    if rows is not None and tables.embedding is not None:
        raise CheckpointError(f"{file}: the embeddings are whole, and LoRA's for {model.embedding.name!r} are besides")
    for tensor, base in tables.head_base.items():
        head[tensor] = base + _dense(products.pop(tensor))
    if rows is not None and tables.embedding_base is not None:
        return products, head, tables.embedding_base + _dense(rows).T
    return products, head, tables.embedding if rows is None else rows


def _dense(product: AdapterProduct) -> npt.NDArray[np.float32]:
    return product.up.astype(np.float32) @ product.down.astype(np.float32)


def expert_tensors(model: Model) -> dict[str, tuple[int, int]]:
    """The matrices of a model's routed experts, by the names by which `Adapter.products` has them: each with the layer
    and the number of its expert."""
    return {tensor.name: key for key, tensor in _expert_matrices(model)}


def _content(file: Path, alive: Callable[[], None], most: int | None) -> npt.NDArray[np.uint8]:
    """u8[bytes]: what a file has.

    Raises:
        CheckpointError: that is more than `most` bytes.
    """
    with file.open("rb", buffering=0) as opened:
        size = os.fstat(opened.fileno()).st_size
        if most is not None and size > most:
            raise CheckpointError(
                f"{file} has {size} bytes, and there is room for {most} of an adapter: if it is one, start the session"
                " with a larger --adapter-rank"
            )
        content = np.empty(size, np.uint8)
        done = 0
        while read := opened.readinto(content.data[done : done + PIECE_BYTES]):
            done += read
            alive()
    return content[:done]


def _products(
    file: Path, sides: Sides, said: Said, model: Model, also: Collection[str] = ()
) -> dict[str, AdapterProduct]:
    """What the matrices of modules, each with its A and B, add to the products with the model's matrices.

    Args:
        also: modules that may have some, whatever is said of them.
    """
    places = _places(model)
    problems = []
    strange = 0
    products: dict[str, AdapterProduct] = {}
    for module, pair in sides.items():
        own = _own_name(model, module)
        if own not in places:
            problems.append(f"{file}: {said.called(module, next(iter(pair)))!r}: {_why_not(model, own)}")
            strange += 1
            continue
        if not said.adapts(module) and own not in also:
            problems.append(f"{file}: {said.called(module, next(iter(pair)))!r} is not among what {CONFIG} targets")
            continue
        try:
            made = _product(file, module, pair, said, places[own])
        except CheckpointError as error:
            problems.append(str(error))
            strange += isinstance(error, _Unlike)
            continue
        if twice := made.keys() & products.keys():
            problems.append(f"{file}: two tensors are for {min(twice)!r}: {said.called(module, 'A')!r} is the second")
        products |= made
    problems += [
        f"{file}: tensor {said.called(module, places[_own_name(model, module)][0].kind + 'A')!r} is absent, which"
        f" {CONFIG} targets"
        for module in _missing(model, said, sides)
    ]
    if 1 < len(sides) == strange:
        problems.insert(0, f"{file}: is an adapter of another model: nothing in it fits this one ({model.family})")
    refuse_all(problems)
    if not products:
        raise CheckpointError(f"{file}: the adapter has no matrices")
    return products


def _product(
    file: Path, module: str, pair: Mapping[str, Factor], said: Said, places: list[_Place]
) -> dict[str, AdapterProduct]:
    """What a module's A and B add, for each of the model's matrices that it multiplies with.

    Raises:
        _Unlike: they are of another matrix.
        CheckpointError: they do not fit each other, or are broken.
    """
    rank = said.rank_of(module)
    kind = places[0].kind
    of_a, of_b = f"{kind}A", f"{kind}B"
    for side in (of_a, of_b):
        if side not in pair:
            raise CheckpointError(f"{file}: tensor {said.called(module, side)!r} is absent")
    rows, columns = places[0].height, places[0].columns
    a, b = pair[of_a], pair[of_b]
    if a.ndim == b.ndim == 2 and (len(b), a.shape[1]) == (rows, columns) and (len(a), b.shape[1]) != (rank, rank):
        told = f"have rank {len(a)}, and {CONFIG} says {rank}"
        if len(a) != b.shape[1]:
            told = f"do not fit each other: {of_a} has rank {len(a)}, {of_b} has rank {b.shape[1]}"
        raise CheckpointError(f"{file}: the matrices of {module!r} {told}")
    for side, shape, what in ((of_a, (rank, columns), "rows"), (of_b, (rows, rank), "columns")):
        if pair[side].shape != shape:
            raise _Unlike(
                f"{file}: tensor {said.called(module, side)!r} has shape {list(pair[side].shape)}; the model and"
                f" the config make it {list(shape)}, {rank} {what} being the adapter's rank"
            )
    down, up = pair[of_a], _scaled(pair[of_b], said.scale_of(module))
    for side, factor in ((of_a, down), (of_b, up)):
        if not np.isfinite(factor).all():
            raise CheckpointError(f"{file}: tensor {said.called(module, side)!r} has values that are no finite numbers")
    return {place.tensor: AdapterProduct(down, up[place.rows]) for place in places}


def _scaled(factor: Factor, scale: float) -> Factor:
    """A matrix times a number: of its own type if that holds every value exactly, else float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        exact = factor.astype(np.float32) * np.float32(scale)
        narrow = exact.astype(factor.dtype)
    return narrow if np.array_equal(narrow.astype(np.float32), exact) else exact


def _places(model: Model) -> dict[str, list[_Place]]:
    """What may be adapted: by the names of the base's modules, the model's matrices that these multiply with."""
    vocabulary, width = model.embedding.shape
    begin = _Place(_ROWS, vocabulary, slice(0, width), width, "embedding_")
    places: dict[str, list[_Place]] = {model.embedding.name.removesuffix(_WEIGHT): [begin]}
    tensors = ((module, Tensor(w.name, w.shape, w.parts)) for module, w in _matrices(model))
    experts = ((each.name.removesuffix(_WEIGHT), each) for _, each in _expert_matrices(model))
    for module, each in chain(tensors, experts):
        name, (height, width), parts = each.name, each.shape, each.parts
        places[module] = [_Place(name, width, slice(0, height), height)]
        for part in parts:
            if part.tensor.endswith("]"):  # of stacked experts, transposed or not
                own = slice(part.start, part.start + height * part.step, part.step)
                places.setdefault(part.tensor, []).append(_Place(name, width, own, part.shape[part.transposed]))
            elif not part.transposed and part.tensor.endswith(_WEIGHT):
                stretches = (piece.rows for piece in part.pieces(Piece(name, range(height))))
                rows = np.concatenate([np.arange(own.start, own.stop, own.step) for own in stretches])
                place = _Place(name, width, rows, part.shape[0])
                places.setdefault(part.tensor.removesuffix(_WEIGHT), []).append(place)
    return places


def _missing(model: Model, said: Said, given: Collection[str]) -> Iterator[str]:
    """The modules that a config targets, and that an adapter has nothing for; routers may be no modules of the base."""
    known = {_own_name(model, module) for module in given}
    for module, w in [(model.embedding.name.removesuffix(_WEIGHT), model.embedding), *_matrices(model)]:
        # Where a family has a fused matrix, that is a module of the base, and the matrices in it are none.
        own = {part.tensor.removesuffix(_WEIGHT) for part in w.parts} or {module}
        if w.stays_float or not known.isdisjoint([*own, module]):
            continue
        prefixes = ("model.", *model.prefixes)
        inner = [name.removeprefix("model.") for name in sorted(own) if name.startswith("model.")]
        spelled = [prefix + name for name in inner for prefix in prefixes] or own
        yield from list(filter(said.promises, spelled))[:1]
    experts = [each.name.removesuffix(_WEIGHT) for _, each in _expert_matrices(model)]
    if not known.isdisjoint(experts):  # a base that keeps them stacked has no such modules
        yield from (each for each in experts if each not in known and said.promises(each))


def _matrices(model: Model) -> Iterator[tuple[str, W]]:
    """The matrices of the layers' products, but for those of routed experts, and that of the head, by their modules: a
    head has its own also where its matrix is the embedding table."""
    for layer in model.layers:
        for each in layer.operations:
            if isinstance(each, Linear):
                yield from ((w.name.removesuffix(_WEIGHT), w) for w in each.ws)
    for each in model.head:
        if isinstance(each, Linear):
            yield from ((HEAD.removesuffix(_WEIGHT), w) for w in each.ws)


def _expert_matrices(model: Model) -> Iterator[tuple[tuple[int, int], Tensor]]:
    """The matrices of all routed experts, each with the layer and the number of its expert."""
    for each in model.operations:
        if isinstance(each, Experts):
            tensors = [Tensor(w.name, w.shape, w.parts) for one in each.body if isinstance(one, Linear) for w in one.ws]
            yield from (((each.layer, number), own.of(number)) for number in range(each.count) for own in tensors)


def _why_not(model: Model, module: str) -> str:
    """Why a module, which is none of those that may be adapted, is none."""
    by_heads = (each.w for layer in model.layers for each in layer.operations if isinstance(each, HeadLinear))
    if any(module == part.tensor.removesuffix(_WEIGHT) for w in by_heads for part in w.parts):
        return "adapters for what is multiplied head by head are not computed here"
    return f"this model ({model.family}) has no such matrix in its layers or head"


def _own_name(model: Model, module: str) -> str:
    """The name of a base's module in a model that may be a part of a larger one."""
    for prefix in model.prefixes:
        if module.startswith(prefix):
            return "model." + module.removeprefix(prefix)
    return module
