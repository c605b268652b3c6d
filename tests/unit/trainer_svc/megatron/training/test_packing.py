from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from tests.random_adapters import adapted
from trainer_svc.megatron.lora.settings import LoraSettings
from trainer_svc.megatron.model.forward import hidden_states, output_logits
from trainer_svc.megatron.protocol import Sample
from trainer_svc.megatron.training.packing import MicroBatch, Sequences, idle, pack, prompt_groups

CPU = torch.device("cpu")
MODES: tuple[Sequences, ...] = ("shared", "packed", "padded")


def sample(prompt: tuple[int, ...], completion: tuple[int, ...], advantage: float) -> Sample:
    return Sample(prompt, completion, tuple(-0.1 * token for token in completion), advantage)


FEW = (
    sample((1, 2, 3), (40, 41), 1.0),
    sample((4, 5), (50,), -1.0),
    sample((1, 2, 3), (60, 61, 62), 0.0),
)


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    """Four prompts of uneven length, their completions of uneven length and out of order."""
    generator = torch.Generator().manual_seed(5)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 96, (count,), generator=generator).tolist())

    prompts = [ids(count) for count in (11, 3, 24, 1)]
    lengths = [5, 1, 9, 2, 17, 4, 6, 1, 3, 12, 2]
    return [
        sample(prompts[i % 4], ids(length), (-1.0) ** i * (1 + i))
        for i, length in enumerate(lengths)
    ]


def packed(samples: list[Sample] | tuple[Sample, ...], sequences: Sequences) -> list[MicroBatch]:
    return pack(samples, sequences=sequences, token_budget=1000, device=CPU)


def test_a_shared_prompt_stands_once_and_every_completion_sees_it() -> None:
    rewarded = packed(FEW, "shared")
    (micro,) = rewarded
    assert micro.tokens.tolist() == [1, 2, 3, 40, 60, 61, 4, 5]
    assert micro.layout.tolist() == [[0, 3, 0, 0], [3, 1, 0, 3], [4, 2, 0, 3], [6, 2, 0, 0]]
    assert (micro.order, micro.lengths) == ((0, 2, 1), (2, 3, 1))
    assert micro.targets.tolist() == [40, 41, 60, 61, 62, 50]
    assert micro.sources.tolist() == [2, 3, 2, 4, 5, 7]
    assert micro.advantages.tolist() == [1, 1, 0, 0, 0, -1]
    torch.testing.assert_close(micro.rollout_logprobs, -0.1 * micro.targets)


def test_packed_samples_lie_end_to_end() -> None:
    micro, without_advantage = packed(FEW, "packed")
    assert micro.tokens.tolist() == [1, 2, 3, 40, 4, 5]
    assert micro.layout.tolist() == [[0, 4, 0, 0], [4, 2, 0, 0]]
    assert micro.sources.tolist() == [2, 3, 5]
    assert without_advantage.tokens.tolist() == [1, 2, 3, 60, 61]
    assert (micro.rewarded, without_advantage.rewarded) == (True, False)


def test_padded_samples_are_as_long_as_the_longest() -> None:
    micro, _ = packed(FEW, "padded")
    assert micro.tokens.tolist() == [1, 2, 3, 40, 4, 5, 0, 0]
    assert micro.layout.tolist() == [[0, 4, 0, 0], [4, 4, 0, 0]]
    assert micro.sources.tolist() == [2, 3, 5]


@pytest.mark.parametrize("sequences", MODES)
@pytest.mark.parametrize("token_budget", [1, 30, 60, 1000])
def test_rows_keep_to_the_budget_and_hold_every_sample_once(
    samples: list[Sample], sequences: Sequences, token_budget: int
) -> None:
    micros = pack(samples, sequences=sequences, token_budget=token_budget, device=CPU)
    assert sorted(i for micro in micros for i in micro.order) == list(range(len(samples)))
    for micro in micros:
        assert len(micro.tokens) <= token_budget or len(micro.order) == 1
        ends = sorted((begin, begin + length) for begin, length, _, _ in micro.layout.tolist())
        assert ends[0][0] == 0 and ends[-1][1] == len(micro.tokens)
        assert all(left[1] == right[0] for left, right in pairwise(ends))
        expected = [token for i in micro.order for token in samples[i].completion_ids]
        assert micro.targets.tolist() == expected


def test_the_same_samples_are_packed_the_same_way(samples: list[Sample]) -> None:
    one, other = (pack(samples, sequences="shared", token_budget=40, device=CPU) for _ in range(2))
    assert [micro.order for micro in one] == [micro.order for micro in other]


