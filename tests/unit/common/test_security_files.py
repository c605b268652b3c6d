"""Certificates, keys and tokens as files: what is wrong with them is one clear error."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from common import security as security_module
from common.config import dump_toml
from common.errors import ConfigError
from common.security import SecuritySettings
from common.tokens import TokenBook, read_token
from tests.certificates import Authority
from tests.secured import (
    ADMIN_TOKEN,
    GENERATE_TOKEN,
    SUBSCRIBE_TOKEN,
    presenting,
    serving,
)


def test_half_a_pair_is_an_error(mutual: SecuritySettings, authority: Authority) -> None:
    with pytest.raises(ConfigError, match=r"security\.tls_key: missing, but tls_cert is set"):
        SecuritySettings(tls_cert=mutual.tls_cert).check()
    with pytest.raises(ConfigError, match=r"security\.tls_cert: missing, but tls_key is set"):
        SecuritySettings(tls_key=mutual.tls_key).check()
    with pytest.raises(ConfigError, match=r"security\.tls_ca: set without tls_cert"):
        SecuritySettings(tls_ca=authority.file).check()


@pytest.mark.parametrize("field", ["tls_cert", "tls_key", "tls_ca", "tokens_file", "token_file"])
def test_a_file_that_is_not_there_is_named(
    field: str, mutual: SecuritySettings, tmp_path: Path
) -> None:
    settings = mutual.model_copy(update={field: tmp_path / "absent"})
    with pytest.raises(
        ConfigError, match=rf"security\.{field}: {tmp_path}/absent: No such file or directory; give"
    ):
        settings.check()


@pytest.mark.parametrize("field", ["tls_cert", "tls_key", "tls_ca"])
def test_a_file_that_is_not_pem_is_named(
    field: str, mutual: SecuritySettings, tmp_path: Path
) -> None:
    (tmp_path / "other").write_bytes(b"\xff\x00 not PEM")
    settings = mutual.model_copy(update={field: tmp_path / "other"})
    with pytest.raises(ConfigError, match=rf"security\.{field}: {tmp_path}/other holds no PEM"):
        settings.check()


def test_swapped_damaged_and_foreign_files_are_named(
    mutual: SecuritySettings, authority: Authority, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"security\.tls_cert: .* holds no PEM certificate"):
        mutual.model_copy(update={"tls_cert": mutual.tls_key, "tls_key": mutual.tls_cert}).check()
    with pytest.raises(ConfigError, match="do not belong together"):
        mutual.model_copy(update={"tls_key": authority.issue("other")[1]}).check()
    damaged = tmp_path / "damaged.pem"
    damaged.write_text(authority.file.read_text().replace("M", "N", 1))
    with pytest.raises(ConfigError, match=r"security\.tls_ca: .* is damaged"):
        mutual.model_copy(update={"tls_ca": damaged}).check()


async def test_a_server_does_not_start_with_a_token_it_could_not_show(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"security\.token_file: .* holds no usable token"):
        async with serving(presenting(tmp_path, "short")):
            raise AssertionError("it started")


SECRET = "a-secret-nobody-may-see"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no token"),
        (f"[a]\ntoken = {SECRET}", "not TOML"),
        (f'"{SECRET}" = ["admin"]', r"a key outside a table; write \[name\] above"),
        (f'[a]\ntoken = "{SECRET}"', "a.roles: missing or empty"),
        (f'[a]\ntoken = "{SECRET}"\nroles = []', "a.roles: missing or empty"),
        (
            f'[a]\ntoken = "{SECRET}"\nroles = ["generat"]',
            "a.roles: unknown role 'generat'; did you mean 'generate'",
        ),
        (f'[a]\ntoken = "{SECRET}"\nrole = ["admin"]', "unknown key 'role'; did you mean 'roles'"),
        ('[a]\nroles = ["admin"]', "a: give one of token and sha256"),
        (f'[a]\ntoken = "{SECRET}"\nsha256 = "0"\nroles = ["admin"]', "a: give one of"),
        (f'[a]\nsha256 = "{SECRET}"\nroles = ["admin"]', "a.sha256: no SHA-256"),
        (f'[a]\ntoken = "{SECRET} "\nroles = ["admin"]', "a.token: empty, too short or malformed"),
        ('[a]\ntoken = ""\nroles = ["admin"]', "a.token: empty, too short or malformed"),
        (
            f'[a]\ntoken = "{SECRET}"\nroles = ["admin"]\n'
            f'[b]\ntoken = "{SECRET}"\nroles = ["generate"]',
            "two names have one token",
        ),
    ],
)
def test_a_bad_tokens_file_is_one_clear_line_without_its_tokens(
    content: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        TokenBook.read(path)

    assert str(caught.value).startswith(f"security.tokens_file: {path}")
    assert "\n" not in str(caught.value)
    assert SECRET not in str(caught.value)


def test_files_that_are_not_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "binary"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"security\.token_file: .* is not UTF-8"):
        read_token(path)
    with pytest.raises(ConfigError, match=r"security\.tokens_file: .* is not UTF-8"):
        TokenBook.read(path)


def test_no_token_shows_in_what_is_printed(tokens_file: Path, tmp_path: Path) -> None:
    settings = presenting(tmp_path, GENERATE_TOKEN).model_copy(update={"tokens_file": tokens_file})
    shown = f"{settings!r} {settings.tokens()!r} {dump_toml(settings)}"

    assert str(tokens_file) in dump_toml(settings)
    for token in (GENERATE_TOKEN, SUBSCRIBE_TOKEN, ADMIN_TOKEN):
        assert token not in shown


def test_tokens_without_tls_are_warned_about_once(
    tokens_file: Path,
    tmp_path: Path,
    mutual: SecuritySettings,
    caplog: pytest.LogCaptureFixture,
) -> None:
    security_module._warn_of_plaintext.cache_clear()
    plaintext = presenting(tmp_path, GENERATE_TOKEN).model_copy(update={"tokens_file": tokens_file})
    with caplog.at_level(logging.WARNING):
        mutual.model_copy(update=plaintext.model_dump(exclude_none=True)).check()
        assert caplog.messages == []
        for _ in range(3):
            plaintext.check()

    assert [message.split(":")[0] for message in caplog.messages] == [
        "security.tokens_file",
        "security.token_file",
    ]
    assert GENERATE_TOKEN not in caplog.text
