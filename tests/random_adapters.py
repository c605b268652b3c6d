"""Models of the trainer's with an adapter all of whose values are random."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from common.adapter import Dtype, Manifest
from tests import tiny_models
from trainer_svc.megatron.adapter_io.export import AdapterExporter
from trainer_svc.megatron.adapter_io.flat import tensors_of
from trainer_svc.megatron.adapter_io.load import load_adapter
from trainer_svc.megatron.lora.layers import add_lora, trained_tensors
from trainer_svc.megatron.lora.plan import AdapterPlan, plan_adapter
from trainer_svc.megatron.lora.settings import LoraSettings
from trainer_svc.megatron.model.build import BaseModel, build_model
from trainer_svc.megatron.model.forward import hidden_states, output_logits
from trainer_svc.megatron.model.layout import causal_layout
from trainer_svc.megatron.settings import ParallelSettings

TOKENS = torch.randint(
    0, tiny_models.VOCAB_SIZE, (2, 10), generator=torch.Generator().manual_seed(3)
)


@dataclass(frozen=True)
class Adapted:
    """A model, and the plan of its adapter."""

    base: BaseModel
    plan: AdapterPlan

    @property
    def values(self) -> dict[str, Tensor]:
        """This rank's part of every tensor, by name; the parameters themselves."""
        return {t.name: t.parameter.detach() for t in trained_tensors(self.base.chunks)}

    def exporter(self, *, base_model_name: str = "") -> AdapterExporter:
        return AdapterExporter(self.base, plan=self.plan, base_model_name=base_model_name)

    def export(self, path: Path, *, dtype: Dtype | None = None) -> Manifest:
        """The flat buffer as a file; for one rank."""
        manifest = self.exporter().to_file(path, base_fingerprint="base", dtype=dtype)
        assert manifest is not None
        return manifest

    def load(self, path: Path) -> None:
        load_adapter(self.base, path, plan=self.plan)

    @torch.no_grad()
    def logits(self) -> Tensor:
        """Of `TOKENS`, (2, 10, vocab)."""
        (model,) = self.base.chunks
        layout = causal_layout([TOKENS.shape[1]] * len(TOKENS))
        hidden = hidden_states(model, TOKENS.flatten(), layout=layout)
        return output_logits(model, hidden).view(*TOKENS.shape, -1)


def adapted(
    model_dir: Path, lora: LoraSettings, *, seed: int = 21, parallel: ParallelSettings | None = None
) -> Adapted:
    """Every value depends on the seed and the tensor's name; magnitudes are near the start's."""
    base = build_model(model_dir, dtype=torch.float32, parallel=parallel)
    plan = plan_adapter(base.config, lora)
    add_lora(base, plan=plan, seed=seed)
    for number, tensor in enumerate(trained_tensors(base.chunks)):
        generator = torch.Generator().manual_seed(1000 * seed + number)
        noise = torch.empty(tensor.parameter.shape).normal_(std=0.1, generator=generator)
        with torch.no_grad():
            tensor.parameter.copy_(noise + tensor.parameter * tensor.name.endswith("magnitude"))
    return Adapted(base, plan)


def tensors(manifest: Manifest, path: Path) -> dict[str, Tensor]:
    """The tensors of an exported file by name."""
    return tensors_of(manifest.tensors, memoryview(bytearray(path.read_bytes())))