def test_a_group_above_the_budget_is_split_and_its_prompt_repeated() -> None:
    group = [sample((1, 2, 3), (10 * i, 1, 2), 1.0) for i in range(1, 5)]
    micros = pack(group, sequences="shared", token_budget=8, device=CPU)
    assert [micro.order for micro in micros] == [(0, 1), (2, 3)]
    assert micros[1].tokens.tolist() == [1, 2, 3, 30, 1, 40, 1]


def test_groups_without_any_advantage_go_apart() -> None:
    dull = [replace(s, prompt_ids=(7, 7), advantage=0.0) for s in FEW]
    micros = packed([*dull, *FEW], "shared")
    assert [(micro.order, micro.rewarded) for micro in micros] == [
        ((3, 5, 4), True),
        ((0, 1, 2), False),
    ]


def test_rows_are_padded_to_a_multiple_by_a_segment_that_nothing_sees() -> None:
    (micro,) = pack(FEW[:1], sequences="shared", token_budget=1000, device=CPU, multiple_of=8)
    assert micro.tokens.tolist() == [1, 2, 3, 40, 0, 0, 0, 0]
    assert micro.layout.tolist() == [[0, 3, 0, 0], [3, 1, 0, 3], [4, 4, 0, 0]]


def test_prompts_are_known_by_their_content() -> None:
    assert prompt_groups(FEW) == [[0, 2], [1]]


@pytest.fixture
def model(tiny_dir: Path, ranks: None) -> GPTModel:
    """Two layers, grouped heads, and an adapter that changes the output."""
    (chunk,) = adapted(tiny_dir, LoraSettings(rank=4)).base.chunks
    return chunk


def gradients(model: GPTModel) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.requires_grad and p.grad is not None]


def logprobs(model: GPTModel, micro: MicroBatch) -> Tensor:
    hidden = hidden_states(model, micro.tokens, layout=micro.layout)
    logits = output_logits(model, hidden.squeeze(1)[micro.sources])
    return logits.log_softmax(-1).gather(1, micro.targets[:, None]).squeeze(1)


def by_sample(model: GPTModel, micros: list[MicroBatch]) -> dict[int, list[float]]:
    """Log-probabilities of every sample; the gradient of a policy loss is left in the adapter."""
    found: dict[int, list[float]] = {}
    for micro in micros:
        values = logprobs(model, micro)
        torch.autograd.backward((values * micro.advantages).sum())
        parts = torch.split(values.detach(), list(micro.lengths))
        found |= {i: part.tolist() for i, part in zip(micro.order, parts, strict=True)}
    return found


@pytest.mark.parametrize("token_budget", [45, 1000])
@pytest.mark.parametrize("multiple_of", [1, 8])
def test_logprobs_and_gradients_are_those_of_every_sample_alone(
    model: GPTModel, samples: list[Sample], token_budget: int, multiple_of: int
) -> None:
    alone = by_sample(model, pack(samples, sequences="padded", token_budget=1, device=CPU))
    expected = gradients(model)
    assert len(expected) == 2 * 4 * 2
    for sequences in MODES:
        model.zero_grad()
        micros = pack(
            samples,
            sequences=sequences,
            token_budget=token_budget,
            device=CPU,
            multiple_of=multiple_of,
        )
        found = by_sample(model, [*micros, idle(multiple_of=multiple_of, device=CPU)])
        for index, values in alone.items():
            assert found[index] == pytest.approx(values, rel=1e-5, abs=1e-6)
        for one, other in zip(gradients(model), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * float(other.abs().max()))


def test_a_completion_sees_its_prompt_and_none_of_its_siblings(model: GPTModel) -> None:

    def first(samples: list[Sample]) -> Tensor:
        (micro,) = packed(samples, "shared")
        with torch.no_grad():
            return logprobs(model, micro)[: len(samples[0].completion_ids)]

    group = [sample((1, 2, 3), (40 + i, 41, 42 + i, 43), 1.0) for i in range(3)]
    before = first(group)
    siblings = [replace(s, completion_ids=(9, 8, 7, 6)) for s in group[1:]]
    torch.testing.assert_close(first([group[0], *siblings]), before, rtol=0, atol=1e-6)
    other_prompt = [replace(s, prompt_ids=(1, 2, 4)) for s in group]
    assert (first(other_prompt) - before).abs().min() > 1e-3
