from __future__ import annotations

import pytest
from refit.v1 import rollout_pb2

from common.errors import InvalidField
from rollout_svc.sampling import Sampling, sampling_from_proto


def test_unset_fields_are_left_to_the_engine() -> None:
    msg = rollout_pb2.SamplingParams(max_tokens=5)
    assert sampling_from_proto(msg, n=0) == Sampling(n=1, max_tokens=5)


def test_every_field_arrives() -> None:
    msg = rollout_pb2.SamplingParams(
        max_tokens=5,
        temperature=0.5,
        top_p=0.75,
        top_k=3,
        min_p=0.25,
        seed=7,
        stop=["a"],
        stop_token_ids=[2],
        ignore_eos=True,
        min_tokens=1,
    )
    assert sampling_from_proto(msg, n=4) == Sampling(
        n=4,
        max_tokens=5,
        temperature=0.5,
        top_p=0.75,
        top_k=3,
        min_p=0.25,
        seed=7,
        stop=("a",),
        stop_token_ids=(2,),
        ignore_eos=True,
        min_tokens=1,
    )


def test_zero_is_a_value_and_not_unset() -> None:
    msg = rollout_pb2.SamplingParams(max_tokens=1, temperature=0.0, seed=0)
    sampling = sampling_from_proto(msg, n=1)
    assert (sampling.temperature, sampling.seed) == (0.0, 0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 6),
        ("temperature", -0.1),
        ("temperature", 2.5),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", float("inf")),
        ("seed", -1),
        ("stop", [""]),
        ("stop_token_ids", [-1]),
    ],
)
def test_a_bad_value_is_refused_by_the_fields_name(field: str, value: object) -> None:
    msg = rollout_pb2.SamplingParams(**{"max_tokens": 5, field: value})  # type: ignore[arg-type]
    with pytest.raises(InvalidField, match=rf"^sampling\.{field}: "):
        sampling_from_proto(msg, n=1)


@pytest.mark.parametrize("n", [-1, 1025])
def test_n_is_bounded(n: int) -> None:
    with pytest.raises(InvalidField, match=f"^n: {n}; "):
        sampling_from_proto(rollout_pb2.SamplingParams(max_tokens=1), n=n)
