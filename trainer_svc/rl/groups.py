"""From examples to rewarded groups: one step's samples."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import ConfigError, InvalidField, WaitExpired
from common.tasks import gather_or_cancel
from trainer_svc.rl.completion import Completion
from trainer_svc.rl.data import Example, Reward
from trainer_svc.rl.prompts import PromptEncoder
from trainer_svc.rl.sampler import Sampler
from trainer_svc.rl.settings import RlSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Group:
    """One prompt, its completions and their rewards."""

    prompt_ids: list[int]
    completions: list[Completion]
    rewards: list[float]
    hedged: bool

    @property
    def version(self) -> int:
        """The oldest that made any of its tokens."""
        return min(completion.version for completion in self.completions)


@dataclass(frozen=True, slots=True)
class StepSamples:
    """The groups of one step; `lost` and `stale` count the samples that are not among them."""

    examples: list[Example]
    groups: list[Group]
    lost: int
    stale: int
    seconds: float


class GroupMaker:
    """Encodes, samples and rewards.

    samples = await maker.make(examples, step=3, version=2)
    """

    def __init__(
        self,
        rl: RlSettings,
        *,
        run_id: str,
        sampler: Sampler,
        encoder: PromptEncoder,
        reward: Reward,
    ) -> None:
        self._rl, self._run_id = rl, run_id
        self._sampler, self._encoder, self._reward = sampler, encoder, reward

    async def make(self, examples: Sequence[Example], *, step: int, version: int) -> StepSamples:
        """A group for every example, made by `version` or newer; groups without an answer are lost.

        Raises:
            WaitExpired: all of them are.
            ConfigError: an example or a reward is unusable.
        """
        started = time.monotonic()
        # Sampling a step anew, at a later version or after a restart, is another request.
        names = [f"{self._run_id}-{step}-{index}-v{version}" for index in range(len(examples))]
        found = await gather_or_cancel(
            self._group(example, request_id=name, version=version)
            for example, name in zip(examples, names, strict=True)
        )
        groups = [group for group in found if group]
        if not groups:
            raise WaitExpired("generate: every prompt of the step was lost; the log says why")
        lost = (len(examples) - len(groups)) * self._rl.group_size
        seconds = time.monotonic() - started
        return StepSamples(list(examples), groups, lost=lost, stale=0, seconds=seconds)

    async def _group(self, example: Example, *, request_id: str, version: int) -> Group | None:
        prompt_ids = self._encoder.encode(example)
        try:
            answer = await self._sampler.group(
                prompt_ids,
                request_id=request_id,
                version=version,
                timeout_seconds=self._rl.generate_timeout_seconds,
            )
        except (WaitExpired, InvalidField) as error:
            log.error("%s; the prompt is dropped", error)
            return None
        rewards = await asyncio.to_thread(self._rewards, example, answer.completions)
        return Group(prompt_ids, answer.completions, rewards, answer.hedged)

    def _rewards(self, example: Example, completions: Sequence[Completion]) -> list[float]:
        rewards = [float(self._reward(example, c.text)) for c in completions]
        if not all(map(math.isfinite, rewards)):
            raise ConfigError(
                f"rl.reward: {self._rl.reward} returned {rewards}; return finite ones"
            )
        return rewards
