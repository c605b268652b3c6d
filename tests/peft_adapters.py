"""Adapters as PEFT itself writes them, with random factors and magnitudes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save_adapter(model: PreTrainedModel, path: Path, *, seed: int = 0, **settings: Any) -> Path:
    """`settings` are LoraConfig's; the model is left without the adapter."""
    make_config: Any = LoraConfig
    chosen = {"r": 4, "lora_alpha": 8, "target_modules": list(ALL_LINEAR)} | settings
    adapted: Any = get_peft_model(model, make_config(**chosen))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            noise = torch.rand(parameter.shape, generator=generator) / 2 - 0.25
            parameter.data = parameter.data * (1 + noise) if "magnitude" in name else noise
    adapted.save_pretrained(path)
    adapted.unload()
    return path


def merged_model(model: PreTrainedModel, path: Path) -> Any:
    """The model with the adapter summed into its weights, by PEFT."""
    adapted: Any = PeftModel.from_pretrained(model, path)
    return adapted.merge_and_unload()
