"""What a user sets for model, adapter and training; imports neither torch nor Megatron."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from common.config import Config
from trainer_svc.megatron.lora.settings import DtypeName, LoraSettings
from trainer_svc.megatron.training.settings import TrainSettings as TrainSettings


class ParallelSettings(Config):
    """How the model lies over ranks; those that are left are copies of it (data parallelism)."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share every linear of a layer."""

    pipeline_parallel_size: int = Field(default=1, ge=1)
    """Ranks that each hold some of the layers."""

    virtual_pipeline_size: int = Field(default=1, ge=1)
    """Runs of layers that each pipeline rank holds, interleaved with those of the others."""

    expert_parallel_size: int = Field(default=1, ge=1)
    """Ranks that each hold some of the experts; taken from the data- and tensor-parallel ones."""

    expert_tensor_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share every linear of an expert."""

    sequence_parallel: bool | None = None
    """Split what is not a linear by tokens over the tensor-parallel ranks; unset does so where the
    model has experts, which need it."""


class WorkerSettings(Config):
    """All that the Megatron ranks need to come up."""

    model_dir: Path
    """Hugging Face directory of the base model: `config.json` and safetensors."""

    dtype: DtypeName = "bfloat16"
    """Type of the base weights and of the arithmetic."""

    seed: int = 0
    """Seeds the adapter's initialisation and dropout."""

    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads of each rank; null leaves torch's choice."""

    parallel: ParallelSettings = ParallelSettings()
    """Ranks and what each holds."""

    offload_base: bool = False
    """Base weights leave the accelerator between commands; without effect on a CPU."""

    adapter_path: Path | None = None
    """PEFT directory whose adapter training starts from."""

    lora: LoraSettings = LoraSettings()
    """The adapter."""

    train: TrainSettings = TrainSettings()
    """The update."""
