"""vLLM's processes: started in a thread, as the event loop goes on meanwhile, and ended whole."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Collection
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess

import psutil
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM

from common.tasks import see_through
from rollout_svc.config import RolloutConfig
from rollout_svc.engine import EngineDead
from rollout_svc.vllm_engine.arguments import engine_config
from rollout_svc.vllm_engine.environment import set_cpu_defaults
from rollout_svc.vllm_engine.metrics import VllmMetrics

_TITLE = "VLLM::"
"""How vLLM names its processes."""

_KILL_AGAIN_SECONDS = 0.2
_WORKER_SECONDS = 10.0
_END_SECONDS = 30.0
"""How long the kernel may take to free what killed processes held, be it an accelerator's."""


@dataclass(slots=True)
class RunningLlm:
    """vLLM's client and every process under it.

    running = await start_llm(config)
    running.end()
    """

    llm: AsyncLLM
    processes: list[psutil.Process]
    _ranks: list[psutil.Process] = field(init=False)

    def __post_init__(self) -> None:
        # Beside them there may be some that end when their work is done.
        self._ranks = [process for process in self.processes if _is_vllm(process)]

    @property
    def is_whole(self) -> bool:
        """Whether every rank lives; vLLM notices that one does not once the others give it up."""
        return all(map(_lives, self._ranks))

    def end(self) -> None:
        """End the processes; blocks until they are gone. Without effect a second time."""
        self.llm.shutdown()
        # Workers end with the engine core, and theirs clean up what is shared; but not for ever.
        _, left = psutil.wait_procs(self.processes, timeout=_WORKER_SECONDS)
        _kill(left)


async def start_llm(config: RolloutConfig) -> RunningLlm:
    """Start the processes and load the model; takes seconds to minutes.

    None of them is left when this fails, is cancelled or takes too long.

    Raises:
        ConfigError: vLLM knows no such engine argument, or refuses a value.
        EngineDead: a process ended, or was not ready within `engine_start_seconds`.
    """
    if current_platform.is_cpu():
        set_cpu_defaults()
    others = multiprocessing.active_children()
    starting = asyncio.ensure_future(asyncio.to_thread(_start, config))
    try:
        async with asyncio.timeout(config.engine_start_seconds):
            llm = await asyncio.shield(starting)
    except TimeoutError as error:
        await see_through(_give_up(starting, others))
        raise EngineDead(
            f"engine_start_seconds: vLLM was not ready after {config.engine_start_seconds:g} s; "
            "see its log, or raise it"
        ) from error
    except BaseException:
        await see_through(_give_up(starting, others))
        raise
    return RunningLlm(llm, [p for child in _since(others) for p in _tree(child)])


def _start(config: RolloutConfig) -> AsyncLLM:
    arguments = engine_config(config)
    try:
        return AsyncLLM.from_vllm_config(
            arguments,
            # Those that write a line every few seconds; the metrics take their place.
            disable_log_stats=True,
            stat_loggers=[VllmMetrics],
        )
    except (RuntimeError, OSError) as error:
        raise EngineDead(f"engine: vLLM did not start: {error}") from error


async def _give_up(starting: asyncio.Future[AsyncLLM], others: Collection[BaseProcess]) -> None:
    """The thread ends when the processes that it waits for do; one may be started in between."""
    while not starting.done():
        _kill([p for child in _since(others) for p in _tree(child)])
        await asyncio.wait([starting], timeout=_KILL_AGAIN_SECONDS)
    if not starting.exception():
        starting.result().shutdown()
    _kill([p for child in _since(others) for p in _tree(child)])


def _since(others: Collection[BaseProcess]) -> list[BaseProcess]:
    return [child for child in multiprocessing.active_children() if child not in others]


def _is_vllm(process: psutil.Process) -> bool:
    try:
        return bool(process.name().startswith(_TITLE))
    except psutil.NoSuchProcess:
        return False


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _tree(child: BaseProcess) -> list[psutil.Process]:
    try:
        process = psutil.Process(child.pid)
        return [*process.children(recursive=True), process]
    except psutil.NoSuchProcess:
        return []


def _kill(processes: Collection[psutil.Process]) -> None:
    """Has no effect on one that took over the number of another."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=_END_SECONDS)
