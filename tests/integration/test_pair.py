"""Trainer and rollout as two real processes: Megatron-core on one side, vLLM on the other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from refit.v1 import (
    adapter_pb2,
    adapter_pb2_grpc,
    rollout_pb2,
    trainer_pb2,
    trainer_pb2_grpc,
    version_pb2,
)

from common.adapter import Dtype, Manifest
from common.model_dir import base_model
from common.peft_dir import read_peft_dir, write_peft_dir
from common.wire import ManifestReader, crc32c, dtype_to_proto
from tests.integration.pair import STEPS, Pair, generate, trainer_settings, wait_for_state
from tests.integration.services import START_SECONDS, grpcurl, refit, rows_until
from trainer_svc.demo import tiny

pytestmark = pytest.mark.timeout(240)
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """One finished run of `STEPS` steps; its trainer still serves when the first test begins."""
    root = tmp_path_factory.mktemp("pair")
    model = tiny.prepare(root / "tiny")
    settings = trainer_settings(model, root / "run")
    rollout_settings: dict[str, object] = {
        "model": model,
        "max_lora_rank": 8,
        "staging_dir": root / "staging",
        "engine.dtype": "float32",
        "engine.max_model_len": 128,
        "engine.max_num_seqs": 16,
        "engine.enforce_eager": True,
    }
    with refit("trainer", settings=settings, log=root / "trainer.log") as (first, trainer):
        rollout_settings["trainer_address"] = trainer
        with refit("rollout", settings=rollout_settings, log=root / "rollout.log") as (_, rollout):
            wait_for_state(trainer, trainer_pb2.RUN_STATE_FINISHED)
            yield Pair(model, trainer, rollout, root / "run", root, first)


def _rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def _logprobs(parts: list[rollout_pb2.GenerateResponse]) -> list[float]:
    return [value for part in parts for value in part.logprobs]


def test_every_version_of_the_run_was_served_with_the_trainers_digest(pair: Pair) -> None:
    """faults.md 1, verl#7495."""
    rows = _rows(pair.run_dir)

    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["version"] for row in rows] == [2, 3, 4, 5]
    assert len({row["digest"] for row in rows}) == STEPS
    for row in rows:
        assert [replica["digest"] for replica in row["replicas"]] == [row["digest"]]
        assert (row["staleness_max"], row["samples"], row["samples_lost"]) == (0, 8, 0)
        for stage in ("export", "wire", "stage", "commit", "update"):
            assert 0 < row[f"{stage}_seconds"] < 5


def test_trainer_and_rollout_agree_on_log_probabilities(pair: Pair) -> None:
    """Megatron's and vLLM's, fp32, of every sampled token under every version."""
    assert max(row["mismatch"] for row in _rows(pair.run_dir)) < 1e-4


def test_the_run_leaves_its_records(pair: Pair) -> None:
    summary = json.loads((pair.run_dir / "summary.json").read_text())

    assert (summary["steps"], summary["versions"], summary["versions_verified"]) == (4, 4, 4)
    assert (summary["samples"], summary["samples_lost"]) == (32, 0)
    assert list(pair.run_dir.glob("events.out.tfevents.*"))
    assert (pair.run_dir / "config.toml").read_text().startswith("model = ")
    base = base_model(pair.model).fingerprint
    final = read_peft_dir(pair.run_dir / "adapter", base_fingerprint=base)
    assert final.manifest.digest().hex() == _rows(pair.run_dir)[-1]["digest"]


def test_the_replica_lists_what_the_trainer_published(pair: Pair) -> None:
    response = pair.stub().ListAdapters(rollout_pb2.RolloutServiceListAdaptersRequest(), timeout=10)

    assert [(ref.version, ref.digest.hex()) for ref in response.adapters] == [
        (row["version"], row["digest"]) for row in _rows(pair.run_dir)[-2:]
    ]


def test_the_adapter_changes_what_the_base_says(pair: Pair) -> None:
    """faults.md 1, verl#7495: a served version is not the base in disguise."""
    latest = generate(pair, rollout_pb2.VERSION_RULE_LATEST)
    base = generate(pair, rollout_pb2.VERSION_RULE_BASE, adapter="")

    assert {part.adapter.version for part in latest} == {STEPS + 1}
    assert not any(part.HasField("adapter") for part in base)
    assert abs(_logprobs(latest)[0] - _logprobs(base)[0]) > 1e-3


