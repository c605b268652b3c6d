"""What a user of the trainer sets."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from common.adapter import Dtype
from common.config import Config
from common.rules import Rules
from common.security import SecuritySettings
from common.stream.sender import Pace
from common.wire import CHUNK_BYTES, MAX_CHUNK_BYTES
from trainer_svc.megatron.lora.settings import DtypeName, LoraSettings
from trainer_svc.megatron.settings import ParallelSettings, TrainSettings, WorkerSettings
from trainer_svc.megatron.training.settings import SftSettings
from trainer_svc.publisher import DeltaMode
from trainer_svc.rl.settings import RlSettings
from trainer_svc.rules import MergeName, SwapName, rules_of


class MegatronSettings(ParallelSettings):
    """How the model is laid out over ranks."""

    num_ranks: int = Field(default=1, ge=1)
    """Processes on this machine."""

    dtype: DtypeName = "bfloat16"
    """Type of the base weights and of the arithmetic."""

    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads of each rank; unset leaves torch's choice."""

    max_restarts: int = Field(default=3, ge=0)
    """How often dead ranks are started again, from the last checkpoint."""

    offload_base: bool = False
    """Base weights leave the accelerator between commands; without effect on a CPU."""

    command_timeout_seconds: float = Field(default=1800.0, gt=0)
    """How long the ranks may take to start, and for any one command: a step, say."""

    @property
    def parallel(self) -> ParallelSettings:
        """What of it says which rank holds what."""
        return ParallelSettings(
            **{key: getattr(self, key) for key in ParallelSettings.model_fields}
        )


