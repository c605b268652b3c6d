"""What a user of the trainer sets."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from common.config import Config
from trainer_svc.megatron.settings import DtypeName, LoraSettings, TrainSettings, WorkerSettings


class RlSettings(Config):
    """The loop: what is sampled, how it is rewarded, how often."""

    data: str
    """Prompts: a JSONL file, or `module:generator` called with the seed. See README."""

    reward: str
    """`module:function`, called with the example and the completion's text; returns a float."""

    steps: int = Field(default=100, ge=1)
    """Optimizer steps of the run, those before a resume counted in."""

    prompts_per_step: int = Field(default=8, ge=1)
    """Different prompts in one batch."""

    group_size: int = Field(default=8, ge=2)
    """Completions of each prompt; the group is what advantages are normalised over."""

    max_tokens: int = Field(default=256, ge=1)
    """Longest completion."""

    temperature: float = Field(default=1.0, ge=0.01, le=2.0)
    """Sampling temperature; the trainer computes its log-probabilities at the same one. vLLM takes
    no higher one, and rounds lower ones up."""

    normalise_advantages: bool = True
    """Divide by the group's standard deviation (GRPO), or not (Dr. GRPO)."""

    seed: int = 0
    """Seeds data, adapter initialisation and dropout; the fleet's sampling is not seeded."""

    checkpoint_every_steps: int = Field(default=10, ge=1)
    """Steps between checkpoints; the last step always writes one."""

    min_replicas: int = Field(default=1, ge=1)
    """A step begins once so many replicas serve the current version."""

    replica_timeout_seconds: float = Field(default=300.0, gt=0)
    """How long a version may take to be served by `min_replicas`."""

    straggler_seconds: float = Field(default=10.0, ge=0)
    """How long a step then still waits for the other replicas to serve it."""

    generate_timeout_seconds: float = Field(default=600.0, gt=0)
    """How long one group may take, retries on other replicas included."""

    stop_grace_seconds: float = Field(default=20.0, ge=0)
    """How long the running step may go on after SIGTERM, to end with a checkpoint."""


class MegatronSettings(Config):
    """How the model is laid out over ranks."""

    num_ranks: int = Field(default=1, ge=1)
    """Processes on this machine."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share one copy of the model; the other ranks are data-parallel."""

    dtype: DtypeName = "bfloat16"
    """Type of the base weights and of the arithmetic."""

    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads of each rank; unset leaves torch's choice."""

    max_restarts: int = Field(default=3, ge=0)
    """How often dead ranks are started again, from the last checkpoint."""

    command_timeout_seconds: float = Field(default=1800.0, gt=0)
    """How long the ranks may take to start, and for any one command: a step, say."""


class ServerSettings(Config):
    """Where the trainer listens and how it distributes."""

    host: str = "127.0.0.1"
    """Interface to listen on; 0.0.0.0 for every one."""

    port: int = Field(default=50051, ge=0, le=65535)
    """gRPC port; 0 lets the system choose."""

    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Prometheus port; unset serves none."""

    keep_versions: int = Field(default=2, ge=1)
    """Versions kept for subscribers; older ones are retired."""

    heartbeat_seconds: float = Field(default=5.0, gt=0)
    """Longest silence on a subscription."""


class TrainerConfig(Config):
    """`refit trainer --config FILE`."""

    model: Path
    """Hugging Face directory of the base model."""

    run_dir: Path
    """Where the run's records and checkpoints go."""

    adapter: str = Field(default="default", min_length=1)
    """Name under which replicas serve the policy."""

    adapter_path: Path | None = None
    """PEFT directory to start from; unset starts from a fresh adapter."""

    serve_after_run: bool = False
    """Go on serving the last version when all steps are done, until SIGTERM."""

    server: ServerSettings = ServerSettings()
    megatron: MegatronSettings = MegatronSettings()
    lora: LoraSettings = LoraSettings()
    train: TrainSettings = TrainSettings()
    rl: RlSettings

    def worker(self) -> WorkerSettings:
        """What the Megatron ranks get of it."""
        return WorkerSettings(
            model_dir=self.model,
            dtype=self.megatron.dtype,
            seed=self.rl.seed,
            num_threads=self.megatron.num_threads,
            tensor_parallel_size=self.megatron.tensor_parallel_size,
            adapter_path=self.adapter_path,
            lora=self.lora,
            train=self.train,
        )
