"""The base model's fingerprint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

from common.errors import ConfigError
from common.model_dir import base_model

Tensors = dict[str, npt.NDArray[Any]]
WEIGHTS: Tensors = {"a": np.arange(6000, dtype=np.float32), "b": np.ones((2, 3), dtype=np.float16)}


def _model(path: Path, *files: Tensors) -> str:
    path.mkdir()
    (path / "config.json").write_text("{}")
    for number, tensors in enumerate(files):
        save_file(tensors, path / f"model-{number}.safetensors")
    return base_model(path).fingerprint


def test_fingerprint_does_not_depend_on_sharding(tmp_path: Path) -> None:
    whole = _model(tmp_path / "whole", WEIGHTS)
    split = _model(tmp_path / "split", {"b": WEIGHTS["b"]}, {"a": WEIGHTS["a"]})

    assert whole == split
    assert base_model(tmp_path / "whole").name == "whole"


@pytest.mark.parametrize("index", [0, 5999])
def test_fingerprint_sees_either_end_of_a_tensor(tmp_path: Path, index: int) -> None:
    changed = WEIGHTS["a"].copy()
    changed[index] += 1

    assert _model(tmp_path / "x", WEIGHTS) != _model(tmp_path / "y", {**WEIGHTS, "a": changed})


def test_fingerprint_sees_names_and_types(tmp_path: Path) -> None:
    found = {
        _model(tmp_path / "1", WEIGHTS),
        _model(tmp_path / "2", {"A": WEIGHTS["a"], "b": WEIGHTS["b"]}),
        _model(tmp_path / "3", {**WEIGHTS, "a": WEIGHTS["a"].view(np.int32)}),
        _model(tmp_path / "4", {**WEIGHTS, "a": WEIGHTS["a"].reshape(2, 3000)}),
    }

    assert len(found) == 4


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no directory"):
        base_model(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        base_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"has no \*\.safetensors"):
        base_model(tmp_path)
