"""From the replica's configuration to vLLM's."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch
from vllm.config import StructuredOutputsConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext

from common.config import suggestion
from common.errors import ConfigError
from rollout_svc.config import RolloutConfig

_ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


def engine_config(config: RolloutConfig) -> VllmConfig:
    """Raises `ConfigError`: vLLM knows no such engine argument, or refuses a value."""
    owned = _owned(config)
    _check_names(config.engine, owned)
    try:
        args = AsyncEngineArgs(**{**_defaults(config.engine), **config.engine, **owned})
        return args.create_engine_config(UsageContext.ENGINE_CONTEXT)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"engine: {_one_line(error)}") from error


def _defaults(given: dict[str, Any]) -> dict[str, Any]:
    """What this service would rather have than vLLM's own default."""
    # Rounding logits to bfloat16 is most of what trainer and rollout disagree about.
    defaults: dict[str, Any] = {
        "hf_overrides": {"head_dtype": "float32"},
        # With "auto" a schema that xgrammar refuses is checked by another, and then compiled by
        # whichever of them the engine happened to need first.
        "structured_outputs_config": StructuredOutputsConfig(backend="xgrammar"),
    }
    if current_platform.is_cpu():
        # The smallest block of the CPU's attention: a group's prompts share more of their prefix.
        defaults["block_size"] = 32
        # What the factors are multiplied in: rounded to bfloat16, each step would cast them back.
        defaults["lora_dtype"] = torch.float32
        if _has_one_unbound_rank(given):
            # A worker of its own has the engine core spin for a second after each message, on a
            # core that decoding would use. vLLM refuses the short name "uni", as nobody could bind
            # its threads; here nobody does.
            defaults["distributed_executor_backend"] = _ONE_PROCESS
    return defaults


def _has_one_unbound_rank(given: dict[str, Any]) -> bool:
    ranks = given.get("tensor_parallel_size", 1) * given.get("pipeline_parallel_size", 1)
    return ranks == 1 and os.environ.get("VLLM_CPU_OMP_THREADS_BIND") == "nobind"


def _owned(config: RolloutConfig) -> dict[str, Any]:
    """Arguments that this service decides; giving them in `engine` is an error."""
    return {
        "model": str(config.model),
        "enable_lora": config.max_loras > 0,
        "max_loras": config.max_loras,
        # More than there are slots would let vLLM swap adapters in the middle of requests.
        "max_cpu_loras": config.max_loras,
        "max_lora_rank": config.max_lora_rank,
        # The distribution that is sampled from, not the raw model's.
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "rollout_svc.worker.extension.RefitWorkerExtension",
    }


def _check_names(given: dict[str, Any], owned: dict[str, Any]) -> None:
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    for name in given:
        if name in owned:
            raise ConfigError(f"engine.{name}: set by the service itself; remove it")
        if name not in known:
            raise ConfigError(f"engine.{name}: vLLM has no such argument{suggestion(name, known)}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
