"""Published shapes made smaller, so that a machine of any size can measure how fast each kind of layer is.

What a layer's speed depends on stays: the widths of the residual, of heads, MLPs and experts, and how many experts a
token chooses. What only repeats becomes less: layers, but for one of every kind; experts, but for twice as many as a
token chooses; the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from motley.daemon.models.description.model import Layer, Model, parameters
from motley.daemon.models.description.operations import weights_of
from motley.daemon.models.description.operations.attention import Attend
from motley.daemon.models.keys import ConfigError, Keys
from motley.daemon.models.reading import describe

VOCABULARY = 8192
READ = 550_000_000
"""Elements of weights that a token reads at most: 290 MB in int4, which is far more than caches hold."""
STORED = 600_000_000
"""Elements of all weights, at most: 1.2 GB in float16. Where the least layers have more, these are all."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_k", "top_k_experts", "moe_topk")
_DENSE_FIRST = ("first_k_dense_replace", "num_dense_layers")
"""Keys with the number of layers at the start that have an MLP where others have experts."""


def scaled(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a smaller model of the same kinds of layers.

    It has as many repetitions of its least layers as `READ` and `STORED` allow, and then as many experts.

    Args:
        config: as in ``config.json``.

    Raises:
        ConfigError: Motley runs no such model.
    """
    small = _with_experts(_with_vocabulary(config), 2)
    least = _least_layers(small)
    period = len(_described(least).layers)
    fitting = [least]
    for layers in range(2 * period, config["num_hidden_layers"] + 1, period):
        candidate = with_layers(small, layers)
        model = _described(candidate)
        if parameters(model) > STORED or read_elements(model) > READ:
            break
        fitting.append(candidate)
    best = fitting[-1]
    for times in range(3, 1 + (expert_count(config) // max(1, _chosen(config)))):
        more = with_layers(_with_experts(_with_vocabulary(config), times), best["num_hidden_layers"])
        if parameters(_described(more)) > STORED:
            break
        best = more
    return best


def with_layers(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The first layers of a model; of those at the start without experts only one.

    Of layers that borrow caches of others, which are the last, there are as many in proportion.
    """
    before = config["num_hidden_layers"]
    cut = {
        key: value[:layers] if isinstance(value, list) and len(value) == before else value
        for key, value in config.items()
    }
    cut["num_hidden_layers"] = layers
    if "hybrid_override_pattern" in config:
        cut["hybrid_override_pattern"] = config["hybrid_override_pattern"][:layers]
    if "moe_layer_end_index" in config:
        cut["moe_layer_end_index"] = layers - 1
    for key in set(_DENSE_FIRST) & config.keys():
        cut[key] = min(1, config[key])
    if config.get("num_kv_shared_layers"):
        cut["num_kv_shared_layers"] = layers * config["num_kv_shared_layers"] // before
    return cut


def read_elements(model: Model) -> int:
    """Elements of weights that a token reads: all but the embedding tables and the experts that it has not chosen."""
    tables = sum(w.out.size * w.in_.size for w in model.tables if w.in_ is not None and not model.tied)
    unread = 0
    for layer in model.layers:
        if experts := layer.experts:
            one = sum(w.out.size * w.in_.size for each in experts.body for w in weights_of(each) if w.in_ is not None)
            unread += (experts.count - experts.chosen.axis.size) * one
    return parameters(model) - tables - unread


def kinds_of_layers(model: Model) -> list[object]:
    """Of every layer, what is equal for those that compute alike: operations with the sizes of their weights."""
    return [_kind(layer) for layer in model.layers]


def _kind(layer: Layer) -> object:
    return tuple(
        (
            type(each).__name__,
            (each.window, each.rope, each.borrowed, each.heads) if isinstance(each, Attend) else None,
            tuple((w.out.size, w.in_ and w.in_.size) for w in weights_of(each)),
        )
        for each in layer.operations
    )


def _described(config: Mapping[str, Any]) -> Model:
    return describe(Keys(Path("config.json"), dict(config)))


def _least_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fewest first layers among which there is one of every kind that the model has."""
    wanted = set(kinds_of_layers(_described(with_layers(config, config["num_hidden_layers"]))))
    for cut in _cuts(config):
        try:
            found = set(kinds_of_layers(_described(cut)))
        except ConfigError:  # a kind is missing that the family must have
            continue
        if found == wanted:
            return cut
    raise AssertionError("all layers have all kinds")


def _cuts(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    layers = config["num_hidden_layers"]
    yield from (with_layers(config, number) for number in range(1, layers + 1))


def _with_vocabulary(config: Mapping[str, Any]) -> dict[str, Any]:
    """A model of at most `VOCABULARY` words; those with a meaning are 1 and 2."""
    small = {**config, "eos_token_id": 2}
    for key in {"vocab_size", "vocab_size_per_layer_input"} & config.keys():
        small[key] = min(VOCABULARY, config[key])
    if config.get("bos_token_id") is not None:
        small["bos_token_id"] = 1
    return small


def _with_experts(config: Mapping[str, Any], times: int) -> dict[str, Any]:
    """A model of so many times the experts that a token chooses, in a whole number of its groups."""
    groups = config.get("n_group") or 1
    wanted = -(-times * _chosen(config) // groups) * groups
    return {**config, **{key: min(config[key], wanted) for key in _EXPERTS if config.get(key)}}


def expert_count(config: Mapping[str, Any]) -> int:
    """Experts in each layer that has any; 0: there are none."""
    return next((config[key] for key in _EXPERTS if config.get(key)), 0)


def _chosen(config: Mapping[str, Any]) -> int:
    """Experts that a token chooses; 0: there are none."""
    found = next((config[key] for key in _CHOSEN if config.get(key)), 0)
    return max(found) if isinstance(found, list) else found
