"""The trainer's own log-probabilities of a few prompts, for replicas to compare theirs with."""

from __future__ import annotations

from collections.abc import Sequence

from common.adapter import Canary, CanarySequence
from common.errors import ConfigError
from trainer_svc.megatron.client import MegatronWorker
from trainer_svc.megatron.protocol import Batch, Sample

_TOKENS = 32
"""Of each prompt's end; many begin alike, with the chat template's system message."""


class CanaryMaker:
    """Scores prompts with the policy as it is.

    canary = await CanaryMaker(worker, prompts, max_difference=0.2, deadline_seconds=60).make()
    """

    def __init__(
        self,
        worker: MegatronWorker,
        prompts: Sequence[Sequence[int]],
        *,
        max_difference: float,
        deadline_seconds: float,
    ) -> None:
        """Raises `ConfigError` when no prompt has a second token to score."""
        self._worker = worker
        self._sequences = [tuple(prompt[-_TOKENS:]) for prompt in prompts if len(prompt) > 1]
        if not self._sequences:
            raise ConfigError(
                f"rl.canary_prompts: the first {len(prompts)} prompts have one token each; set more"
            )
        self._max_difference = max_difference
        self._deadline_seconds = deadline_seconds

    async def make(self) -> Canary:
        """One forward pass of the ranks, at temperature 1."""
        # Each token but the first is scored as if it were sampled; nothing is learnt from it.
        samples = [
            Sample(ids[:1], ids[1:], rollout_logprobs=(0.0,) * (len(ids) - 1), advantage=0.0)
            for ids in self._sequences
        ]
        scored = await self._worker.logprobs(
            Batch(tuple(samples)), deadline_seconds=self._deadline_seconds
        )
        return Canary(
            tuple(
                CanarySequence(ids, tuple(logprobs))
                for ids, logprobs in zip(self._sequences, scored, strict=True)
            ),
            self._max_difference,
        )
