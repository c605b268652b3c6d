"""`AdapterPublisher`: the start, the publish and the close of somebody's own training loop."""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, get_args

from common.adapter import Manifest
from common.config import validate_config
from common.errors import AdapterNotFound, Unavailable, WaitExpired
from trainer_svc.config import ServerSettings
from trainer_svc.library.arguments import (
    adapter_name,
    one_of,
    real,
    seconds,
    strings,
    token_ids,
    whole,
)
from trainer_svc.library.completion import Completion
from trainer_svc.library.contents import Contents, read_contents
from trainer_svc.library.published import Published
from trainer_svc.library.server_process import ServerProcess, result_of
from trainer_svc.megatron.protocol import Json, manifest_to_json
from trainer_svc.rules import MergeName, SwapName

_START_SECONDS = 120.0
_ANSWER_SECONDS = 30.0
"""How long the child may take beyond a deadline that it keeps itself."""

_MAX_COMPLETIONS = 1024
"""As many of a prompt as a replica takes."""

_UNHASHED = 2
"""Versions that may wait for their digests; each is a copy of the adapter."""


class AdapterPublisher:
    """Streams the adapters of any training loop to the replicas that subscribe.

        with AdapterPublisher(model="models/smollm2", port=50051) as publisher:
            version = publisher.publish(get_peft_model_state_dict(model), lora_config)
            publisher.wait(version)
            groups = publisher.generate([[1, 2, 3]], n=8, max_tokens=64)

    A child process serves; it ends with `close`, or with this process. Any thread may call any
    method. Versions count from 1 for every adapter, and a new publisher is a new run.

    Args:
        model: Hugging Face directory of the base model, the one that the replicas load.
        host: interface to listen on; 0.0.0.0 for every one.
        port: 0 lets the system choose; see `address`.
        server: all else about the server, as under `[server]` of a trainer's TOML file.
        log_path: file that the server's log is added to. Errors show its end in any case.

    Raises:
        ConfigError: the model cannot be read, or the port not be bound.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        host: str = "127.0.0.1",
        port: int = 50051,
        server: ServerSettings | None = None,
        log_path: Path | None = None,
    ) -> None:
        keys = (server or ServerSettings()).model_dump(mode="json") | {"host": host, "port": port}
        settings = validate_config(ServerSettings, keys, source="AdapterPublisher")
        self._turn = threading.Lock()
        self._newest: dict[str, int] = defaultdict(int)
        self._room = threading.BoundedSemaphore(_UNHASHED)
        self._server = ServerProcess(log_path)
        try:
            started = self._ask(
                "start",
                {"model": str(model), "server": settings.model_dump(mode="json")},
                timeout_seconds=_START_SECONDS,
            )
        except BaseException:
            self._server.close()
            raise
        self.address: str = started["address"]
        """host:port, for `trainer_address` of the replicas."""
        self.run_id: str = started["run_id"]

    def __enter__(self) -> AdapterPublisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def publish(
        self,
        state_dict: Mapping[str, Any],
        lora_config: object,
        *,
        adapter: str = "default",
        swap: SwapName = "replica",
        merge: MergeName = "replica",
    ) -> Published:
        """Hand a version over; the caller may change the tensors as soon as this returns.

        Blocks for one copy of them; digests and streaming are the child's work. Every tensor keeps
        its own type: float32, bfloat16 or float16. A third call waits while the digests of the
        first are still computed.

        Args:
            state_dict: torch tensors, on any device, or numpy arrays: by the names that
                `peft.get_peft_model_state_dict` gives, or those of `model.state_dict()`.
            lora_config: `peft.LoraConfig`, or a dict with the keys of adapter_config.json.
            swap: what becomes of requests in flight on a replica that commits this version:
                "finish", "abort", "continue", or what that replica is configured for.
            merge: whether a replica serves it from a LoRA slot, "never", or sums it into its
                weights, "rollout", and serves nothing else; or what it is configured for.

        Raises:
            ConfigError: the adapter cannot be served; the key, tensor or argument is named.
            StagingFull: there is no memory for the copy.
            Unavailable: the server ended; the message holds the end of its log.
        """
        adapter = adapter_name(adapter)
        rules: Json = {
            "swap": one_of("swap", swap, words=get_args(SwapName)),
            "merge": one_of("merge", merge, words=get_args(MergeName)),
        }
        contents = read_contents(state_dict, lora_config, dora=merge != "never")
        with contextlib.ExitStack() as held:
            file = os.memfd_create("refit-adapter")
            held.callback(os.close, file)
            contents.write(file)
            if not self._room.acquire(timeout=_ANSWER_SECONDS):
                raise WaitExpired(
                    f"publish: {_UNHASHED} versions had no digest after {_ANSWER_SECONDS:g} s"
                )
            held.callback(self._room.release)
            published, sealed = self._hand_over(file, contents, adapter, rules)
            until_sealed = held.pop_all()
        sealed.add_done_callback(lambda _: until_sealed.close())
        return published

    def wait(
        self, version: Published, *, replicas: int = 1, timeout_seconds: float = 300.0
    ) -> None:
        """Block until so many replicas serve the version, or a newer one.

        Raises:
            ConfigError: an argument is of the wrong kind or size.
            WaitExpired: fewer do when the time is over; each one's state is named.
        """
        replicas = whole("replicas", replicas, low=1)
        timeout_seconds = seconds("timeout_seconds", timeout_seconds)
        version.digest(timeout_seconds=timeout_seconds)
        self._ask(
            "wait",
            {
                "adapter": version.adapter,
                "version": version.version,
                "replicas": replicas,
                "timeout_seconds": timeout_seconds,
            },
            timeout_seconds=timeout_seconds + _ANSWER_SECONDS,
        )

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        n: int = 1,
        temperature: float = 1.0,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        min_tokens: int = 0,
        adapter: str = "default",
        timeout_seconds: float = 600.0,
    ) -> list[list[Completion]]:
        """Sample `n` completions of every prompt, given as token ids, from the fleet.

        They come from the version published last or a newer one, each prompt's from one replica:
        the least busy one, another if that one fails. What is unset is as vLLM has it.

        Raises:
            AdapterNotFound: no version of the adapter was published.
            ConfigError: an argument is of the wrong kind or size.
            InvalidField: a replica refused a prompt or a parameter; it is named.
            WaitExpired: no replica answered in time.
        """
        timeout_seconds = seconds("timeout_seconds", timeout_seconds)
        if not (version := self._newest.get(adapter_name(adapter), 0)):
            raise AdapterNotFound(f"generate: no version of {adapter!r}; publish one first")
        sampling = {
            "max_tokens": whole("max_tokens", max_tokens),
            "temperature": real("temperature", temperature),
            "top_p": top_p if top_p is None else real("top_p", top_p),
            "top_k": top_k if top_k is None else whole("top_k", top_k),
            "min_p": min_p if min_p is None else real("min_p", min_p),
            "seed": seed if seed is None else whole("seed", seed),
            "stop": strings("stop", stop),
            "stop_token_ids": [whole("stop_token_ids", found) for found in stop_token_ids],
            "ignore_eos": bool(ignore_eos),
            "min_tokens": whole("min_tokens", min_tokens),
        }
        reply = self._ask(
            "generate",
            {
                "prompts": [token_ids("prompts", prompt) for prompt in prompts],
                "n": whole("n", n, low=1, high=_MAX_COMPLETIONS),
                "sampling": sampling,
                "adapter": adapter,
                "version": version,
                "timeout_seconds": timeout_seconds,
            },
            timeout_seconds=timeout_seconds + _ANSWER_SECONDS,
        )
        return [[Completion.from_json(raw) for raw in group] for group in reply["groups"]]

    @contextlib.contextmanager
    def pinned(self, version: Published) -> Iterator[None]:
        """Keep a version on the replicas inside the block, however many newer ones come.

        Those that sum adapters into their weights serve the newest alone, whatever is pinned.

        Raises:
            AdapterNotFound: it is not kept any more.
        """
        version.digest()
        pin: Json = {"pin": uuid.uuid4().hex}
        held = {"adapter": version.adapter, "version": version.version}
        self._ask("pin", pin | held, timeout_seconds=_ANSWER_SECONDS)
        try:
            yield
        finally:
            # The pins of a server that ended went with it.
            with contextlib.suppress(Unavailable):
                self._ask("unpin", pin, timeout_seconds=_ANSWER_SECONDS)

    def close(self) -> None:
        """End the server. Replicas go on serving what they have."""
        self._server.close()

    def _hand_over(
        self, file: int, contents: Contents, adapter: str, rules: Json
    ) -> tuple[Published, Future[Json]]:
        manifest = Manifest("", contents.lora, contents.specs)
        args: Json = {
            "adapter": adapter,
            "manifest": manifest_to_json(manifest),
            # No name in a file system: the memory is freed with the last process that holds it.
            "path": f"/proc/{os.getpid()}/fd/{file}",
            **rules,
        }
        with self._turn:
            version = self._newest[adapter] + 1
            sealed = self._server.request("publish", args | {"version": version})
            self._newest[adapter] = version
        return Published(adapter, version, sealed), sealed

    def _ask(self, command: str, args: Json, *, timeout_seconds: float) -> Json:
        reply = self._server.request(command, args)
        try:
            return result_of(reply, command=command, timeout_seconds=timeout_seconds)
        except WaitExpired as error:
            # What kept the replicas away, a refusal say, is known to the server alone.
            said = self._server.last_lines()
            raise WaitExpired(f"{error}; the server's log ends:\n{said}") from None
