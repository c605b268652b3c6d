"""The child process of an `AdapterPublisher`: how it starts, dies and is ended."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest

from common.errors import ConfigError, RefitError, Unavailable
from trainer_svc.demo import tiny
from trainer_svc.library import AdapterPublisher

SECONDS = 10.0
CONFIG = {"r": 1, "lora_alpha": 1}
A = np.ones((1, 4), np.float32)
TENSORS = {"m.q_proj.lora_A.weight": A, "m.q_proj.lora_B.weight": A.T}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.prepare(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def publisher(model: Path) -> Iterator[AdapterPublisher]:
    with AdapterPublisher(model, port=0) as publisher:
        yield publisher


def test_a_start_that_fails_leaves_nothing(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no directory; give a Hugging Face model"):
        AdapterPublisher(tmp_path / "nothing", port=0)
    with pytest.raises(ConfigError, match="port"):
        AdapterPublisher(model, port=1 << 16)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="port"):
            AdapterPublisher(model, port=taken.getsockname()[1])

    assert _children() == []


def test_a_dead_server_is_an_error_with_its_last_words(model: Path, tmp_path: Path) -> None:
    log_path = tmp_path / "server.log"
    with AdapterPublisher(model, port=0, log_path=log_path) as publisher:
        version = publisher.publish(TENSORS, CONFIG)
        version.digest()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(publisher.wait, version, timeout_seconds=60)
            _children()[0].kill()
            with pytest.raises(Unavailable, match=r"status -9; start another.*\n.*\n.*published"):
                waiting.result(SECONDS)
        with pytest.raises(Unavailable, match="status -9"):
            publisher.publish(TENSORS, CONFIG)

    assert "published default@1" in log_path.read_text()


def test_an_unforeseen_error_of_one_command_ends_nothing_else(model: Path, tmp_path: Path) -> None:
    log_path = tmp_path / "server.log"
    with AdapterPublisher(model, port=0, log_path=log_path) as publisher:
        reply = publisher._server.request("wait", {"adapter": "default"})
        with pytest.raises(
            RefitError, match=r"server failed: KeyError\('version'\); its log has the traceback$"
        ):
            reply.result(SECONDS)
        assert publisher.publish(TENSORS, CONFIG).version == 1

    assert "Traceback (most recent call last)" in log_path.read_text()


def test_closing_ends_what_waits_and_may_be_done_twice(publisher: AdapterPublisher) -> None:
    version = publisher.publish(TENSORS, CONFIG)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(publisher.wait, version, timeout_seconds=60)
        publisher.close()
        with pytest.raises(Unavailable, match="publisher: closed"):
            waiting.result(SECONDS)
    publisher.close()

    with pytest.raises(Unavailable, match="publisher: closed"):
        publisher.publish(TENSORS, CONFIG)
    assert _children() == []


_DIES = """
publisher = AdapterPublisher(sys.argv[1], port=0)
print(publisher._server.pid, flush=True)
# A worker of a data loader, say, that outlives the parent and still has its sockets.
os.fork()
sys.stdin.read()
"""

_FORKS = """
from common.errors import Unavailable
# From a thread that ends: the child must outlive it.
made = []
thread = threading.Thread(target=lambda: made.append(AdapterPublisher(sys.argv[1], port=0)))
thread.start()
thread.join()
[publisher] = made
if os.fork() == 0:
    try:
        publisher.publish(TENSORS, CONFIG)
    except Unavailable as error:
        print(error, flush=True)
    publisher.close()
    os._exit(0)
os.wait()
version = publisher.publish(TENSORS, CONFIG)
print(version.version, len(version.digest()), flush=True)
publisher.close()
"""


def _run(body: str, model: Path) -> subprocess.Popen[str]:
    code = f"""
import os, sys, threading
from tests.unit.trainer_svc.test_library_processes import CONFIG, TENSORS
from trainer_svc.library import AdapterPublisher
{body}
"""
    return subprocess.Popen(
        [sys.executable, "-c", code, str(model)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )


def test_the_server_dies_with_its_parent(model: Path) -> None:
    with _run(_DIES, model) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)
        child.wait(SECONDS)


def test_a_fork_cannot_use_it_nor_end_it(model: Path) -> None:
    with _run(_FORKS, model) as parent:
        out, _ = parent.communicate(timeout=30)

    said, went_on = out.splitlines()
    assert said == (
        f"publisher: it belongs to process {parent.pid}, this one was forked from it; "
        "call it from there"
    )
    assert went_on == "1 32"


def _children() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if "trainer_svc.library.server" in child.cmdline()
    ]
