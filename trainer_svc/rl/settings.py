"""What a user of the trainer sets of the loop: `[rl]`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from common.config import Config


class OldPolicySettings(Config):
    """A slower copy of the policy, which replicas serve as `old`."""

    interval: int = Field(default=1, ge=1)
    """Steps between its updates."""

    decay: float = Field(default=0.0, ge=0, le=1)
    """What an update keeps of it; the rest is the policy's. 0 copies the policy."""


class RlSettings(Config):
    """The loop: what is sampled, how it is rewarded, how often."""

    data: str
    """Prompts: a JSONL file, or `module:generator` called with the seed. See README."""

    reward: str
    """`module:function`, called with the example and the completion's text; returns a float."""

    steps: int = Field(default=100, ge=1)
    """Optimizer steps of the run, those before a resume counted in."""

    prompts_per_step: int = Field(default=8, ge=1)
    """Different prompts in one batch."""

    group_size: int = Field(default=8, ge=2)
    """Completions of each prompt; the group is what advantages are normalised over."""

    max_tokens: int = Field(default=256, ge=1)
    """Longest completion."""

    temperature: float = Field(default=1.0, ge=0.01, le=2.0)
    """Sampling temperature; the trainer computes its log-probabilities at the same one. vLLM takes
    no higher one, and rounds lower ones up."""

    normalise_advantages: bool = True
    """Divide by the group's standard deviation (GRPO), or not (Dr. GRPO)."""

    seed: int = 0
    """Seeds data, adapter initialisation and dropout; the fleet's sampling is not seeded."""

    checkpoint_every_steps: int = Field(default=10, ge=1)
    """Steps between checkpoints; the last step always writes one."""

    keep_checkpoints: int = Field(default=3, ge=1)
    """Newest checkpoints that stay."""

    min_replicas: int = Field(default=1, ge=1)
    """A step begins once so many replicas serve the current version."""

    replica_timeout_seconds: float = Field(default=300.0, gt=0)
    """How long a version may take to be served by `min_replicas`."""

    straggler_seconds: float = Field(default=10.0, ge=0)
    """How long a step then still waits for the other replicas to serve it."""

    max_staleness: int = Field(default=0, ge=0)
    """Versions that may lie between the one that made a sample and the one that is trained on it.
    Above 0 keep `train.tis_cap`: its weight corrects for what the policy has changed meanwhile."""

    stale: Literal["drop", "wait"] = "wait"
    """`wait`: prompts go only to replicas whose answer will be fresh enough when its step trains.
    `drop`: they go to any that takes prompts, and a group that is too stale when its step trains is
    thrown away; if none is left the step's prompts are sampled again, at the newest version."""

    async_steps: int = Field(default=0, ge=0)
    """Steps that generation may be ahead of training; 0: they take turns. At most `max_staleness`,
    since a sample made so many steps ahead is so many versions old when it is trained on."""

    generate_timeout_seconds: float = Field(default=600.0, gt=0)
    """How long one group may take, retries on other replicas included."""

    hedge_after_seconds: float | None = Field(default=None, gt=0)
    """A group without an answer so long after it was sent is sent to another replica as well; the
    first answer counts, the other call is cancelled. Unset never does."""

    canary_prompts: int = Field(default=0, ge=0)
    """With every version go this many of the run's first prompts, their last 32 tokens scored by
    the trainer; a replica that scores them otherwise refuses the version. 0 sends none."""

    canary_max_difference: float = Field(default=0.2, gt=0, allow_inf_nan=False)
    """Mean absolute difference of the canary's log-probabilities that a replica still accepts."""

    old_policy: OldPolicySettings | None = None
    """Keep, and publish as `old`, a slower copy of the policy; unset keeps none."""

    publish_reference: bool = False
    """Publish the base as the adapter `reference`, which replicas serve by that name."""

    stop_grace_seconds: float = Field(default=20.0, ge=0)
    """How long the running step may go on after SIGTERM, to end with a checkpoint."""

    @field_validator("async_steps")
    @classmethod
    def _never_too_far_ahead(cls, value: int, info: ValidationInfo) -> int:
        bound = info.data.get("max_staleness", value)
        if value > bound:
            raise ValueError(f"raise rl.max_staleness, which is {bound}, or take fewer steps")
        return value
