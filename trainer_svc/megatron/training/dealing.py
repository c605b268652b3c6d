"""Which samples make up a minibatch, and which of them a copy of the model learns from."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from trainer_svc.megatron.protocol import Sample
from trainer_svc.megatron.training.packing import prompt_groups


def deal(samples: Sequence[Sample], *, parts: int) -> list[list[int]]:
    """Numbers of the samples in each of `parts` parts of like size; some may be empty.

    A prompt's samples stay together but where parts meet: they share its computation.
    """
    order = [index for group in prompt_groups(samples) for index in group]
    cuts = [len(order) * part // parts for part in range(parts + 1)]
    return [order[start:end] for start, end in pairwise(cuts)]
