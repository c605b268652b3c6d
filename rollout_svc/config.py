"""Configuration of a rollout replica. Importing it loads neither torch nor vLLM."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from common.config import Config, suggestion
from common.rules import Merge, Swap
from common.security import SecuritySettings

OPENAI_ARGS = (
    "chat_template",
    "chat_template_content_format",
    "default_chat_template_kwargs",
    "enable_auto_tool_choice",
    "enable_force_include_usage",
    "enable_prompt_tokens_details",
    "exclude_tools_when_tool_choice_none",
    "response_role",
    "return_tokens_as_token_ids",
    "tool_call_parser",
)


def _default_staging_dir() -> Path:
    return Path(f"/dev/shm/refit-{os.getuid()}")


class RolloutConfig(Config):
    """One replica: which model, where it serves, which trainer it follows."""

    model: Path
    """Hugging Face directory of the base model: config.json and *.safetensors."""

    host: str = "127.0.0.1"
    """Interface the gRPC server binds; 0.0.0.0 for every one."""

    port: int = Field(default=0, ge=0, le=65535)
    """gRPC port; 0 lets the system choose. The bound one is printed at start."""

    advertised_address: str = ""
    """host:port at which the trainer reaches this replica; empty: `host` and the bound port."""

    trainer_address: str = ""
    """host:port of the trainer to follow, or of several, separated by commas; empty serves the base
    model alone."""

    staging_dir: Path = Field(default_factory=_default_staging_dir)
    """Memory-backed directory for received adapters; each replica makes its own folder in it.

    Unset: /dev/shm/refit-UID, with the number of the user, for no other can write to it.
    """

    health_port: int | None = Field(default=None, ge=0, le=65535)
    """Plaintext port that answers health alone, for probes without a certificate; unset: none."""

    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the Prometheus endpoint; unset: none is served."""

    openai_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the OpenAI endpoint on `host`, with `security`'s TLS and tokens; 0 lets the system
    choose; unset: none is served. See docs/openai.md."""

    openai_args: dict[str, Any] = Field(default_factory=dict)
    """Passed on to vLLM's OpenAI server, by its own names, e.g. {"tool_call_parser": "hermes"}; it
    takes those arguments that shape prompts and answers."""

    grace_seconds: float = Field(default=20.0, ge=0)
    """How long running generations may go on after SIGTERM."""

    swap: Swap = Swap.FINISH
    """What becomes of requests in flight when a version is committed: `finish`, `abort` or
    `continue`; an update may say otherwise."""

    merge: Merge = Merge.NEVER
    """`never` serves adapters from LoRA slots, `rollout` sums each into the engine's weights; an
    update may say otherwise."""

    base_copy: Literal["host", "checkpoint"] = "host"
    """Where the base's weights come from at each merge: a copy in `staging_dir`, made at the first,
    or the files of `model`, read again."""

    max_loras: int = Field(default=4, ge=0)
    """LoRA slots. One is kept free for the next version, so this many minus one take part in a
    batch; more adapters than that wait in `staging_dir` and change places. 0, with
    `merge = rollout`, starts the engine without slots, which decodes fastest."""

    max_lora_rank: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512] = 64
    """Largest LoRA rank; vLLM takes no others."""

    keep_versions: int = Field(default=2, ge=1)
    """Newest versions of an adapter that requests may ask for; running ones keep theirs anyway. Of
    versions that are summed into the weights only the newest is served."""

    slot_wait_seconds: float = Field(default=120.0, gt=0)
    """How long an update waits for running requests to free a slot, or all of them to end where it
    replaces the engine's weights, before it is refused; and a request for its adapter's slot."""

    max_update_bytes: int = Field(default=4 << 30, gt=0)
    """Largest update that is accepted, in bytes; one of merged weights, or of the base, is a whole
    model. `staging_dir` holds it, and the one before until that is replaced."""

    engine_restarts: int = Field(default=3, ge=0)
    """How often in a row the engine is started anew after its death, or after a start that failed;
    then the process ends. A death after ten minutes of health begins a new row. 0: the process ends
    with its engine."""

    engine_start_seconds: float = Field(default=1800.0, gt=0)
    """How long a start of the engine may take until its processes are ended."""

    max_requests: int = Field(default=1024, ge=1)
    """Generate calls that run or wait at once; one more is refused with RESOURCE_EXHAUSTED."""

    max_children: int = Field(default=8, ge=0)
    """Replicas that may take their bytes from this one, where the trainer says so; 0 for none."""

    security: SecuritySettings = SecuritySettings()
    """TLS and tokens; see docs/security.md."""

    engine: dict[str, Any] = Field(default_factory=dict)
    """Passed on to vLLM's AsyncEngineArgs, by its own names, e.g. {"max_model_len": 2048}.

    With {"load_format": "dummy"} `model` needs no weights: the trainer sends them.

    Two defaults differ from vLLM's: `hf_overrides = {head_dtype = "float32"}`, which keeps logits
    from being rounded, and on a CPU `block_size = 32`.
    """

    @model_validator(mode="after")
    def _trainer_can_call_back(self) -> RolloutConfig:
        every_interface = self.host in ("0.0.0.0", "::", "[::]")
        if self.trainer_address and every_interface and not self.advertised_address:
            raise ValueError(
                f"advertised_address: empty while host is {self.host}; give the host:port at which "
                "the trainer reaches this replica"
            )
        return self

    @property
    def starts_without_weights(self) -> bool:
        """Whether the base's weights have to be sent: vLLM fills the model with random ones."""
        return self.engine.get("load_format") == "dummy"

    @model_validator(mode="after")
    def _weights_come_from_somewhere(self) -> RolloutConfig:
        if self.starts_without_weights and not self.trainer_address:
            raise ValueError(
                "engine.load_format: dummy without a trainer_address; nobody would send the "
                "weights, so name a trainer"
            )
        return self

    @field_validator("openai_args")
    @classmethod
    def _shape_prompts_and_answers(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if name not in OPENAI_ARGS:
                raise ValueError(f"{name!r} is none that is taken{suggestion(name, OPENAI_ARGS)}")
        return value

    @model_validator(mode="after")
    def _openai_has_a_tokenizer(self) -> RolloutConfig:
        if self.openai_port is not None and self.engine.get("skip_tokenizer_init"):
            raise ValueError(
                "openai_port: set with engine.skip_tokenizer_init; the endpoint needs a tokenizer, "
                "so unset one of them"
            )
        return self

    @property
    def trainer_addresses(self) -> list[str]:
        """Every trainer to follow."""
        parts = (part.strip() for part in self.trainer_address.split(","))
        return list(dict.fromkeys(part for part in parts if part))

    @field_validator("trainer_address")
    @classmethod
    def _hosts_and_ports(cls, value: str) -> str:
        for address in filter(None, map(str.strip, value.split(","))):
            host, _, port = address.rpartition(":")
            if not host or not (port.isascii() and port.isdigit() and int(port[:6]) < 1 << 16):
                raise ValueError(f"{address!r} is no host:port; give one, as 127.0.0.1:50051")
        return value

    @model_validator(mode="after")
    def _slots_suffice(self) -> RolloutConfig:
        if self.max_loras == 1:
            raise ValueError(
                "max_loras: 1; one slot must stay free for the next version, so give 2 or more, "
                "or 0 with merge = rollout"
            )
        if self.max_loras == 0 and self.merge is Merge.NEVER:
            raise ValueError("max_loras: 0 with merge = never; nothing could be served, so give 2")
        return self