@pytest.mark.parametrize(("adapter", "version"), [("other", 1), ("default", 1), ("default", 99)])
def test_unknown_adapter_or_version_is_not_found(pair: Pair, adapter: str, version: int) -> None:
    """faults.md 2, verl#3821: never the base by silence."""
    with pytest.raises(grpc.RpcError) as caught:
        generate(pair, rollout_pb2.VERSION_RULE_EXACT, adapter=adapter, version=version)

    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    assert adapter in str(caught.value.details())


@pytest.mark.parametrize("service", ["trainer", "rollout"])
def test_grpcurl_lists_checks_and_asks_for_versions(pair: Pair, service: str) -> None:
    address = getattr(pair, service)
    main = {"trainer": "refit.v1.AdapterService", "rollout": "refit.v1.RolloutService"}[service]

    assert {main, "refit.v1.VersionService", "grpc.health.v1.Health"} <= set(
        grpcurl(address, "list").split()
    )
    for request in ("{}", json.dumps({"service": main})):
        found = grpcurl("-d", request, address, "grpc.health.v1.Health/Check")
        assert json.loads(found) == {"status": "SERVING"}
    version = json.loads(grpcurl(address, "refit.v1.VersionService/GetVersion"))
    assert (version["service"], version["api_version"]) == (service, "refit.v1")
    assert version["base_model"]["fingerprint"] == base_model(pair.model).fingerprint
    assert [ref["version"] for ref in version["adapters"]] == ["4", "5"]


def test_grpcurl_generates_and_shows_the_run(pair: Pair) -> None:
    request = {
        "text": "Hello",
        "sampling": {"max_tokens": 8},
        "adapter": {"adapter": "default", "rule": "VERSION_RULE_LATEST"},
    }
    answer = grpcurl("-d", json.dumps(request), pair.rollout, "refit.v1.RolloutService/Generate")
    status = json.loads(grpcurl(pair.trainer, "refit.v1.TrainerService/GetStatus"))

    assert f'"version": "{STEPS + 1}"' in answer
    assert (status["state"], status["step"]) == ("RUN_STATE_FINISHED", STEPS)


def _subscribe(pair: Pair, request: adapter_pb2.AdapterUpdateRequest) -> tuple[Manifest, bytes]:
    """The first update of a subscription."""
    with grpc.insecure_channel(pair.trainer) as channel:
        call = adapter_pb2_grpc.AdapterServiceStub(channel).AdapterUpdate(request, timeout=20)
        assert next(call).HasField("heartbeat")
        manifest = ManifestReader(next(call).manifest).manifest()
        received = bytearray()
        for event in call:
            if event.HasField("commit"):
                break
            assert event.chunk.offset_bytes == len(received)
            assert crc32c(event.chunk.data) == event.chunk.crc32c
            received += event.chunk.data
        call.cancel()
    return manifest, bytes(received)


def _able(pair: Pair) -> adapter_pb2.AdapterUpdateRequest:
    base = base_model(pair.model)
    return adapter_pb2.AdapterUpdateRequest(
        replica_id="late",
        advertised_address="127.0.0.1:1",
        base_model=version_pb2.BaseModel(name=base.name, fingerprint=base.fingerprint),
        capabilities=adapter_pb2.ReplicaCapabilities(
            max_rank=8,
            max_loras=4,
            dtypes=list(map(dtype_to_proto, Dtype)),
            target_modules=[
                "q_proj",
                "k_proj",
                "v_proj",
                "o_proj",
                "gate_proj",
                "up_proj",
                "down_proj",
            ],
        ),
    )


def test_a_late_subscriber_gets_the_current_version_at_once(pair: Pair) -> None:
    manifest, received = _subscribe(pair, _able(pair))

    assert manifest.digest().hex() == _rows(pair.run_dir)[-1]["digest"]
    assert len(received) == manifest.total_bytes
    # Two layers of seven projections: 28 tensors, of which k's and v's A and up's A are aliases.
    assert sum(1 for spec in manifest.tensors if spec.alias_of) == 2 * 3
    assert len(manifest.tensors) == 28