class ServerSettings(Config):
    """Where the trainer listens and how it distributes."""

    host: str = "127.0.0.1"
    """Interface to listen on; 0.0.0.0 for every one."""

    port: int = Field(default=50051, ge=0, le=65535)
    """gRPC port; 0 lets the system choose."""

    health_port: int | None = Field(default=None, ge=0, le=65535)
    """Plaintext port that answers health alone, for probes without a certificate; unset: none."""

    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Prometheus port; unset serves none."""

    keep_versions: int = Field(default=2, ge=1)
    """Versions of each adapter kept for subscribers, in memory; older ones are retired."""

    heartbeat_seconds: float = Field(default=5.0, gt=0)
    """Longest silence on a subscription."""

    lease_seconds: float = Field(default=15.0, gt=0)
    """A replica that was silent for so long leaves the fleet."""

    stall_seconds: float = Field(default=300.0, gt=0)
    """A replica that took no byte for so long leaves it as well. Longer than replicas wait for a
    free slot, their `slot_wait_seconds`."""

    chunk_bytes: int = Field(default=CHUNK_BYTES, ge=1 << 10, le=MAX_CHUNK_BYTES, multiple_of=4)
    """Bytes of an adapter in one message of the stream."""

    delta: DeltaMode = "auto"
    """Send differences to the version a replica holds: always, never, or (auto) where its link,
    measured by its updates, is slower than the codec."""

    fan_out: int = Field(default=0, ge=0)
    """Most replicas that take bytes from the trainer itself, and from each replica that relays;
    0 for no limit, and then nobody relays."""

    security: SecuritySettings = SecuritySettings()

    @property
    def pace(self) -> Pace:
        """What of it the stream goes by."""
        return Pace(
            chunk_bytes=self.chunk_bytes,
            heartbeat_seconds=self.heartbeat_seconds,
            lease_seconds=self.lease_seconds,
            stall_seconds=self.stall_seconds,
        )


class TrainerConfig(Config):
    """`refit trainer --config FILE`."""

    model: Path
    """Hugging Face directory of the base model."""

    run_dir: Path
    """Where the run's records and checkpoints go."""

    adapter: str = Field(default="default", min_length=1)
    """Name under which replicas serve the policy."""

    merge: Literal[MergeName, "trainer"] = "replica"
    """Where an adapter is summed into the weights. `never`: nowhere, replicas serve many at once
    from LoRA slots. `rollout`: on each replica, which then decodes at the base's speed and serves
    one version at a time. `replica`: as each is configured. `trainer`: here, and the whole merged
    model is published; each version is a model in memory, here `server.keep_versions` of them, and
    two on every replica."""

    swap: SwapName = "replica"
    """What becomes of requests in flight when a replica commits a version. `finish`: they end on
    the version before. `abort`: they end at once, and the rest of each is sampled from the new one.
    `continue`: they go on under the new weights. `replica`: as each is configured."""

    adapter_dtype: DtypeName | None = None
    """Type in which versions are published, rounded once. Unset: that of the base weights, to which
    a replica would round them."""

    adapter_path: Path | None = None
    """PEFT directory, or checkpoint, whose adapter the run starts from; it has to be of the type,
    rank, alpha and modules that `lora` says. Unset starts from a fresh one."""

    serve_after_run: bool = False
    """Go on serving the last version when all steps are done, until SIGTERM."""

    server: ServerSettings = ServerSettings()
    megatron: MegatronSettings = MegatronSettings()
    lora: LoraSettings = LoraSettings()
    train: TrainSettings = TrainSettings()
    sft: SftSettings = SftSettings()
    rl: RlSettings

    @model_validator(mode="after")
    def _merged_weights_have_the_models_type(self) -> TrainerConfig:
        if self.merge == "trainer" and self.adapter_dtype is not None:
            raise ValueError(
                f"adapter_dtype: {self.adapter_dtype} with merge = trainer, whose weights have the "
                "type of megatron.dtype; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _what_can_be_published(self) -> TrainerConfig:
        sides = self.side_policies
        if sides and self.merge in ("rollout", "trainer"):
            raise ValueError(
                f"merge: {self.merge}, with {' and '.join(sides)} published; a replica with merged "
                "weights serves one policy, so use merge = never or leave the others out"
            )
        if self.lora.type == "dora" and (sides or self.merge == "never"):
            also = f", with {' and '.join(sides)} published" if sides else ""
            raise ValueError(
                f"lora.type: dora{also}, which no LoRA slot serves; set merge = rollout or "
                "trainer, and publish the policy alone"
            )
        if self.adapter in sides:
            raise ValueError(f"adapter: {self.adapter} is published as well; rename the policy")
        if self.train.kl_to == "old" and self.rl.old_policy is None:
            raise ValueError("train.kl_to: old, but there is none; set rl.old_policy")
        return self

    @property
    def side_policies(self) -> tuple[str, ...]:
        """Names of what is published beside the policy."""
        old = ("old",) if self.rl.old_policy else ()
        return (*old, "reference") if self.rl.publish_reference else old

    @property
    def rules(self) -> Rules:
        """What goes with every version."""
        merge = "replica" if self.merge == "trainer" else self.merge
        return rules_of(swap=self.swap, merge=merge)

    @property
    def published_dtype(self) -> Dtype:
        """The type of every published tensor."""
        return Dtype[(self.adapter_dtype or self.megatron.dtype).upper()]

    def worker(self) -> WorkerSettings:
        """What the Megatron ranks get of it."""
        return WorkerSettings(
            model_dir=self.model,
            dtype=self.megatron.dtype,
            seed=self.rl.seed,
            num_threads=self.megatron.num_threads,
            parallel=self.megatron.parallel,
            offload_base=self.megatron.offload_base,
            adapter_path=self.adapter_path,
            lora=self.lora,
            train=self.train.model_copy(
                update={"max_tokens": self.train.max_tokens or self.rl.max_tokens}
            ),
        )


class PublishConfig(Config):
    """What `refit publish` takes from `--set` and the environment, e.g. REFIT_SWAP=abort."""

    server: ServerSettings = ServerSettings()

    merge: MergeName = "replica"
    """As that of a trainer: `never`, `rollout`, or as each replica is configured."""

    swap: SwapName = "replica"
    """As that of a trainer."""

    @property
    def rules(self) -> Rules:
        """What goes with every version."""
        return rules_of(swap=self.swap, merge=self.merge)
