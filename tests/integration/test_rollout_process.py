"""A rollout replica as its own process, with a hand-written trainer to follow."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from refit.v1 import adapter_pb2, adapter_pb2_grpc, rollout_pb2, rollout_pb2_grpc
from transformers import LlamaConfig, LlamaForCausalLM

from common.adapter import Dtype, Layout, LoraConfig, Manifest, TensorEntry, plan, seal
from common.grpc_server import connect, start_server
from common.model_dir import base_model
from common.wire import ref_to_proto
from tests.adapters import make_ref
from tests.eventually import eventually
from tests.fake_trainer import FakeTrainer, serving, update_events

pytestmark = pytest.mark.timeout(150)

SERVICE = "refit.v1.RolloutService"
LATEST = rollout_pb2.AdapterSelector(adapter="default", rule=rollout_pb2.VERSION_RULE_LATEST)
BASE = rollout_pb2.AdapterSelector(rule=rollout_pb2.VERSION_RULE_BASE)
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
    )
    path = tmp_path_factory.mktemp("model") / "tiny"
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def tiny_adapter(fingerprint: str) -> tuple[Manifest, memoryview]:
    """Rank 2, on q and k of the tiny model's layer; large enough to change what is greedy."""
    widths = {"q_proj": 64, "k_proj": 32}
    specs = plan(
        TensorEntry(
            f"base_model.model.model.layers.0.self_attn.{module}.{layout.value}.weight",
            Dtype.FLOAT32,
            (2, 64) if layout is Layout.LORA_A else (width, 2),
            layout,
        )
        for module, width in widths.items()
        for layout in (Layout.LORA_A, Layout.LORA_B)
    )
    lora = LoraConfig(2, 4.0, tuple(sorted(widths)))
    count = Manifest(fingerprint, lora, specs).total_bytes // 4
    values = torch.randn(count, generator=torch.Generator().manual_seed(1))
    buffer = memoryview(values.numpy().tobytes())
    return Manifest(fingerprint, lora, seal(specs, buffer)), buffer


@dataclass(frozen=True, slots=True)
class Replica:
    process: asyncio.subprocess.Process
    channel: grpc.aio.Channel
    staging: Path

    async def health(self, service: str) -> int:
        stub: Any = health_pb2_grpc.HealthStub(self.channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=2)
        return int(answer.status)

    async def errors(self) -> list[str]:
        assert self.process.stderr is not None
        return (await self.process.stderr.read()).decode().splitlines()


