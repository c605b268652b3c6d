"""What an `AdapterPublisher` may ask of its child process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from refit.v1 import rollout_pb2

from common.adapter import AdapterRef, seal
from common.errors import InvalidField
from common.peft_dir import PeftAdapter
from common.tasks import gather_or_cancel
from trainer_svc.library.completion import Completion
from trainer_svc.megatron.protocol import Json, manifest_from_json
from trainer_svc.node import Node
from trainer_svc.rl import completion
from trainer_svc.rl.sampler import Sampler
from trainer_svc.rules import rules_of

log = logging.getLogger(__name__)

_FINISH_REASONS = {
    rollout_pb2.FINISH_REASON_STOP: "stop",
    rollout_pb2.FINISH_REASON_LENGTH: "length",
}


class Commands:
    """Each returns a JSON object, or raises RefitError."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._turn = asyncio.Lock()
        self._published: dict[str, dict[int, AdapterRef]] = defaultdict(dict)
        self._pins: dict[str, contextlib.ExitStack] = {}
        self._table: dict[str, Callable[[Json], Awaitable[Json]]] = {
            "publish": self._publish,
            "wait": self._wait,
            "generate": self._generate,
            "pin": self._pin,
            "unpin": self._unpin,
        }

    async def run(self, command: str, args: Json) -> Json:
        return await self._table[command](args)

    async def _publish(self, args: Json) -> Json:
        # The lock is taken in the order in which the requests came, and versions only grow.
        async with self._turn:
            found = await asyncio.to_thread(_read, args, self._node.base.fingerprint)
            rules = rules_of(swap=args["swap"], merge=args["merge"])
            self._node.fleet.require(found.manifest, rules=rules, adapters=[args["adapter"]])
            ref = self._node.publisher.publish(
                args["adapter"],
                found.manifest,
                found.buffer,
                version=args["version"],
                rules=rules,
            )
            self._published[ref.adapter][ref.version] = ref
            await self._node.ready()
        log.info("published %s", ref)
        return {"digest": ref.digest.hex()}

    async def _wait(self, args: Json) -> Json:
        await self._node.fleet.wait_for(
            args["adapter"],
            args["version"],
            replicas=args["replicas"],
            timeout_seconds=args["timeout_seconds"],
            straggler_seconds=0,
        )
        return {}

    async def _generate(self, args: Json) -> Json:
        group = Sampler(
            self._node.fleet,
            run_id=self._node.control.run_id,
            adapter=args["adapter"],
            params=_sampling(args["sampling"]),
            group_size=args["n"],
            published=self._published[args["adapter"]],
        )
        answers = await gather_or_cancel(
            group.group(
                prompt,
                request_id=uuid.uuid4().hex,
                version=args["version"],
                timeout_seconds=args["timeout_seconds"],
            )
            for prompt in args["prompts"]
        )
        return {"groups": [[_to_json(c) for c in answer.completions] for answer in answers]}

    async def _pin(self, args: Json) -> Json:
        pin = contextlib.ExitStack()
        pin.enter_context(self._node.publisher.pinned(args["adapter"], args["version"]))
        self._pins[args["pin"]] = pin
        return {}

    async def _unpin(self, args: Json) -> Json:
        self._pins.pop(args["pin"]).close()
        return {}


def _to_json(found: completion.Completion) -> Json:
    return Completion(
        token_ids=tuple(found.token_ids),
        logprobs=tuple(found.logprobs),
        text=found.text,
        versions=tuple(found.versions),
        finish_reason=_FINISH_REASONS[found.finish_reason],
    ).to_json()


def _read(args: Json, base_fingerprint: str) -> PeftAdapter:
    """Map the parent's copy of the adapter and compute its digests."""
    with Path(args["path"]).open("rb") as file:
        buffer = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    manifest = manifest_from_json(args["manifest"])
    sealed = seal(manifest.tensors, buffer)
    return PeftAdapter(replace(manifest, base_fingerprint=base_fingerprint, tensors=sealed), buffer)


def _sampling(fields: Json) -> rollout_pb2.SamplingParams:
    given = {key: value for key, value in fields.items() if value is not None}
    try:
        return rollout_pb2.SamplingParams(**given)
    except (TypeError, ValueError) as error:
        raise InvalidField(f"generate: {error}") from error
