"""Server addresses, with one parser for configuration, command-line flags and benchmarks."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

import msgspec

URL_REMEDY = "write http://HOST:PORT, https://HOST or unix:/PATH/OF.sock"


class Endpoint(msgspec.Struct, frozen=True):
    """Address of a server, either host and port or a Unix socket."""

    host: str
    port: int = 0
    socket_path: str | None = None
    """Path of the Unix socket, used instead of host and port."""
    tls: bool = False
    path_prefix: str = ""
    """Prefix of each request's path, without a slash at the end."""
    address: str | None = None
    """IP address of the host to connect to; None for any."""

    @property
    def authority(self) -> str:
        """Value of the `Host` header."""
        if self.socket_path is not None:
            return self.host
        host = f"[{self.host}]" if ":" in self.host else self.host
        default_port = 443 if self.tls else 80
        return host if self.port == default_port else f"{host}:{self.port}"

    @property
    def display_name(self) -> str:
        """Address for messages and logs."""
        return self.authority if self.socket_path is None else f"unix:{self.socket_path}"


def parse_endpoint(url: str) -> Endpoint:
    """Parse the URL of a server; a `/v1` at the end is dropped.

    Args:
        url: `http(s)://HOST[:PORT][/PATH]`, `unix:/PATH/OF.sock`, or `http+unix://%2FPATH%2FOF.sock[/PATH]`.

    Raises:
        ValueError: The URL is invalid. The message contains the remedy.
    """
    if url.startswith("unix:"):
        socket = unquote(url.removeprefix("unix:").removeprefix("//"))
        if not socket.startswith("/"):
            raise ValueError(f"{url!r} is not the URL of a server; {URL_REMEDY}")
        return Endpoint("localhost", socket_path=socket)
    try:
        parts = urlsplit(url)
        port = parts.port if parts.scheme in {"http", "https"} else None
    except ValueError as error:
        raise ValueError(f"{url!r} is not a URL ({error}); {URL_REMEDY}") from error
    path = parts.path.rstrip("/").removesuffix("/v1")
    if parts.scheme == "http+unix" and parts.netloc:
        return Endpoint("localhost", socket_path=unquote(parts.netloc), path_prefix=path)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f"{url!r} is not the URL of a server; {URL_REMEDY}")
    if parts.query or parts.fragment or parts.username is not None or " " in url:
        message = f"the URL of {parts.hostname} has a user, a query, a fragment or a space"
        raise ValueError(f"{message}, which would not be sent to the server; {URL_REMEDY}")
    tls = parts.scheme == "https"
    return Endpoint(parts.hostname, port or (443 if tls else 80), tls=tls, path_prefix=path)
