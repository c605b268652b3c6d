"""An environment plays against the policy of a real replica, through its OpenAI endpoint."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import torch
from openai import OpenAI
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import AutoModelForCausalLM

from tests.integration.services import refit
from trainer_svc.demo import tiny
from trainer_svc.library import AdapterPublisher

pytestmark = pytest.mark.timeout(180)
EXAMPLE = Path(__file__).parents[2] / "examples" / "reasoning_gym_scores.py"
TASKS = 6


@dataclass(frozen=True, slots=True)
class Replica:
    """One that looks for a trainer at `trainer_port`."""

    process: subprocess.Popen[str]
    model: Path
    trainer_port: int
    url: str


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    root = tmp_path_factory.mktemp("openai")
    model = tiny.prepare(root / "tiny")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings: dict[str, object] = {
        "model": model,
        "trainer_address": f"127.0.0.1:{port}",
        "openai_port": 0,
        "max_lora_rank": 8,
        "staging_dir": root / "staging",
        "engine.dtype": "float32",
        "engine.max_model_len": 512,
        "engine.max_num_seqs": 16,
        "engine.enforce_eager": True,
    }
    with refit("rollout", settings=settings, log=root / "rollout.log") as (process, _):
        assert process.stdout is not None
        words = process.stdout.readline().split()
        assert words[:3] == ["openai", "listening", "on"]
        yield Replica(process, model, port, f"{words[3]}/v1")


def scores(url: str, model: str) -> list[dict[str, Any]]:
    """What the example prints."""
    options = {"--url": url, "--model": model, "--tasks": TASKS, "--max-tokens": 8}
    words = [str(word) for option in options.items() for word in option]
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *words], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]


def test_an_environment_scores_the_version_that_serves(replica: Replica) -> None:
    """faults.md 5, ART#661: the newest version answers once its commit is reported."""
    pytest.importorskip("reasoning_gym", reason="see requirements/examples.txt")
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(replica.model, dtype=torch.float32)
    policy = get_peft_model(
        base, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    config = policy.peft_config["default"]
    with AdapterPublisher(model=str(replica.model), port=replica.trainer_port) as publisher:
        for number in (1, 2):
            publisher.wait(publisher.publish(get_peft_model_state_dict(policy), config))
            [row] = scores(replica.url, "default")
            assert (row["model"], row["tasks"]) == (f"default@{number}", TASKS)
            assert 0 <= row["reward"] <= 1
    assert [row["model"] for row in scores(replica.url, "base")] == ["base"]


def test_it_answers_again_once_a_dead_engine_was_started_anew(replica: Replica) -> None:
    with OpenAI(base_url=replica.url, api_key="none", max_retries=0) as client:

        def ask() -> Any:
            messages: Any = [{"role": "user", "content": "Hello"}]
            return client.chat.completions.create(model="base", messages=messages, max_tokens=4)

        before = ask()
        [engine] = _engines(replica.process.pid)
        os.kill(engine, signal.SIGKILL)
        refused: list[openai.InternalServerError] = []
        deadline = time.monotonic() + 60
        while not (answer := _answer(ask, refused)) or not refused:
            assert time.monotonic() < deadline, refused[-1:]
            time.sleep(0.1)
        assert {error.status_code for error in refused} == {503}
        assert "1" in {error.response.headers.get("retry-after") for error in refused}
        assert answer.model == before.model == "base"
    replica.process.send_signal(signal.SIGTERM)
    assert replica.process.wait(timeout=60) == 0


def _engines(pid: int) -> list[int]:
    below = psutil.Process(pid).children(recursive=True)
    return [child.pid for child in below if "EngineCore" in " ".join(child.cmdline())]


def _answer(ask: Callable[[], Any], refused: list[openai.InternalServerError]) -> Any:
    """None while the engine is away; its error is added to `refused`."""
    try:
        return ask()
    except openai.InternalServerError as error:
        refused.append(error)
        return None
