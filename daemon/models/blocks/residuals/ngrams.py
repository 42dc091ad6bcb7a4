"""Rows by the last tokens, from tables of billions of numbers, which a layer's residual streams take in (Qwen4-Exp).

A layer is given rows of a table by hashes of its tokens' n-grams (`HashedRows`): they are read from the files, and are
in no rank's memory. Of these every rank makes a key for each stream and a value; a stream gets as much of the value as
the key fits what it has. What streams get is convolved over some rows before besides, which are a state of the layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count, islice
from math import isqrt

from motley.daemon.models.blocks.residuals.gated_streams import GatedStreams
from motley.daemon.models.blocks.shape import Shape
from motley.daemon.models.description.axes import Axis, Kind, Value, W
from motley.daemon.models.description.hashed_rows import HashedRows
from motley.daemon.models.description.writing import Writer
from motley.daemon.models.keys import Keys
from motley.daemon.weights.places import FLAT, Part

_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Of SplitMix64 (Steele, Lea and Flood 2014, https://doi.org/10.1145/2660193.2660195)."""
_APART = 10007
"""How far seeds of layers are from each other."""
_BITS = (1 << 64) - 1
MOST_HEADS, MOST_PARTS, MOST_WORDS = 4096, 1 << 16, 1 << 31
"""Of all tables together, and about how many rows one of a head may have: a damaged file could keep a reader busy."""


@dataclass(frozen=True)
class NGrams:
    """What layers are given by n-grams.

    Attributes:
        tables: of the layers that are given rows, in their order.
        taps, dilation: of the convolution.
    """

    shape: Shape
    streams: GatedStreams
    tables: tuple[HashedRows, ...]
    taps: int
    dilation: int

    @property
    def layers(self) -> list[int]:
        """Those that are given rows."""
        return [table.layer for table in self.tables]

    @property
    def told(self) -> list[str]:
        """Tensors that files may have of tables and that follow from the keys."""
        names = "layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"
        return [f"{_module(number)}.{name}" for number in self.layers for name in names]

    def given(self, number: int) -> Value:
        """What a layer is given, f32[T, E]."""
        return Value(f"layers.{number}.given", Axis(Kind.PLAIN, self.tables[0].width, "ple_embed_dim"))

    def take_in(self, writer: Writer, number: int, x: Value) -> Value:
        """f32[T, S D] -> f32[T, S D]: streams with what they get of what a layer is given."""
        at, module, given = f"layers.{number}.ngrams", f"model.layers.{number}.ple", self.given(number)
        residual, along, normed = self.shape.residual, self.streams.along, self.streams.normed
        (keys,) = writer.linear(f"{at}.keys", given, W(f"{module}.key_proj.weight", along, given.axis))
        (value,) = writer.linear(f"{at}.value", given, W(f"{module}.value_proj.weight", residual, given.axis))
        keys = normed(writer, f"{at}.keys.norm", keys, f"{module}.norm_key.weight")
        queries = normed(writer, f"{at}.queries.norm", x, f"{module}.norm_query.weight")
        own = writer.match_streams(f"{at}.own", queries, keys, value)
        taps = Axis(Kind.PLAIN, self.taps, "ple_conv_kernel_size")
        stored = Part(f"{module}.conv1d.weight{FLAT}", (along.size, self.taps))
        w = W(f"{module}.conv1d_taps.weight", along, taps, parts=(stored,))
        seen = normed(writer, f"{at}.own.norm", own, f"{module}.norm_conv.weight")
        state = self.shape.layers + number  # the layer's number is that of its other state
        convolved = writer.dilated_convolution(f"{at}.convolved", state, seen, w, self.dilation)
        both = writer.add(own, convolved, name=f"{at}.both")
        return writer.add(x, both, name=f"{at}.residual")


def read_ngrams(keys: Keys, shape: Shape, streams: GatedStreams, end: int | None) -> NGrams | None:
    """What keys say of n-grams; None: layers are given nothing.

    Args:
        end: the token that ends a text; None: the keys name none.

    Raises:
        ConfigError: naming the key that is missing or not possible.
    """
    numbers = keys.get("ple_layer_ids") or []
    known = range(1, shape.layers + 1)
    if not isinstance(numbers, list) or not all(type(each) is int and each in known for each in numbers):
        raise keys.refusal("ple_layer_ids", f"a list of layers, counted from 1 to {shape.layers}")
    if not numbers:
        return None
    longest, of_length = keys.size("ngram_size", 3, least=2), keys.size("heads_per_ngram", 8)
    heads, width = (longest - 1) * of_length, keys.size("ple_embed_dim", shape.hidden)
    if width % heads:
        raise keys.refusal("ple_embed_dim", f"a multiple of {heads}, (ngram_size - 1) * heads_per_ngram")
    if end is None:
        raise keys.refusal("eos_token_id", "a token, as n-grams end with it")
    layers = sorted({each - 1 for each in numbers})
    if heads * len(layers) > MOST_HEADS:
        raise keys.refusal("heads_per_ngram", f"at most {MOST_HEADS} heads of all lengths and layers together")
    base = keys.size("ngram_vocab_size_base", 20_000_000, most=MOST_WORDS)
    padded = keys.size("make_ngram_vocab_size_divisible_by", 128, most=MOST_WORDS)
    parts = keys.size("split_ngram_parts", 512, most=MOST_PARTS // len(layers))
    sizes = [*islice(filter(_is_prime, count(base)), heads * len(layers))]
    columns = Axis(Kind.PLAIN, width // heads, "ple_embed_dim / heads")
    seed = keys.size("seed", 1234, least=0)
    tables = []
    for place, number in enumerate(layers):
        own = tuple(sizes[place * heads : (place + 1) * heads])
        rows = -(-sum(own) // padded) * padded
        name = f"{_module(number)}.ngram_embedding"
        multipliers = _multipliers(shape.vocabulary, longest, seed + _APART * place)
        tables.append(HashedRows(number, _parts(name, rows, columns, parts), multipliers, own, end))
    taps = keys.size("ple_conv_kernel_size", 4)
    return NGrams(shape, streams, tuple(tables), taps, longest)


def _module(number: int) -> str:
    """What the names of tensors of a layer's table begin with."""
    return f"model.layers.{number}.ple.ple_embedding"


def _parts(name: str, rows: int, columns: Axis, count: int) -> tuple[W, ...]:
    """A table of so many rows in parts, the last of which may be shorter, as files have it; or whole."""
    each = -(-rows // count)
    return tuple(
        W(
            f"{name}.shard_{number}.weight",
            Axis(Kind.PLAIN, min(each, rows - number * each), "rows of n-grams"),
            columns,
            parts=(Part(f"{name}.weight", (rows, columns.size), number * each),),
        )
        for number in range(-(-rows // each))
    )


def _multipliers(words: int, longest: int, seed: int) -> tuple[int, ...]:
    """Odd numbers, one for each token of an n-gram, none of whose products with a token is beyond 63 bits."""
    half = max(1, ((1 << 63) - 1) // words // 2)
    return tuple(2 * (_mixed((seed + _GOLDEN * number) & _BITS) % half) + 1 for number in range(1, longest + 1))


def _mixed(number: int) -> int:
    """The next number of SplitMix64 after a state of 64 bits."""
    number = (number + _GOLDEN) & _BITS
    number = ((number ^ (number >> 30)) * _FIRST) & _BITS
    number = ((number ^ (number >> 27)) * _SECOND) & _BITS
    return number ^ (number >> 31)


def _is_prime(number: int) -> bool:
    return number == 2 or (number % 2 == 1 < number and all(number % each for each in range(3, isqrt(number) + 1, 2)))
