"""A PEFT directory while it is being written."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import StagingFailed, StagingFull
from common.peft_dir import WEIGHTS_FILE, PeftWriter, write_peft_dir
from tests.adapters import make_adapter
from tests.open_files import open_files


@pytest.mark.parametrize("chunk_bytes", [1, 7, 64, 1 << 20])
def test_bytes_written_in_pieces_are_seen_at_once(tmp_path: Path, chunk_bytes: int) -> None:
    manifest, buffer = make_adapter()
    writer = PeftWriter(tmp_path / "adapter", manifest)

    for begin in range(0, len(buffer), chunk_bytes):
        piece = buffer[begin : begin + chunk_bytes]
        writer.write(begin, piece)
        assert bytes(writer.buffer[: begin + len(piece)]) == bytes(buffer[: begin + len(piece)])

    assert writer.finish() == writer.finish() == tmp_path / "adapter"
    whole = write_peft_dir(tmp_path / "whole", manifest, buffer)
    weights = (tmp_path / "adapter" / WEIGHTS_FILE).read_bytes()
    assert weights == (whole / WEIGHTS_FILE).read_bytes()


def test_the_buffer_outlives_its_files_and_is_read_only(tmp_path: Path) -> None:
    manifest, buffer = make_adapter()
    writer = PeftWriter(tmp_path / "adapter", manifest)
    writer.write(0, buffer)

    writer.discard()

    assert list(tmp_path.iterdir()) == []
    assert bytes(writer.buffer) == bytes(buffer)
    with pytest.raises(TypeError):
        writer.buffer[0] = 1


def test_a_directory_that_is_there_is_left_alone(tmp_path: Path) -> None:
    manifest, _ = make_adapter()
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "file").write_text("mine")

    with pytest.raises(StagingFailed, match="File exists; see to it and retry"):
        PeftWriter(tmp_path / "adapter", manifest)

    assert (tmp_path / "adapter" / "file").read_text() == "mine"


def test_an_update_larger_than_the_file_system_is_refused_with_both_sizes() -> None:
    manifest, _ = make_adapter()
    large = replace(manifest.tensors[0], shape=(1 << 20, 1 << 24))
    path = Path("/dev/shm") / "refit-test-staging-full"

    with pytest.raises(
        StagingFull, match=r"No space left on device; an update needs \d+ bytes, \d+ are free"
    ):
        PeftWriter(path, replace(manifest, tensors=(large,)))

    assert not path.exists()


def test_what_a_sweeper_has_removed_is_discarded_without_an_error(tmp_path: Path) -> None:
    manifest, buffer = make_adapter()
    writer = PeftWriter(tmp_path / "adapter", manifest)
    writer.write(0, buffer)
    shutil.rmtree(tmp_path / "adapter")

    writer.discard()

    assert bytes(writer.buffer) == bytes(buffer)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES, errno.ENOENT, errno.EIO])
@pytest.mark.parametrize("call", ["os.posix_fallocate", "mmap.mmap", "pathlib.Path.mkdir"])
def test_another_error_of_the_file_system_is_no_lack_of_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    manifest, _ = make_adapter()
    before = open_files()
    with monkeypatch.context() as patched, pytest.raises(StagingFailed) as caught:
        patched.setattr(call, failing)
        PeftWriter(tmp_path / "adapter", manifest)

    assert type(caught.value) is StagingFailed
    text = f"staging directory {tmp_path}: {os.strerror(number)}; see to it and retry"
    assert str(caught.value) == text
    assert list(tmp_path.iterdir()) == []
    assert open_files() == before


def test_no_room_for_the_first_directory_names_the_room_above_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    manifest, _ = make_adapter()
    with monkeypatch.context() as patched, pytest.raises(StagingFull, match=r" \d+ are free"):
        patched.setattr("pathlib.Path.mkdir", full)
        PeftWriter(tmp_path / "not" / "there" / "adapter", manifest)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG])
@pytest.mark.parametrize("call", ["os.posix_fallocate", "mmap.mmap", "pathlib.Path.mkdir"])
def test_whatever_lacks_room_is_one_error_that_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    manifest, _ = make_adapter()
    before = open_files()
    with monkeypatch.context() as patched, pytest.raises(StagingFull, match=os.strerror(number)):
        patched.setattr(call, full)
        PeftWriter(tmp_path / "adapter", manifest)

    assert list(tmp_path.iterdir()) == []
    assert open_files() == before
