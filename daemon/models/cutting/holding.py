"""How a session holds each matrix of a model, from what was asked for and how the checkpoint stores it.

Asked for ``fp32``, ``fp16``, ``int8`` or ``int4``, all matrices are held alike; codes of the checkpoint are carried
over where that format can express them. Asked for ``stored``, a matrix keeps the codes of its checkpoint, bit for bit,
and one that has none is held in int8: floats (such as a head, which is read whole for every token: int8 is a quarter of
what it would be in float32, and its error is a sixteenth of int4's), and formats whose blocks are not affine with whole
zero points. Matrices that the graph fuses into one are held in the narrowest format that expresses all of them. A rank
whose engine would widen FP16 when it loads is given FP32: `for_engine`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import gcd

from motley.daemon.models.description.model import Model
from motley.daemon.models.description.operations.rows import Linear
from motley.daemon.models.keys import ConfigError
from motley.daemon.weights.spec import Encoding
from motley.daemon.weights.stored import Format
from motley.plugins.installed import abilities
from motley.protocol import BLOCKS

STORED = "stored"
QUANTISATIONS = (*Encoding, STORED)
UNQUANTISED = tuple(encoding for encoding in Encoding if encoding.float_bytes)


FLOATS = Format(Encoding.FP32, called="floats")

_ERROR = {Encoding.INT8: "0.5", Encoding.INT4: "9"}
"""What values lose as a rule, in percent of their root mean square; ``docs/formats.md`` has it for every format."""

Formats = Mapping[str, Format]
"""By the name of a tensor."""


def for_engine(quantisation: str, engine: str) -> str:
    """How a rank with this engine holds matrices in a session of this quantisation. Its units are the same.

    Raises:
        EngineError: no such engine.
    """
    return Encoding.FP32 if quantisation == Encoding.FP16 and not abilities(engine).keeps_fp16 else quantisation


def has_floats(model: Model, quantisation: str) -> bool:
    """Whether some of the matrices that a model multiplies with are held as floats: routers always are."""
    return quantisation in UNQUANTISED or any(
        w.stays_float for each in model.operations if isinstance(each, Linear) for w in each.ws
    )


def wanted_format(parts: Sequence[Format], quantisation: str, block: int) -> Format:
    """How matrices that are fused into one should be held, before cuts are taken into account.

    Args:
        parts: how the checkpoint stores them, which counts for `STORED` alone.
        quantisation: one of `QUANTISATIONS`.
        block: for what is quantised while loading.
    """
    if quantisation != STORED:
        encoding = Encoding(quantisation)
        return Format(encoding, 0 if encoding.float_bytes else block)
    encodings = {part.encoding for part in parts}
    if Encoding.FP32 in encodings:
        return Format(Encoding.INT8, block)
    encoding = Encoding.INT8 if Encoding.INT8 in encodings else Encoding.INT4
    return Format(
        encoding, gcd(*(part.block for part in parts)), any(part.zeros and part.encoding is encoding for part in parts)
    )


def blocks_together(form: Format) -> int:
    """How many neighbouring blocks no cut may part: a row of int4 zero points is whole bytes."""
    return 2 if form.zeros and form.encoding is Encoding.INT4 else 1


def narrowed(wanted: Format, width: int, what: str) -> Format:
    """`wanted` with blocks that cuts after any multiple of `width` columns leave whole: the largest of `BLOCKS`.

    Blocks are cut into narrower ones of the same scale, which express the wider ones.

    Args:
        what: the name of `width`, for the message.

    Raises:
        ConfigError: there is no such block.
    """
    if wanted.encoding.float_bytes:
        return wanted
    fitting = [size for size in BLOCKS if wanted.block % size == 0 and width % (size * blocks_together(wanted)) == 0]
    if not fitting:
        least = BLOCKS[0] * blocks_together(wanted)
        raise ConfigError(
            f"{wanted.encoding} needs {what} to be a multiple of {least}, and it is {width}; use fp32 for this model"
        )
    return Format(wanted.encoding, fitting[-1], wanted.zeros)


def told(held: Formats, stored: Formats) -> str:
    """How matrices are held, for people: ``"154 GPTQ int4 as stored, 1 F16 converted to int8 (error about 0.5 %)"``.

    Args:
        stored: those that are absent are floats.
    """

    def become(form: Format, before: Format) -> str:
        if form.expresses(before):
            return "as stored"
        if form.encoding.float_bytes:
            return f"in {form.encoding}"
        return f"converted to {form.encoding} (error about {_ERROR[form.encoding]} %)"

    befores = {name: stored.get(name, FLOATS) for name in held}
    counts = Counter(f"{befores[name].called} {become(form, befores[name])}" for name, form in held.items())
    return ", ".join(f"{count} {what}" for what, count in counts.most_common())
