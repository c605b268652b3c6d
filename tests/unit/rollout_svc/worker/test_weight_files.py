"""A model's tensors, whichever files they lie in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rollout_svc.worker.weight_files import WeightFiles

FIRST, SECOND = torch.arange(6.0).view(2, 3), torch.ones(4, dtype=torch.bfloat16)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_file({"first": FIRST}, tmp_path / "model-1.safetensors")
    save_file({"second": SECOND}, tmp_path / "model-2.safetensors")
    return tmp_path


def check(weights: WeightFiles) -> None:
    assert set(weights) == {"first", "second"}
    assert (weights.shape("first"), weights.shape("second")) == ((2, 3), (4,))
    assert torch.equal(weights["first"], FIRST) and torch.equal(weights["second"], SECOND)
    assert weights["second"].dtype is torch.bfloat16
    assert "third" not in weights


def test_every_file_of_a_directory_counts(sharded: Path) -> None:
    check(WeightFiles.of_model(sharded))


def test_with_an_index_only_the_files_that_it_names(sharded: Path) -> None:
    """Mistral's directories hold the whole model a second time, under other names."""
    save_file({"third": FIRST}, sharded / "consolidated.safetensors")
    places = {"first": "model-1.safetensors", "second": "model-2.safetensors"}
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    check(WeightFiles.of_model(sharded))


def test_a_directory_without_weights_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no \\*\\.safetensors; give a model's directory"):
        WeightFiles.of_model(tmp_path)
