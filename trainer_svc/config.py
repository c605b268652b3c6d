"""What a user of the trainer sets."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from common.adapter import Dtype
from common.config import Config
from common.security import SecuritySettings
from common.stream.sender import Pace
from common.wire import CHUNK_BYTES, MAX_CHUNK_BYTES
from trainer_svc.megatron.lora.settings import DtypeName, LoraSettings
from trainer_svc.megatron.settings import ParallelSettings, TrainSettings, WorkerSettings
from trainer_svc.megatron.training.settings import SftSettings
from trainer_svc.publisher import DeltaMode


class OldPolicySettings(Config):
    """A slower copy of the policy, which replicas serve as `old`."""

    interval: int = Field(default=1, ge=1)
    """Steps between its updates."""

    decay: float = Field(default=0.0, ge=0, le=1)
    """What an update keeps of it; the rest is the policy's. 0 copies the policy."""


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

    keep_checkpoints: int = Field(default=3, ge=1)
    """Newest checkpoints that stay."""

    min_replicas: int = Field(default=1, ge=1)
    """A step begins once so many replicas serve the current version."""

    replica_timeout_seconds: float = Field(default=300.0, gt=0)
    """How long a version may take to be served by `min_replicas`."""

    straggler_seconds: float = Field(default=10.0, ge=0)
    """How long a step then still waits for the other replicas to serve it."""

    max_staleness: int = Field(default=0, ge=0)
    """Versions that may lie between the one that made a sample and the one that is trained on it.
    Above 0 keep `train.tis_cap`: its weight corrects for what the policy has changed meanwhile."""

    stale: Literal["drop", "wait"] = "wait"
    """`wait`: prompts go only to replicas whose answer will be fresh enough when its step trains.
    `drop`: they go to any that takes prompts, and a group that is too stale when its step trains is
    thrown away; if none is left the step's prompts are sampled again, at the newest version."""

    async_steps: int = Field(default=0, ge=0)
    """Steps that generation may be ahead of training; 0: they take turns. At most `max_staleness`,
    since a sample made so many steps ahead is so many versions old when it is trained on."""

    generate_timeout_seconds: float = Field(default=600.0, gt=0)
    """How long one group may take, retries on other replicas included."""

    hedge_after_seconds: float | None = Field(default=None, gt=0)
    """A group without an answer so long after it was sent is sent to another replica as well; the
    first answer counts, the other call is cancelled. Unset never does."""

    canary_prompts: int = Field(default=0, ge=0)
    """With every version go this many of the run's first prompts, their last 32 tokens scored by
    the trainer; a replica that scores them otherwise refuses the version. 0 sends none."""

    canary_max_difference: float = Field(default=0.2, gt=0, allow_inf_nan=False)
    """Mean absolute difference of the canary's log-probabilities that a replica still accepts."""

    old_policy: OldPolicySettings | None = None
    """Keep, and publish as `old`, a slower copy of the policy; unset keeps none."""

    publish_reference: bool = False
    """Publish the base as the adapter `reference`, which replicas serve by that name."""

    stop_grace_seconds: float = Field(default=20.0, ge=0)
    """How long the running step may go on after SIGTERM, to end with a checkpoint."""

    @field_validator("async_steps")
    @classmethod
    def _never_too_far_ahead(cls, value: int, info: ValidationInfo) -> int:
        bound = info.data.get("max_staleness", value)
        if value > bound:
            raise ValueError(f"raise rl.max_staleness, which is {bound}, or take fewer steps")
        return value


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

    merge: Literal["never", "trainer"] = "never"
    """`never`: adapters are published, and replicas serve many at once from LoRA slots.
    `trainer`: the whole merged model is, and takes the place of a replica's own weights; each
    version is a model in memory, here `server.keep_versions` of them, and two on every replica."""

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
        if sides and self.merge == "trainer":
            raise ValueError(
                f"merge: trainer, with {' and '.join(sides)} published; a replica with merged "
                "weights serves one policy, so use merge = never or leave the others out"
            )
        if self.lora.type == "dora" and self.merge == "never":
            raise ValueError(
                "lora.type: dora, which no replica serves as an adapter; set merge = trainer"
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
    """What `refit publish` takes from the environment, e.g. REFIT_SERVER__LEASE_SECONDS=5."""

    server: ServerSettings = ServerSettings()
