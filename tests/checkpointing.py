"""Tiny trainers that are saved and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.serialization import load_plain_tensors
from torch import Tensor

from trainer_svc.megatron.engine import MegatronTrainer
from trainer_svc.megatron.protocol import Batch, Sample
from trainer_svc.megatron.settings import WorkerSettings

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2},
    "vpp2": {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2},
    "dp2": {},
    "ep2": {"expert_parallel_size": 2},
    "etp2": {"tensor_parallel_size": 2, "expert_tensor_parallel_size": 2},
}
"""Of two ranks."""

STATE = {"step": 1, "seen": [3, 4], "name": "é"}


def settings_of(model_dir: Path, *, layout: str = "dp2", **lora: Any) -> WorkerSettings:
    return WorkerSettings.model_validate(
        {
            "model_dir": model_dir,
            "dtype": "float32",
            "num_threads": 1,
            "parallel": LAYOUTS[layout],
            "lora": {"rank": 4, "alpha": 8} | lora,
            "train": {"lr": 0.001, "warmup_updates": 3, "micro_batch_tokens": 24},
        }
    )


def batch_of(shift: int) -> Batch:
    return Batch(
        samples=tuple(
            Sample(
                prompt_ids=tuple(range(1 + shift, 4 + shift + i)),
                completion_ids=tuple(range(40 + i, 43 + 2 * i)),
                rollout_logprobs=(-4.5,) * (3 + i),
                advantage=(1.0, -1.0, 0.5)[i % 3],
            )
            for i in range(4)
        )
    )


def trained(trainer: MegatronTrainer) -> MegatronTrainer:
    """After two updates, with an adapter `old` on the way from the first to the second."""
    trainer.step(batch_of(0))
    trainer.policies.add_adapter("old")
    trainer.step(batch_of(1))
    trainer.policies.ema_update_adapter("default", "old", decay=0.75)
    return trainer


def numbers(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name != "seconds"}


def next_step(trainer: MegatronTrainer, path: Path) -> dict[str, float]:
    """Metrics of one more step; its adapter lies under `path`."""
    metrics = numbers(trainer.step(batch_of(2)))
    trainer.exporter.to_peft_dir(path)
    return metrics


def stored(path: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, whole."""
    found: dict[str, Tensor] = load_plain_tensors(str(path / "state"))
    return {key: value for key, value in found.items() if isinstance(value, Tensor)}
