from __future__ import annotations

import pytest

from common.adapter import Dtype, Kind, Layout, LoraConfig, Manifest, TensorSpec
from common.errors import ConfigError, StagingFull
from tests.whole_weights import make_weights
from trainer_svc.megatron.protocol import (
    Batch,
    Sample,
    decode,
    encode,
    error_from_json,
    error_to_json,
    manifest_from_json,
    manifest_to_json,
)


def test_a_batch_survives_the_line() -> None:
    batch = Batch(
        samples=(Sample((1, 2), (3,), (-0.125,), 1.5), Sample((4,), (5, 6), (-0.1, -1e-9), -0.5)),
        temperature=0.7,
    )
    line = encode(batch.to_json())
    assert line.count(b"\n") == 1
    assert Batch.from_json(decode(line)) == batch


def test_a_manifest_survives_the_line() -> None:
    specs = (
        TensorSpec("a", Dtype.FLOAT32, (2, 3), Layout.LORA_A, 0, bytes(range(32))),
        TensorSpec("b", Dtype.FLOAT32, (2, 3), Layout.LORA_A, 0, bytes(range(32)), "a"),
        TensorSpec("c", Dtype.BFLOAT16, (4, 2), Layout.LORA_B, 24, bytes(32)),
    )
    patterns = {"rank_pattern": (("q_proj", 1),), "alpha_pattern": (("x", 1.5), ("y", 2.0))}
    lora = LoraConfig(2, 5.5, ("k_proj", "q_proj"), True, True, **patterns)  # type: ignore[arg-type]
    manifest = Manifest("base", lora, specs)
    found = manifest_from_json(decode(encode(manifest_to_json(manifest))))
    assert found == manifest
    assert found.digest() == manifest.digest()


@pytest.mark.parametrize("kind", [Kind.MERGED, Kind.BASE])
def test_a_manifest_of_whole_weights_survives_the_line(kind: Kind) -> None:
    manifest = make_weights(kind=kind).manifest
    assert manifest_from_json(decode(encode(manifest_to_json(manifest)))) == manifest


def test_a_domain_error_arrives_as_its_own_class() -> None:
    found = error_from_json(decode(encode(error_to_json(StagingFull("path: no room")))))
    assert type(found) is StagingFull
    assert str(found) == "path: no room"


@pytest.mark.parametrize(
    ("prompt", "completion", "logprobs", "message"),
    [
        ((), (1,), (0.0,), "empty"),
        ((1,), (), (), "empty"),
        ((1,), (2, 3), (-1.0,), "found 1 rollout_logprobs for 2 completion tokens"),
    ],
)
def test_samples_that_cannot_train_are_refused(
    prompt: tuple[int, ...],
    completion: tuple[int, ...],
    logprobs: tuple[float, ...],
    message: str,
) -> None:
    with pytest.raises(ConfigError, match=message):
        Sample(prompt, completion, logprobs, 1.0)


def test_a_batch_needs_samples_and_a_temperature() -> None:
    with pytest.raises(ConfigError, match="found no samples"):
        Batch(samples=())
    with pytest.raises(ConfigError, match="temperature: found 0"):
        Batch(samples=(Sample((1,), (2,), (-1.0,), 1.0),), temperature=0)
