"""What precision costs: the error that each wire format adds to a sum over ranks.

The sums are real: ranks are threads of this process, with a mesh on loopback. Two kinds of activations are summed:
*gaussian*, and *heavy-tailed* (Student's t with 3 degrees of freedom), because a few channels of a language model are
many times larger than the others, and a large value takes the precision of those that share its scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from motley.bench.meshes.thread_mesh import thread_mesh
from motley.transport import Communicator, WireFormat
from motley.transport.formats import Codecs

ELEMENTS = 1 << 18
ACTIVATIONS = ("gaussian", "heavy-tailed")

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class FormatError:
    """Errors are against float64 sums of the same float32 terms, in units of these sums' root mean square.

    `bytes_per_value`: of a float32 on the wire.
    """

    format: str
    activations: str
    mean_error: float
    max_error: float
    bytes_per_value: float


def measure_wire_formats(ranks: int) -> list[FormatError]:
    """All-reduce random activations over `ranks` in every format."""
    terms = {kind: [_activations(kind, rank) for rank in range(ranks)] for kind in ACTIVATIONS}
    exact = {kind: np.sum(arrays, axis=0, dtype=np.float64) for kind, arrays in terms.items()}
    errors = []
    for wire_format in WireFormat:
        sums = _all_reduce(wire_format, terms, ranks)
        _, wire, _ = Codecs(wire_format).of("float32")
        for kind in ACTIVATIONS:
            error = np.abs(sums[kind] - exact[kind]) / np.sqrt(np.mean(exact[kind] ** 2))
            errors.append(
                FormatError(
                    format=wire_format,
                    activations=kind,
                    mean_error=float(error.mean()),
                    max_error=float(error.max()),
                    bytes_per_value=wire.size(ELEMENTS) / ELEMENTS,
                )
            )
    return errors


def _activations(kind: str, rank: int) -> Floats:
    rng = np.random.default_rng([ACTIVATIONS.index(kind), rank])
    values = rng.standard_normal(ELEMENTS) if kind == "gaussian" else rng.standard_t(3, ELEMENTS)
    return values.astype(np.float32)


def _all_reduce(wire_format: WireFormat, terms: dict[str, list[Floats]], ranks: int) -> dict[str, Floats]:
    """The sums as rank 0 gets them."""

    def work(communicator: Communicator) -> dict[str, Floats]:
        sums = {kind: arrays[communicator.rank].copy() for kind, arrays in terms.items()}
        for buffer in sums.values():
            communicator.all_reduce(buffer)
        return sums

    with thread_mesh(ranks, wire_format) as on_every_rank:
        return on_every_rank(work)[0]
