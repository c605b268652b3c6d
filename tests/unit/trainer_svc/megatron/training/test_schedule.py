from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from trainer_svc.megatron.lora.layers import add_lora, trained_tensors
from trainer_svc.megatron.lora.plan import plan_adapter
from trainer_svc.megatron.lora.settings import LoraSettings
from trainer_svc.megatron.model.build import BaseModel, build_model
from trainer_svc.megatron.protocol import Batch
from trainer_svc.megatron.training.packing import MicroBatch, idle, pack
from trainer_svc.megatron.training.policy import completion_scores
from trainer_svc.megatron.training.schedule import forward, forward_backward, lengthened

pytestmark = pytest.mark.usefixtures("ranks")


@pytest.fixture
def base(tiny_dir: Path) -> BaseModel:
    """With an adapter that changes the output."""
    base = build_model(tiny_dir, dtype=torch.float32)
    settings = LoraSettings(rank=4, b_init="normal")
    add_lora(base, plan=plan_adapter(base.config, settings), seed=0)
    return base


@pytest.fixture
def micros(batch: Batch) -> list[MicroBatch]:
    return pack(batch.samples, sequences="shared", token_budget=24, device=torch.device("cpu"))


def logprobs(base: BaseModel, micros: list[MicroBatch]) -> list[Tensor]:
    def output(number: int, hidden: Tensor) -> Tensor:
        return completion_scores(base.chunks[0], hidden, micros[number], temperature=1).logprobs

    return forward(micros, base.chunks, output=output)


def gradients(base: BaseModel, micros: list[MicroBatch]) -> list[Tensor]:
    def output(number: int, hidden: Tensor) -> tuple[Tensor, int]:
        scores = completion_scores(base.chunks[0], hidden, micros[number], temperature=1)
        return scores.logprobs.sum(), number

    found = forward_backward(micros, base.chunks, output=output, learns=lambda _: True)
    assert found == list(range(len(micros)))
    return list(taken(base))


def taken(base: BaseModel) -> Iterator[Tensor]:
    for tensor in trained_tensors(base.chunks):
        assert tensor.parameter.grad is not None
        yield tensor.parameter.grad
        tensor.parameter.grad = None


def test_an_idle_row_has_no_tokens_and_adds_nothing_to_the_gradient(
    base: BaseModel, micros: list[MicroBatch]
) -> None:
    row = idle(multiple_of=3, device=torch.device("cpu"))
    assert len(row.tokens) == 3
    assert logprobs(base, [row])[0].shape == (0,)
    with_idle = gradients(base, [*micros, row])
    assert all(
        torch.equal(mine, other)
        for mine, other in zip(with_idle, gradients(base, micros), strict=True)
    )


def test_padding_changes_no_logprob(base: BaseModel, micros: list[MicroBatch]) -> None:
    longer = [lengthened(micro, len(micro.tokens) + 5) for micro in micros]
    assert [len(row.tokens) for row in longer] == [len(row.tokens) + 5 for row in micros]
    for mine, other in zip(logprobs(base, longer), logprobs(base, micros), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-5)


def test_what_does_not_learn_gets_no_backward_pass(
    base: BaseModel, micros: list[MicroBatch]
) -> None:
    def output(number: int, hidden: Tensor) -> tuple[Tensor, bool]:
        return hidden.sum(), hidden.requires_grad

    learns = forward_backward(
        micros, base.chunks, output=output, learns=lambda micro: micro.rewarded
    )
    assert learns == [micro.rewarded for micro in micros]
    assert {True, False} == set(learns)
