"""What most families have in common: the facts their configs begin with, and the blocks their layers are made of.

A family (`motley.daemon.models.families`) reads its keys, and writes its layers with these; where it differs from the
others it uses `motley.daemon.models.description.writing.Writer` itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from motley.daemon.models.description.axes import Axis, Heads, Kind, Value, W, key_axis, query_axis
from motley.daemon.models.description.model import EMBEDDING, HEAD, Layer, Model
from motley.daemon.models.description.operations import Activation, Routing
from motley.daemon.models.description.rope import Rope
from motley.daemon.models.description.writing import ShardingError, Writer
from motley.daemon.models.keys import Keys
from motley.daemon.weights.places import Part

FULL, SLIDING = "full_attention", "sliding_attention"
DEFAULT_WINDOW = 4096
"""What transformers takes where a config with a window does not say how wide; null means none."""


@dataclass(frozen=True)
class Shape:
    """The facts that nearly every config has.

    Attributes:
        layers: how many.
        hidden: D, elements of the residual.
        heads: of every layer's attention, unless the family says otherwise.
        vocabulary: words.
        epsilon: of RMS norms.
        tied: the head is the embedding table.
        eos: tokens that end a text.
        norm_offset: what is added to a norm's gain as it is stored: 1 in the Gemma families.
    """

    layers: int
    hidden: int
    heads: Heads
    vocabulary: int
    epsilon: float
    tied: bool
    eos: tuple[int, ...]
    norm_offset: float = 0.0

    @property
    def residual(self) -> Axis:
        """The axis of the residual."""
        return Axis(Kind.HIDDEN, self.hidden, "hidden_size")


def read_shape(
    keys: Keys,
    *,
    head_dim: int | None = None,
    kv_heads: bool = False,
    epsilon: float = 1e-6,
    tied: bool = False,
    norm_offset: float = 0.0,
) -> Shape:
    """Read the facts that nearly every config has.

    Args:
        head_dim: elements of a head where the keys are silent; None: hidden size / heads.
        kv_heads: there are as many KV heads as query heads where the keys are silent; else they may not be.
        epsilon, tied: where the keys are silent.
        norm_offset: see `Shape`; the key ``norms_are_whole`` (of a GGUF file) says that it has been added.

    Raises:
        ConfigError: naming the key that is missing or not possible.
    """
    hidden = keys.size("hidden_size")
    queries = keys.size("num_attention_heads")
    shared = keys.size("num_key_value_heads", queries if kv_heads else None)
    if queries % shared:
        raise keys.refusal("num_key_value_heads", f"a divisor of num_attention_heads = {queries}")
    derived = keys.get("head_dim") is None and head_dim is None
    size = keys.size("head_dim", head_dim or hidden // queries)
    if size % 2 or (derived and hidden % queries):
        raise keys.refusal("head_dim", "an even number, by default hidden_size / num_attention_heads")
    return Shape(
        layers=keys.size("num_hidden_layers"),
        hidden=hidden,
        heads=Heads(queries, shared, size),
        vocabulary=keys.size("vocab_size"),
        epsilon=keys.number("rms_norm_eps", epsilon),
        tied=keys.flag("tie_word_embeddings", tied),
        eos=tuple(dict.fromkeys(keys.tokens("eos_token_id"))),
        norm_offset=0.0 if keys.flag("norms_are_whole", False) else norm_offset,
    )


def no_windows(keys: Keys, layers: int) -> list[int]:
    """A window of 0, which is none, for each layer of a family that has none.

    Raises:
        ConfigError: the keys ask for one.
    """
    if keys.flag("use_sliding_window", True) and keys.size("sliding_window", 0):
        raise keys.refusal("sliding_window", "only null in this family")
    return listed_windows(keys, layers, 0, [FULL] * layers)


def windows_everywhere(keys: Keys, layers: int, silent: int = DEFAULT_WINDOW) -> list[int]:
    """The same window for each layer; `silent` is what it is where the keys do not say."""
    window = keys.size("sliding_window", 0 if keys.says("sliding_window") else silent)
    return listed_windows(keys, layers, window, [SLIDING if window else FULL] * layers)


def windows_from_a_layer(keys: Keys, layers: int) -> list[int]:
    """Windows from layer ``max_window_layers`` on, or where ``layer_types`` has them, if ``use_sliding_window``."""
    silent = 0 if keys.says("sliding_window") else DEFAULT_WINDOW
    window = keys.size("sliding_window", silent) if keys.flag("use_sliding_window", False) else 0
    first = keys.size("max_window_layers", 28, least=0)
    default = [SLIDING if window and layer >= first else FULL for layer in range(layers)]
    return listed_windows(keys, layers, window, default, [FULL, SLIDING] if window else [FULL])


def listed_windows(
    keys: Keys, layers: int, window: int, default: Sequence[str], allowed: Sequence[str] = ()
) -> list[int]:
    """How many positions a row of each layer sees, itself included, by ``layer_types``; 0: all.

    Args:
        window: of the layers that have one.
        default: the kind of each layer where ``layer_types`` is silent.
        allowed: the kinds that it may name; empty: those of `default`.

    Raises:
        ConfigError: ``layer_types`` is no list of them.
    """
    kinds = keys.get("layer_types") or list(default)
    possible = set(allowed or default)
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= possible:
        raise keys.refusal("layer_types", f"a list of {layers} times {' or '.join(sorted(possible))}")
    return [window if kind == SLIDING else 0 for kind in kinds]


def expert_count(keys: Keys, *spellings: str) -> int:
    """How many experts a layer has: both spellings are read in every family, as transformers does.

    Raises:
        ConfigError: no spelling says it, or they say different numbers.
    """
    both = spellings or ("num_experts", "num_local_experts")
    spelled = next((key for key in both if keys.get(key) is not None), both[0])
    count = keys.size(spelled)
    for key in both:
        if keys.size(key, count) != count:
            raise keys.refusal(key, f"only the same as {spelled} = {count}")
    if keys.size("num_experts_per_tok") > count:
        raise keys.refusal("num_experts_per_tok", f"at most {spelled} = {count}")
    return count


def sparse_layers(keys: Keys, layers: int) -> list[bool]:
    """Which layers have experts, by ``mlp_only_layers`` and ``decoder_sparse_step``.

    Raises:
        ConfigError: none has, or the keys name layers that there are not.
    """
    plain = keys.get("mlp_only_layers") or []
    if not isinstance(plain, list) or not all(layer in range(layers) for layer in plain):
        raise keys.refusal("mlp_only_layers", f"a list of layers from 0 to {layers - 1}")
    step = keys.size("decoder_sparse_step", 1)
    sparse = [layer not in plain and (layer + 1) % step == 0 for layer in range(layers)]
    if not any(sparse):
        raise keys.refusal("decoder_sparse_step", f"at most num_hidden_layers = {layers}, or mlp_only_layers less")
    return sparse


def model(
    family: str,
    shape: Shape,
    layer: Callable[[int], Layer],
    ropes: Mapping[str, Rope],
    context: int,
    *,
    embedding_scale: float = 1.0,
    logits_scale: float = 1.0,
    logits_cap: float = 0.0,
    ignored: Sequence[str] = (),
) -> Model:
    """A model of layers between an embedding table and a head with an RMS norm.

    Args:
        layer: writes a layer, given its number; `residual` is what it begins with.
        context: the longest sequence that the rotary embeddings are for, tokens.
        logits_scale: what logits are multiplied by: the rows that the head reads are, as they are shorter.
        logits_cap: logits are ``cap * tanh(logits / cap)``; 0: they are not.
        ignored: see `Model`.

    Raises:
        ShardingError: a layer does not begin with what the one before it ends with.
    """
    words = Axis(Kind.VOCABULARY, shape.vocabulary, "vocab_size")
    table = W(EMBEDDING, words, shape.residual)
    head = Writer(Value("head.rows", shape.residual))
    normed = norm(head, shape, "head.norm", head.x, "model.norm.weight")
    normed = head.scaled(normed, logits_scale)
    matrix = table if shape.tied else W(HEAD, words, shape.residual)
    (logits,) = head.linear("head", normed, matrix, ys=("head.uncapped" if logits_cap else "logits",))
    logits = head.soft_capped(logits, logits_cap, "logits")
    layers = tuple(layer(number) for number in range(shape.layers))
    for before, after in pairwise(layers):
        if before.y != after.x:
            raise ShardingError(f"a layer begins with {after.x.name}, and the one before it ends with {before.y.name}")
    return Model(
        family=family,
        hidden=shape.hidden,
        vocabulary=shape.vocabulary,
        context=context,
        eos=shape.eos,
        embedding=table,
        layers=layers,
        head=tuple(head.operations),
        head_x=head.x,
        logits=logits,
        ropes=dict(ropes),
        embedding_scale=embedding_scale,
        ignored=tuple(ignored),
    )


def begin(shape: Shape, number: int) -> Writer:
    """Begin a layer with the residual that the one before it ends with: what its block ``layers.N.mlp`` adds up to."""
    name = "hidden" if number == 0 else f"layers.{number - 1}.mlp.residual"
    return Writer(Value(name, shape.residual))


def norm(writer: Writer, shape: Shape, name: str, x: Value, tensor: str) -> Value:
    """RMS norm of whole rows, f32[T, D], by a gain that is `tensor` in a checkpoint."""
    return writer.norm(name, x, W(tensor, shape.residual), shape.epsilon, shape.norm_offset)


def pre_norm_layer(
    shape: Shape, number: int, attend: Callable[[Writer, Value], Value], mlp: Callable[[Writer, Value], Value]
) -> Layer:
    """A layer as Llama has it: a norm before attention and before the MLP, each added to the residual.

    Args:
        attend, mlp: from normalised rows to what is added, f32[T, D] -> f32[T, D]{U_tp}.
    """
    writer = begin(shape, number)
    module = f"model.layers.{number}"
    x = norm(writer, shape, f"layers.{number}.attention.norm", writer.x, f"{module}.input_layernorm.weight")
    residual = writer.add(writer.x, attend(writer, x))
    x = norm(writer, shape, f"layers.{number}.mlp.norm", residual, f"{module}.post_attention_layernorm.weight")
    return writer.layer(writer.add(residual, mlp(writer, x)))


def attention(
    writer: Writer,
    shape: Shape,
    number: int,
    x: Value,
    *,
    heads: Heads | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    qk_norm: bool = False,
    whole_qk_norm: bool = False,
    clip: float = 0.0,
    rope: str | None = "main",
    window: int = 0,
    scale: float | None = None,
    soft_cap: float = 0.0,
    sinks: bool = False,
    fused: str = "",
    gated: bool = False,
) -> Value:
    """f32[T, D] -> f32[T, D]{U_tp}: attention of a layer, from its normalised input to its output projection.

    Args:
        heads: of this layer; None: the model's.
        qk_norm: each query and key head has an RMS norm before the rotation.
        whole_qk_norm: that norm is over all query heads at once, and over all key heads.
        clip: the largest magnitude of queries, keys and values before the rotation; 0: any.
        rope: which of the model's rotary embeddings; None: none.
        window: how many positions a row sees, itself included; 0: all.
        scale: of the products of queries and keys; None: ``head size ** -0.5``.
        sinks: the softmax has a logit per head that is no position.
        gated: what a query head finds is multiplied by the sigmoid of a gate, which ``q_proj`` makes beside the query.
        fused: the module, beside the usual ones, whose rows are all queries, keys and values; empty: there is none.
    """
    heads = heads or shape.heads
    at, module = f"layers.{number}.attention", f"model.layers.{number}.self_attn"
    residual, query, key = shape.residual, query_axis(heads), key_axis(heads)
    rows = query.size + 2 * key.size

    def projection(letter: str, out: Axis, start: int) -> W:
        parts = (Part(f"{module}.{fused}.weight", (rows, shape.hidden), start),) if fused else ()
        bias_parts = (Part(f"{module}.{fused}.bias", (rows,), start),) if fused else ()
        name = f"{module}.{letter}_proj"
        return W(f"{name}.weight", out, residual, f"{name}.bias" * qkv_bias, parts=parts, bias_parts=bias_parts)

    q, k, v = writer.linear(
        f"{at}.qkv",
        x,
        projection("q", query_axis(replace(heads, size=2 * heads.size)) if gated else query, 0),
        projection("k", key, query.size),
        projection("v", key, query.size + key.size),
        ys=(f"{at}.q", f"{at}.k", f"{at}.v"),
    )
    if gated:
        q, gate = writer.head_parts(f"{at}.q.parts", q, (f"{at}.query", query), (f"{at}.gate", query))
    q_norm, k_norm = f"{module}.q_norm.weight", f"{module}.k_norm.weight"
    if whole_qk_norm:
        q, k = writer.whole_norm(f"{at}.squares", (q, k), (W(q_norm, query), W(k_norm, key)), shape.epsilon)
    elif qk_norm:
        one = Axis(Kind.PLAIN, heads.size, "head_dim")
        q = writer.norm(f"{q.name}.norm", q, W(q_norm, one), shape.epsilon, shape.norm_offset)
        k = writer.norm(f"{k.name}.norm", k, W(k_norm, one), shape.epsilon, shape.norm_offset)
    if clip:
        q, k, v = (writer.clip(each, clip) for each in (q, k, v))
    attended = writer.attend(
        f"{at}.attended",
        number,
        q,
        k,
        v,
        heads,
        rope=rope,
        window=window,
        scale=heads.size**-0.5 if scale is None else scale,
        soft_cap=soft_cap,
        sinks=W(f"{module}.sinks", query_axis(Heads(heads.queries, heads.keys, 1))) if sinks else None,
    )
    if gated:
        attended = writer.gated(f"{at}.opened", gate, attended, Activation.SIGMOID)
    output = W(f"{module}.o_proj.weight", residual, query, f"{module}.o_proj.bias" * output_bias)
    return writer.linear(f"{at}.output", attended, output)[0]


@dataclass(frozen=True)
class MlpNames:
    """What a checkpoint calls the matrices of a gated MLP, and where they may lie instead.

    Attributes:
        biases: of gate, up and down, the tensors that are added to their products; empty: none.
        gate_parts, up_parts, down_parts: see `W.parts`.
        bias_parts: the same for the biases of gate, up and down.
    """

    gate: str
    up: str
    down: str
    biases: tuple[str, str, str] = ("", "", "")
    gate_parts: tuple[Part, ...] = ()
    up_parts: tuple[Part, ...] = ()
    down_parts: tuple[Part, ...] = ()
    bias_parts: tuple[tuple[Part, ...], tuple[Part, ...], tuple[Part, ...]] = ((), (), ())


def usual_names(module: str, bias: bool = False, parts: Mapping[str, tuple[Part, ...]] | None = None) -> MlpNames:
    """The names of a gated MLP in nearly every family; `parts` is by the letters ``gate``, ``up`` and ``down``."""
    names = [f"{module}.{part}_proj" for part in ("gate", "up", "down")]
    gate, up, down = (f"{name}.weight" for name in names)
    biases = tuple(f"{name}.bias" * bias for name in names)
    own = parts or {}
    return MlpNames(
        gate,
        up,
        down,
        (biases[0], biases[1], biases[2]),
        own.get("gate", ()),
        own.get("up", ()),
        own.get("down", ()),
    )


def gated_mlp(
    writer: Writer,
    at: str,
    x: Value,
    columns: Axis,
    names: MlpNames,
    activation: Activation = Activation.SILU,
) -> Value:
    """f32[T, D] -> f32[T, D]{U_tp}: a gated MLP, from its normalised input to its down projection."""
    gate_bias, up_bias, down_bias = names.biases
    gate, up = writer.linear(
        f"{at}.gate_up",
        x,
        W(names.gate, columns, x.axis, gate_bias, parts=names.gate_parts, bias_parts=names.bias_parts[0]),
        W(names.up, columns, x.axis, up_bias, parts=names.up_parts, bias_parts=names.bias_parts[1]),
        ys=(f"{at}.gate", f"{at}.up"),
    )
    gated = writer.gated(f"{at}.gated", gate, up, activation)
    down = W(names.down, x.axis, columns, down_bias, parts=names.down_parts, bias_parts=names.bias_parts[2])
    return writer.linear(f"{at}.down", gated, down)[0]


def mlp(writer: Writer, number: int, x: Value, columns: Axis, bias: bool = False) -> Value:
    """f32[T, D] -> f32[T, D]{U_tp}: a layer's gated MLP that all rows go through, with SiLU and the usual names."""
    return gated_mlp(writer, f"layers.{number}.mlp", x, columns, usual_names(f"model.layers.{number}.mlp", bias))


