"""A gated DeltaNet, from its projections to its output.

Sources: Yang et al. 2024, Gated Delta Networks, https://arxiv.org/abs/2412.06464;
https://github.com/fla-org/flash-linear-attention.
"""

from __future__ import annotations

from motley.daemon.models.blocks.shape import Shape
from motley.daemon.models.description.axes import Axis, Kind, RecurrentHeads, Value, W
from motley.daemon.models.description.writing import Writer
from motley.daemon.weights.places import Part

REACH = "linear_conv_kernel_dim"
"""What configs call the positions that the convolution sees."""


def gated_delta_net(
    writer: Writer,
    shape: Shape,
    number: int,
    module: str,
    qkvz: tuple[Value, Value, Value, Value],
    gates: tuple[Value, Value],
    heads: RecurrentHeads,
    reach: int,
    *,
    epsilon: float,
    norm: str = "o_norm",
    output: str = "o_proj",
    written: float = 1.0,
    squashed: bool = False,
    floor: float = 0.0,
) -> Value:
    """f32[T, D]{U_tp}: what a layer makes of its projections, to the output projection.

    Args:
        module: the layer's in a checkpoint.
        gates: b and a, see `DeltaRule`, as are `epsilon`, `written`, `squashed` and `floor`.
        reach: positions that the convolution of queries, keys and values sees, a row's own among them. Files have a
            filter for each of the three, or one for all.
        norm, output: what files call the norm of heads and the output projection.
    """
    at = f"layers.{number}.attention"
    axes = {"q": heads.key_axis, "k": heads.key_axis, "v": heads.value_axis}
    elements, start, filters = sum(axis.size for axis in axes.values()), 0, []
    for letter, axis in axes.items():
        own = Part(f"{module}.{letter}_conv1d.weight[:, 0]", (axis.size, reach))
        together = Part(f"{module}.conv1d.weight[:, 0]", (elements, reach), start)
        start += axis.size
        sees = Axis(Kind.PLAIN, reach, REACH)
        filters.append(W(f"{module}.conv1d_{letter}.weight", axis, sees, parts=(own, together)))
    y = writer.delta_rule(
        f"{at}.recurrent",
        number,
        qkvz,
        gates,
        heads,
        filters=(filters[0], filters[1], filters[2]),
        decay=W(f"{module}.decay", heads.gate_axis, parts=(Part(f"{module}.A_log[:]", (heads.values,)),)),
        bias=W(f"{module}.dt_bias", gates[1].axis),
        gain=W(f"{module}.{norm}.weight", Axis(Kind.PLAIN, heads.value_size, "the size of a value head")),
        epsilon=epsilon,
        written=written,
        squashed=squashed,
        floor=floor,
    )
    return writer.linear(f"{at}.output", y, W(f"{module}.{output}.weight", shape.residual, heads.value_axis))[0]
