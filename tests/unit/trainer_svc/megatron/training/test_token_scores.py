"""Log-probabilities and entropies of tokens, and the gradient of the former."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from trainer_svc.megatron.training import scores
from trainer_svc.megatron.training.scores import token_scores


def by_autograd(
    logits: Tensor, tokens: Tensor, temperature: float, upstream: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, entropy and gradient as plain torch computes them in float64."""
    wide = logits.detach().double().requires_grad_()
    every = torch.log_softmax(wide / temperature, dim=-1)
    found = every.gather(1, tokens[:, None])[:, 0]
    torch.autograd.backward(found, upstream.double())
    assert wide.grad is not None
    return found.detach(), -(every.exp() * every).sum(dim=1).detach(), wide.grad


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_log_probabilities_are_of_the_tempered_distribution(temperature: float) -> None:
    """faults.md 18: the raw distribution's values were used at temperature 0.7."""
    logits = torch.tensor([[1.0, 2.0, 3.0], [0.0, -1.0, 4.0]])
    found = token_scores(logits, torch.tensor([2, 0]), temperature=temperature)
    expected = [
        3 / temperature - math.log(sum(math.exp(x / temperature) for x in (1, 2, 3))),
        0 / temperature - math.log(sum(math.exp(x / temperature) for x in (0, -1, 4))),
    ]
    assert found.logprobs.tolist() == pytest.approx(expected, abs=1e-6)


def test_entropy_is_that_of_the_distribution() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [math.log(9.0), 0.0, -1e4, -1e4]])
    found = token_scores(logits, torch.tensor([0, 1]), temperature=1.0)
    second = -(0.9 * math.log(0.9) + 0.1 * math.log(0.1))
    assert found.entropy.tolist() == pytest.approx([math.log(4), second], abs=1e-6)
    assert found.logprobs.tolist() == pytest.approx([math.log(0.25), math.log(0.1)], abs=1e-6)


@pytest.mark.parametrize("chunk_elements", [1, 64, 1 << 20])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_values_and_gradients_are_those_of_autograd(
    monkeypatch: pytest.MonkeyPatch, chunk_elements: int, temperature: float
) -> None:
    """However many rows are looked at together."""
    monkeypatch.setattr(scores, "_CHUNK_ELEMENTS", chunk_elements)
    torch.manual_seed(0)
    logits = (torch.randn(7, 31) * 8).requires_grad_()
    tokens, upstream = torch.randint(0, 31, (7,)), torch.randn(7)
    logprobs, entropy, gradient = by_autograd(logits, tokens, temperature, upstream)

    found = token_scores(logits, tokens, temperature=temperature)
    torch.autograd.backward(found.logprobs, upstream)

    assert torch.allclose(found.logprobs.double(), logprobs, atol=2e-5)
    assert torch.allclose(found.entropy.double(), entropy, atol=1e-5)
    assert logits.grad is not None
    assert torch.allclose(logits.grad.double(), gradient, atol=1e-6)
    assert not found.entropy.requires_grad


def test_bfloat16_logits_are_scored_in_float32() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 50).bfloat16().requires_grad_()
    tokens = torch.tensor([1, 2, 3])
    logprobs, entropy, gradient = by_autograd(logits, tokens, 0.7, torch.ones(3))
    found = token_scores(logits, tokens, temperature=0.7)
    torch.autograd.backward(found.logprobs.sum())
    assert found.logprobs.dtype is found.entropy.dtype is torch.float32
    assert torch.allclose(found.logprobs.double(), logprobs, atol=1e-5)
    assert torch.allclose(found.entropy.double(), entropy, atol=1e-5)
    assert logits.grad is not None and logits.grad.dtype is torch.bfloat16
    assert torch.allclose(logits.grad.double(), gradient, rtol=1e-2, atol=1e-6)


def test_logits_beyond_float32s_exponentials_are_finite() -> None:
    found = token_scores(torch.tensor([[1e4, 0.0]]), torch.tensor([1]), temperature=0.5)
    assert found.logprobs.tolist() == [-2e4]
    assert found.entropy.tolist() == [0.0]


def test_no_token_is_no_score() -> None:
    logits = torch.zeros(0, 5, requires_grad=True)
    found = token_scores(logits, torch.zeros(0, dtype=torch.int64), temperature=1.0)
    torch.autograd.backward(found.logprobs.sum())
    assert found.logprobs.shape == found.entropy.shape == (0,)
    assert logits.grad is not None and logits.grad.shape == (0, 5)