@asynccontextmanager
async def launched(
    model: Path, staging: Path, *, trainer: str = "", **more: object
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A replica's process, with `more` settings; killed at the end if it still runs."""
    engine = (
        '{dtype = "float32", skip_tokenizer_init = true, max_num_seqs = 8, enforce_eager = true}'
    )
    settings = {
        "model": f'"{model}"',
        "staging_dir": f'"{staging}"',
        "trainer_address": f'"{trainer}"',
        "max_lora_rank": "8",
        "engine": engine,
        **{name: str(value) for name, value in more.items()},
    }
    arguments = [part for item in settings.items() for part in ("--set", "=".join(item))]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "common.cli", "rollout", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=1 << 24,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@asynccontextmanager
async def started(
    model: Path, staging: Path, *, trainer: str = "", **more: object
) -> AsyncIterator[Replica]:
    """A replica that has printed its address."""
    async with launched(model, staging, trainer=trainer, **more) as process:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        assert line.startswith("rollout listening on "), (line, await process.stderr.read())  # type: ignore[union-attr]
        async with connect(line.split()[-1]) as channel:
            yield Replica(process, channel, staging)


async def test_a_replica_is_ready_with_its_first_adapter_and_leaves_nothing_behind(
    model_dir: Path, tmp_path: Path
) -> None:
    """faults.md 6: no traffic before the current version is held; then SIGTERM ends it with 0."""
    manifest, buffer = tiny_adapter(base_model(model_dir).fingerprint)
    ref = make_ref(manifest)
    trainer = FakeTrainer(list(update_events(ref, manifest, buffer)))
    trainer.may_send.clear()

    def register(server: grpc.aio.Server) -> None:
        adapter_pb2_grpc.add_AdapterServiceServicer_to_server(trainer, server)

    server = await start_server(register, host="127.0.0.1", port=0, services=[])
    async with started(model_dir, tmp_path / "staging", trainer=server.address) as replica:
        await eventually(lambda: trainer.subscriptions, seconds=30)
        assert await replica.health("") == SERVING
        assert await replica.health(SERVICE) == NOT_SERVING
        trainer.may_send.set()
        stub = rollout_pb2_grpc.RolloutServiceStub(replica.channel)
        request = rollout_pb2.GenerateRequest(
            token_ids=rollout_pb2.TokenIds(ids=[1, 2, 3]),
            sampling=rollout_pb2.SamplingParams(max_tokens=4, ignore_eos=True),
            adapter=rollout_pb2.AdapterSelector(
                adapter="default", rule=rollout_pb2.VERSION_RULE_AT_LEAST, version=1
            ),
        )
        answer = [message async for message in stub.Generate(request, timeout=60)]
        assert sum(len(message.token_ids) for message in answer) == 4
        assert {message.adapter.digest for message in answer} == {ref.digest}
        await eventually(lambda: trainer.reports, seconds=10)
        assert trainer.reports[0].outcome == adapter_pb2.OUTCOME_COMMITTED
        assert trainer.reports[0].ref == ref_to_proto(ref)
        assert list(trainer.reports[0].bound_modules) == [2]
        assert await replica.health(SERVICE) == SERVING
        replica.process.send_signal(signal.SIGTERM)
        assert await replica.process.wait() == 0
        assert list(replica.staging.iterdir()) == []
    await server.stop(0)


async def test_without_restarts_the_engines_death_ends_the_replica_with_one_clear_line(
    model_dir: Path, tmp_path: Path
) -> None:
    async with started(model_dir, tmp_path / "staging", engine_restarts=0) as replica:
        [engine] = engine_cores(replica.process.pid)
        os.kill(engine, signal.SIGKILL)
        errors = asyncio.create_task(replica.errors())
        async with asyncio.timeout(30):
            assert await replica.process.wait() == 1
        expected = "refit rollout: engine_restarts: 0, and the engine failed 1 times in a row"
        assert [line for line in await errors if line.startswith(expected)]
        assert list(replica.staging.iterdir()) == []


@pytest.mark.timeout(300)
async def test_an_engine_that_is_killed_comes_back_with_its_adapter(
    model_dir: Path, tmp_path: Path
) -> None:
    """faults.md 6, miles#1724, prime-rl#1564: no traffic before it holds the version again.

    Health answers all the while. Then SIGTERM in the middle of another restart: nothing is left.
    """
    manifest, buffer = tiny_adapter(base_model(model_dir).fingerprint)
    ref = make_ref(manifest)
    trainer = FakeTrainer(list(update_events(ref, manifest, buffer)), later=[[]])
    port = free_port()
    async with (
        serving(trainer) as address,
        started(model_dir, tmp_path / "staging", trainer=address, metrics_port=port) as replica,
    ):
        errors = asyncio.create_task(replica.errors())
        stub = rollout_pb2_grpc.RolloutServiceStub(replica.channel)
        await until(replica, SERVICE, SERVING, seconds=60)
        before = await tokens(stub, LATEST)
        assert before != await tokens(stub, BASE)
        load = [asyncio.create_task(tokens(stub, LATEST, count=240)) for _ in range(4)]
        await asyncio.sleep(0.3)

        [engine] = engine_cores(replica.process.pid)
        below = [engine, *children(engine)]
        os.kill(engine, signal.SIGKILL)
        await until(replica, SERVICE, NOT_SERVING, seconds=1)
        async with asyncio.timeout(1):
            ends = await asyncio.gather(*load, return_exceptions=True)
        assert {end.code() for end in ends} == {grpc.StatusCode.UNAVAILABLE}  # type: ignore[union-attr]
        with pytest.raises(grpc.aio.AioRpcError, match="it ended and is being started anew"):
            await tokens(stub, LATEST)

        # Each answer comes within 2 s, and "" is SERVING throughout.
        await until(replica, SERVICE, SERVING, seconds=90)
        assert await tokens(stub, LATEST) == before
        listed = await stub.ListAdapters(rollout_pb2.RolloutServiceListAdaptersRequest(), timeout=5)
        assert list(listed.adapters) == [ref_to_proto(ref)]
        assert not [pid for pid in below if Path(f"/proc/{pid}").exists()]
        await eventually(lambda: len(trainer.subscriptions) == 2, seconds=15)
        assert list(trainer.subscriptions[1].held) == [ref_to_proto(ref)]
        assert [report.outcome for report in trainer.reports] == [adapter_pb2.OUTCOME_COMMITTED]
        await check_metrics(port)

        [engine] = engine_cores(replica.process.pid)
        os.kill(engine, signal.SIGKILL)
        await until(replica, SERVICE, NOT_SERVING, seconds=1)
        await eventually(lambda: engine_cores(replica.process.pid) != [engine], seconds=30)
        below = children(replica.process.pid)
        replica.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(20):
            assert await replica.process.wait() == 0
        assert not [line for line in await errors if line.startswith("Traceback")]
        await eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below), seconds=5)
        assert list(replica.staging.iterdir()) == []


