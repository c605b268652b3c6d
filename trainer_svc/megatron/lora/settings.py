"""What a user sets for the adapter; imports neither torch nor Megatron."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from common.adapter import ExpertLayout
from common.config import Config
from common.peft_dir import BASE_CHANGING_INITS

DtypeName = Literal["float32", "bfloat16"]
LoraType = Literal["lora", "canonical_lora", "dora"]
Start = Literal["xavier", "xavier_uniform", "kaiming", "normal"]
Rank = Annotated[int, Field(ge=1)]
Alpha = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class LoraSettings(Config):
    """Which linears get an adapter, and what it looks like at the start.

    A name is a module's own (`linear_qkv`) or a wildcard, which is matched with own names and with
    full ones (`*.layers.0.*.linear_qkv`).
    """

    type: LoraType = "lora"
    """`lora`: one adapter a linear, whose A the fused projections share. `canonical_lora`: one a
    projection. `dora`: `lora` and a magnitude an output row (arXiv 2402.09353)."""

    rank: Rank = 16
    """Inner dimension of an adapter."""

    alpha: Alpha = 32.0
    """Numerator of an adapter's scale."""

    use_rslora: bool = False
    """Scale by alpha / sqrt(rank) instead of alpha / rank (arXiv 2312.03732)."""

    rank_pattern: dict[str, Rank] = Field(default={})
    """Other ranks by name; the first that matches counts."""

    alpha_pattern: dict[str, Alpha] = Field(default={})
    """Other alphas by name; the first that matches counts."""

    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability of zeroing an element while training."""

    dropout_position: Literal["pre", "post"] = "pre"
    """Whether dropout falls on the adapter's input or on its output."""

    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Names of what is adapted; "all-linear" is all but the router. `canonical_lora` knows
    `linear_q`, `linear_k`, `linear_v`, `linear_fc1_gate` and `linear_fc1_up` besides."""

    exclude_modules: tuple[str, ...] = ()
    """Names of what is not, though it is a target."""

    experts: Literal["per_expert", "shared"] = "per_expert"
    """One adapter for each expert of a layer, or one that all of them share."""

    expert_layout: ExpertLayout = ExpertLayout.PER_EXPERT
    """How exports and checkpoints hold the experts' factors: `per_expert` in tensors of their own,
    `packed`, `flat` or `swapped` in one for all of a layer. Loading takes each."""

    dtype: DtypeName = "float32"
    """Type of the trained parameters; optimizer masters are float32 either way."""

    a_init: Start = "xavier"
    """Xavier (normal or uniform), Kaiming uniform with a = sqrt(5), or normal with deviation
    1 / rank, which PEFT calls gaussian."""

    b_init: Literal["zero"] | Start = "zero"
    """Zero leaves the base's output as it is; of the others training starts elsewhere."""

    @field_validator("a_init", "b_init", mode="before")
    @classmethod
    def _keep_base(cls, value: object) -> object:
        if isinstance(value, str) and value.lower().startswith(BASE_CHANGING_INITS):
            raise ValueError(
                f"{value} changes the base weights, which replicas never receive; "
                "use xavier, kaiming or normal"
            )
        return "normal" if value == "gaussian" else value

    @field_validator("target_modules")
    @classmethod
    def _some_target(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not value:
            raise ValueError('an empty list trains nothing; use "all-linear" or name modules')
        return value

    @model_validator(mode="after")
    def _one_magnitude_a_row(self) -> Self:
        if self.type == "dora" and self.experts == "shared":
            raise ValueError(
                "experts = shared does not go with type = dora, whose magnitudes belong to one "
                "base weight; use experts = per_expert"
            )
        return self
