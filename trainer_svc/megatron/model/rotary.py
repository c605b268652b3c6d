"""Rotary position embeddings, by the position of every token of a row."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor

from trainer_svc.megatron import device
from trainer_svc.megatron.model.base_config import BaseConfig, Llama3Scaling, YarnScaling
from trainer_svc.megatron.model.layout import token_positions

_LAYOUTS_KEPT = 16


class Rotary(RotaryEmbedding):  # type: ignore[misc]
    """Angles of a base model's rotary embedding; it takes the place of Megatron's."""

    def __init__(self, base: BaseConfig) -> None:
        super().__init__(base.rotary_dim, rotary_percent=1.0, use_cpu_initialization=True)
        self.inv_freq = inverse_frequencies(base).to(device.compute_device())
        # By value: every micro-batch brings its own layout, and recomputation a copy of it.
        self._at = lru_cache(_LAYOUTS_KEPT)(self._compute)

    def at(self, layout: Tensor) -> Tensor:
        """Angles (T, 1, 1, rotary_dim) of the tokens of a `layout`, as Megatron takes them."""
        return self._at(layout.numpy().tobytes())

    def _compute(self, layout: bytes) -> Tensor:
        table = torch.frombuffer(bytearray(layout), dtype=torch.int64).view(-1, 4)
        positions = token_positions(table).to(self.inv_freq)
        half = torch.outer(positions, self.inv_freq)
        return torch.cat((half, half), dim=-1)[:, None, None, :]


class LatentRotary(Rotary):
    """Rotary embedding inside of Megatron's latent attention, which asks for rows 0 to T.

    Set `layout` before each call of that attention.
    """

    def __init__(self, base: BaseConfig) -> None:
        super().__init__(base)
        self.layout: Tensor | None = None
        self._factor = attention_factor(base)

    def forward(self, *_: Any, **__: Any) -> tuple[Tensor, float]:
        """Angles of the layout's tokens, and the factor on what they rotate."""
        assert self.layout is not None
        return self.at(self.layout), self._factor


def attention_factor(base: BaseConfig) -> float:
    """Factor on the rotated parts of queries and keys."""
    scaling = base.rope_scaling
    return scaling.attention_factor if isinstance(scaling, YarnScaling) else 1.0


def inverse_frequencies(base: BaseConfig) -> Tensor:
    """Radians a position turns each pair of dimensions by: (rotary_dim / 2,) in float32."""
    dim, scaling = base.rotary_dim, base.rope_scaling
    plain = 1.0 / base.rotary_base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if isinstance(scaling, Llama3Scaling):
        return _llama3(plain, scaling)
    return plain if scaling is None else _yarn(plain, base, scaling)


def _llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Long waves divided by the factor, short ones kept, those between blended."""
    turns = scaling.original_max_positions * plain / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * plain + (1 - kept) * plain / scaling.factor


def _yarn(plain: Tensor, base: BaseConfig, scaling: YarnScaling) -> Tensor:
    """Blended by dimension (arXiv 2309.00071, section 3.2), the ramp as transformers has it."""
    low, high = _ramp(base, scaling)
    blend = ((torch.arange(len(plain), dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return blend * plain / scaling.factor + (1 - blend) * plain


def _ramp(base: BaseConfig, scaling: YarnScaling) -> tuple[float, float]:
    """Pairs of dimensions between which frequencies go over from kept to divided."""
    dim = base.rotary_dim

    def pair_that_turns(times: float) -> float:
        wave = scaling.original_max_positions / (times * 2 * math.pi)
        return dim * math.log(wave) / (2 * math.log(base.rotary_base))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return low, high if high != low else high + 0.001
