"""The graph of one whole expert, or of a slice of one, for whoever holds experts that the ranks do not have."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import onnx

from motley.daemon.models.cutting.units import Units
from motley.daemon.models.description.axes import Axis, Kind
from motley.daemon.models.description.model import Model
from motley.daemon.models.graph.adapted_parts import Parts
from motley.daemon.models.graph.nodes import Nodes
from motley.daemon.models.graph.protos import whole_model
from motley.daemon.models.graph.rank_graph import expert_body
from motley.daemon.models.keys import ConfigError
from motley.daemon.weights.spec import SHARE_FILE, Placed, lay_out
from motley.plugins.expert_engine import ExpertGraph


@dataclass(frozen=True)
class DeclaredExpert:
    """The graph of an expert, or of a slice of one, and its weights, declared before one was read."""

    proto: onnx.ModelProto
    """f32[N, hidden] -> f32[N, hidden]."""
    weights: list[Placed]
    share_bytes: int
    """The share file's size."""
    hidden: int
    """D, elements of the residual."""
    adapters: int = 0
    """See `ExpertGraph.adapters`."""
    adapted: Parts = field(default_factory=dict)
    """What is here of the matrices that adapters may add to, by the parts' names in the graph's Adapted nodes."""

    @property
    def weight_bytes(self) -> int:
        """All that its weights take, without alignment."""
        return sum(place.weight.all_bytes for place in self.weights)

    def bind(self, share_file: Path) -> ExpertGraph:
        """The graph with its weights in `share_file`, which is called `SHARE_FILE` in a folder of its own."""
        assert share_file.name == SHARE_FILE, share_file
        return ExpertGraph(self.proto, share_file, self.hidden, self.adapters)


class _SliceHolding:
    """What a slice of an expert has of each axis: see `motley.daemon.models.graph.nodes.Holding`."""

    def __init__(self, cut: Units, units: range) -> None:
        self._cut = cut
        self._units = units

    def ranges(self, axis: Axis) -> list[range]:
        """The elements of an axis."""
        return [self._cut.columns(self._units, axis.size) if axis.kind is Kind.MLP else range(axis.size)]

    def leaves(self, axis: Axis) -> dict[range, range]:
        """A slice makes a single term."""
        return dict(zip([self._units], self.ranges(axis), strict=True))


def build_expert_graph(
    model: Model, cut: Units, layer: int, index: int, slice_: int = 0, slices: int = 1, adapters: int = 0
) -> DeclaredExpert:
    """Declare one expert, f32[N, D] -> f32[N, D], or one slice of it, whose result is a term of a sum over all slices.

    Args:
        cut: how the model's matrices are held, as `units` gives it: values and blocks are those of any slice.
        slice_, slices: the number of the slice, and into how many the expert is cut: at most `cut.mlp`.
        adapters: how many slots for adapters there are, which may add to each of its products.

    Raises:
        ConfigError: the model has no such expert, or it has fewer units than slices.
    """
    experts = model.experts_of(layer)
    if experts is None or not 0 <= index < experts.count:
        raise ConfigError(f"this model has no expert {index} in layer {layer} ({model.family})")
    if not slices <= cut.mlp:
        raise ConfigError(f"an expert of {cut.mlp} units cannot be cut in {slices} slices ({model.family})")
    units = range(cut.mlp * slice_ // slices, cut.mlp * (slice_ + 1) // slices)
    nodes = Nodes(_SliceHolding(cut, units), cut.held, index)
    nodes.adapts = adapters > 0
    graph = expert_body(nodes, experts)
    if slices > 1:
        graph.name += f".slice.{slice_}.of.{slices}"
    placed, share_bytes = lay_out(nodes.weights)
    graph.initializer.extend(nodes.initializers(placed))
    return DeclaredExpert(whole_model(graph), placed, share_bytes, model.expert_width, adapters, nodes.adapted)
