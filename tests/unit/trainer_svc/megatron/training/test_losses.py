"""Every loss function: hand-computed values and gradients by the log-probabilities."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.errors import ConfigError
from tests.token_batches import gradient, make_tokens
from trainer_svc.megatron.training.losses import (
    cispo,
    clipped_ratio,
    cross_entropy,
    find_loss,
    gspo,
    reinforce,
)
from trainer_svc.megatron.training.settings import LOSSES, TrainSettings

DAPO = TrainSettings(clip_ratio=0.2, clip_ratio_high=0.28)


def test_the_clip_cuts_off_only_what_would_go_too_far() -> None:
    tokens = make_tokens(ratios=[1.5, 0.5, 1.5, 0.5, 1.1], advantages=[1, 1, -1, -1, 2.0])
    loss = clipped_ratio(tokens, DAPO)
    assert loss.per_token.tolist() == pytest.approx([-1.28, -0.5, 1.5, 0.8, -2.2])
    assert loss.metrics["clip_fraction"].tolist() == [True, False, False, True, False]
    assert gradient(tokens, loss) == pytest.approx([0.0, -0.5, 1.5, 0.0, -2.2])


def test_without_a_higher_bound_both_distances_are_one() -> None:
    tokens = make_tokens(ratios=[1.25, 0.75], advantages=[1.0, -1.0])
    loss = clipped_ratio(tokens, TrainSettings(clip_ratio=0.2))
    assert loss.per_token.tolist() == pytest.approx([-1.2, 0.8])


def test_on_policy_the_gradient_is_minus_the_advantage() -> None:
    tokens = make_tokens(ratios=[1.0, 1.0], advantages=[2.0, -3.0])
    for loss in (clipped_ratio, gspo, cispo, reinforce):
        assert gradient(tokens, loss(tokens, DAPO)) == [-2.0, 3.0]
    assert not clipped_ratio(tokens, DAPO).metrics["clip_fraction"].any()


def test_the_dual_clip_bounds_negative_advantages_alone() -> None:
    tokens = make_tokens(ratios=[5.0, 2.5, 5.0, 0.5], advantages=[-2.0, -2.0, 2.0, -2.0])
    loss = clipped_ratio(tokens, TrainSettings(clip_ratio=0.2, clip_ratio_c=3.0))
    assert loss.per_token.tolist() == pytest.approx([6.0, 5.0, -2.4, 1.6])
    assert loss.metrics["clip_fraction"].tolist() == [True, False, True, True]
    assert gradient(tokens, loss) == pytest.approx([0.0, 5.0, 0.0, 0.0])
    plain = clipped_ratio(tokens, TrainSettings(clip_ratio=0.2))
    assert plain.per_token.tolist() == pytest.approx([10.0, 5.0, -2.4, 1.6])


def test_gspo_gives_every_token_its_sequences_geometric_mean() -> None:
    """Sequence 1: ratios 4, 1, 2 of mean 2; sequence 2: 0.9, 1.1 of mean sqrt(0.99)."""
    tokens = make_tokens(
        ratios=[4.0, 1.0, 2.0, 0.9, 1.1], advantages=[-1, -1, -1, 3, 3.0], lengths=[3, 2]
    )
    loss = gspo(tokens, TrainSettings(loss="gspo", clip_ratio=0.2))
    mean = math.sqrt(0.99)
    assert loss.per_token.tolist() == pytest.approx([2.0, 2.0, 2.0, -3 * mean, -3 * mean])
    assert gradient(tokens, loss) == pytest.approx([2.0, 2.0, 2.0, -3 * mean, -3 * mean])
    assert not loss.metrics["clip_fraction"].any()


def test_gspo_clips_whole_sequences() -> None:
    tokens = make_tokens(ratios=[4.0, 1.0, 1.0], advantages=[1.0, 1.0, 1.0], lengths=[2, 1])
    loss = gspo(tokens, TrainSettings(loss="gspo", clip_ratio=0.2))
    assert loss.per_token.tolist() == pytest.approx([-1.2, -1.2, -1.0])
    assert loss.metrics["clip_fraction"].tolist() == [True, True, False]
    assert gradient(tokens, loss) == pytest.approx([0.0, 0.0, -1.0])


def test_gspo_over_samples_is_the_papers_sequence_objective() -> None:
    """Equation 5 written out for sequences, and its gradient by autograd."""
    lengths, advantages = [3, 2], [-1.0, 3.0]
    tokens = make_tokens(
        ratios=[1.3, 0.8, 1.1, 0.9, 1.05],
        advantages=[-1, -1, -1, 3, 3.0],
        lengths=lengths,
        weights=[1 / 6, 1 / 6, 1 / 6, 1 / 4, 1 / 4],
    )
    settings = TrainSettings(loss="gspo", clip_ratio=0.2)
    expected = torch.zeros(())
    parts = torch.split(tokens.logprobs - tokens.old_logprobs, lengths)
    for part, advantage in zip(parts, advantages, strict=True):
        ratio = part.mean().exp()
        limited = ratio.clamp(0.8, 1.2)
        expected = expected - torch.minimum(ratio * advantage, limited * advantage) / 2
    (slope,) = torch.autograd.grad(expected, tokens.logprobs)
    loss = gspo(tokens, settings)
    assert settings.weighting == "sample_mean"
    assert (tokens.weights * loss.per_token).sum().item() == pytest.approx(expected.item())
    assert gradient(tokens, loss) == pytest.approx(slope.tolist())


def test_cispo_has_a_gradient_for_every_token_and_none_through_the_ratio() -> None:
    tokens = make_tokens(ratios=[1.5, 0.5, 1.1], advantages=[2.0, -1.0, 1.0])
    loss = cispo(tokens, DAPO)
    assert gradient(tokens, loss) == pytest.approx([-2 * 1.28, 0.8, -1.1])
    weights = [2 * 1.28, -0.8, 1.1]
    pairs = zip(weights, tokens.logprobs.tolist(), strict=True)
    assert loss.per_token.tolist() == pytest.approx([-w * logprob for w, logprob in pairs])
    assert loss.metrics["clip_fraction"].tolist() == [True, True, False]


def test_cispo_with_a_distance_of_one_has_no_lower_bound() -> None:
    tokens = make_tokens(ratios=[1e-6], advantages=[1.0])
    loss = cispo(tokens, TrainSettings(clip_ratio=1.0, clip_ratio_high=0.28))
    assert gradient(tokens, loss) == pytest.approx([-1e-6], rel=1e-3)


def test_reinforce_follows_the_ratio_however_far() -> None:
    tokens = make_tokens(ratios=[3.0, 0.1], advantages=[1.0, -2.0])
    loss = reinforce(tokens, DAPO)
    assert loss.per_token.tolist() == pytest.approx([-3.0, 0.2])
    assert gradient(tokens, loss) == pytest.approx([-3.0, 0.2])


def test_cross_entropy_is_the_weighted_negative_log_probability() -> None:
    tokens = make_tokens(ratios=[2.0, 1.0], advantages=[1.0, 0.5])
    loss = cross_entropy(tokens, DAPO)
    assert loss.per_token.tolist() == pytest.approx([math.log(2), 0.5 * math.log(4)])
    assert gradient(tokens, loss) == [-1.0, -0.5]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("shift", [-300.0, 300.0])
def test_an_absurd_ratio_leaves_values_and_gradients_finite(name: str, shift: float) -> None:
    """An infinite ratio times a gradient of zero would be no number, and the step lost."""
    tokens = make_tokens(ratios=[1.0, 1.0], advantages=[1.0, -1.0])
    with torch.no_grad():
        tokens.logprobs.add_(shift)
    loss = find_loss(name)(tokens, DAPO)
    assert loss.per_token.isfinite().all()
    assert all(map(math.isfinite, gradient(tokens, loss)))


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_the_slopes_of_the_values(name: str) -> None:
    """Central differences in float64, away from kinks and where CISPO's weights are constant."""
    ratios = [2.0] * 4 if name == "cispo" else [1.3, 0.9, 1.1, 0.7]
    tokens = make_tokens(ratios=ratios, advantages=[1.0, -2.0, 0.5, 1.5])
    settings = TrainSettings(loss=name, clip_ratio=0.25)
    base = tokens.logprobs.detach().double()

    def value(logprobs: Tensor) -> Tensor:
        return find_loss(name)(replace(tokens, logprobs=logprobs), settings).per_token.sum()

    leaf = base.clone().requires_grad_()
    (found,) = torch.autograd.grad(value(leaf), leaf)
    step = 1e-6
    for index in range(4):
        offset = torch.zeros(4, dtype=torch.float64)
        offset[index] = step
        slope = (value(base + offset) - value(base - offset)) / (2 * step)
        assert found[index].item() == pytest.approx(slope.item(), abs=1e-6)


