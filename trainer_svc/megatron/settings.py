"""What a user sets for model, adapter and training; imports neither torch nor Megatron."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from common.config import Config
from common.peft_dir import BASE_CHANGING_INITS

DtypeName = Literal["float32", "bfloat16"]
Decay = Annotated[float, Field(ge=0, lt=1)]


class LoraSettings(Config):
    """Which linears get an adapter, and what it looks like at the start."""

    rank: int = Field(default=16, ge=1)
    """Inner dimension of every adapter."""

    alpha: float = Field(default=32.0, gt=0, allow_inf_nan=False)
    """Numerator of the adapter's scale."""

    use_rslora: bool = False
    """Scale by alpha / sqrt(rank) instead of alpha / rank (arXiv 2312.03732)."""

    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability of zeroing an element of the adapter's input while training."""

    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Module names (`linear_qkv`), or wildcards over full names (`*.layers.0.*.linear_qkv`)."""

    dtype: DtypeName = "float32"
    """Type of the trained parameters; optimizer masters are float32 either way."""

    a_init: Literal["xavier", "kaiming", "normal"] = "xavier"
    """Xavier normal, Kaiming uniform with a = sqrt(5), or normal with deviation 1 / rank."""

    b_init: Literal["zero"] = "zero"
    """B starts at zero, so a new adapter leaves the base's output as it is."""

    @field_validator("a_init", mode="before")
    @classmethod
    def _keep_base(cls, value: object) -> object:
        if isinstance(value, str) and value.lower().startswith(BASE_CHANGING_INITS):
            raise ValueError(
                f"{value} changes the base weights, which replicas never receive; "
                "use xavier, kaiming or normal"
            )
        return value

    @field_validator("target_modules")
    @classmethod
    def _some_target(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not value:
            raise ValueError('an empty list trains nothing; use "all-linear" or name modules')
        return value

    @property
    def scale(self) -> float:
        """Factor on B A."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


class TrainSettings(Config):
    """Objective and optimizer of one policy update."""

    lr: float = Field(default=3e-4, gt=0, allow_inf_nan=False)
    """Learning rate after warm-up."""

    warmup_updates: int = Field(default=0, ge=0)
    """Optimizer updates over which the learning rate rises linearly to `lr`."""

    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Decoupled weight decay of AdamW."""

    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay of AdamW's first and second moments."""

    eps: float = Field(default=1e-8, gt=0, allow_inf_nan=False)
    """AdamW's epsilon."""

    max_grad_norm: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Gradients are scaled down to this global L2 norm."""

    clip_ratio: float = Field(default=0.2, gt=0, lt=1)
    """Lower clip distance of the probability ratio, and the upper one if that is not set."""

    clip_ratio_high: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Upper clip distance of the probability ratio (DAPO's clip-higher)."""

    kl_coef: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Weight of the KL term to the base model; 0 saves its forward pass."""

    tis_cap: float = Field(default=2.0, ge=0, allow_inf_nan=False)
    """Cap of the importance weight between trainer and rollout; 0 leaves the weight out.

    It corrects for an older policy, so keep it where `rl.max_staleness` is above 0.
    """

    minibatches: int = Field(default=1, ge=1)
    """Optimizer updates made from one batch."""

    micro_batch_tokens: int = Field(default=1024, ge=1)
    """Padded tokens in one forward pass; a longer sequence goes alone."""


class WorkerSettings(Config):
    """All that the Megatron ranks need to come up."""

    model_dir: Path
    """Hugging Face directory of the base model: `config.json` and safetensors."""

    dtype: DtypeName = "bfloat16"
    """Type of the base weights and of the arithmetic."""

    seed: int = 0
    """Seeds the adapter's initialisation and dropout."""

    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads of each rank; null leaves torch's choice."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share one copy of the model; the other ranks are data-parallel."""

    adapter_path: Path | None = None
    """PEFT directory whose adapter training starts from."""

    lora: LoraSettings = LoraSettings()
    """The adapter."""

    train: TrainSettings = TrainSettings()
    """The update."""
