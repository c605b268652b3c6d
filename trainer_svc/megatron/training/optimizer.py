"""AdamW (arXiv 1711.05101) on float32 masters, with clipped gradients and a linear warm-up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from trainer_svc.megatron import device, parallel
from trainer_svc.megatron.lora.layers import TrainedTensor
from trainer_svc.megatron.settings import TrainSettings


@dataclass(frozen=True, slots=True)
class Update:
    """What one optimizer update did; `grad_norm` is that before clipping."""

    grad_norm: float
    lr: float
    skipped: bool


@dataclass(frozen=True, slots=True)
class TensorState:
    """What the optimizer keeps of one trained tensor: float32, of the shape of this rank's part."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """All that the optimizer keeps; `tensors` by `TrainedTensor.name`, those of this rank."""

    updates: int
    tensors: Mapping[str, TensorState]


class AdapterOptimizer:
    """Updates this rank's part of an adapter from its gradients.

    A float32 parameter is its own master; a narrower one follows its master by one rounding, and
    its gradients add up in float32.

        optimizer = AdapterOptimizer(trained_tensors(base.chunks), settings=settings.train)
        loss.backward()
        update = optimizer.step()
    """

    def __init__(self, trained: Sequence[TrainedTensor], *, settings: TrainSettings) -> None:
        self.updates = 0
        """Updates made so far."""

        self._settings = settings
        self._trained = list(trained)
        self._parameters = [tensor.parameter for tensor in trained]
        self._gradients = [_GradientSum(parameter) for parameter in self._parameters]
        self._states = [
            TensorState(master, torch.zeros_like(master), torch.zeros_like(master))
            for master in (parameter.detach().float() for parameter in self._parameters)
        ]

    @property
    def lr(self) -> float:
        """Learning rate of the next update."""
        warm = self._settings.warmup_updates
        return self._settings.lr * min(1.0, (self.updates + 1) / (warm + 1))

    def step(self) -> Update:
        """Sum gradients over ranks, clip, update, and drop the gradients; on every rank.

        A gradient that is not finite changes nothing: it would ruin the adapter for good.
        """
        gradients = [gradient.take() for gradient in self._gradients]
        self._sum_over_ranks(gradients)
        norm = self._norm(gradients)
        lr = self.lr
        finite = bool(norm.isfinite())
        if finite:
            scale = float((self._settings.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
            self._apply([gradient * scale for gradient in gradients], lr=lr)
            self.updates += 1
        return Update(grad_norm=float(norm), lr=lr, skipped=not finite)

    def masters(self) -> dict[str, Tensor]:
        """The live float32 values that are trained, by `TrainedTensor.name`."""
        return {name: state.master for name, state in self.state().tensors.items()}

    def state(self) -> OptimizerState:
        """The live state: its tensors change with every update."""
        names = [tensor.name for tensor in self._trained]
        return OptimizerState(self.updates, dict(zip(names, self._states, strict=True)))

    @torch.no_grad()
    def load_state(self, state: OptimizerState) -> None:
        """Copy a state of the same tensors; the parameters follow its masters."""
        self.updates = state.updates
        for tensor, own in zip(self._trained, self._states, strict=True):
            other = state.tensors[tensor.name]
            own.master.copy_(other.master)
            own.exp_avg.copy_(other.exp_avg)
            own.exp_avg_sq.copy_(other.exp_avg_sq)
        self._refresh_parameters()

    def _sum_over_ranks(self, gradients: Sequence[Tensor]) -> None:
        """Over all ranks that hold the same part of a tensor, or, of one adapter shared by experts,
        that use the same part."""
        pairs = list(zip(self._trained, gradients, strict=True))
        partial = [(t.group, g) for t, g in pairs if t.partial_over_tp]
        shared = [g for t, g in pairs if t.is_shared_by_experts]
        experts = [g for t, g in pairs if t.is_expert or t.is_shared_by_experts]
        others = [g for t, g in pairs if not (t.is_expert or t.is_shared_by_experts)]
        for group in dict.fromkeys(group for group, _ in partial):
            parallel.sum_over(group, [g for own, g in partial if own is group])
        parallel.sum_over(parallel.expert_group(), shared)
        parallel.sum_over(parallel.expert_dp_group(), experts)
        parallel.sum_over(parallel.dp_group(), others)

    @torch.no_grad()
    def _norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """L2 norm over the whole adapter, each of whose elements counts once, however many ranks
        hold it; float64."""
        total = torch.zeros((), dtype=torch.float64, device=device.compute_device())
        if gradients:
            norms = torch.stack(torch._foreach_norm(list(gradients))).double()
            holders = norms.new_tensor([_num_holders(tensor) for tensor in self._trained])
            total += (norms.square() / holders).sum()
        return parallel.sum_over_all(total).sqrt()

    @torch.no_grad()
    def _apply(self, gradients: Sequence[Tensor], *, lr: float) -> None:
        if not gradients:
            return
        beta1, beta2 = self._settings.betas
        adamw(
            [state.master for state in self._states],
            list(gradients),
            [state.exp_avg for state in self._states],
            [state.exp_avg_sq for state in self._states],
            [],
            [torch.tensor(float(self.updates)) for _ in self._states],
            foreach=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=self._settings.weight_decay,
            eps=self._settings.eps,
            maximize=False,
        )
        self._refresh_parameters()

    @torch.no_grad()
    def _refresh_parameters(self) -> None:
        for parameter, state in zip(self._parameters, self._states, strict=True):
            if parameter.dtype is not torch.float32:
                parameter.copy_(state.master)


class _GradientSum:
    """A parameter's gradient since the last update, in float32."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter
        self._sum: Tensor | None = None
        if parameter.dtype is not torch.float32:
            parameter.register_post_accumulate_grad_hook(self._widen)  # type: ignore[no-untyped-call]

    def take(self) -> Tensor:
        """The sum, which starts anew; zeros where this rank saw nothing to learn from."""
        found = self._parameter.grad if self._sum is None else self._sum
        self._parameter.grad = self._sum = None
        if found is None:
            return torch.zeros_like(self._parameter, dtype=torch.float32)
        return found

    def _widen(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        wide = parameter.grad.float()
        self._sum = wide if self._sum is None else self._sum.add_(wide)
        parameter.grad = None


def _num_holders(tensor: TrainedTensor) -> int:
    """Ranks that each hold the same part of a tensor."""
    parts = 1 if tensor.split_dim is None else tensor.group.size()
    if tensor.is_expert and not tensor.is_shared_by_experts:
        parts *= parallel.expert_group().size()
    return parallel.num_stage_ranks() // parts