def test_a_replica_with_another_base_is_refused_naming_both(pair: Pair) -> None:
    request = _able(pair)
    request.base_model.fingerprint = "f" * 64
    request.capabilities.max_rank = 4

    with pytest.raises(grpc.RpcError) as caught:
        _subscribe(pair, request)

    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    details = str(caught.value.details())
    for part in ("f" * 64, base_model(pair.model).fingerprint, "max_rank: 4", "rank 8"):
        assert part in details


def test_a_resumed_run_goes_on_with_its_id_and_the_next_version(pair: Pair) -> None:
    """faults.md 5 and 25, ART#661: the fleet follows a trainer that was restarted."""
    run_id = json.loads((pair.run_dir / "run.json").read_text())["run_id"]
    pair.free_the_port()
    settings = pair.settings(pair.run_dir, steps=STEPS + 2)
    log = pair.log_dir / "resumed.log"
    with refit("trainer", "--resume", settings=settings, log=log):
        status = wait_for_state(pair.trainer, trainer_pb2.RUN_STATE_FINISHED)

    rows = _rows(pair.run_dir)
    assert status.run_id == run_id
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    # Version 6 is what the restart published of the checkpoint.
    assert [row["version"] for row in rows] == [2, 3, 4, 5, 7, 8]
    assert all(r["digest"] == row["digest"] for row in rows for r in row["replicas"])


def test_a_killed_rank_costs_no_version_and_no_record(pair: Pair) -> None:
    """faults.md 22 and 23, AReaL#1160: the service goes on, the run from its last checkpoint."""
    pair.free_the_port()
    run_dir = pair.log_dir / "killed"
    settings = pair.settings(run_dir, steps=6)
    with refit("trainer", settings=settings, log=pair.log_dir / "killed.log") as (process, _):
        rows_until(run_dir / "metrics.jsonl", count=3, seconds=START_SECONDS)
        [rank] = [
            child
            for child in psutil.Process(process.pid).children(recursive=True)
            if "trainer_svc.megatron.worker" in child.cmdline()
            and "torch.distributed.run" not in child.cmdline()
        ]
        rank.kill()
        wait_for_state(pair.trainer, trainer_pb2.RUN_STATE_FINISHED)

    rows = _rows(run_dir)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    versions = [row["version"] for row in rows]
    assert versions == sorted(set(versions))
    assert versions[-1] > 7
    assert all(r["digest"] == row["digest"] for row in rows for r in row["replicas"])


def test_publish_serves_each_adapter_that_is_written(pair: Pair) -> None:
    """`refit publish --watch`: no training, the same stream, the same replica."""
    pair.free_the_port()
    base = base_model(pair.model).fingerprint
    final = read_peft_dir(pair.run_dir / "adapter", base_fingerprint=base)
    watched = pair.log_dir / "watched"
    write_peft_dir(watched / "one", final.manifest, final.buffer)
    port = pair.trainer.rpartition(":")[2]
    arguments = ("--model", str(pair.model), "--set", f"server.port={port}")
    log = pair.log_dir / "publish.log"
    with refit("publish", str(watched), "--watch", *arguments, log=log):
        assert _served_digest(pair, version=1) == final.manifest.digest()
        assert final.manifest.lora
        halved = replace(final.manifest, lora=replace(final.manifest.lora, alpha=1.0))
        write_peft_dir(watched / "two", halved, final.buffer)
        assert _served_digest(pair, version=2) == halved.digest()


def _served_digest(pair: Pair, *, version: int) -> bytes:
    """Digest by which the replica serves the version of the trainer's run, once it does."""
    with grpc.insecure_channel(pair.trainer) as channel:
        stub = trainer_pb2_grpc.TrainerServiceStub(channel)
        run_id = stub.GetStatus(trainer_pb2.GetStatusRequest(), timeout=10).run_id
    rule = rollout_pb2.VERSION_RULE_AT_LEAST
    parts = generate(pair, rule, version=version, run_id=run_id)
    return bytes(parts[0].adapter.digest)
