"""GRPO over a fleet, top to bottom: sample, reward, advantage, step, publish."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from refit.v1 import rollout_pb2, trainer_pb2

from common.adapter import AdapterRef
from common.errors import ConfigError, InvalidField, WaitExpired, WorkerGone, WorkerLost
from common.tasks import gather_or_cancel
from trainer_svc.config import TrainerConfig
from trainer_svc.fleet import Replica
from trainer_svc.megatron.client import MegatronWorker
from trainer_svc.megatron.protocol import Batch, Sample
from trainer_svc.node import Node
from trainer_svc.rl.advantage import group_advantages
from trainer_svc.rl.data import Example, Reward
from trainer_svc.rl.prompts import PromptEncoder
from trainer_svc.rl.records import Records
from trainer_svc.rl.sampler import Completion, Sampler
from trainer_svc.run_dir import RunDir
from trainer_svc.sources import AdapterSource

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Group:
    """One prompt, its completions and their rewards."""

    prompt_ids: list[int]
    completions: list[Completion]
    rewards: list[float]


@dataclass(frozen=True, slots=True)
class Parts:
    """What the loop works with; `trainer_svc.main` makes and closes them."""

    run_dir: RunDir
    node: Node
    worker: MegatronWorker
    source: AdapterSource
    examples: Callable[[int], Iterator[Example]]
    """The run's examples from the one with this number on."""

    reward: Reward
    encoder: PromptEncoder
    records: Records


