"""TLS for listening sockets, with certificate and key files that are reloaded when they change or on SIGHUP."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import msgspec
import structlog

CERTIFICATE_CHECK_INTERVAL_S = 10.0
"""Interval between two checks of the files' modification times."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.http_server")


class TlsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TLS settings of a listening socket. All files are PEM. New connections use the files' current content.

    The server reloads the files after they change, and on SIGHUP.
    """

    certificate: str
    """Certificate file: the server's certificate and its intermediate certificates."""
    key: str
    """Path of the private key (PEM)."""
    client_ca: str | None = None
    """Certificate authority file. If set, clients must present a certificate of this authority."""


class _ReloadableContext(ssl.SSLContext):
    """SSL context that uses the latest loaded context for each new connection.

    A context caches sessions, and a resumed session skips the check of the client's certificate. A new context drops
    these sessions.
    """

    current: ssl.SSLContext

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,  # noqa: FBT001, FBT002 - signature of the standard library
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        """Wrap one connection. asyncio and uvloop call this method for each connection."""
        return self.current.wrap_bio(incoming, outgoing, server_side, server_hostname, session)


class CertificateWatcher:
    """Loads a server's certificates and reloads them when their files change.

    Raises:
        ValueError: The files cannot be used; the message names the file to change.
    """

    def __init__(self, config: TlsConfig) -> None:
        self._config = config
        self._context = _ReloadableContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.current = _build_context(config)
        self._loaded_mtimes = self._read_mtimes()

    @property
    def context(self) -> ssl.SSLContext:
        """SSL context for asyncio's servers, which uses the latest certificates for each new connection."""
        return self._context

    def reload(self) -> bool:
        """Load the files again, and keep the loaded certificates if the files cannot be used.

        Returns:
            Whether the new files are in use.
        """
        self._loaded_mtimes = self._read_mtimes()
        try:
            self._context.current = _build_context(self._config)
        except ValueError as error:
            log.warning("certificate_reload_failed", reason=str(error))
            return False
        log.info("certificate_reloaded", certificate=self._config.certificate)
        return True

    def reload_if_changed(self) -> bool:
        """Reload the files if their modification times have changed, and return whether new files are in use."""
        return self._read_mtimes() != self._loaded_mtimes and self.reload()

    async def watch(self) -> None:
        """Reload changed files periodically until cancelled."""
        while True:
            await asyncio.sleep(CERTIFICATE_CHECK_INTERVAL_S)
            self.reload_if_changed()

    def _read_mtimes(self) -> list[int]:
        config = self._config
        paths = (config.certificate, config.key, config.client_ca)
        return [_mtime_ns(Path(path)) for path in paths if path]


def _build_context(config: TlsConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _load_certificates(context, config)
    return context


def _load_certificates(context: ssl.SSLContext, config: TlsConfig) -> None:
    try:
        context.load_cert_chain(config.certificate, config.key, password=_reject_encrypted_key)
    except (OSError, ValueError) as error:
        message = f"tls: cannot use {config.certificate} with {config.key} ({_error_reason(error)})"
        raise ValueError(f"{message}; give PEM files that belong together") from error
    if config.client_ca is not None:
        try:
            context.load_verify_locations(config.client_ca)
        except (OSError, ValueError) as error:
            message = f"tls: cannot use {config.client_ca} ({_error_reason(error)})"
            raise ValueError(
                f"{message}; give a PEM file with the authority's certificate"
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED


def _mtime_ns(path: Path) -> int:
    """Return the modification time, or 0 if the file cannot be read, for example while it is being replaced."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _reject_encrypted_key() -> str:
    """Reject an encrypted key, for which OpenSSL would ask for a password on the terminal."""
    raise ValueError("the key is encrypted; decrypt it and make it readable by this user only")


def _error_reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
