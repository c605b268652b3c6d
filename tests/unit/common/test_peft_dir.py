"""PEFT directories: written, read by the real libraries, read back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from common.adapter import Dtype
from common.errors import ConfigError
from common.peft_dir import (
    BASE_CHANGING_INITS,
    CONFIG_FILE,
    WEIGHTS_FILE,
    read_peft_dir,
    write_peft_dir,
)
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
    assert {s.name: s.digest for s in found.manifest.tensors} == {
        s.name: s.digest for s in manifest.tensors
    }


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("use_dora", True, "has only lora_A and lora_B; save all of"),
        ("rank_pattern", {"q_proj": 4}, "of rank 2, but r = 4"),
        ("rank_pattern", {"q_proj": 0}, r"rank_pattern\['q_proj'\] = 0; a LoRA rank is"),
        ("rank_pattern", ["q_proj"], r"rank_pattern = \['q_proj'\]; give an object"),
        ("rank_pattern", {"(": 4}, r"rank_pattern has '\(', which is no pattern"),
        (
            "alpha_pattern",
            {"q_proj": -1.0},
            r"alpha_pattern\['q_proj'\] = -1.0; it must be above 0",
        ),
        ("target_parameters", ["lm_head.weight"], "only those of experts and routers"),
        ("target_parameters", "experts", "target_parameters = 'experts'; give the list"),
        ("modules_to_save", ["lm_head"], r"modules_to_save = \['lm_head'\] cannot be served"),
        ("bias", "all", "bias"),
        ("r", 0, "r = 0"),
        ("r", True, "r = True"),
        ("lora_alpha", 0, "lora_alpha = 0"),
        ("lora_alpha", None, "lora_alpha = None"),
        ("lora_alpha", 10**400, "lora_alpha = 1000"),
        ("target_modules", "all-linear", "target_modules"),
        ("target_modules", ["q_proj", 1], "target_modules"),
        ("init_lora_weights", "PiSSA_niter_4", "init_lora_weights = 'PiSSA_niter_4' changes the"),
        *(("init_lora_weights", init, "changes the base") for init in BASE_CHANGING_INITS),
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


@pytest.mark.parametrize("init", [True, False, "gaussian", "eva", "orthogonal"])
def test_inits_that_keep_the_base_are_served(tmp_path: Path, init: object) -> None:
    path = _adapter(tmp_path)
    config = json.loads((path / CONFIG_FILE).read_text())
    (path / CONFIG_FILE).write_text(json.dumps(config | {"init_lora_weights": init}))

    assert read_peft_dir(path, base_fingerprint="base").manifest.lora == LORA


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "not JSON, or cut short: Expecting value: line 1 column 1 (char 0); write the file"),
        ("{", "not JSON, or cut short"),
        ("[" * 100_000, "not JSON, or cut short"),
        ("[1]", "not JSON: found a list instead of an object"),
    ],
)
def test_a_config_that_is_no_object_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    path = _adapter(tmp_path)
    (path / CONFIG_FILE).write_text(text)

    assert _refusal(path).startswith(f"{path / CONFIG_FILE}: {expected}")


Header = dict[str, Any]
_Q = "base_model.model.model.layers.0.self_attn.q_proj"
_A, _B = f"{_Q}.lora_A.weight", f"{_Q}.lora_B.weight"


def _adapter(tmp_path: Path) -> Path:
    return write_peft_dir(tmp_path / "adapter", *make_adapter())


def _refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_peft_dir(path, base_fingerprint="base")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def _write_weights(path: Path, header: object, data_bytes: int) -> None:
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(data_bytes)
    (path / WEIGHTS_FILE).write_bytes(content)


def _good_header() -> Header:
    """A is 2 x 8 and B is 4 x 2 float32: 64 and 32 bytes."""
    return {
        "__metadata__": {"format": "pt"},
        _A: {"dtype": "F32", "shape": [2, 8], "data_offsets": [0, 64]},
        _B: {"dtype": "F32", "shape": [4, 2], "data_offsets": [64, 96]},
    }


def test_a_header_in_any_order_is_read(tmp_path: Path) -> None:
    path = _adapter(tmp_path)
    header = _good_header()
    _write_weights(path, dict(reversed(header.items())), 96)

    found = read_peft_dir(path, base_fingerprint="base")

    assert [(s.name, s.shape) for s in found.manifest.tensors] == [(_A, (2, 8)), (_B, (4, 2))]


def _set(name: str, key: str, value: object) -> Callable[[Header], object]:
    return lambda header: header[name].update({key: value})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda h: h[_A].pop("dtype"), "lora_A.weight' lacks dtype;"),
        (lambda h: h[_A].pop("shape"), "lora_A.weight' lacks shape;"),
        (lambda h: h[_A].pop("data_offsets"), "lora_A.weight' lacks data_offsets;"),
        (lambda h: h.update({_A: [1]}), "lora_A.weight' lacks data_offsets, dtype, shape;"),
        (_set(_A, "dtype", "I32"), "has dtype 'I32'; use F32, BF16, F16"),
        (_set(_A, "dtype", ["F32"]), "has dtype ['F32']; use"),
        (_set(_A, "shape", [-2, -8]), "has shape [-2, -8]; a LoRA factor has two sizes above 0"),
        (_set(_A, "shape", [2, 0]), "has shape [2, 0]; a LoRA factor has two"),
        (_set(_A, "shape", [2.0, 8]), "has shape [2.0, 8]; a LoRA factor has two"),
        (_set(_A, "shape", [2, True]), "has shape [2, True]; a LoRA factor has two"),
        (_set(_A, "shape", [2, 4, 2]), "has shape [2, 4, 2]; a LoRA factor has two"),
        (_set(_A, "shape", 16), "has shape 16; a LoRA factor has two"),
        (_set(_A, "shape", [4, 4]), "has shape [4, 4], of rank 4, but r = 2 in its configuration"),
        (_set(_B, "shape", [2, 4]), "has shape [2, 4], of rank 4, but r = 2 in its configuration"),
        (_set(_A, "data_offsets", [-64, 0]), "has data_offsets [-64, 0], but"),
        (_set(_A, "data_offsets", [64, 0]), "has data_offsets [64, 0], but"),
        (_set(_A, "data_offsets", [0, 60]), "[0, 60], but shape and dtype need 64 bytes"),
        (_set(_A, "data_offsets", None), "has data_offsets None, but"),
        (_set(_B, "data_offsets", [60, 92]), "starts at byte 60 of the data, the one before it"),
        (_set(_B, "data_offsets", [68, 100]), "starts at byte 68 of the data, the one before it"),
        (_set(_A, "data_offsets", [4, 68]), "starts at byte 4 of the data, the one before it ends"),
        (lambda h: h.pop(_B), "96 bytes of data, its header says 64;"),
        (lambda h: h.update({f"{_Q}.lora_A.bias": h.pop(_A)}), "lora_A.bias' is no LoRA factor"),
        (lambda h: h.update({"k.lora_B.weight": h.pop(_B)}), f"{_Q!r} has only lora_A; save both"),
        (lambda h: h.update({"k.lora_B.weight": h.pop(_A)}), "of rank 8, but r = 2"),
    ],
)
def test_a_header_that_is_wrong_is_refused(
    tmp_path: Path, change: Callable[[Header], object], expected: str
) -> None:
    """One line that names the file, for each; never a slice of other bytes."""
    path = _adapter(tmp_path)
    header = _good_header()
    change(header)
    _write_weights(path, header, 96)

    found = _refusal(path)

    assert found.startswith(f"{path / WEIGHTS_FILE}: ")
    assert expected in found


def test_a_lone_lora_b_is_refused(tmp_path: Path) -> None:
    path = _adapter(tmp_path)
    entry = {"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 32]}
    _write_weights(path, {_B: entry}, 32)

    expected = f"{path / WEIGHTS_FILE}: {_Q!r} has only lora_B; save both lora_A and lora_B of it"
    assert _refusal(path) == expected


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ([1], "not a safetensors header: found a list instead of an object"),
        ({}, "holds no tensor"),
    ],
)
def test_a_header_without_tensors_is_refused(tmp_path: Path, header: object, expected: str) -> None:
    path = _adapter(tmp_path)
    _write_weights(path, header, 96)

    assert _refusal(path).startswith(f"{path / WEIGHTS_FILE}: {expected}")


@pytest.mark.parametrize("length", [97, 2**63, 2**64 - 1])
def test_a_header_longer_than_its_file_is_refused(tmp_path: Path, length: int) -> None:
    path = _adapter(tmp_path)
    (path / WEIGHTS_FILE).write_bytes(length.to_bytes(8, "little") + b"{}" + bytes(94))

    expected = f"{path / WEIGHTS_FILE}: 104 bytes, its header alone should end at {length + 8};"
    assert _refusal(path).startswith(expected)