def mlp_axis(columns: int) -> Axis:
    """The columns of an MLP that all rows go through."""
    return Axis(Kind.MLP, columns, "intermediate_size")


def shared_axis(columns: int, called: str = "shared_expert_intermediate_size") -> Axis:
    """The columns of an expert that all rows go through."""
    return Axis(Kind.MLP, columns, called)


def expert_axis(columns: int) -> Axis:
    """The columns of an expert that a router sends rows to."""
    return Axis(Kind.MLP, columns, "the intermediate size of experts", routed=True)


def stacked_parts(module: str, hidden: int, columns: int) -> dict[str, tuple[Part, ...]]:
    """Where experts' matrices lie in files as transformers 5 keeps them: those of a layer in two tensors,
    ``gate_up_proj`` [E, 2F, D] and ``down_proj`` [E, D, F]."""
    both = f"{module}.gate_up_proj[{{expert}}]"
    return {
        "gate": (Part(both, (2 * columns, hidden)),),
        "up": (Part(both, (2 * columns, hidden), columns),),
        "down": (Part(f"{module}.down_proj[{{expert}}]", (hidden, columns)),),
    }


@dataclass(frozen=True)
class SharedExpert:
    """An expert that all rows go through.

    Attributes:
        columns: between its projections.
        module: its name within the layer's MLP.
        gated: a row gets as much of it as the sigmoid of a product with ``{module}_gate`` says.
    """

    columns: int
    module: str = "shared_expert"
    gated: bool = True


