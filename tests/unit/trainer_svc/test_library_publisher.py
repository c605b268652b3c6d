"""`AdapterPublisher` and its real child process, with a replica that has no engine."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from refit.v1 import (
    adapter_pb2,
    adapter_pb2_grpc,
    rollout_pb2,
)

from common.errors import (
    AdapterNotFound,
    ConfigError,
    InvalidField,
    WaitExpired,
)
from common.rules import Merge, Rules, Swap
from tests.fake_replica import SECONDS, FakeReplica
from tests.open_files import open_files
from trainer_svc.config import ServerSettings
from trainer_svc.demo import tiny
from trainer_svc.library import AdapterPublisher, Completion, Published

CONFIG = {"r": 2, "lora_alpha": 4}
_MODULE = "base_model.model.model.layers.0.self_attn.q_proj"


def arrays(
    seed: int, *, out_features: int = 8
) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    rng = np.random.default_rng(seed)
    return {
        f"{_MODULE}.lora_A.weight": rng.standard_normal((2, 8), dtype=np.float32),
        f"{_MODULE}.lora_B.weight": rng.standard_normal((out_features, 2), dtype=np.float32),
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.prepare(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def publisher(model: Path) -> Iterator[AdapterPublisher]:
    with AdapterPublisher(model, port=0) as publisher:
        yield publisher


def test_what_was_published_is_what_a_replica_gets(
    publisher: AdapterPublisher, model: Path
) -> None:
    """faults.md 5 and 21, ART#661 and verl#6688: the caller may overwrite its tensors at once."""
    tensors = arrays(0)
    expected = b"".join(tensor.tobytes() for tensor in tensors.values())

    version = publisher.publish(tensors, CONFIG)
    for tensor in tensors.values():
        tensor[:] = 0

    assert (version.adapter, version.version) == ("default", 1)
    with FakeReplica(publisher.address, model) as replica:
        publisher.wait(version, timeout_seconds=SECONDS)
        assert replica.received == {version.digest(): expected}


def test_completions_come_from_the_fleet_in_the_order_of_the_prompts(
    publisher: AdapterPublisher, model: Path
) -> None:
    publisher.publish(arrays(0), CONFIG)
    publisher.publish(arrays(1), CONFIG)
    with FakeReplica(publisher.address, model) as replica:
        groups = publisher.generate(
            [[5, 6], [7]],
            n=2,
            max_tokens=4,
            temperature=0.5,
            top_k=3,
            seed=1,
            stop=["x"],
            timeout_seconds=SECONDS,
        )

    def completion(*token_ids: int) -> Completion:
        logprobs = (*(-0.5 for _ in token_ids[1:]), -2.0)
        made_by = ((2, len(token_ids)),)
        return Completion(token_ids, logprobs, "a", versions=made_by, finish_reason="length")

    assert groups == [
        [completion(5, 6, 0), completion(5, 6, 1)],
        [completion(7, 0), completion(7, 1)],
    ]
    first = replica.requests[0]
    assert first.adapter == rollout_pb2.AdapterSelector(
        adapter="default",
        rule=rollout_pb2.VERSION_RULE_AT_LEAST,
        version=2,
        run_id=publisher.run_id,
    )
    assert first.sampling == rollout_pb2.SamplingParams(
        max_tokens=4, temperature=0.5, top_k=3, seed=1, stop=["x"]
    )
    assert len({request.request_id for request in replica.requests}) == 2
    assert groups[0][0].version == 2


def test_many_threads_publish_wait_and_generate_at_once(
    publisher: AdapterPublisher, model: Path
) -> None:
    """Every number is given once and in order, and newer versions never turn into older ones."""

    def work(seed: int) -> tuple[int, bytes, int]:
        version = publisher.publish(arrays(seed), CONFIG)
        publisher.wait(version, timeout_seconds=SECONDS)
        [[answer]] = publisher.generate([[1]], max_tokens=1, timeout_seconds=SECONDS)
        return version.version, version.digest(), answer.version

    with FakeReplica(publisher.address, model) as replica, ThreadPoolExecutor(8) as pool:
        found = list(pool.map(work, range(24)))

    assert sorted(version for version, _, _ in found) == list(range(1, 25))
    assert len({digest for _, digest, _ in found}) == 24
    assert set(replica.received) <= {digest for _, digest, _ in found}
    assert all(made_by >= version for version, _, made_by in found)


