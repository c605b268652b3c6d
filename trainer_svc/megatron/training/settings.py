"""What a user sets for a policy update; imports neither torch nor Megatron."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from common.config import Config

Aggregation = Literal["token_mean", "sample_mean", "constant"]
KlEstimator = Literal["k1", "k2", "k3", "k3+"]
Sequences = Literal["shared", "packed", "padded"]
Decay = Annotated[float, Field(ge=0, lt=1)]

LOSSES = ("grpo", "ppo", "gspo", "cispo", "reinforce", "cross_entropy")
"""Names in `losses.py`."""


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

    loss: str = "grpo"
    """`grpo` (or `ppo`, the same clipped ratio), `gspo`, `cispo`, `reinforce`, `cross_entropy`, or
    your own `module:function`, called as those in trainer_svc/megatron/training/losses.py are."""

    aggregation: Aggregation | None = None
    """How tokens' losses become one: `token_mean`, `sample_mean` (each sample weighs the same) or
    `constant` (Dr. GRPO). Unset: `sample_mean` for `gspo`, else `token_mean`."""

    max_tokens: int | None = Field(default=None, ge=1)
    """What `constant` divides a sample's losses by; unset: `rl.max_tokens`."""

    clip_ratio: float = Field(default=0.2, gt=0, le=1)
    """Lower clip distance of the probability ratio, and the upper one if that is not set. For
    `gspo`, whose ratios are means over a sequence, about 3e-4; 1 sets no lower bound."""

    clip_ratio_high: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Upper clip distance of the probability ratio (DAPO's clip-higher)."""

    clip_ratio_c: float | None = Field(default=None, gt=1, allow_inf_nan=False)
    """Dual clip of `grpo`: where the advantage is negative the ratio counts at most this much.
    Unset: it counts in full."""

    kl_coef: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Weight of the KL term; 0 saves the forward pass of what it compares with."""

    kl_to: Literal["reference", "old"] = "reference"
    """What that term keeps the policy near: the base, or the slower copy of `rl.old_policy`."""

    kl_estimator: KlEstimator = "k3"
    """Estimator of that KL: `k3` as in GRPO. `k1`, `k2` and `k3+` follow the KL's exact gradient,
    `k3` that of the reverse KL; see trainer_svc/megatron/training/kl.py."""

    tis_cap: float = Field(default=2.0, ge=0, allow_inf_nan=False)
    """Cap of the importance weight between trainer and rollout; 0 leaves the weight out.

    It corrects for an older policy, so keep it where `rl.max_staleness` is above 0.
    """

    tis_floor: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Lower bound of that weight where `tis_mode` is `mask`."""

    tis_level: Literal["token", "sequence"] = "token"
    """The weight of each token, or of its whole sequence: the product over its tokens."""

    tis_mode: Literal["truncate", "mask"] = "truncate"
    """What lies outside the bounds: is set to the cap, or is not learnt from."""

    minibatches: int = Field(default=1, ge=1)
    """Optimizer updates made from one batch."""

    sequences: Sequences = "shared"
    """How samples lie in a forward pass: `shared` computes a prompt once for all its completions,
    `packed` lays whole samples end to end, `padded` makes them equally long."""

    micro_batch_tokens: int = Field(default=1024, ge=1)
    """Tokens in one forward pass, padding counted in; a longer sequence goes alone."""

    recompute: bool = False
    """Keep only each layer's input for the backward pass and compute the rest once more: memory
    for a third more time."""

    @field_validator("loss")
    @classmethod
    def _known_loss(cls, value: str) -> str:
        if value not in LOSSES and ":" not in value:
            raise ValueError(
                f"no such loss; choose one of {', '.join(LOSSES)}, or write your own as "
                "module:function"
            )
        return value

    @model_validator(mode="after")
    def _bounds_that_hold(self) -> Self:
        if self.tis_floor > 0 and self.tis_cap == 0:
            raise ValueError(f"tis_floor: {self.tis_floor} bounds nothing while tis_cap is 0")
        if self.tis_floor > 0 and self.tis_mode == "truncate":
            raise ValueError(f"tis_floor: {self.tis_floor} bounds nothing unless tis_mode is mask")
        if 0 < self.tis_cap <= self.tis_floor:
            raise ValueError(
                f"tis_floor: {self.tis_floor} is not below tis_cap, {self.tis_cap}; all would go"
            )
        return self

    @model_validator(mode="after")
    def _dual_clip_of_a_clipped_ratio(self) -> Self:
        if self.clip_ratio_c is not None and self.loss in set(LOSSES) - {"grpo", "ppo"}:
            raise ValueError(f"clip_ratio_c: {self.loss} has no dual clip; leave it out")
        return self

    @property
    def weighting(self) -> Aggregation:
        """The aggregation in force. GSPO (arXiv 2507.18071) is defined as a mean over samples."""
        return self.aggregation or ("sample_mean" if self.loss == "gspo" else "token_mean")

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """Lowest and highest ratio that the clip lets through."""
        return 1 - self.clip_ratio, 1 + (self.clip_ratio_high or self.clip_ratio)


class SftSettings(Config):
    """A warm start: supervised training on examples, before the first step of the loop."""

    data: str | None = None
    """JSONL file of objects with `messages`, whose last is the assistant's and is learnt, or with
    `prompt` and `completion`, the text that is learnt. Unset: no warm start."""

    epochs: int = Field(default=1, ge=1)
    """Passes over the file."""

    batch_size: int = Field(default=32, ge=1)
    """Examples of one optimizer update."""

    lr: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Learning rate after warm-up; unset: `train.lr`."""

    def apply(self, train: TrainSettings) -> TrainSettings:
        """The loop's settings as the warm start needs them: the mean cross entropy of a token."""
        return train.model_copy(
            update={
                "loss": "cross_entropy",
                "aggregation": "token_mean",
                "lr": self.lr or train.lr,
                "minibatches": 1,
                "kl_coef": 0.0,
                # No rollout made these samples.
                "tis_cap": 0.0,
                "tis_floor": 0.0,
            }
        )
