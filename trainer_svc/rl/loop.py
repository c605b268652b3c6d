"""GRPO over a fleet, top to bottom: sample, reward, advantage, step, publish."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from refit.v1 import rollout_pb2, trainer_pb2

from common.adapter import AdapterRef, Manifest
from common.errors import ConfigError, WorkerGone, WorkerLost
from trainer_svc.config import TrainerConfig
from trainer_svc.megatron.client import MegatronWorker
from trainer_svc.megatron.protocol import Batch, Sample
from trainer_svc.node import Node
from trainer_svc.rl.advantage import group_advantages
from trainer_svc.rl.ahead import Ahead
from trainer_svc.rl.canary import CanaryMaker
from trainer_svc.rl.data import Example, Reward
from trainer_svc.rl.groups import Group, GroupMaker, StepSamples
from trainer_svc.rl.prompts import PromptEncoder
from trainer_svc.rl.records import Records
from trainer_svc.rl.row import describe_samples, describe_update
from trainer_svc.rl.sampler import Sampler
from trainer_svc.rl.side_policies import SidePolicies
from trainer_svc.rl.staleness import StalenessBound, describe_staleness
from trainer_svc.rl.warm_start import warm_start
from trainer_svc.run_dir import WARM_START_DIR, RunDir
from trainer_svc.sources import AdapterSource

log = logging.getLogger(__name__)


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
    side_sources: Mapping[str, AdapterSource] = field(default_factory=dict)
    """What is published beside the policy, by name; see `SidePolicies`."""

    lessons: Sequence[Sample] = ()
    """What the adapter is taught before the first step; see `warm_start`."""


class GrpoLoop:
    """One run. `train` returns when all steps are done or the run was stopped."""

    def __init__(self, config: TrainerConfig, parts: Parts) -> None:
        self._config, self._rl, self._parts = config, config.rl, parts
        self._deadline_seconds = config.megatron.command_timeout_seconds
        self._published: dict[int, AdapterRef] = {}
        self._first_version = self._version = 0
        self._examples: Iterator[Example] = iter(())
        self._bound = StalenessBound(self._rl.max_staleness, self._rl.stale)
        parts.node.fleet.max_staleness = self._rl.max_staleness
        self._groups = GroupMaker(
            self._rl,
            run_id=parts.run_dir.run_id,
            sampler=self._sampler(),
            encoder=parts.encoder,
            reward=parts.reward,
        )
        self._ahead = Ahead(self._sample, steps=self._rl.async_steps, last=self._rl.steps)
        self._sides = SidePolicies(
            self._rl.old_policy,
            sources=parts.side_sources,
            worker=parts.worker,
            node=parts.node,
            rules=config.rules,
            deadline_seconds=self._deadline_seconds,
        )
        self._canary = self._canary_maker() if self._rl.canary_prompts else None

    async def train(self) -> None:
        """Run every step that is left; dead ranks cost the steps since the last checkpoint.

        Raises:
            WaitExpired: too few replicas, for too long.
            WorkerGone: the ranks died more often than they may be restarted.
            ConfigError: data or reward function gave something unusable.
        """
        control = self._parts.node.control
        restored = False
        try:
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
        finally:
            await self._ahead.clear()

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
        await control.after_step(step, numbers, save=self._save, due=due, last=last)

    async def _step(self, step: int) -> dict[str, Any]:
        started = time.monotonic()
        samples = await self._fresh(step, await self._ahead.take(step))
        sampled = time.monotonic()
        metrics = await self._parts.worker.step(
            self._batch(samples.groups), deadline_seconds=self._deadline_seconds
        )
        trained = time.monotonic()
        staleness = [self._version - c.version for g in samples.groups for c in g.completions]
        self._parts.node.control.gauges.show_staleness(staleness)
        published = await self._publish()
        await self._sides.after_step(step, version=self._version)
        return {
            "step": step,
            **describe_samples(samples),
            **describe_staleness(staleness),
            **{key: value for key, value in metrics.items() if key not in ("tokens", "seconds")},
            **published,
            "generate_wait_seconds": sampled - started,
            "train_seconds": trained - sampled,
            "step_seconds": time.monotonic() - started,
        }

    async def _sample(self, step: int) -> StepSamples:
        """The next prompts' groups, at versions that will do when `step` trains."""
        examples = list(itertools.islice(self._examples, self._rl.prompts_per_step))
        if not examples:
            raise ConfigError("rl.data: the generator ended; let it yield for ever")
        version = self._bound.oldest_asked(
            self._version,
            ahead=step - self._parts.node.control.step - 1,
            first=self._first_version,
        )
        return await self._groups.make(examples, step=step, version=version)

    async def _fresh(self, step: int, samples: StepSamples) -> StepSamples:
        """Without what is too stale to train on now; made anew if that leaves nothing."""
        groups = [
            group
            for group in samples.groups
            if self._bound.is_fresh(group.version, current=self._version)
        ]
        stale = (len(samples.groups) - len(groups)) * self._rl.group_size
        if not groups:
            log.warning("step %d: every sample is too stale; sampling its prompts again", step)
            samples = await self._groups.make(samples.examples, step=step, version=self._version)
            groups = samples.groups
        return replace(samples, groups=groups, stale=stale)

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

    async def _publish(self) -> dict[str, Any]:
        """Export, distribute, and wait until the fleet serves the new version; the row's share."""
        started = time.monotonic()
        adapter = await self._parts.source.read()
        exported = time.monotonic()
        canary = await self._canary.make() if self._canary else None
        scored = time.monotonic()
        self._require(adapter.manifest)
        ref = self._parts.node.publisher.publish(
            self._config.adapter,
            adapter.manifest,
            adapter.buffer,
            version=self._parts.run_dir.spend_version(),
            canary=canary,
            rules=self._config.rules,
        )
        self._version, self._published[ref.version] = ref.version, ref
        await self._parts.node.ready()
        log.info("published %s, waiting for replicas", ref)
        replicas = await self._parts.node.fleet.wait_for(
            ref.adapter,
            ref.version,
            replicas=self._rl.min_replicas,
            timeout_seconds=self._rl.replica_timeout_seconds,
            straggler_seconds=self._rl.straggler_seconds,
        )
        return {
            **describe_update(ref, replicas),
            "export_seconds": exported - started,
            "canary_seconds": scored - exported,
            "update_seconds": time.monotonic() - started,
        }

    def _require(self, manifest: Manifest) -> None:
        """What a replica must be able to serve, that joins from here on."""
        self._parts.node.fleet.require(
            manifest,
            rules=self._config.rules,
            adapters=(self._config.adapter, *self._parts.side_sources),
        )

    async def _restore(self) -> None:
        """Bring the ranks to the newest checkpoint, or to step 0, and publish what they hold.

        What was sampled before goes: its policy is not an ancestor of the one that trains now.
        """
        await self._ahead.clear()
        parts, deadline_seconds = self._parts, self._deadline_seconds
        await parts.worker.wait_connected(deadline_seconds=deadline_seconds)
        settings, step = self._config.worker(), 0
        checkpoint = parts.run_dir.last_checkpoint()
        if parts.lessons and not checkpoint:
            adapter = await warm_start(
                parts.worker,
                parts.lessons,
                sft=self._config.sft,
                settings=settings,
                directory=parts.run_dir.path / WARM_START_DIR,
                deadline_seconds=deadline_seconds,
            )
            settings = settings.model_copy(update={"adapter_path": adapter})
        await parts.worker.init(settings, deadline_seconds=deadline_seconds)
        await self._sides.add()
        if checkpoint:
            path, step = checkpoint
            await parts.worker.load(path, deadline_seconds=deadline_seconds)
        log.info("at step %d of %d", step, self._rl.steps)
        parts.node.control.step = step
        self._examples = parts.examples(step * self._rl.prompts_per_step)
        parts.records.truncate(step)
        await self._publish()
        await self._sides.publish(version=self._version)
        self._first_version = self._version
        parts.node.control.state = trainer_pb2.RUN_STATE_RUNNING

    async def _save(self) -> Path:
        """Write a checkpoint of the step just done."""
        run_dir = self._parts.run_dir
        path = run_dir.checkpoint(self._parts.node.control.step)
        state = {"step": self._parts.node.control.step, "version": self._version}
        await self._parts.worker.save(path, state=state, deadline_seconds=self._deadline_seconds)
        run_dir.drop_old_checkpoints(self._rl.keep_checkpoints)
        return path

    def _sampler(self) -> Sampler:
        return Sampler(
            self._parts.node.fleet,
            run_id=self._parts.run_dir.run_id,
            adapter=self._config.adapter,
            params=rollout_pb2.SamplingParams(
                max_tokens=self._rl.max_tokens, temperature=self._rl.temperature
            ),
            group_size=self._rl.group_size,
            published=self._published,
            hedge_after_seconds=self._rl.hedge_after_seconds,
        )

    def _canary_maker(self) -> CanaryMaker:
        examples = itertools.islice(self._parts.examples(0), self._rl.canary_prompts)
        return CanaryMaker(
            self._parts.worker,
            [self._parts.encoder.encode(example) for example in examples],
            max_difference=self._rl.canary_max_difference,
            deadline_seconds=self._deadline_seconds,
        )