def experts(
    writer: Writer,
    shape: Shape,
    number: int,
    x: Value,
    count: int,
    columns: int,
    routing: Routing,
    *,
    names: MlpNames | None = None,
    router: str = "gate",
    router_bias: bool = False,
    router_parts: tuple[Part, ...] = (),
    shared: SharedExpert | None = None,
    activation: Activation = Activation.SILU,
) -> Value:
    """f32[T, D] -> f32[T, D]{U_tp}: a router sends each row to some of `count` experts, and their results are summed.

    Args:
        columns: of an expert.
        names: of an expert's matrices; None: the usual ones.
        router: the module within the layer's MLP; `router_parts` is where its matrix may lie otherwise.
    """
    at, module = f"layers.{number}.mlp", f"model.layers.{number}.mlp"
    chooses = Axis(Kind.PLAIN, count, "num_experts")
    gate = f"{module}.{router}"
    matrix = W(f"{gate}.weight", chooses, shape.residual, f"{gate}.bias" * router_bias, True, router_parts)
    x = writer.replicated(x)
    route = writer.route(f"{at}.router", x, matrix, routing)
    base = None
    if shared is not None:
        inner = f"{module}.{shared.module}"
        base = gated_mlp(writer, f"{at}.shared", x, shared_axis(shared.columns), usual_names(inner), activation)
        if shared.gated:
            one = Axis(Kind.PLAIN, 1, "1")
            (share,) = writer.linear(
                f"{at}.shared.router", x, W(f"{inner}_gate.weight", one, shape.residual, routes=True)
            )
            base = writer.scaled_rows(f"{at}.shared.scaled", base, share)
    inner = f"{module}.experts.{{expert}}"
    body = Writer(Value(f"{at}.experts.{{expert}}.x", shape.residual))
    result = gated_mlp(
        body,
        f"{at}.experts.{{expert}}",
        body.x,
        expert_axis(columns),
        names or usual_names(inner, parts=stacked_parts(f"{module}.experts", shape.hidden, columns)),
        activation,
    )
    return writer.experts(f"{at}.mixture", number, x, route, count, (body, result), base)
