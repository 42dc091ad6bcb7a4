"""What a model costs, in the planner's terms: bytes per unit, from its description alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from itertools import groupby

from motley.daemon.models.cutting.holding import FLOATS, Formats, told
from motley.daemon.models.cutting.states import state_spec
from motley.daemon.models.cutting.units import Units, units
from motley.daemon.models.description.axes import Axis, Heads, Kind, W
from motley.daemon.models.description.model import Model, parameters
from motley.daemon.models.description.operations import Operation, weights_of
from motley.daemon.models.description.operations.attention import Attend, Choose
from motley.daemon.models.description.operations.experts import Experts
from motley.daemon.models.description.operations.recurrence import Recurrence
from motley.daemon.models.description.operations.rows import HeadLinear, Linear
from motley.daemon.weights.places import numbered
from motley.daemon.weights.spec import Piece, Weight
from motley.daemon.weights.stored import Format
from motley.plugins.engine import EngineOptions, cached_bytes
from motley.protocol import mesh_pb2

RUNTIME_BYTES = 192 << 20
"""An interpreter with the ONNX Runtime engine (75 MiB were seen on Linux), what its allocators keep after loading and
long prompts, and what moving a cache that grows takes for a moment (together 100 MiB at TinyLlama-1.1B's size)."""
EXPERT_BYTES = 192 << 10
"""What the ONNX Runtime engine takes for an expert of a layer besides its weights: a session (160 KiB were seen)."""


def profile(
    model: Model,
    quantisation: str,
    block: int,
    stored: Formats | None = None,
    exact: bool = False,
    beside: Collection[str] = (),
    cache_format: str = "fp32",
) -> mesh_pb2.ModelProfile:
    """Count units and bytes; the caller, who knows the files, adds ``name`` and ``fingerprint``.

    Where units are unequal (in exact mode, of MLPs of several widths, or of layers with unlike heads), every one counts
    as the largest. All experts count, although a token reads a few of them; the fields after ``hidden`` tell them from
    the rest.

    Args:
        quantisation, block, stored, exact, beside: see `units`.
        cache_format: of the KV caches, one of `motley.plugins.engine.CACHE_FORMATS`.

    Raises:
        ConfigError: as `units`.
    """
    cut = units(model, quantisation, block, stored, exact, beside)
    shared_by = _groups_per_shared_head(model, cut)
    count = _Count(cut, cache_format, shared_by)
    each = [_Count(cut, cache_format, shared_by) for _ in model.layers]
    for own, layer in zip(each, model.layers, strict=True):
        own.add(layer.operations)
        own.follows = layer.follows
        count.add(layer.operations)
    first = model.experts
    chosen = first.chosen.axis.size if first else 0
    expert = max((count.whole_expert(layer.experts) for layer in model.layers if layer.experts), default=0)
    trunk_fixed = RUNTIME_BYTES + 4 * activations(model) + count.replicated
    of_head = [] if model.last_norm is None else weights_of(model.last_norm)
    trunk_fixed += sum(4 * tensor.shape[0] for w in of_head for tensor in w.tensors())
    return mesh_pb2.ModelProfile(
        layers=len(model.layers),
        kv_groups=cut.kv_groups,
        attention_splits=cut.attention_splits,
        mlp_units=cut.mlp,
        vocabulary_units=cut.vocabulary,
        attention_query_bytes=count.query,
        attention_kv_bytes=count.key_value,
        mlp_unit_bytes=count.mlp + count.experts,
        vocabulary_unit_bytes=sum(
            count.bytes_of(w, cut.vocabulary_rows, model.hidden) + 4 * cut.vocabulary_rows * bool(w.bias)
            for each in model.head
            if isinstance(each, Linear)
            for w in each.ws
        ),
        cache_bytes_per_token=count.cached,
        windowed_bytes_per_token=count.windowed,
        window=count.window,
        state_bytes=count.state,
        groups_per_shared_head=count.shared_by,
        shared_kv_bytes=count.shared_key_value,
        shared_cache_bytes_per_token=count.shared_cached,
        fixed_bytes=trunk_fixed + count.sessions + count.expert_biases,
        context_length=model.context,
        family=model.family,
        parameters=parameters(model),
        matrices=told(cut.held, stored or {}),
        hidden=model.hidden,
        further_streams=model.further_streams,
        expert_layers=model.expert_layers,
        expert_count=first.count if first else 0,
        experts_per_token=chosen,
        expert_bytes=expert + EXPERT_BYTES if first else 0,
        expert_weight_bytes=expert,
        trunk_mlp_unit_bytes=count.mlp,
        trunk_fixed_bytes=trunk_fixed,
        position_bytes=4 * sum(size for _, size in model.rotations(model.layers).values()),
        host_fixed_bytes=RUNTIME_BYTES + 4 * activations(model),
        adapter_elements=adapter_elements(model),
        layer_costs=[] if model.whole else _costs(each),  # without them nobody plans stages
    )


def _costs(each: Sequence[_Count]) -> Iterator[mesh_pb2.LayerCosts]:
    """What layers cost, by runs of those that are alike."""
    for costs, alike in groupby(own.costs for own in each):
        costs.layers = len([*alike])
        yield costs


class _Count:
    """Adds up the bytes of layers.

    Attributes:
        query, key_value: of one KV group: what is cut by query heads, and what by KV heads.
        mlp, experts: of one MLP unit: of what all rows go through, and of all experts together.
        replicated: of what every rank has.
        expert_biases: of the biases that experts add to their results; any one of the ranks that have slices of them
            may have them.
        state: bytes of a sequence's recurrent states, of one KV group.
        cached: bytes that a token takes in the caches, of one KV group.
        windowed: those of them that are of layers with a window.
        window: the widest of these, in positions; 0: there is none.
        sessions: bytes that an engine takes for all experts besides their weights.
        shared_by: how many KV groups share a KV head of the layers that have fewer of these; 0: there are none.
        shared_key_value, shared_cached: as `key_value` and `cached` of one such head, which these do not count.
        follows: as of a single layer, see `Layer.follows`.
    """

    def __init__(self, cut: Units, cache_format: str, shared_by: int) -> None:
        self._cut = cut
        self._cache_format = cache_format
        self.shared_by = shared_by
        self.follows = False
        self.shared_key_value = self.shared_cached = 0
        self.query = self.key_value = self.mlp = self.experts = self.replicated = self.expert_biases = 0
        self.state = self.cached = self.windowed = self.window = self.sessions = 0

    @property
    def costs(self) -> mesh_pb2.LayerCosts:
        """What was counted, as one layer's costs."""
        return mesh_pb2.LayerCosts(
            layers=1,
            attention_query_bytes=self.query,
            attention_kv_bytes=self.key_value,
            mlp_unit_bytes=self.mlp + self.experts,
            cache_bytes_per_token=self.cached,
            fixed_bytes=self.replicated + self.expert_biases + self.sessions,
            trunk_mlp_unit_bytes=self.mlp,
            windowed_bytes_per_token=self.windowed,
            state_bytes=self.state,
            shared_kv_bytes=self.shared_key_value,
            shared_cache_bytes_per_token=self.shared_cached,
            follows=self.follows,
        )

    def add(self, operations: Collection[Operation]) -> None:
        """Count the weights of some operations, and of all experts that they name."""
        shares = any(isinstance(each, Attend) and self._has_shared_heads(each) for each in operations)
        for each in operations:
            for w in weights_of(each):
                self._add(w, shares)
            if isinstance(each, Choose) or (isinstance(each, Attend) and not each.borrowed):
                a_token = self._cached(each)
                if self._has_shared_heads(each):
                    self.shared_cached += a_token
                else:
                    self.cached += a_token
            if isinstance(each, Attend) and each.window:
                self.windowed += 0 if each.borrowed else self._cached(each)
                self.window = max(self.window, each.window)
            if isinstance(each, Recurrence):
                self.state += state_spec(each, lambda axis: self._unit(axis) if axis.cut else axis.size).bytes
            if isinstance(each, Experts):
                matrices = [w for one in each.body for w in weights_of(one)]
                for number in range(each.count):
                    self.experts += sum(self._unit_bytes(w, number) for w in matrices)
                self.expert_biases += each.count * sum(map(_summed_bias, matrices))
                self.sessions += EXPERT_BYTES * each.count

    def _cached(self, operation: Attend | Choose) -> int:
        """Bytes that a token takes in the caches of a layer's attention, or of its index keys, of one KV group."""
        heads = _largest_group(operation.heads, False, self._cut.kv_groups)
        kinds = 2 if isinstance(operation, Attend) and operation.v is not None else 1
        size = operation.cached if isinstance(operation, Choose) else operation.heads.size
        return kinds * heads * cached_bytes(self._cache_format, size)

    def _has_shared_heads(self, operation: Attend | Choose) -> bool:
        return bool(self.shared_by) and _groups_per_head(operation, self._cut) == self.shared_by

    def _add(self, w: W, shares: bool) -> None:
        size = self._unit_bytes(w)
        self.replicated += _summed_bias(w)
        match _cut_axis(w):
            case None:
                self.replicated += size
            case Axis(kind=Kind.HEADS):
                self.query += size
            case Axis(kind=Kind.KV_HEADS) if shares:
                self.shared_key_value += size
            case Axis(kind=Kind.KV_HEADS):
                self.key_value += size
            case _:
                self.mlp += size

    def whole_expert(self, experts: Experts) -> int:
        """Bytes of the weights of the largest expert of a layer."""
        matrices = [w for one in experts.body for w in weights_of(one)]
        return max(sum(self._whole_bytes(w, number) for w in matrices) for number in range(experts.count))

    def _whole_bytes(self, w: W, expert: int) -> int:
        """Bytes of a whole matrix of an expert, with its bias."""
        assert w.in_ is not None, w.name
        return self.bytes_of(w, w.out.size, w.in_.size, expert) + 4 * bool(w.bias) * w.out.size

    def _unit_bytes(self, w: W, expert: int | None = None) -> int:
        """Bytes of what one unit has of a weight; of all of it if it is not cut."""
        cut = _cut_axis(w)
        rows = self._unit(cut) if cut is not None and w.out == cut else w.out.size
        if w.in_ is None:
            return 4 * rows * (2 if w.bias else 1)
        columns = self._unit(cut) if cut is not None and w.in_ == cut else w.in_.size
        return self.bytes_of(w, rows, columns, expert) + 4 * rows * bool(w.bias and (w.out.cut or cut is None))

    def _unit(self, axis: Axis) -> int:
        """Elements of an axis that the largest unit has."""
        if axis.kind is Kind.MLP:
            block = self._cut.mlp_blocks[axis.size]
            return -(-axis.size // block // self._cut.mlp) * block
        assert axis.heads is not None
        return _largest_group(axis.heads, axis.kind is Kind.HEADS, self._cut.kv_groups) * axis.heads.size

    def bytes_of(self, w: W, rows: int, columns: int, expert: int | None = None) -> int:
        """Bytes of some rows and columns of a matrix as it is held, without its bias."""
        form = FLOATS if w.stays_float else self._cut.held.get(numbered(w.name, expert), FLOATS)
        return _held_bytes(form, rows, columns)


def _groups_per_head(operation: Attend | Choose, cut: Units) -> int:
    """How many KV groups share a KV head of a layer, or its index key; 0: none do, or the layer has a window."""
    windowed, keys = isinstance(operation, Attend) and operation.window, operation.heads.keys
    return 0 if windowed or keys >= cut.kv_groups else cut.kv_groups // keys


def _groups_per_shared_head(model: Model, cut: Units) -> int:
    """How many KV groups share a KV head, or an index key, of most layers of which several do; 0: there are none. The
    profile has such layers of one kind; others count as if each group had a head of its own."""
    cached = (each for layer in model.layers for each in (layer.attention, layer.choice) if each)
    kinds = Counter(_groups_per_head(each, cut) for each in cached)
    del kinds[0]
    return max(kinds, key=kinds.__getitem__, default=0)


@lru_cache(maxsize=1024)
def _held_bytes(form: Format, rows: int, columns: int) -> int:
    """Bytes of a matrix f32[rows, columns] in a format; remembered, as a model's thousands of experts are alike."""
    pieces = (Piece("", range(rows), range(columns)),)
    return Weight("", pieces, form.encoding, form.block, form.zeros).all_bytes


def _largest_group(heads: Heads, queries: bool, kv_groups: int) -> int:
    """Heads that the largest KV group has of a layer."""
    keys = -(-heads.keys // kv_groups)
    if not queries:
        return keys
    return heads.queries // kv_groups if heads.keys < kv_groups else heads.group * keys


def _cut_axis(w: W) -> Axis | None:
    """The axis along which a weight is cut over the ranks; None: every rank has all of it."""
    return next((axis for axis in (w.out, w.in_) if axis is not None and axis.cut), None)


def _summed_bias(w: W) -> int:
    """Bytes of a bias that is added to a sum over the ranks, by any one of them."""
    return 4 * w.out.size if w.bias and w.in_ is not None and w.in_.cut else 0


def adapter_elements(model: Model) -> int:
    """Elements of a LoRA adapter of all matrices of the layers that may have one, for each unit of its rank: a column
    and a row for each. Routed experts, of which there may be very many, are not counted."""
    linear = (each for layer in model.layers for each in layer.operations if isinstance(each, Linear))
    return sum(w.out.size + w.in_.size for each in linear for w in each.ws if w.in_ is not None)


def activations(model: Model) -> int:
    """Elements of the values that are alive at a time in the widest step, generously: residual and MLP, twice, or what
    queries become where each head has a product of its own, or gates of all residual streams."""
    streams = (1 + model.further_streams) * model.hidden if model.further_streams else 0
    columns = max(
        w.out.size
        for each in model.operations
        if isinstance(each, Linear | HeadLinear)
        for w in each.ws
        if w.out.kind is Kind.MLP or isinstance(each, HeadLinear) or w.out.size == streams
    )
    return EngineOptions().max_rows * 2 * ((2 + model.further_streams) * model.hidden + 3 * columns)
