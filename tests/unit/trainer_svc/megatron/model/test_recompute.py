from __future__ import annotations

from pathlib import Path

import pytest
import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from trainer_svc.megatron.lora.layers import add_lora
from trainer_svc.megatron.lora.plan import plan_adapter
from trainer_svc.megatron.lora.settings import LoraSettings
from trainer_svc.megatron.model.attention import LayoutAttention
from trainer_svc.megatron.model.build import build_model
from trainer_svc.megatron.model.forward import hidden_states

pytestmark = pytest.mark.usefixtures("ranks")

TOKENS = torch.arange(14)
LAYOUT = torch.tensor([[0, 5, 0, 0], [5, 3, 0, 5], [8, 2, 0, 5], [10, 4, 0, 0]])


def adapted(path: Path, *, dropout: float, recompute: bool) -> GPTModel:
    base = build_model(path, dtype=torch.float32, recompute=recompute)
    lora = LoraSettings(rank=4, dropout=dropout)
    add_lora(base, plan=plan_adapter(base.config, lora), seed=5)
    (model,) = base.chunks
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.train()


def loss_and_gradients(model: GPTModel) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(3)
    loss = hidden_states(model, TOKENS, layout=LAYOUT).square().mean()
    torch.autograd.backward(loss)
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return loss.detach(), found


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_loss_and_gradients_are_those_of_kept_activations(tiny_dir: Path, dropout: float) -> None:
    """Shared prompts and dropout come through the second pass as through the first."""
    expected_loss, expected = loss_and_gradients(
        adapted(tiny_dir, dropout=dropout, recompute=False)
    )
    loss, found = loss_and_gradients(adapted(tiny_dir, dropout=dropout, recompute=True))
    assert torch.equal(loss, expected_loss)
    assert len(found) == 2 * 4 * 2
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0)


@pytest.mark.parametrize("recompute", [False, True])
def test_layers_run_once_more_for_the_backward_pass_and_never_without(
    tiny_dir: Path, recompute: bool
) -> None:
    model = adapted(tiny_dir, dropout=0.0, recompute=recompute)
    runs: list[str] = []
    for module in model.modules():
        if isinstance(module, LayoutAttention):
            module.register_forward_hook(lambda *_: runs.append("layer"))
    with torch.no_grad():
        hidden_states(model, TOKENS, layout=LAYOUT)
    assert len(runs) == 2
    loss_and_gradients(model)
    assert len(runs) == 2 + (4 if recompute else 2)