def test_settings_and_functions_agree_on_the_names() -> None:
    assert [find_loss(name).__name__ for name in LOSSES] == [
        *("clipped_ratio", "clipped_ratio", "gspo", "cispo", "reinforce", "cross_entropy")
    ]


def own_module(path: Path, monkeypatch: pytest.MonkeyPatch, *, returns: str, name: str) -> None:
    (path / f"{name}.py").write_text(
        "from trainer_svc.megatron.training.tokens import TokenLoss\n"
        f"def loss(tokens, settings):\n    return {returns}\n"
        "number = 3\n"
    )
    monkeypatch.syspath_prepend(path)


def test_a_users_function_gets_tokens_and_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    returns = "TokenLoss(settings.lr * tokens.logprobs, {'seen': tokens.advantages})"
    own_module(tmp_path, monkeypatch, returns=returns, name="own_loss_a")
    tokens = make_tokens(ratios=[4.0, 4.0], advantages=[5.0, 6.0])
    loss = find_loss("own_loss_a:loss")(tokens, TrainSettings(lr=0.5))
    assert gradient(tokens, loss) == [0.5, 0.5]
    assert loss.metrics["seen"].tolist() == [5.0, 6.0]


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        ("tokens.logprobs", "returned Tensor; return a TokenLoss"),
        ("TokenLoss(tokens.logprobs.sum())", r"per_token of \(\); return a tensor of \(2,\)"),
        ("TokenLoss(tokens.logprobs, {'x': 3.0})", r"returned x of float; return a tensor"),
    ],
)
def test_what_a_users_function_returns_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, returns: str, message: str
) -> None:
    name = f"own_loss_{abs(hash(returns))}"
    own_module(tmp_path, monkeypatch, returns=returns, name=name)
    with pytest.raises(ConfigError, match=message):
        find_loss(f"{name}:loss")(make_tokens(ratios=[1.0, 1.0]), DAPO)


def test_a_users_function_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_module(tmp_path, monkeypatch, returns="None", name="own_loss_b")
    with pytest.raises(ConfigError, match=r"train\.loss: 'no_such_module:loss': No module named"):
        find_loss("no_such_module:loss")
    with pytest.raises(ConfigError, match=r"train\.loss: own_loss_b has no function 'number'"):
        find_loss("own_loss_b:number")
    with pytest.raises(ConfigError, match="did you mean 'loss'"):
        find_loss("own_loss_b:los")
