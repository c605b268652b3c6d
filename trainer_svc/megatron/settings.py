"""What a user sets for model, adapter and training; imports neither torch nor Megatron."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from common.config import Config
from common.errors import ConfigError
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

    def check(self, *, num_ranks: int) -> None:
        """Raises `ConfigError` where the sizes do not divide the number of ranks."""
        tensor, stages = self.tensor_parallel_size, self.pipeline_parallel_size
        if self.virtual_pipeline_size > 1 and stages == 1:
            raise ConfigError(
                f"megatron.virtual_pipeline_size: found {self.virtual_pipeline_size} without a "
                "pipeline; set megatron.pipeline_parallel_size above 1"
            )
        experts = self.expert_parallel_size * self.expert_tensor_parallel_size
        for keys, size in (
            ("tensor_parallel_size", tensor),
            ("pipeline_parallel_size", stages),
            ("tensor_parallel_size * pipeline_parallel_size", tensor * stages),
            ("expert_parallel_size * expert_tensor_parallel_size", experts),
            (
                "expert_parallel_size * expert_tensor_parallel_size * pipeline_parallel_size",
                experts * stages,
            ),
        ):
            if num_ranks % size:
                raise ConfigError(
                    f"megatron.{keys}: found {size} over {num_ranks} ranks; choose a divisor of "
                    "megatron.num_ranks"
                )


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
    """PEFT directory, or checkpoint, whose adapter training starts from."""

    lora: LoraSettings = LoraSettings()
    """The adapter."""

    train: TrainSettings = TrainSettings()
    """The update."""
