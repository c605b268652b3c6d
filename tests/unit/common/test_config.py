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
    path.write_text(text, encoding="utf-8")
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
        ('model = "m"\n[inner]\nrat = 1', "unknown key 'inner.rat'; did you mean 'inner.rate'?"),
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


@pytest.mark.parametrize("text", ["\U0001f600 \U00020000", "é\u2028\x7f\t\x01", 'a\\b"c'])
def test_any_text_survives_a_dump(tmp_path: Path, text: str) -> None:
    """JSON would write a character over U+FFFF as two surrogates, which TOML forbids."""
    config = Outer(model=Path("m"), inner=Inner(names=(text,)))

    file = _write(tmp_path / "c.toml", dump_toml(config))

    assert load_config(Outer, file).inner.names == (text,)


@pytest.mark.parametrize(
    "overrides", [{"inner": "3", "inner.rate": "1"}, {"inner.rate": "1", "inner": "3"}]
)
def test_a_section_that_is_set_to_a_value_is_one_line(overrides: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(Outer, None, {"model": "m"} | overrides)

    assert "inner" in str(caught.value)
    assert "3" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_key_below_a_value_names_both() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(Outer, None, {"inner": "3", "inner.rate": "1"})

    assert str(caught.value) == "inner.rate: inner is set to 3, no section; drop one of them"


def test_a_directory_is_no_config_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(Outer, tmp_path)

    assert str(caught.value) == f"--config: {tmp_path}: Is a directory; give a TOML file"


def test_a_file_that_is_not_utf8_is_refused_at_the_byte(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_bytes(b'model = "\xff"')

    with pytest.raises(ConfigError) as caught:
        load_config(Outer, file)

    assert str(caught.value) == f"{file}: not UTF-8 at byte 9; save it as UTF-8"


def test_a_section_misspelt_in_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFIT_INENR__RATE", "2")

    with pytest.raises(ConfigError) as caught:
        load_config(Outer, None, {"model": "m"})

    assert str(caught.value) == (
        "REFIT_INENR__RATE: unknown section 'inenr'; did you mean REFIT_INNER__RATE?"
    )


@pytest.mark.parametrize("name", ["REFIT_ENGINE__MAX_LEN", "REFIT_INENR", "REFIT_MODLE__X"])
def test_the_environment_of_another_service_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "2")

    assert load_config(Outer, None, {"model": "m"}) == Outer(model=Path("m"))


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("REFIT_TRIAN__LR", "REFIT_TRAIN__LR"),
        ("REFIT_SERVR__PORT", "REFIT_SERVER__PORT"),
        ("REFIT_LROA__RANK", "REFIT_LORA__RANK"),
    ],
)
def test_the_trainers_own_sections_are_known(
    monkeypatch: pytest.MonkeyPatch, name: str, right: str
) -> None:
    from trainer_svc.config import TrainerConfig

    monkeypatch.setenv(name, "2")

    with pytest.raises(ConfigError, match=f"{name}: .*did you mean {right}"):
        load_config(TrainerConfig, None)


def test_a_mistake_is_blamed_on_where_it_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c.toml"
    path.write_text('model = "m"\n[inner]\nrate = "fast"\n')
    monkeypatch.setenv("REFIT_LIMIT", "many")

    with pytest.raises(ConfigError) as caught:
        load_config(Outer, path, {"inner.names": "1"})

    origins = [line.partition(": ")[0] for line in str(caught.value).splitlines()]
    assert origins == ["environment", str(path), "--set"]
