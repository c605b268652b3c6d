"""Micro-batches through this rank's part of the model, in step with the ranks of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from torch import Tensor

from trainer_svc.megatron import device, parallel
from trainer_svc.megatron.model.forward import hidden_states
from trainer_svc.megatron.training.packing import MicroBatch, idle

T = TypeVar("T")

Micros = Sequence[MicroBatch]

Output = Callable[[int, Tensor], T]
"""What is made of a micro-batch's number and its final hidden states (T, 1, hidden)."""


def row_multiple(chunks: Sequence[GPTModel]) -> int:
    """What the length of every row must divide by."""
    return parallel.tp_size() if chunks[0].config.sequence_parallel else 1


def in_step(micros: Micros, chunks: Sequence[GPTModel]) -> list[MicroBatch]:
    """The same work, with idle rows and padding where ranks would wait for each other in vain.

    Ranks that share experts need as many rows, each as long, and interleaved stages a multiple of
    their number. Every rank must call this.
    """
    count = len(micros)
    if parallel.num_stages() > 1:
        multiple = parallel.num_stages() if len(chunks) > 1 else 1
        count = -(-max(1, count) // multiple) * multiple
    spread = parallel.spreads_experts()
    if spread:
        (count,) = parallel.max_over_copies([count])
    row = idle(multiple_of=row_multiple(chunks), device=device.compute_device())
    rows = [*micros, *[row] * (count - len(micros))]
    if not spread:
        return rows
    lengths = parallel.max_over_copies([len(row.tokens) for row in rows])
    return [lengthened(row, length) for row, length in zip(rows, lengths, strict=True)]


@torch.no_grad()
def forward(micros: Micros, chunks: Sequence[GPTModel], *, output: Output[T]) -> list[T]:
    """What `output` makes of every micro-batch, without gradient and without dropout.

    Returns:
        One value for each micro-batch on the last stage of a pipeline; nothing on the others.
    """
    _set_training(chunks, training=False)
    if parallel.num_stages() > 1:
        return _pipeline(micros, chunks, output=output, forward_only=True)
    (model,) = chunks
    return [output(number, _hidden(model, micro)) for number, micro in enumerate(micros)]


def forward_backward(
    micros: Micros,
    chunks: Sequence[GPTModel],
    *,
    output: Output[tuple[Tensor, T]],
    learns: Callable[[MicroBatch], bool],
) -> list[T]:
    """Add up every micro-batch's gradient; `output` gives (loss, what is wanted of it).

    Args:
        learns: whether a micro-batch has a gradient; without one it needs no backward pass.

    Returns:
        As `forward`.
    """
    _set_training(chunks, training=True)
    if parallel.num_stages() > 1:
        return _pipeline(micros, chunks, output=output, forward_only=False)
    (model,) = chunks
    found = []
    for number, micro in enumerate(micros):
        # A rank that shares experts has a part in the others' backward passes.
        with torch.set_grad_enabled(parallel.spreads_experts() or learns(micro)):
            loss, value = output(number, _hidden(model, micro))
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        found.append(value)
    return found


def _pipeline(
    micros: Micros,
    chunks: Sequence[GPTModel],
    *,
    output: Output[Any],
    forward_only: bool,
) -> list[T]:
    """Megatron's schedule: 1F1B, or interleaved where a rank holds several runs of layers."""
    interleaved = len(chunks) > 1
    # One object for all chunks. Between two stages that are each other's neighbour on both sides,
    # Megatron's batched messages of both directions would be taken for one another.
    config = chunks[0].config
    config.overlap_p2p_comm, config.batch_p2p_comm = interleaved, not interleaved
    config.variable_seq_lengths = True
    # The loss is used as it is: it is a share of the whole minibatch's.
    config.calculate_per_token_loss = True
    iterators = [iter(enumerate(micros)) for _ in chunks]
    with device.cuda_is_cpu():
        found: list[T] = get_forward_backward_func()(
            forward_step_func=partial(_forward_step, output=output),
            data_iterator=iterators if interleaved else iterators[0],
            model=list(chunks) if interleaved else chunks[0],
            num_microbatches=len(micros),
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
    return found


def _forward_step(
    micros: Iterator[tuple[int, MicroBatch]],
    model: GPTModel,
    *,
    output: Output[Any],
) -> tuple[Tensor, Callable[..., Any]]:
    number, micro = next(micros)

    def finish(hidden: Tensor, *, non_loss_data: bool = False) -> Any:
        if non_loss_data:
            return output(number, hidden)
        loss, value = output(number, hidden)
        if not loss.requires_grad:
            # The stage before waits for a gradient.
            loss = hidden.sum() * 0
        return loss, torch.zeros((), dtype=torch.int), value

    return _hidden(model, micro), finish


def _hidden(model: GPTModel, micro: MicroBatch) -> Tensor:
    return hidden_states(model, micro.tokens, layout=micro.layout)


def lengthened(micro: MicroBatch, length: int) -> MicroBatch:
    """The row padded to `length` tokens, by a segment that nothing sees."""
    begin = len(micro.tokens)
    if begin == length:
        return micro
    padding = torch.tensor([[begin, length - begin, 0, 0]])
    return replace(
        micro,
        tokens=torch.nn.functional.pad(micro.tokens, (0, length - begin)),
        layout=torch.cat([micro.layout, padding]),
    )


def _set_training(chunks: Sequence[GPTModel], *, training: bool) -> None:
    for chunk in chunks:
        chunk.train(training)
