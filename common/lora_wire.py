"""A LoRA configuration as its message and back."""

from __future__ import annotations

from refit.v1 import adapter_pb2

from common.adapter import LoraConfig
from common.errors import InvalidField


def lora_to_proto(lora: LoraConfig) -> adapter_pb2.LoraConfig:
    return adapter_pb2.LoraConfig(
        rank=lora.rank,
        alpha=lora.alpha,
        target_modules=lora.target_modules,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        rank_pattern=[adapter_pb2.RankPattern(module=m, rank=r) for m, r in lora.rank_pattern],
        alpha_pattern=[adapter_pb2.AlphaPattern(module=m, alpha=a) for m, a in lora.alpha_pattern],
    )


def lora_from_proto(msg: adapter_pb2.LoraConfig) -> LoraConfig:
    """Raises `InvalidField` where a value can never be right."""
    for rank in (msg.rank, *(item.rank for item in msg.rank_pattern)):
        if rank < 1:
            raise InvalidField(f"manifest.lora.rank: {rank}; a LoRA rank is at least 1")
    for alpha in (msg.alpha, *(item.alpha for item in msg.alpha_pattern)):
        if not 0 < alpha < float("inf"):
            raise InvalidField(f"manifest.lora.alpha: {alpha}; it must be above 0 and finite")
    if not msg.target_modules:
        raise InvalidField("manifest.lora.target_modules: empty; name the adapted projections")
    return LoraConfig(
        rank=msg.rank,
        alpha=msg.alpha,
        target_modules=tuple(msg.target_modules),
        use_rslora=msg.use_rslora,
        use_dora=msg.use_dora,
        rank_pattern=tuple((item.module, item.rank) for item in msg.rank_pattern),
        alpha_pattern=tuple((item.module, item.alpha) for item in msg.alpha_pattern),
    )
