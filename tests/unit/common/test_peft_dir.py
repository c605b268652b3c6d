"""PEFT directories: written, read by the real libraries, read back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from common.adapter import Dtype
from common.errors import ConfigError, StagingFull
from common.peft_dir import CONFIG_FILE, WEIGHTS_FILE, PeftWriter, read_peft_dir, write_peft_dir
from tests.adapters import LORA, make_adapter


@pytest.mark.parametrize("dtype", list(Dtype))
def test_safetensors_reads_every_tensor_aliases_included(tmp_path: Path, dtype: Dtype) -> None:
    """faults.md 17, verl#3675: bit-exactly, in each dtype."""
    manifest, buffer = make_adapter(dtype=dtype)

    path = write_peft_dir(tmp_path / "adapter", manifest, buffer)

    with safe_open(path / WEIGHTS_FILE, framework="pt") as file:
        assert set(file.keys()) == {spec.name for spec in manifest.tensors}
        for spec in manifest.tensors:
            tensor = file.get_tensor(spec.name)
            found = bytes(tensor.contiguous().view(-1).view(_byte_type()).numpy())
            assert found == bytes(buffer[spec.offset_bytes : spec.end_bytes])
            assert tuple(tensor.shape) == spec.shape


def _byte_type() -> object:
    import torch

    return torch.uint8


def test_config_is_what_peft_reads(tmp_path: Path) -> None:
    from peft import LoraConfig

    manifest, buffer = make_adapter()
    path = write_peft_dir(tmp_path / "adapter", manifest, buffer)

    config = LoraConfig.from_pretrained(str(path))

    assert (config.r, config.lora_alpha, config.use_rslora) == (LORA.rank, LORA.alpha, False)
    assert config.target_modules == set(LORA.target_modules)


def test_reading_gives_the_same_content(tmp_path: Path) -> None:
    manifest, buffer = make_adapter()
    path = write_peft_dir(tmp_path / "adapter", manifest, buffer)

    found = read_peft_dir(path, base_fingerprint="base")

    assert found.manifest.lora == manifest.lora
    assert found.manifest.total_bytes == manifest.total_bytes
    assert {s.name: s.sha256 for s in found.manifest.tensors} == {
        s.name: s.sha256 for s in manifest.tensors
    }


def test_discard_leaves_nothing(tmp_path: Path) -> None:
    manifest, _ = make_adapter()

    PeftWriter(tmp_path / "adapter", manifest).discard()

    assert list(tmp_path.iterdir()) == []


def test_an_update_larger_than_the_file_system_is_refused_with_both_sizes() -> None:
    from dataclasses import replace

    manifest, _ = make_adapter()
    large = replace(manifest.tensors[0], shape=(1 << 20, 1 << 24))
    path = Path("/dev/shm") / "refit-test-staging-full"

    with pytest.raises(StagingFull, match=r"needs \d+ bytes, \d+ are free"):
        PeftWriter(path, replace(manifest, tensors=(large,)))

    assert not path.exists()


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("use_dora", True, "use_dora"),
        ("rank_pattern", {"q_proj": 4}, "rank_pattern"),
        ("bias", "all", "bias"),
        ("r", 0, "r = 0"),
        ("lora_alpha", 0, "lora_alpha = 0"),
        ("target_modules", "all-linear", "target_modules"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused(
    tmp_path: Path, key: str, value: object, expected: str
) -> None:
    """faults.md 10 and 14, verl#7413 and verl#5325."""
    manifest, buffer = make_adapter()
    path = write_peft_dir(tmp_path / "adapter", manifest, buffer)
    config = json.loads((path / CONFIG_FILE).read_text())
    (path / CONFIG_FILE).write_text(json.dumps(config | {key: value}))

    with pytest.raises(ConfigError, match=expected):
        read_peft_dir(path, base_fingerprint="base")


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    """faults.md 25, prime-rl#2391: a half-written adapter is seen as such."""
    manifest, buffer = make_adapter()
    path = write_peft_dir(tmp_path / "adapter", manifest, buffer)
    weights = (path / WEIGHTS_FILE).read_bytes()

    for length in (0, 5, 100, len(weights) - 1):
        (path / WEIGHTS_FILE).write_bytes(weights[:length])
        with pytest.raises(ConfigError, match=WEIGHTS_FILE):
            read_peft_dir(path, base_fingerprint="base")


def test_a_missing_directory_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give a PEFT adapter directory"):
        read_peft_dir(tmp_path / "nothing", base_fingerprint="base")
