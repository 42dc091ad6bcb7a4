"""How tokens are chosen for requests that do not say: as the model's makers would have it, else as at OpenAI. Pure."""

from __future__ import annotations

from motley.protocol.mesh_pb2 import Sampling

OPENAI = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Of a model whose makers say nothing, as of any at OpenAI: tokens come as likely as the model says."""


def usual(of_model: Sampling) -> dict[str, float]:
    """Every field that a request may leave out, with what it is then.

    Args:
        of_model: what the model's ``generation_config.json`` says; fields that it leaves open are absent.
    """
    return {
        name: getattr(of_model, name) if of_model.HasField(name) else otherwise for name, otherwise in OPENAI.items()
    }


def fill(asked: Sampling, of_model: Sampling) -> None:
    """Set what a request has left out."""
    for name, value in usual(of_model).items():
        if not asked.HasField(name):
            setattr(asked, name, value)
