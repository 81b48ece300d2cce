"""TLS for whoever listens: certificate and key from files, taken in again when they change, or when told to."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import msgspec
import structlog

CERTIFICATE_CHECK_INTERVAL_S = 10.0
"""How often the files are looked at."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.http_server")


class TlsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Listening over TLS. The files are PEM; new connections get what they hold since they changed, or SIGHUP came."""

    certificate: str
    """The certificate, and those between it and its authority."""
    key: str
    client_ca: str | None = None
    """Clients must show a certificate of this authority."""


class _ReloadableContext(ssl.SSLContext):
    """Gives each connection to the latest context.

    A context keeps sessions, which are resumed without a look at the client's certificate: they must not outlast it.
    """

    current: ssl.SSLContext

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,  # noqa: FBT001, FBT002 - as the library has it
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        """What asyncio and uvloop call for each connection."""
        return self.current.wrap_bio(incoming, outgoing, server_side, server_hostname, session)


class CertificateWatcher:
    """What a server shows and asks for. Raises ValueError, naming the file to change, when it cannot be used."""

    def __init__(self, config: TlsConfig) -> None:
        self._config = config
        self._context = _ReloadableContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.current = _build_context(config)
        self._loaded_mtimes = self._read_mtimes()

    @property
    def context(self) -> ssl.SSLContext:
        """For asyncio's servers: for every connection from now on, whatever is taken in later."""
        return self._context

    def reload(self) -> bool:
        """Take in what the files hold now; whether it can be used: else what was taken before stays."""
        self._loaded_mtimes = self._read_mtimes()
        try:
            self._context.current = _build_context(self._config)
        except ValueError as error:
            log.warning("certificate_reload_failed", reason=str(error))
            return False
        log.info("certificate_reloaded", certificate=self._config.certificate)
        return True

    def reload_if_changed(self) -> bool:
        """Reload when the files have changed; whether there was something new."""
        return self._read_mtimes() != self._loaded_mtimes and self.reload()

    async def watch(self) -> None:
        """Refresh again and again, for as long as it is awaited."""
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
    """0 while it cannot be looked at: it may just be being replaced."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _reject_encrypted_key() -> str:
    """Instead of OpenSSL's question on the terminal."""
    raise ValueError("the key is encrypted; give it in the clear, readable by this user only")


def _error_reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