async def test_an_engine_that_takes_too_long_to_start_ends_with_one_clear_line(
    model_dir: Path, tmp_path: Path
) -> None:
    """faults.md 23: the start has a deadline, and leaves no process."""
    staging = tmp_path / "staging"
    async with launched(model_dir, staging, engine_start_seconds=3) as process:
        await eventually(lambda: spawned(process.pid), seconds=60)
        below = children(process.pid)
        async with asyncio.timeout(30):
            _, errors = await process.communicate()
        assert process.returncode == 1
        expected = "refit rollout: engine_start_seconds: vLLM was not ready after 3 s"
        assert [line for line in errors.decode().splitlines() if line.startswith(expected)]
        await eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below), seconds=5)
        assert list(staging.iterdir()) == []


async def until(replica: Replica, service: str, status: int, *, seconds: float) -> None:
    """Return once health says so; every check is answered, and the process is healthy."""
    async with asyncio.timeout(seconds):
        while await replica.health(service) != status:
            assert await replica.health("") == SERVING
            await asyncio.sleep(0.02)


async def tokens(
    stub: rollout_pb2_grpc.RolloutServiceStub,
    adapter: rollout_pb2.AdapterSelector,
    *,
    count: int = 24,
) -> list[int]:
    """The greedy ones."""
    request = rollout_pb2.GenerateRequest(
        token_ids=rollout_pb2.TokenIds(ids=[1, 2, 3]),
        sampling=rollout_pb2.SamplingParams(max_tokens=count, temperature=0, ignore_eos=True),
        adapter=adapter,
    )
    return [t async for message in stub.Generate(request, timeout=60) for t in message.token_ids]


async def check_metrics(port: int) -> None:
    """One endpoint with this service's own figures, vLLM's and the process's."""
    answer = await asyncio.to_thread(
        urllib.request.urlopen, f"http://127.0.0.1:{port}/metrics", timeout=5
    )
    lines = answer.read().decode().splitlines()
    assert {
        "refit_rollout_engine_restarts_total 1.0",
        'refit_rollout_state{refit_rollout_state="serving"} 1.0',
        'refit_rollout_adapter_version{adapter="default"} 1.0',
        'refit_rollout_adapter_versions_behind{adapter="default"} 0.0',
        "refit_rollout_slots 4.0",
        "refit_rollout_slots_used 1.0",
        "refit_rollout_slots_pinned 0.0",
        "refit_rollout_requests_waiting 0.0",
        'refit_rollout_updates_total{outcome="committed"} 1.0',
    } <= set(lines)
    assert any(line.startswith("vllm:generation_tokens_total") for line in lines)
    assert any(line.startswith("process_resident_memory_bytes") for line in lines)
    # Its labels are versions: those of the past must go.
    assert len([line for line in lines if line.startswith("vllm:lora_requests_info{")]) <= 1


async def test_a_signal_while_the_engine_starts_leaves_nothing_behind(
    model_dir: Path, tmp_path: Path
) -> None:
    """faults.md 27: neither a process nor a byte of staging outlives a start that is given up."""
    async with launched(model_dir, tmp_path / "staging") as process:
        await eventually(lambda: engine_cores(process.pid), seconds=60)
        below = children(process.pid)
        assert len(list((tmp_path / "staging").iterdir())) == 2
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(20):
            output = await process.communicate()
        assert (process.returncode, output[0]) == (0, b""), output[1].decode()
        assert b"Traceback" not in output[1], output[1].decode()
        await eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below), seconds=5)
        assert list((tmp_path / "staging").iterdir()) == []


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def engine_cores(pid: int) -> list[int]:
    return [child for child in children(pid) if "EngineCore" in name_of(child)]


def spawned(pid: int) -> list[int]:
    """What will call itself an engine core in a few seconds."""
    return [child for child in children(pid) if "spawn_main" in name_of(child)]


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    threads = [path.name for path in Path(f"/proc/{pid}/task").iterdir()]
    texts = [Path(f"/proc/{pid}/task/{thread}/children").read_text() for thread in threads]
    return sorted({int(child) for part in [text, *texts] for child in part.split()})


def name_of(pid: int) -> str:
    """Empty for one that has just ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except FileNotFoundError:
        return ""