class GrpoLoop:
    """One run. `train` returns when all steps are done or the run was stopped."""

    def __init__(self, config: TrainerConfig, parts: Parts) -> None:
        self._config, self._rl, self._parts = config, config.rl, parts
        self._current: AdapterRef | None = None
        self._examples: Iterator[Example] = iter(())
        self._deadline_seconds = config.megatron.command_timeout_seconds
        params = rollout_pb2.SamplingParams(
            max_tokens=self._rl.max_tokens, temperature=self._rl.temperature
        )
        self._sampler = Sampler(
            parts.node.fleet,
            run_id=parts.run_dir.run_id,
            adapter=config.adapter,
            params=params,
            group_size=self._rl.group_size,
        )

    async def train(self) -> None:
        """Run every step that is left; dead ranks cost the steps since the last checkpoint.

        Raises:
            WaitExpired: too few replicas, for too long.
            WorkerGone: the ranks died more often than they may be restarted.
            ConfigError: data or reward function gave something unusable.
        """
        control = self._parts.node.control
        restored = False
        while not restored or (control.step < self._rl.steps and not control.stopping):
            try:
                if restored:
                    await self._advance(control.step + 1)
                else:
                    await self._restore()
                    restored = True
            except WorkerGone:
                raise
            except WorkerLost as error:
                log.error("%s; going on from the last checkpoint", error)
                restored = False

    async def _advance(self, step: int) -> None:
        """One step with its record and, where it is due, its checkpoint."""
        control = self._parts.node.control
        row = await self._step(step)
        self._parts.records.append(row)
        log.info(
            "step %d of %d: reward %.3f, version %d on %d replicas, %.1f s",
            *(step, self._rl.steps, row["reward_mean"], row["version"], len(row["replicas"])),
            row["step_seconds"],
        )
        numbers = {key: float(v) for key, v in row.items() if isinstance(v, int | float)}
        last = step == self._rl.steps or control.stopping
        due = last or step % self._rl.checkpoint_every_steps == 0
        await control.after_step(step, numbers, save=self._save, due=due)

    async def _step(self, step: int) -> dict[str, Any]:
        started = time.monotonic()
        groups, lost = await self._sample()
        sampled = time.monotonic()
        metrics = await self._parts.worker.step(
            self._batch(groups), deadline_seconds=self._deadline_seconds
        )
        trained = time.monotonic()
        staleness = self._staleness(groups)
        update = await self._publish()
        return {
            "step": step,
            **_describe(groups, generate_seconds=sampled - started),
            "samples_lost": lost,
            "staleness_mean": fmean(staleness),
            "staleness_max": max(staleness),
            **{key: value for key, value in metrics.items() if key not in ("tokens", "seconds")},
            **update,
            "generate_seconds": sampled - started,
            "train_seconds": trained - sampled,
            "step_seconds": time.monotonic() - started,
        }

    async def _sample(self) -> tuple[list[Group], int]:
        """Groups for one step, all at the current version, and how many samples were lost."""
        examples = list(itertools.islice(self._examples, self._rl.prompts_per_step))
        if not examples:
            raise ConfigError("rl.data: the generator ended; let it yield for ever")
        found = await gather_or_cancel(map(self._group, examples))
        groups = [group for group in found if group]
        if not groups:
            raise WaitExpired("generate: every prompt of the step was lost; the log says why")
        return groups, (len(examples) - len(groups)) * self._rl.group_size

    async def _group(self, example: Example) -> Group | None:
        assert self._current is not None, "sampling follows publishing"
        prompt_ids = self._parts.encoder.encode(example)
        try:
            completions = await self._sampler.group(
                prompt_ids,
                version=self._current.version,
                timeout_seconds=self._rl.generate_timeout_seconds,
            )
        except (WaitExpired, InvalidField) as error:
            log.error("%s; the prompt is dropped", error)
            return None
        rewards = await asyncio.to_thread(self._rewards, example, completions)
        return Group(prompt_ids, completions, rewards)

    def _rewards(self, example: Example, completions: list[Completion]) -> list[float]:
        rewards = [float(self._parts.reward(example, c.text)) for c in completions]
        if not all(map(math.isfinite, rewards)):
            raise ConfigError(
                f"rl.reward: {self._rl.reward} returned {rewards}; return finite ones"
            )
        return rewards

    def _batch(self, groups: list[Group]) -> Batch:
        samples = [
            Sample(
                prompt_ids=tuple(group.prompt_ids),
                completion_ids=tuple(completion.token_ids),
                rollout_logprobs=tuple(completion.logprobs),
                advantage=advantage,
            )
            for group in groups
            for completion, advantage in zip(
                group.completions,
                group_advantages(group.rewards, normalise=self._rl.normalise_advantages),
                strict=True,
            )
        ]
        return Batch(tuple(samples), temperature=self._rl.temperature)

    def _staleness(self, groups: list[Group]) -> list[int]:
        """Versions between the one that made a sample and the one that is being trained."""
        assert self._current is not None, "training follows publishing"
        return [self._current.version - c.version for group in groups for c in group.completions]

    async def _publish(self) -> dict[str, Any]:
        """Export, distribute, and wait until the fleet serves the new version; the row's share."""
        started = time.monotonic()
        adapter = await self._parts.source.read()
        exported = time.monotonic()
        self._parts.node.fleet.require(adapter.manifest)
        self._current = self._parts.node.publisher.publish(
            self._config.adapter,
            adapter.manifest,
            adapter.buffer,
            version=self._parts.run_dir.spend_version(),
        )
        await self._parts.node.ready()
        log.info("published %s, waiting for replicas", self._current)
        replicas = await self._parts.node.fleet.wait_for(
            self._current.adapter,
            self._current.version,
            replicas=self._rl.min_replicas,
            timeout_seconds=self._rl.replica_timeout_seconds,
            straggler_seconds=self._rl.straggler_seconds,
        )
        return {
            **_describe_update(self._current, replicas),
            "export_seconds": exported - started,
            "update_seconds": time.monotonic() - started,
        }

    async def _restore(self) -> None:
        """Bring the ranks to the newest checkpoint, or to step 0, and publish what they hold."""
        parts, deadline_seconds = self._parts, self._deadline_seconds
        await parts.worker.wait_connected(deadline_seconds=deadline_seconds)
        await parts.worker.init(self._config.worker(), deadline_seconds=deadline_seconds)
        step = 0
        if checkpoint := parts.run_dir.last_checkpoint():
            path, step = checkpoint
            await parts.worker.load(path, deadline_seconds=deadline_seconds)
        log.info("at step %d of %d", step, self._rl.steps)
        parts.node.control.step = step
        self._examples = parts.examples(step * self._rl.prompts_per_step)
        parts.records.truncate(step)
        await self._publish()
        parts.node.control.state = trainer_pb2.RUN_STATE_RUNNING

    async def _save(self) -> Path:
        """Write a checkpoint of the step just done."""
        assert self._current is not None, "saving follows publishing"
        path = self._parts.run_dir.checkpoint(self._parts.node.control.step)
        state = {"step": self._parts.node.control.step, "version": self._current.version}
        await self._parts.worker.save(path, state=state, deadline_seconds=self._deadline_seconds)
        return path


def _describe(groups: list[Group], *, generate_seconds: float) -> dict[str, Any]:
    rewards = [reward for group in groups for reward in group.rewards]
    lengths = [len(c.token_ids) for group in groups for c in group.completions]
    return {
        "samples": len(rewards),
        "reward_mean": fmean(rewards),
        "reward_std": pstdev(rewards),
        "completion_tokens_mean": fmean(lengths),
        "tokens_per_second": sum(lengths) / generate_seconds,
    }


def _describe_update(ref: AdapterRef, replicas: list[Replica]) -> dict[str, Any]:
    """The version, each replica's own digest of it, and the stages of the slowest replica."""
    slowest = max(
        (replica.timings for replica in replicas),
        key=lambda t: t.wire_seconds + t.stage_seconds + t.commit_seconds,
    )
    reported = {r.id: r.committed[ref.adapter, ref.version] for r in replicas}
    return {
        "version": ref.version,
        "digest": ref.digest.hex(),
        "replicas": [
            {"replica_id": name, "digest": found.digest.hex()} for name, found in reported.items()
        ],
        "wire_seconds": slowest.wire_seconds,
        "stage_seconds": slowest.stage_seconds,
        "commit_seconds": slowest.commit_seconds,
    }
