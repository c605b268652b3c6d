"""`refit publish --watch`: real files, a real server, whatever state a directory is found in."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from common.adapter import Dtype, Layout, Manifest, TensorEntry, TensorSpec, plan, seal
from common.errors import ConfigError
from common.model_dir import BaseModel
from common.peft_dir import CONFIG_FILE, WEIGHTS_FILE, write_peft_dir
from common.rules import Merge, Rules, Swap
from common.tasks import cancel
from tests.adapters import make_adapter
from tests.eventually import eventually
from trainer_svc import publish
from trainer_svc.config import ServerSettings
from trainer_svc.control import RunControl
from trainer_svc.fleet.admission import Needed
from trainer_svc.node import Node, serve_node
from trainer_svc.publish import DirectoryFeed

_Q_PROJ, _K_PROJ = (f"base_model.model.model.layers.0.self_attn.{name}_proj" for name in ("q", "k"))
_SEVERAL_RESCANS = 0.4
"""Seconds; a rescan is due every 0.1."""


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    control = RunControl("run", steps_total=0)
    settings = ServerSettings(port=0, keep_versions=9)
    base = BaseModel("m", "base")
    async with serve_node(settings, base=base, control=control, engine="") as running:
        yield running


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "watched"
    path.mkdir()
    return path


@asynccontextmanager
async def _watching(root: Path, node: Node) -> AsyncIterator[None]:
    """The feed runs during the block, and has not failed by its end."""
    feed = DirectoryFeed(root, node, adapter="a", rescan_seconds=0.1)
    task = asyncio.create_task(feed.watch())
    try:
        yield
        assert not task.done()
    finally:
        await cancel(task)


def _published(node: Node) -> list[tuple[int, bytes]]:
    return [(ref.version, ref.digest) for ref in node.publisher.refs()]


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def _write(path: Path, *, seed: int) -> bytes:
    """Write a whole adapter at once, as a rename does; returns its digest."""
    manifest, buffer = make_adapter(seed=seed)
    partial = path.parent.parent / f"partial-{seed}"
    write_peft_dir(partial, manifest, buffer)
    partial.rename(path)
    return manifest.digest()


@pytest.mark.parametrize(
    ("file", "kept_bytes"), [(CONFIG_FILE, 0), (CONFIG_FILE, 20), (WEIGHTS_FILE, 50)]
)
async def test_a_half_written_directory_is_published_once_it_is_whole(
    root: Path, node: Node, caplog: pytest.LogCaptureFixture, file: str, kept_bytes: int
) -> None:
    """faults.md 25, prime-rl#2391: PEFT writes the weights first, then opens the configuration."""
    digest = _write(root / "one", seed=1)
    half = root / "one" / file
    whole = half.read_bytes()
    half.write_bytes(whole[:kept_bytes])

    async with _watching(root, node):
        await eventually(lambda: _warnings(caplog))
        await asyncio.sleep(_SEVERAL_RESCANS)
        assert _published(node) == []
        [warning] = _warnings(caplog)
        assert warning.startswith(f"not published: {half}: ")

        half.write_bytes(whole)
        await eventually(lambda: _published(node))
        await asyncio.sleep(_SEVERAL_RESCANS)

    assert _published(node) == [(1, digest)]


@pytest.mark.parametrize(
    ("key", "value"),
    [("rank_pattern", {"v_proj": 2}), ("alpha_pattern", {"q_proj": 8.0})],
)
async def test_what_replicas_cannot_serve_is_refused_by_its_key(
    root: Path, node: Node, key: str, value: dict[str, float]
) -> None:
    """A trainer can start from it, but it is published as it is."""
    _write(root / "one", seed=1)
    file = root / "one" / CONFIG_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    feed = DirectoryFeed(root, node, adapter="a")
    with pytest.raises(ConfigError, match=f"{CONFIG_FILE}: {key} = .* cannot be served; remove it"):
        await feed.publish(root / "one")
    assert _published(node) == []


@pytest.mark.parametrize("merge", [None, Merge.ROLLOUT, Merge.NEVER])
async def test_dora_is_published_where_replicas_may_merge_it(
    root: Path, node: Node, merge: Merge | None
) -> None:
    rules = Rules(Swap.ABORT, merge)
    feed = DirectoryFeed(root, node, adapter="a", rules=rules)
    manifest, _ = make_adapter()
    assert manifest.lora is not None
    lora = replace(manifest.lora, use_dora=True)
    magnitudes = [
        TensorEntry(f"{_Q_PROJ}.lora_magnitude_vector", Dtype.FLOAT32, (8,), Layout.MAGNITUDE),
        TensorEntry(f"{_K_PROJ}.lora_magnitude_vector", Dtype.FLOAT32, (4,), Layout.MAGNITUDE),
    ]
    specs = plan([*map(_entry, manifest.tensors), *magnitudes])
    buffer = memoryview(bytes(Manifest("base", lora, specs).total_bytes))
    write_peft_dir(root / "one", Manifest("base", lora, seal(specs, buffer)), buffer)
    if merge is Merge.NEVER:
        with pytest.raises(ConfigError, match="use_dora = True cannot be served"):
            await feed.publish(root / "one")
        return
    await feed.publish(root / "one")
    newest = node.publisher.store.newest("a")
    assert newest is not None
    assert newest.rules == rules
    assert Layout.MAGNITUDE in {tensor.layout for tensor in newest.manifest.tensors}
    assert node.fleet.members.needed == Needed(newest.manifest, rules)


def _entry(spec: TensorSpec) -> TensorEntry:
    return TensorEntry(spec.name, spec.dtype, spec.shape, spec.layout, alias_of=spec.alias_of)


async def test_the_same_content_again_is_no_new_version(root: Path, node: Node) -> None:
    first = _write(root / "one", seed=1)

    async with _watching(root, node):
        await eventually(lambda: _published(node))
        for file in (root / "one").iterdir():
            file.write_bytes(file.read_bytes())
        assert _write(root / "copy", seed=1) == first
        await asyncio.sleep(_SEVERAL_RESCANS)
        second = _write(root / "two", seed=2)
        await eventually(lambda: len(_published(node)) > 1)

    assert _published(node) == [(1, first), (2, second)]


async def test_a_directory_that_vanishes_under_the_scan_is_waited_out(
    root: Path, node: Node, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(root / "gone", seed=1)
    scan = publish._adapters

    def scan_then_lose(path: Path) -> list[Path]:
        found = scan(path)
        shutil.rmtree(root / "gone", ignore_errors=True)
        return found

    monkeypatch.setattr(publish, "_adapters", scan_then_lose)

    async with _watching(root, node):
        await eventually(lambda: _warnings(caplog))
        digest = _write(root / "two", seed=2)
        await eventually(lambda: _published(node))

    assert _published(node) == [(1, digest)]
    [warning] = _warnings(caplog)
    assert "No such file or directory" in warning
    assert str(root / "gone") in warning


async def test_an_error_of_the_program_ends_the_watch(
    root: Path, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what a directory can cause is survived."""

    def broken(_: Path) -> list[Path]:
        raise KeyError("bug")

    monkeypatch.setattr(publish, "_adapters", broken)

    with pytest.raises(KeyError, match="bug"):
        await DirectoryFeed(root, node, adapter="a").watch()
