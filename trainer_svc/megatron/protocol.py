"""What service and Megatron ranks say to each other: JSON lines; imports no torch.

A request is `{"id": n, "command": name, "args": {...}}`; its reply has the same id and either
`result` or `error` with `type` and `message`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from common import errors
from common.adapter import Dtype, Kind, Layout, LoraConfig, Manifest, TensorSpec
from common.errors import ConfigError, RefitError

MAX_LINE_BYTES = 1 << 30

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion; `rollout_logprobs` has an entry for every completion token.

    Sample(prompt_ids=(1, 2), completion_ids=(3,), rollout_logprobs=(-0.5,), advantage=1.0)
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    rollout_logprobs: tuple[float, ...]
    advantage: float

    def __post_init__(self) -> None:
        if not self.prompt_ids or not self.completion_ids:
            raise ConfigError(
                "sample: the prompt or the completion is empty; leave such samples out"
            )
        if len(self.rollout_logprobs) != len(self.completion_ids):
            raise ConfigError(
                f"sample: found {len(self.rollout_logprobs)} rollout_logprobs for "
                f"{len(self.completion_ids)} completion tokens; give one for each"
            )

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples of one update, all drawn at `temperature` with neither top-k nor top-p."""

    samples: tuple[Sample, ...]
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not self.samples:
            raise ConfigError("batch: found no samples; give at least one")
        if not self.temperature > 0:
            raise ConfigError(f"temperature: found {self.temperature}; give one above 0")

    def to_json(self) -> Json:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Batch:
        samples = tuple(
            Sample(
                prompt_ids=tuple(item["prompt_ids"]),
                completion_ids=tuple(item["completion_ids"]),
                rollout_logprobs=tuple(item["rollout_logprobs"]),
                advantage=item["advantage"],
            )
            for item in raw["samples"]
        )
        return cls(samples=samples, temperature=raw["temperature"])


def manifest_to_json(manifest: Manifest) -> Json:
    """Plain values of a manifest; digests in hex."""
    return {
        "base_fingerprint": manifest.base_fingerprint,
        "kind": manifest.kind.value,
        "lora": asdict(manifest.lora) if manifest.lora else None,
        "tensors": [
            {
                "name": spec.name,
                "dtype": spec.dtype.value,
                "shape": list(spec.shape),
                "layout": spec.layout.value,
                "offset_bytes": spec.offset_bytes,
                "digest": spec.digest.hex(),
                "alias_of": spec.alias_of,
            }
            for spec in manifest.tensors
        ],
    }


def manifest_from_json(raw: Mapping[str, Any]) -> Manifest:
    """Inverse of `manifest_to_json`."""
    return Manifest(
        base_fingerprint=raw["base_fingerprint"],
        kind=Kind(raw["kind"]),
        lora=_lora_from_json(raw["lora"]) if raw["lora"] else None,
        tensors=tuple(
            TensorSpec(
                name=item["name"],
                dtype=Dtype(item["dtype"]),
                shape=tuple(item["shape"]),
                layout=Layout(item["layout"]),
                offset_bytes=item["offset_bytes"],
                digest=bytes.fromhex(item["digest"]),
                alias_of=item["alias_of"],
            )
            for item in raw["tensors"]
        ),
    )


def _lora_from_json(raw: Mapping[str, Any]) -> LoraConfig:
    return LoraConfig(
        **{
            **raw,
            "target_modules": tuple(raw["target_modules"]),
            "rank_pattern": tuple((key, rank) for key, rank in raw["rank_pattern"]),
            "alpha_pattern": tuple((key, alpha) for key, alpha in raw["alpha_pattern"]),
        }
    )


def encode(message: Mapping[str, Any]) -> bytes:
    """One line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Json:
    """The message of one line."""
    message: Json = json.loads(line)
    return message


def error_to_json(error: RefitError) -> Json:
    """A domain error, by the name of its class."""
    return {"type": type(error).__name__, "message": str(error)}


def error_from_json(raw: Mapping[str, str]) -> RefitError:
    """The domain error that the ranks raised."""
    kind = getattr(errors, raw["type"])
    error: RefitError = kind(raw["message"])
    return error
