"""The operations that layers are lists of. Each names the values it reads and makes, and the weights it has.

`motley.daemon.models.description.writing` makes them and checks the types of their values.
"""

from __future__ import annotations

from motley.daemon.models.description.axes import W
from motley.daemon.models.description.operations.attention import Attend, Choose, Means
from motley.daemon.models.description.operations.experts import Experts, Route, Routing
from motley.daemon.models.description.operations.recurrence import (
    DeltaRule,
    DilatedConvolution,
    HeadParts,
    ShortConvolution,
    StateSpace,
)
from motley.daemon.models.description.operations.rows import (
    Add,
    AsLarge,
    Clip,
    Gated,
    HeadLinear,
    Join,
    Linear,
    Norm,
    Scale,
    ScaleRows,
    SideBySide,
    SoftCap,
    StatisticalTopK,
    Sum,
    Times,
    WholeNorm,
    Xielu,
)
from motley.daemon.models.description.operations.streams import (
    MatchStreams,
    ReadStreams,
    StreamGates,
    WriteStreams,
)

Operation = (
    Norm
    | WholeNorm
    | StatisticalTopK
    | AsLarge
    | Linear
    | HeadLinear
    | Join
    | SideBySide
    | StreamGates
    | ReadStreams
    | WriteStreams
    | MatchStreams
    | Clip
    | HeadParts
    | Choose
    | Attend
    | DeltaRule
    | StateSpace
    | ShortConvolution
    | DilatedConvolution
    | Gated
    | Xielu
    | Sum
    | Scale
    | Times
    | ScaleRows
    | SoftCap
    | Add
    | Route
    | Experts
)


def weights_of(operation: Operation) -> tuple[W, ...]:
    """The weights of an operation; not those of the bodies of experts."""
    match operation:
        case Norm(gain=W() as gain):
            return (gain,)
        case WholeNorm(gains=gains):
            return gains
        case Linear(ws=ws):
            return ws
        case HeadLinear(w=w):
            return (w,)
        case Attend(sinks=sinks, gains=gains):
            return (*([] if sinks is None else [sinks]), *(gains or ()))
        case Choose(pooling=W() as pooling):
            return (pooling,)
        case Choose(means=Means(gain=gain)):
            return (gain,)
        case DeltaRule(filters=filters, decay=decay, bias=bias, gain=gain):
            return (*filters, decay, bias, gain)
        case StateSpace(filters=filters, filter_biases=biases, decay=decay, bias=bias, skip=skip):
            return (*filters, *(biases or ()), decay, bias, skip)
        case ShortConvolution(filter=own, filter_bias=added):
            return (own,) if added is None else (own, added)
        case DilatedConvolution(filter=own):
            return (own,)
        case StreamGates(scale=scale, base=base):
            return (scale, base)
        case Times(w=w):
            return (w,)
        case Xielu(bend=bend, fall=fall):
            return (bend, fall)
        case Route(routing=Routing(correction=correction, gains=gains)):
            return tuple(w for w in (correction, gains) if w is not None)
        case _:
            return ()
