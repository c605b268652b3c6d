from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trainer_svc.megatron.lora.layers import TrainedTensor, add_lora, trained_tensors
from trainer_svc.megatron.lora.plan import plan_adapter
from trainer_svc.megatron.lora.settings import DtypeName, LoraSettings
from trainer_svc.megatron.model.build import build_model
from trainer_svc.megatron.settings import TrainSettings
from trainer_svc.megatron.training.optimizer import AdapterOptimizer

pytestmark = pytest.mark.usefixtures("ranks")


def adapter(tiny_dir: Path, *, dtype: DtypeName = "float32") -> list[TrainedTensor]:
    base = build_model(tiny_dir, dtype=torch.float32)
    settings = LoraSettings(rank=4, b_init="normal", dtype=dtype)
    add_lora(base, plan=plan_adapter(base.config, settings), seed=0)
    return trained_tensors(base.chunks)


def backward(trained: list[TrainedTensor], *, seed: int, scale: float) -> None:
    """Add a gradient that is `scale` times a random one."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in trained:
        weight = torch.randn(tensor.parameter.shape, generator=generator) * scale
        (tensor.parameter * weight).sum().backward()  # type: ignore[no-untyped-call]


def test_updates_are_those_of_adamw_with_clipped_gradients(tiny_dir: Path) -> None:
    settings = TrainSettings(
        lr=0.01, weight_decay=0.1, max_grad_norm=0.5, betas=(0.8, 0.7), eps=1e-5
    )
    trained = adapter(tiny_dir)
    twins = [t.parameter.detach().clone().requires_grad_() for t in trained]
    optimizer = AdapterOptimizer(trained, settings=settings)
    reference = torch.optim.AdamW(twins, lr=0.01, betas=(0.8, 0.7), eps=1e-5, weight_decay=0.1)
    for seed, scale in enumerate((1e-3, 1.0, 1e-4)):
        backward(trained, seed=seed, scale=scale)
        for twin, tensor in zip(twins, trained, strict=True):
            assert tensor.parameter.grad is not None
            twin.grad = tensor.parameter.grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(twins, 0.5)
        reference.step()
        assert optimizer.step().grad_norm == pytest.approx(float(norm), rel=1e-5)
    for twin, tensor in zip(twins, trained, strict=True):
        torch.testing.assert_close(tensor.parameter, twin, rtol=0, atol=1e-6)
        assert tensor.parameter.grad is None


def test_gradients_of_a_bfloat16_adapter_add_up_in_float32(tiny_dir: Path) -> None:
    """1 + 16 / 1024 in steps of 1 / 1024, each of which bfloat16 would lose beside the 1."""
    trained = adapter(tiny_dir, dtype="bfloat16")
    optimizer = AdapterOptimizer(trained, settings=TrainSettings())
    for gradient in (1.0, *[1 / 1024] * 16):
        sum(t.parameter.float().sum() for t in trained).mul(gradient).backward()  # type: ignore[union-attr]
    count = sum(t.parameter.numel() for t in trained)
    assert optimizer.step().grad_norm == pytest.approx(count**0.5 * (1 + 16 / 1024), rel=1e-6)


def test_a_loaded_state_goes_on_as_its_origin(tiny_dir: Path) -> None:
    settings = TrainSettings(lr=0.01, warmup_updates=4)
    first, second = adapter(tiny_dir), adapter(tiny_dir)
    origin = AdapterOptimizer(first, settings=settings)
    backward(first, seed=1, scale=1.0)
    origin.step()
    copy = AdapterOptimizer(second, settings=settings)
    copy.load_state(origin.state())
    updates = []
    for trained, optimizer in ((first, origin), (second, copy)):
        backward(trained, seed=2, scale=1.0)
        updates.append(optimizer.step())
    assert updates[0] == updates[1]
    assert all(torch.equal(a.parameter, b.parameter) for a, b in zip(first, second, strict=True))
