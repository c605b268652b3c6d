"""The versions kept: immutable, few, one buffer for equal bytes."""

from __future__ import annotations

import pytest

from common.adapter import BASE_NAME, AdapterRef, Canary, CanarySequence
from common.errors import AdapterNotFound, AlreadyExists, InvalidField
from common.rules import Merge, Rules, Swap
from tests.adapters import make_adapter
from trainer_svc.store import VersionStore


def _add(
    store: VersionStore, version: int, *, adapter: str = "default", seed: int = 0
) -> AdapterRef:
    return store.add(adapter, *make_adapter(seed=seed or version), version=version)


def _kept(store: VersionStore) -> list[tuple[str, int]]:
    return [(ref.adapter, ref.version) for ref in store.refs()]


def test_the_newest_versions_of_each_adapter_are_kept() -> None:
    """faults.md 27, AReaL#1385: what is kept levels off over hundreds of versions."""
    store = VersionStore("run", keep=2)
    for version in range(1, 301):
        _add(store, version)
    _add(store, 7, adapter="old")

    assert _kept(store) == [("default", 299), ("default", 300), ("old", 7)]
    assert store.newest("default") is store.find(store.refs()[1])
    assert store.newest("another") is None


def test_the_same_version_again_changes_nothing() -> None:
    store = VersionStore("run", keep=2)
    first, second = _add(store, 1), _add(store, 2)

    assert (_add(store, 2), _add(store, 1)) == (second, first)
    assert store.refs() == [first, second]


@pytest.mark.parametrize(("version", "seed"), [(3, 9), (2, 9), (1, 1)])
def test_a_number_is_never_given_twice(version: int, seed: int) -> None:
    """Not to other bytes, nor to a version that is gone."""
    store = VersionStore("run", keep=2)
    for number in (1, 2, 3):
        _add(store, number)
    before = store.refs()

    with pytest.raises(AlreadyExists, match=f"default@{version} .* newest is default@3"):
        _add(store, version, seed=seed)
    assert store.refs() == before


def test_equal_bytes_are_kept_once_and_outlive_their_first_name() -> None:
    store = VersionStore("run", keep=1)
    manifest, buffer = make_adapter(seed=1)
    store.add("default", manifest, buffer, version=1)
    twin = _add(store, 1, adapter="old")
    _add(store, 2)

    kept = store.find(twin)
    assert kept is not None
    assert kept.buffer.obj is buffer.obj
    assert store.with_digest(twin.digest) is kept
    assert _kept(store) == [("default", 2), ("old", 1)]


def test_a_pinned_version_is_kept_until_its_last_pin_is_gone() -> None:
    """faults.md 25, prime-rl#2395: nothing is removed while somebody needs it."""
    store = VersionStore("run", keep=1)
    pinned = _add(store, 1)
    with store.pinned("default", 1) as ref:
        with store.pinned("default", 1):
            for version in (2, 3):
                _add(store, version)
        assert ref == pinned
        assert _kept(store) == [("default", 1), ("default", 3)]
    assert _kept(store) == [("default", 3)]


def test_what_is_gone_cannot_be_pinned() -> None:
    store = VersionStore("run", keep=1)
    with pytest.raises(AdapterNotFound, match="default@1 is not kept"), store.pinned("default", 1):
        pass


def test_what_is_published_cannot_be_written_to() -> None:
    """faults.md 21, verl#6688: no later write to a buffer shows in a version."""
    store = VersionStore("run", keep=1)
    manifest, buffer = make_adapter()
    store.add("default", manifest, memoryview(bytearray(buffer)), version=1)
    content = store.newest("default")

    assert content is not None
    with pytest.raises(TypeError, match="read-only"):
        content.buffer[0] = 1


def test_a_canary_belongs_to_its_version() -> None:
    store = VersionStore("run", keep=2)
    canary = Canary((CanarySequence((1, 2), (-1.0,)),), max_difference=0.1)
    store.add("default", *make_adapter(), version=1, canary=canary)
    store.add("old", *make_adapter(), version=1)

    assert [c and c.canary for c in map(store.newest, ("default", "old"))] == [canary, None]


def test_rules_belong_to_their_version() -> None:
    """Equal bytes are kept once, and may be served by other rules."""
    store = VersionStore("run", keep=2)
    rules = Rules(Swap.ABORT, Merge.ROLLOUT)
    store.add("default", *make_adapter(), version=1)
    store.add("default", *make_adapter(), version=2, rules=rules)

    assert [found and found.rules for found in map(store.find, store.refs())] == [Rules(), rules]


@pytest.mark.parametrize("adapter", ["", "a" * 257, "\ud800", BASE_NAME])
def test_a_name_that_no_replica_can_be_told_is_refused(adapter: str) -> None:
    store = VersionStore("run", keep=1)
    with pytest.raises(InvalidField, match=r"^adapter: '"):
        _add(store, 1, adapter=adapter)
    assert store.adapters() == []
    assert _add(store, 1, adapter="a" * 256).version == 1


@pytest.mark.parametrize("version", [0, -3, 2**63])
def test_a_version_that_no_message_can_carry_is_refused(version: int) -> None:
    store = VersionStore("run", keep=1)
    with pytest.raises(InvalidField, match=rf"^version: {version}; give a number from 1 to"):
        _add(store, version, seed=1)
    assert store.adapters() == []
    assert _add(store, 2**63 - 1, seed=1).version == 2**63 - 1