def test_adapters_count_by_themselves(publisher: AdapterPublisher, model: Path) -> None:
    versions = [
        publisher.publish(arrays(seed), CONFIG, adapter=name)
        for seed, name in enumerate(["default", "old", "default"])
    ]

    assert [(v.adapter, v.version) for v in versions] == [
        ("default", 1),
        ("old", 1),
        ("default", 2),
    ]
    with FakeReplica(publisher.address, model):
        for version in versions:
            publisher.wait(version, timeout_seconds=SECONDS)
        [[answer]] = publisher.generate([[1]], max_tokens=1, adapter="old", timeout_seconds=SECONDS)
    assert answer.version == 1


def test_rules_go_with_the_version_that_they_are_given_for(
    publisher: AdapterPublisher, model: Path
) -> None:
    with FakeReplica(publisher.address, model) as replica:
        for number, given in enumerate([{}, {"swap": "finish"}, {"merge": "never"}, {}]):
            version = publisher.publish(arrays(number), CONFIG, **given)  # type: ignore[arg-type]
            publisher.wait(version, timeout_seconds=SECONDS)
    assert replica.rules == {
        ("default", 1): Rules(),
        ("default", 2): Rules(swap=Swap.FINISH),
        ("default", 3): Rules(merge=Merge.NEVER),
        ("default", 4): Rules(),
    }


def test_replicas_that_cannot_follow_are_refused_by_every_reason(
    publisher: AdapterPublisher, model: Path
) -> None:
    version = publisher.publish(arrays(0), CONFIG, swap="abort", merge="rollout")
    why = (
        r"127\.0\.0\.1:\d+: refused \(capabilities\.swap_rules: the run asks for .*; "
        r"capabilities\.merging: the replica cannot sum .*\)"
    )
    with FakeReplica(publisher.address, model), pytest.raises(WaitExpired, match=why):
        publisher.wait(version, timeout_seconds=1)


_NOBODY_CAME = (
    r"default@1: 1 replicas must serve it, 0 do; none is subscribed.*; the server's log ends:\n"
    r"(.*\n)*.*published default@1"
)


def test_a_wait_ends_at_its_deadline_and_says_why(publisher: AdapterPublisher) -> None:
    """faults.md 23, TRL#6797."""
    version = publisher.publish(arrays(0), CONFIG)

    started = time.monotonic()
    with pytest.raises(WaitExpired, match=_NOBODY_CAME):
        publisher.wait(version, timeout_seconds=0.2)

    assert time.monotonic() - started < 5


def test_what_cannot_be_asked_is_refused(publisher: AdapterPublisher, model: Path) -> None:
    """faults.md 2, verl#3821: nothing answers for an adapter that nobody published."""
    with pytest.raises(AdapterNotFound, match="'default'; publish one first"):
        publisher.generate([[1]], max_tokens=1)
    publisher.publish(arrays(0), CONFIG)
    with pytest.raises(InvalidField, match="n: found 0"):
        publisher.generate([[1]], n=0, max_tokens=1)
    for prompt in ([], [-1], [1 << 31]):
        with pytest.raises(InvalidField, match="prompts: found"):
            publisher.generate([prompt], max_tokens=1)
    with pytest.raises(InvalidField, match="generate: "):
        publisher.generate([[1]], max_tokens=1 << 40)
    with FakeReplica(publisher.address, model) as replica:
        replica.error = grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(InvalidField, match="max_tokens: 0; at least 1"):
            publisher.generate([[1]], max_tokens=0, timeout_seconds=SECONDS)


