"""Environment vLLM reads, with this service's defaults; whatever is set already stays."""

from __future__ import annotations

import os

_ALWAYS = {
    # gRPC does not survive a fork, and neither do its threads.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # Standard output carries the line with the bound port, for whoever started the replica.
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    # Outputs that are worked on before other tasks have a turn; a step may have thousands.
    "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE": "8",
}
_CPU_ONLY = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # vLLM's own choice pins to a core and leaves one idle; on a shared small machine the kernel
    # places the threads better.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # With LoRA vLLM compiles no model on a CPU, only sampling helpers: half a minute of C++ at the
    # first requests, for nothing that shows.
    "TORCH_COMPILE_DISABLE": "1",
    # Idle OpenMP threads spin for microseconds, from one small product to the next, and
    # then sleep, instead of spinning beside whatever else runs here.
    "GOMP_SPINCOUNT": "1000",
}


def set_engine_defaults() -> None:
    """Call before vLLM is imported: its logging is set up by the import."""
    _fill(_ALWAYS)


def set_cpu_defaults() -> None:
    """Call before the engine starts; its workers inherit these."""
    _fill(_CPU_ONLY)


def _fill(defaults: dict[str, str]) -> None:
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
