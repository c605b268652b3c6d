"""Certificates of two authorities, and tokens for each role."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from common.security import SecuritySettings
from tests.certificates import Authority
from tests.secured import (
    ADMIN_TOKEN,
    GENERATE_TOKEN,
    SUBSCRIBE_TOKEN,
)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.create(tmp_path_factory.mktemp("ours") / "ours")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.create(tmp_path_factory.mktemp("strangers") / "strangers")


@pytest.fixture(scope="module")
def mutual(authority: Authority) -> SecuritySettings:
    """All three files."""
    certificate, key = authority.issue("mutual")
    return SecuritySettings(tls_cert=certificate, tls_key=key, tls_ca=authority.file)


@pytest.fixture
def tokens_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.toml"
    digest = hashlib.sha256(GENERATE_TOKEN.encode()).hexdigest()
    path.write_text(
        f'[trainer]\nsha256 = "{digest}"\nroles = ["generate"]\n'
        f'[replicas]\ntoken = "{SUBSCRIBE_TOKEN}"\nroles = ["subscribe"]\n'
        f'[operators]\ntoken = "{ADMIN_TOKEN}"\nroles = ["admin"]\n'
    )
    return path
