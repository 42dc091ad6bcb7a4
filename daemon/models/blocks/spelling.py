"""Names of tensors of a model that is written with the usual blocks, but whose files call modules otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from motley.daemon.models.description.axes import Axis, Value, W
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.weights.places import Part


def spelled(model: Model, names: Mapping[str, str]) -> Model:
    """The same model, with parts of its weights' names replaced, one after another; the embedding table keeps its own.

    Args:
        names: what replaces what, such as ``{".mlp.": ".feed_forward."}``.
    """

    def rename(name: str) -> str:
        for usual, own in names.items():
            name = name.replace(usual, own)
        return name

    def renamed(thing: Any) -> Any:
        made = thing
        match thing:
            case W(name=name, bias=bias) if name != model.embedding.name:
                parts, bias_parts = renamed(thing.parts), renamed(thing.bias_parts)
                made = replace(thing, name=rename(name), bias=rename(bias), parts=parts, bias_parts=bias_parts)
            case Part(tensor=tensor):
                made = replace(thing, tensor=rename(tensor))
            case W() | Axis() | Value():
                pass
            case tuple():
                made = tuple(renamed(each) for each in thing)
            case _ if is_dataclass(thing) and not isinstance(thing, type):
                made = replace(thing, **{field.name: renamed(getattr(thing, field.name)) for field in fields(thing)})
        return made

    layers: tuple[Layer, ...] = renamed(model.layers)
    return replace(model, layers=layers, head=renamed(model.head))


def also_spelled(
    model: Model, whole: Mapping[str, str], of_layers: Mapping[str, str], layers: str = "model.layers."
) -> Model:
    """The same model, whose files may have the usual names or others.

    Args:
        whole: what names may begin with instead.
        of_layers: what names within a layer may begin with instead; the first that fits counts.
        layers: what stands before a layer's number then.
    """
    found = {
        f"model.layers.{number}.{usual}": f"{layers}{number}.{own}"
        for number in range(len(model.layers))
        for usual, own in of_layers.items()
    }
    return replace(model, spelled={**whole, **found})
