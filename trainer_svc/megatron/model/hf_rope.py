"""RoPE as a `config.json` states it, in the spelling of transformers 4 or 5. Imports no torch."""

from __future__ import annotations

from trainer_svc.megatron.model.base_config import Llama3Scaling, YarnScaling, yarn_mscale
from trainer_svc.megatron.model.hf_config import HfConfig

_BY_TYPE = {
    "default": (),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}
"""Keys of each type, beside those of all."""


def read_rope(
    config: HfConfig, *, default_base: float
) -> tuple[float, Llama3Scaling | YarnScaling | None]:
    """Base of the frequencies, and how they are scaled.

    Raises:
        ConfigError: a type or a key that is not implemented, or a missing one.
    """
    # transformers 5 states all of it in `rope_parameters`, 4 the base outside of `rope_scaling`.
    own = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = HfConfig(f"{config.source}: {own}", config.get(own, default={}))
    config.allow("partial_rotary_factor", 1.0)
    rope.allow("partial_rotary_factor", 1.0)
    rope.allow("rope_type", *_BY_TYPE)
    rope.allow("type", *_BY_TYPE)
    kind = rope.get("rope_type", "type", default="default")
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_BY_TYPE[kind]}
    for name in rope.keys.keys() - known:
        rope.allow(name)
    base = float(rope.get("rope_theta", default=config.get("rope_theta", default=default_base)))
    if kind == "llama3":
        return base, _llama3(config, rope)
    return base, _yarn(config, rope) if kind == "yarn" else None


def _llama3(config: HfConfig, rope: HfConfig) -> Llama3Scaling:
    return Llama3Scaling(
        factor=rope.need("factor"),
        low_freq_factor=rope.need("low_freq_factor"),
        high_freq_factor=rope.need("high_freq_factor"),
        original_max_positions=_original_positions(config, rope),
    )


def _yarn(config: HfConfig, rope: HfConfig) -> YarnScaling:
    """With transformers' defaults; a zero counts as missing there."""
    positions = _original_positions(config, rope)
    factor = rope.get("factor", default=config.need("max_position_embeddings") / positions)
    mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    attention_factor = yarn_mscale(factor)
    if mscale and mscale_all_dim:
        attention_factor = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    return YarnScaling(
        factor=factor,
        original_max_positions=positions,
        beta_fast=rope.get("beta_fast") or 32,
        beta_slow=rope.get("beta_slow") or 1,
        truncate=rope.get("truncate", default=True),
        attention_factor=rope.get("attention_factor", default=attention_factor),
        mscale_all_dim=mscale_all_dim or 0.0,
    )


def _original_positions(config: HfConfig, rope: HfConfig) -> int:
    found = rope.get("original_max_position_embeddings")
    return int(found or config.need("max_position_embeddings"))
