"""What a service is given to be private and to know its callers: paths, read when they are used."""

from __future__ import annotations

import functools
import logging
import ssl
from pathlib import Path

import grpc

from common.config import Config
from common.errors import ConfigError
from common.tokens import TokenBook, read_token

log = logging.getLogger(__name__)


class SecuritySettings(Config):
    """TLS and tokens of one service; a server reads the files at its start, a channel at its own.

    Every method raises `ConfigError` for a file that cannot be used.
    """

    tls_cert: Path | None = None
    """PEM certificate (chain) this service shows, as a server and as a client; with `tls_key`, TLS.
    It must name the hosts in the addresses others connect to."""

    tls_key: Path | None = None
    """PEM private key of `tls_cert`, not encrypted."""

    tls_ca: Path | None = None
    """PEM certificates of the authorities that peers are verified by. A server then takes only
    clients with a certificate of theirs (mTLS). Unset: public ones, and any client."""

    tokens_file: Path | None = None
    """TOML file of the bearer tokens this server takes, with their roles; unset: no call needs one.
    See docs/security.md."""

    token_file: Path | None = None
    """File that holds the bearer token this service shows to other servers."""

    def check(self) -> None:
        """Read every file a service needs, so that a mistake shows before anything else starts."""
        self.server_credentials()
        self.tokens()
        self.token()

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """None: plaintext."""
        pair, authorities = self._pair(), self._authorities()
        if pair is None and authorities:
            raise ConfigError(
                "security.tls_ca: set without tls_cert; a server needs a certificate of its own"
            )
        if pair is None:
            return None
        return grpc.ssl_server_credentials(
            [pair], root_certificates=authorities, require_client_auth=authorities is not None
        )

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """None: plaintext. With `tls_ca` alone the client shows no certificate."""
        pair, authorities = self._pair(), self._authorities()
        if pair is None and authorities is None:
            return None
        key, certificate = pair or (None, None)
        return grpc.ssl_channel_credentials(authorities, key, certificate)

    def tokens(self) -> TokenBook | None:
        """None: no call needs a token."""
        if self.tokens_file is None:
            return None
        if self.tls_cert is None:
            _warn_of_plaintext("tokens_file")
        return TokenBook.read(self.tokens_file)

    def token(self) -> str | None:
        if self.token_file is None:
            return None
        if self.tls_cert is None and self.tls_ca is None:
            _warn_of_plaintext("token_file")
        return read_token(self.token_file)

    def _pair(self) -> tuple[bytes, bytes] | None:
        """The key and its certificate."""
        if self.tls_cert is None and self.tls_key is None:
            return None
        if self.tls_cert is None or self.tls_key is None:
            found, absent = ("tls_key", "cert") if self.tls_key else ("tls_cert", "key")
            raise ConfigError(f"security.tls_{absent}: missing, but {found} is set; give both")
        certificate = _read_pem(self.tls_cert, "tls_cert", "CERTIFICATE")
        key = _read_pem(self.tls_key, "tls_key", "PRIVATE KEY")
        if b"ENCRYPTED" in key:
            raise ConfigError(f"security.tls_key: {self.tls_key} is encrypted; decrypt it")
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.tls_cert, self.tls_key)
        except ssl.SSLError as error:
            raise ConfigError(
                f"security.tls_key: {self.tls_key} and tls_cert {self.tls_cert} do not belong "
                f"together ({error.reason}); give a certificate and its own key"
            ) from error
        return key, certificate

    def _authorities(self) -> bytes | None:
        if self.tls_ca is None:
            return None
        authorities = _read_pem(self.tls_ca, "tls_ca", "CERTIFICATE")
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(self.tls_ca)
        except ssl.SSLError as error:
            raise ConfigError(
                f"security.tls_ca: {self.tls_ca} is damaged ({error.reason}); give PEM certificates"
            ) from error
        return authorities


PLAINTEXT = SecuritySettings()
"""No TLS, no tokens: the default."""


def _read_pem(path: Path, field: str, label: str) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"security.{field}: {path}: {error.strerror}; give a file that can be read"
        ) from error
    if b"-----BEGIN " not in content or f"{label}-----".encode() not in content:
        raise ConfigError(f"security.{field}: {path} holds no PEM {label.lower()}; give one")
    return content


@functools.cache
def _warn_of_plaintext(field: str) -> None:
    """Once a process, however many channels it opens."""
    log.warning("security.%s: without TLS, whoever sees the traffic can take the tokens", field)
