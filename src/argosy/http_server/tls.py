"""TLS for whoever listens: certificate and key from files, taken in again when they change, or when told to."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import msgspec
import structlog

LOOK_EACH_S = 10.0
"""How often the files are looked at."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.http_server")


class TlsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Listening over TLS. The files are PEM; new connections get what they hold since they changed, or SIGHUP came."""

    certificate: str
    """The certificate, and those between it and its authority."""
    key: str
    client_ca: str | None = None
    """Clients must show a certificate of this authority."""


class _Latest(ssl.SSLContext):
    """Gives each connection to the latest context.

    A context keeps sessions, which are resumed without a look at the client's certificate: they must not outlast it.
    """

    latest: ssl.SSLContext

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,  # noqa: FBT001, FBT002 - as the library has it
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        """What asyncio and uvloop call for each connection."""
        return self.latest.wrap_bio(incoming, outgoing, server_side, server_hostname, session)


class Certificates:
    """What a server shows and asks for. Raises ValueError, naming the file to change, when it cannot be used."""

    def __init__(self, config: TlsConfig) -> None:
        self._config = config
        self._context = _Latest(ssl.PROTOCOL_TLS_SERVER)
        self._context.latest = _context(config)
        self._seen = self._times()

    @property
    def context(self) -> ssl.SSLContext:
        """For asyncio's servers: for every connection from now on, whatever is taken in later."""
        return self._context

    def reload(self) -> bool:
        """Take in what the files hold now; whether it can be used: else what was taken before stays."""
        self._seen = self._times()
        try:
            self._context.latest = _context(self._config)
        except ValueError as error:
            log.warning("certificate_not_taken", reason=str(error))
            return False
        log.info("certificate_taken", certificate=self._config.certificate)
        return True

    def refresh(self) -> bool:
        """Reload when the files have changed; whether there was something new."""
        return self._times() != self._seen and self.reload()

    async def watch(self) -> None:
        """Refresh again and again, for as long as it is awaited."""
        while True:
            await asyncio.sleep(LOOK_EACH_S)
            self.refresh()

    def _times(self) -> list[int]:
        config = self._config
        paths = (config.certificate, config.key, config.client_ca)
        return [_changed_at(Path(path)) for path in paths if path]


def _context(config: TlsConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _load(context, config)
    return context


def _load(context: ssl.SSLContext, config: TlsConfig) -> None:
    try:
        context.load_cert_chain(config.certificate, config.key, password=_no_password)
    except (OSError, ValueError) as error:
        message = f"tls: cannot use {config.certificate} with {config.key} ({_reason(error)})"
        raise ValueError(f"{message}; give PEM files that belong together") from error
    if config.client_ca is not None:
        try:
            context.load_verify_locations(config.client_ca)
        except (OSError, ValueError) as error:
            message = f"tls: cannot use {config.client_ca} ({_reason(error)})"
            raise ValueError(
                f"{message}; give a PEM file with the authority's certificate"
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED


def _changed_at(path: Path) -> int:
    """0 while it cannot be looked at: it may just be being replaced."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _no_password() -> str:
    """Instead of OpenSSL's question on the terminal."""
    raise ValueError("the key is encrypted; give it in the clear, readable by this user only")


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
