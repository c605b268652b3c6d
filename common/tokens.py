"""Bearer tokens: the one a client shows, those a server takes, and what each of them may call.

A token itself is in no error, no log and no `repr`.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from common.config import suggestion
from common.errors import ConfigError, PermissionDenied, Unauthenticated

Role = Literal["subscribe", "generate", "admin"]
"""No role includes another."""

ROLES: tuple[Role, ...] = typing.get_args(Role)
ANY: tuple[Role, ...] = ROLES

NEEDED: Mapping[str, tuple[Role, ...]] = {
    "/refit.v1.AdapterService/AdapterUpdate": ("subscribe",),
    "/refit.v1.AdapterService/ReportAdapter": ("subscribe",),
    "/refit.v1.AdapterService/RenewLease": ("subscribe",),
    "/refit.v1.AdapterService/ListAdapters": ("subscribe",),
    "/refit.v1.RolloutService/Generate": ("generate",),
    "/refit.v1.RolloutService/GenerateBatch": ("generate",),
    "/refit.v1.RolloutService/ListAdapters": ("generate",),
    "/refit.v1.TrainerService/GetStatus": ANY,
    "/refit.v1.VersionService/GetVersion": ANY,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": ANY,
}
"""One of these roles opens the method. A method that is not here needs `admin`."""

_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{16,}")
_TOKEN_RULE = "give at least 16 characters of A-Z a-z 0-9 . _ ~ + / = -"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_KEYS = ("token", "sha256", "roles")


@dataclass(frozen=True, slots=True)
class Grant:
    """One known token, by its digest."""

    name: str
    sha256: bytes
    roles: frozenset[Role]


@dataclass(frozen=True, slots=True)
class TokenBook:
    """The tokens a server takes."""

    grants: tuple[Grant, ...]

    @classmethod
    def read(cls, path: Path) -> TokenBook:
        """A TOML file with a table for each token: `roles`, and `sha256` (in hex) or `token`.

        Raises:
            ConfigError: the file cannot be read, or an entry cannot be used.
        """
        try:
            tables = tomllib.loads(_read(path, "tokens_file"))
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"security.tokens_file: {path}: not TOML: {error}") from None
        grants = [_grant(f"security.tokens_file: {path}", *entry) for entry in tables.items()]
        if not grants:
            raise ConfigError(f"security.tokens_file: {path} holds no token; add a [name] table")
        if len({grant.sha256 for grant in grants}) < len(grants):
            raise ConfigError(f"security.tokens_file: {path}: two names have one token; change one")
        return cls(tuple(grants))

    def authorise(self, method: str, metadata: Mapping[str, str | bytes]) -> None:
        """Let the call pass, by its full method name ("/package.Service/Method").

        Raises:
            Unauthenticated: it carries no token, or an unknown one.
            PermissionDenied: its token has none of the roles that open the method.
        """
        grant = self._find(_bearer(metadata.get("authorization", "")))
        needed = NEEDED.get(method, ("admin",))
        if grant.roles.isdisjoint(needed):
            raise PermissionDenied(
                f"authorization: {method} needs the role {' or '.join(needed)}, token "
                f"{grant.name!r} has {', '.join(sorted(grant.roles))}; use another token"
            )

    def _find(self, token: str) -> Grant:
        """Looks at every grant, each in constant time: how long it takes tells nothing."""
        digest = hashlib.sha256(token.encode()).digest()
        found = [grant for grant in self.grants if hmac.compare_digest(grant.sha256, digest)]
        if not found:
            raise Unauthenticated("authorization: unknown token; use one that this server takes")
        return found[0]


def read_token(path: Path) -> str:
    """The token a client shows; white space around it does not count.

    Raises:
        ConfigError: the file cannot be read, or holds no such token.
    """
    token = _read(path, "token_file").strip()
    if not _TOKEN.fullmatch(token):
        raise ConfigError(f"security.token_file: {path} holds no usable token; {_TOKEN_RULE}")
    return token


def _bearer(header: str | bytes) -> str:
    scheme, _, token = str(header).partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise Unauthenticated("authorization: no token; send `authorization: Bearer TOKEN`")
    return token


def _read(path: Path, field: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"security.{field}: {path}: {error.strerror}; give a file that can be read"
        ) from error
    except UnicodeDecodeError:
        # Without its cause, which holds what was read.
        raise ConfigError(f"security.{field}: {path} is not UTF-8; save it as UTF-8") from None


def _grant(file: str, name: str, table: Any) -> Grant:
    if not isinstance(table, dict):
        # Without the name, which may be a token in the wrong place.
        raise ConfigError(f"{file}: a key outside a table; write [name] above each token's keys")
    where = f"{file}: {name}"
    for key in table:
        if key not in _KEYS:
            raise ConfigError(f"{where}: unknown key {key!r}{suggestion(key, _KEYS)}")
    return Grant(name, _digest(where, table), _roles(where, table.get("roles")))


def _digest(where: str, table: Mapping[str, Any]) -> bytes:
    if ("token" in table) == ("sha256" in table):
        raise ConfigError(f"{where}: give one of token and sha256")
    if "sha256" in table:
        text = str(table["sha256"]).lower()
        if not _SHA256.fullmatch(text):
            raise ConfigError(f"{where}.sha256: no SHA-256; give its 64 hexadecimal digits")
        return bytes.fromhex(text)
    token = table["token"]
    if not isinstance(token, str) or not _TOKEN.fullmatch(token):
        raise ConfigError(f"{where}.token: empty, too short or malformed; {_TOKEN_RULE}")
    return hashlib.sha256(token.encode()).digest()


def _roles(where: str, found: Any) -> frozenset[Role]:
    if not isinstance(found, list) or not found:
        raise ConfigError(f"{where}.roles: missing or empty; give a list of {', '.join(ROLES)}")
    for role in found:
        if role not in ROLES:
            raise ConfigError(f"{where}.roles: unknown role {role!r}{suggestion(str(role), ROLES)}")
    return frozenset(found)