_WRONG: list[tuple[dict[str, Any], str]] = [
    ({"n": 1 << 40}, f"n: found {1 << 40}; give a whole number, 1 to 1024"),
    ({"n": 1025}, "n: found 1025; give a whole number, 1 to 1024"),
    ({"n": 2.5}, "n: found 2.5; give a whole number, 1 to 1024"),
    ({"n": True}, "n: found True; give a whole number, 1 to 1024"),
    ({"max_tokens": 2.0}, "max_tokens: found 2.0; give a whole number"),
    ({"top_k": "3"}, "top_k: found '3'; give a whole number"),
    ({"seed": 0.5}, "seed: found 0.5; give a whole number"),
    ({"min_tokens": None}, "min_tokens: found None; give a whole number"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids: found 'a'; give a whole number"),
    ({"temperature": float("nan")}, "temperature: found nan; give a finite number"),
    ({"temperature": "hot"}, "temperature: found 'hot'; give a finite number"),
    ({"top_p": float("inf")}, "top_p: found inf; give a finite number"),
    ({"min_p": False}, "min_p: found False; give a finite number"),
    ({"stop": "end"}, "stop: found 'end'; give a list of strings"),
    ({"timeout_seconds": float("nan")}, "timeout_seconds: found nan; give a finite number"),
    ({"timeout_seconds": float("inf")}, "timeout_seconds: found inf; give a finite number"),
    ({"timeout_seconds": 0}, "timeout_seconds: found 0; give more than 0 seconds"),
    ({"adapter": 5}, "adapter: found 5 of type int; give a name of printable characters"),
]


def test_a_wrong_argument_is_named_and_never_reaches_the_server(
    publisher: AdapterPublisher,
) -> None:
    version = publisher.publish(arrays(0), CONFIG)
    for given, expected in _WRONG:
        with pytest.raises(ConfigError, match=f"^{re.escape(expected)}$"):
            publisher.generate([[1]], **{"max_tokens": 1} | given)
    with pytest.raises(ConfigError, match=r"^prompts: .*float.*; give lists of token ids$"):
        publisher.generate([[1.5]], max_tokens=1)  # type: ignore[list-item]
    with pytest.raises(ConfigError, match=r"^replicas: found 'x'; give a whole number, 1 or more$"):
        publisher.wait(version, replicas="x")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^replicas: found 0; give a whole number, 1 or more$"):
        publisher.wait(version, replicas=0)
    with pytest.raises(ConfigError, match=r"^timeout_seconds: found nan; give a finite number$"):
        publisher.wait(version, timeout_seconds=float("nan"))
    for key, words in (("swap", "finish, abort or continue"), ("merge", "never or rollout")):
        with pytest.raises(ConfigError, match=f"^{key}: found 'x'; give replica, {words}$"):
            publisher.publish(arrays(0), CONFIG, **{key: "x"})  # type: ignore[arg-type]
    for name in ("", "\udc80", 5, None):
        with pytest.raises(ConfigError, match=f"^adapter: found {re.escape(repr(name))} of type "):
            publisher.publish(arrays(0), CONFIG, adapter=name)  # type: ignore[arg-type]

    assert publisher.publish(arrays(0), CONFIG).version == 2


def test_a_pinned_version_outlives_newer_ones(publisher: AdapterPublisher) -> None:
    first = publisher.publish(arrays(0), CONFIG)
    with publisher.pinned(first):
        for seed in range(1, 5):
            last = publisher.publish(arrays(seed), CONFIG)
        last.digest()
        assert 1 in _versions(publisher)

    assert _versions(publisher) == [4, 5]
    with pytest.raises(AdapterNotFound, match="default@1 is not kept"), publisher.pinned(first):
        pass


def test_no_file_is_left_open_by_what_was_published(publisher: AdapterPublisher) -> None:
    """faults.md 27, AReaL#1385: nothing is kept a version."""
    before = _open_files_after(publisher, publisher.publish(arrays(0), CONFIG))
    for seed in range(20):
        published = publisher.publish(arrays(seed), CONFIG)
    with pytest.raises(ConfigError):
        publisher.publish(arrays(0), {"r": 3, "lora_alpha": 1})

    assert _open_files_after(publisher, published) == before


def test_settings_of_the_server_reach_it(model: Path) -> None:
    settings = ServerSettings(keep_versions=3, port=1)
    with AdapterPublisher(model, port=0, server=settings) as publisher:
        for seed in range(5):
            publisher.publish(arrays(seed), CONFIG).digest()
        assert _versions(publisher) == [3, 4, 5]


def _versions(publisher: AdapterPublisher) -> list[int]:
    with grpc.insecure_channel(publisher.address) as channel:
        stub = adapter_pb2_grpc.AdapterServiceStub(channel)
        listed = stub.ListAdapters(adapter_pb2.AdapterServiceListAdaptersRequest(), timeout=5)
    return [ref.version for ref in listed.adapters]


def _open_files_after(publisher: AdapterPublisher, published: Published) -> list[str]:
    """Once the version's own is closed: after its digest, before the next reply is read."""
    with publisher.pinned(published):
        return open_files()
