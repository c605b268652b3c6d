"""A model that is nothing but a name, and processes that end with the test."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from safetensors.numpy import save_file

from tests.integration.faults.liar import LiedTo, lied_to
from tests.integration.faults.processes import Processes


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a fingerprint."""
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps({"model_type": "none"}))
    save_file({"weight": np.arange(16, dtype=np.float32)}, path / "model.safetensors")
    return path


@pytest.fixture
async def processes(model: Path, tmp_path: Path) -> AsyncIterator[Processes]:
    """Starts trainers and replicas that share `tmp_path / "staging"`."""
    async with Processes(model, tmp_path) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LiedTo]:
    """One replica for all tests of a module, since it outlives every lie."""
    async with Processes(model, tmp_path_factory.mktemp("liar")) as started, lied_to(started) as it:
        yield it
