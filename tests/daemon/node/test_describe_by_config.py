"""What a model costs by its config alone, of which nobody has files."""

from __future__ import annotations

import json

import pytest

from motley.daemon.models.keys import ConfigError
from motley.daemon.node.survey.describe import describe
from motley.orchestrator.known_models.names import KNOWN
from motley.orchestrator.known_models.shapes import SHAPES
from motley.protocol.mesh_pb2 import ModelSpec


def by_config(config: dict[str, object], quantisation: str = "int8") -> ModelSpec:
    return ModelSpec(config_json=json.dumps(config), quantisation=quantisation, block=128, beside=["int4"])


def test_a_config_tells_what_a_model_costs() -> None:
    described = describe(by_config(SHAPES["tinyllama-1.1b"]), None)
    whole, smaller = described.profile, described.beside[0]
    assert (whole.name, whole.layers, whole.parameters) == ("llama", 22, 1_100_048_384)
    assert whole.mlp_unit_bytes > smaller.mlp_unit_bytes
    with pytest.raises(ConfigError, match=r"config\.json: model_type = \"bert\" is not supported"):
        describe(by_config({"model_type": "bert"}), None)


@pytest.mark.parametrize("name", [name for name in KNOWN if "moe" not in name and "b-a" not in name][:12:3])
def test_known_models_can_be_described(name: str) -> None:
    assert describe(by_config(SHAPES[name], KNOWN[name].held), None).profile.parameters > 10**8
