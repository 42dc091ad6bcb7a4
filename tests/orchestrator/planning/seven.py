"""A model of seven billion parameters, as a node would describe it to the planner."""

from __future__ import annotations

from motley.protocol.mesh_pb2 import LayerCosts, ModelProfile


def layered(profile: ModelProfile) -> ModelProfile:
    """The same model, with the costs of its layers, which are alike: so it can be in stages."""
    names = [
        field.name for field in LayerCosts.DESCRIPTOR.fields if field.name not in ("layers", "fixed_bytes", "follows")
    ]
    each = {name: getattr(profile, name) // profile.layers for name in names}
    profile.layer_costs.append(LayerCosts(layers=profile.layers, **each))
    return profile


def seven_billion(context: int = 4096) -> ModelProfile:
    """In int4, with 8 KV groups of 4 query heads, and caches in float32."""
    return ModelProfile(
        name="seven",
        fingerprint="0123456789abcdef",
        layers=32,
        hidden=4096,
        kv_groups=8,
        attention_splits=[1, 2, 4],
        mlp_units=112,
        vocabulary_units=250,
        attention_query_bytes=84_000_000,
        attention_kv_bytes=21_000_000,
        mlp_unit_bytes=30_000_000,
        vocabulary_unit_bytes=330_000,
        cache_bytes_per_token=2 * 128 * 4 * 32,
        fixed_bytes=300_000_000,
        context_length=context,
        family="llama",
        parameters=7 * 10**9,
    )
