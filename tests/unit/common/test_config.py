"""Configuration from file, environment and command line; what is wrong with it in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config import Config, dump_toml, load_config
from common.errors import ConfigError


class Inner(Config):
    rate: float = 1.0
    names: tuple[str, ...] = ()


class Outer(Config):
    model: Path
    limit: int | None = None
    inner: Inner = Inner()


def _write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_command_line_beats_environment_beats_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = _write(tmp_path / "c.toml", 'model = "file"\nlimit = 1\n[inner]\nrate = 1.5\n')
    monkeypatch.setenv("REFIT_LIMIT", "2")
    monkeypatch.setenv("REFIT_INNER__RATE", "2.5")
    monkeypatch.setenv("REFIT_ANOTHER_SERVICE", "x")

    config = load_config(Outer, file, {"inner.rate": "1e-4", "inner.names": '["a", "b"]'})

    assert config == Outer(model=Path("file"), limit=2, inner=Inner(rate=1e-4, names=("a", "b")))


def test_what_is_dumped_reads_back_equal(tmp_path: Path) -> None:
    config = Outer(model=Path('a "quoted" path'), inner=Inner(rate=0.25, names=("x",)))

    file = _write(tmp_path / "c.toml", dump_toml(config))

    assert load_config(Outer, file) == config


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('model = "m"\nlimt = 1', "unknown key 'limt'; did you mean 'limit'?"),
        ('model = "m"\n[inner]\nrat = 1', "unknown key 'inner.rat'; did you mean 'rate'?"),
        ('model = "m"\n[inner]\nzzz = 1', "unknown key 'inner.zzz'; known are names, rate"),
        ("limit = 1", "model: missing; it has no default"),
        ('model = "m"\nlimit = "x"', "limit: found 'x'; input should be a valid integer"),
        ("model = ", "not TOML"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(tmp_path: Path, text: str, expected: str) -> None:
    """faults.md 10, Megatron-Bridge create_peft: unknown knobs are never dropped in silence."""
    file = _write(tmp_path / "c.toml", text)

    with pytest.raises(ConfigError) as caught:
        load_config(Outer, file)

    assert str(caught.value).startswith(str(file))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config: .*does not exist"):
        load_config(Outer, tmp_path / "none.toml")
