"""Terminal output of a server that starts: a progress bar, then its address, and commands that work as printed."""

from __future__ import annotations

import ipaddress
import json
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from argosy.progress_bar import ProgressBar

if TYPE_CHECKING:
    from argosy.http_server import TlsConfig

_DEFAULT_URL = "http://127.0.0.1:8000"
"""URL that `argosy chat` uses without `--url`."""
_LOOPBACK_FOR_WILDCARD = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - nothing listens here


class StartupDisplay(ProgressBar):
    """Start-up messages on standard error."""

    def __init__(self) -> None:
        super().__init__("starting the engine", total=1.0)
        self._first_key_shown = False

    def show_first_key(self, key: str) -> None:
        """Show the administrator key that was just created. The store keeps only its digest."""
        self._first_key_shown = True
        self._print(f"""First API key, for an administrator. It is not shown again:
              export ARGOSY_API_KEY={key}""")

    def show_ready(
        self,
        url: str,
        model: str,
        *,
        embedding_models: Sequence[str] = (),
        added_models: Sequence[str] = (),
        key_required: bool,
        tls: TlsConfig | None = None,
        store_url: str | None = None,
        has_console: bool = False,
    ) -> None:
        """Replace the bar by a panel with the address, and print commands that send a request.

        `url` is where the server listens, and `store_url` its store unless it is the default one.
        """
        from rich.panel import Panel
        from rich.text import Text

        self.stop()
        headline = Text.assemble(
            (model, "bold"), " is ready at ", (api_url(url, tls), "bold green")
        )
        self.console.print(Panel(headline, title="Argosy", expand=False))
        if key_required and not self._first_key_shown:
            self._print(key_hint(store_url))
        self._print(usage_hint(client_url(url, tls), model, key_required=key_required, tls=tls))
        if added_models:
            self._print(f"Also serves:  {', '.join(added_models)}")
        if embedding_models:
            self._print(f"Embeddings:   {', '.join(embedding_models)} at /v1/embeddings")
        if has_console:
            self._print(f"Console:      {client_url(url, tls)}/ in a browser")
        self._print("Press Ctrl-C to stop the server.")

    def show_draining(self, drain_deadline_s: float) -> None:
        """Announce the drain, and how to stop without it."""
        self._print(
            f"Finishing running requests, for at most {drain_deadline_s:g} s. Press Ctrl-C again to stop at once."
        )

    def _print(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, markup=False, highlight=False)


def client_url(url: str, tls: TlsConfig | None) -> str:
    """Return the URL by which a client on this machine reaches the server that listens at `url`.

    A wildcard address becomes the loopback address. With TLS the host is a name from the server's certificate, because
    clients reject other names. URLs of Unix sockets stay as they are.
    """
    if url.startswith("unix:"):
        return url
    parts = urlsplit(url)
    host = parts.hostname or ""
    host = _LOOPBACK_FOR_WILDCARD.get(host, host)
    if tls is not None:
        host = _certified_host(host, _certificate_names(tls.certificate))
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{parts.port}"


def api_url(url: str, tls: TlsConfig | None) -> str:
    """Return the address to show for the server that listens at `url`, which a client on this machine can open."""
    url = client_url(url, tls)
    return f"{url}/v1" if url.startswith("http") else url


def program_command() -> str:
    """Return the shell command that runs `argosy`, by the path of this program if `argosy` is not on `PATH`."""
    if shutil.which("argosy") is not None:
        return "argosy"
    program = Path(sys.argv[0])
    if program.name == "__main__.py":
        return shlex.join((sys.executable, "-m", "argosy.cli"))
    return shlex.quote(str(program if len(program.parts) > 1 else program.absolute()))


def usage_hint(url: str, model: str, *, key_required: bool, tls: TlsConfig | None = None) -> str:
    """Return commands that send a request to the server. They read an API key from `ARGOSY_API_KEY`.

    `url` is that for clients, from `client_url`.
    """
    lines = []
    needs_certificate = tls is not None and tls.client_ca is not None
    is_unix = url.startswith("unix:")
    if tls is not None and _is_self_signed(tls.certificate):
        lines.append(
            f"Trust it:     export SSL_CERT_FILE={shlex.quote(_absolute_path(tls.certificate))}"
        )
    if not needs_certificate and not (is_unix and tls is not None):
        lines.append(f"Chat:         {_chat_command(url)}")
    if not needs_certificate and not is_unix:
        lines.append(f"OpenAI SDK:   {_sdk_code(url, key_required=key_required)}")
    command = _curl_command(url, model, key_required=key_required, tls=tls)
    lines.append(f"curl:         {command}")
    if needs_certificate:
        lines.append("Replace CLIENT.pem and CLIENT.key by your client certificate and its key.")
    return "\n".join(lines)


def key_hint(store_url: str | None) -> str:
    """Return how to get an API key into `ARGOSY_API_KEY`. URLs that may contain a password are not printed."""
    known = store_url is None or store_url == os.environ.get("ARGOSY_STORE")
    if not known and "@" in (store_url or ""):
        return "API key:      set ARGOSY_API_KEY to one of your keys"
    option = "" if known else f" --store {shlex.quote(store_url or '')}"
    return f"""API key:      set ARGOSY_API_KEY to one of your keys, or create a key:
              export ARGOSY_API_KEY="$({program_command()} keys create{option})\""""


def _chat_command(url: str) -> str:
    is_default = url == os.environ.get("ARGOSY_URL", _DEFAULT_URL)
    return f"{program_command()} chat{'' if is_default else f' --url {shlex.quote(url)}'}"


def _sdk_code(url: str, *, key_required: bool) -> str:
    """Return one line, because pasted continuation lines would be indented."""
    imports = "import os, openai" if key_required else "import openai"
    key = 'os.environ["ARGOSY_API_KEY"]' if key_required else '"none"'
    return f'{imports}; client = openai.OpenAI(base_url="{url}/v1", api_key={key})'


def _curl_command(url: str, model: str, *, key_required: bool, tls: TlsConfig | None) -> str:
    """Return a chat completion with curl. The arguments are quoted for POSIX shells."""
    options = ""
    if url.startswith("unix:"):
        options = f" --unix-socket {shlex.quote(url.removeprefix('unix:'))}"
        url = f"{'http' if tls is None else 'https'}://localhost"
    if tls is not None and _is_self_signed(tls.certificate):
        options += f" --cacert {shlex.quote(_absolute_path(tls.certificate))}"
    if tls is not None and tls.client_ca is not None:
        options += " --cert CLIENT.pem --key CLIENT.key"
    if key_required:
        options += ' -H "authorization: Bearer $ARGOSY_API_KEY"'
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}]})
    return f"""curl{options} {shlex.quote(f"{url}/v1/chat/completions")} \\
                -H 'content-type: application/json' -d {shlex.quote(body)}"""


def _certified_host(host: str, names: list[str]) -> str:
    """Return `host` if the certificate has that name, else a name that it has."""
    if host in names:
        return host
    if "localhost" in names and ipaddress.ip_address(host).is_loopback:
        return "localhost"
    return next((name for name in names if "*" not in name), host)


def _certificate_names(path: str) -> list[str]:
    """Return the DNS names and IP addresses of the first certificate in a PEM file."""
    from cryptography import x509

    certificate = x509.load_pem_x509_certificate(Path(path).read_bytes())
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    dns_names = names.get_values_for_type(x509.DNSName)
    return dns_names + [str(address) for address in names.get_values_for_type(x509.IPAddress)]


def _absolute_path(path: str) -> str:
    return str(Path(path).absolute())


def _is_self_signed(path: str) -> bool:
    from cryptography import x509

    certificate = x509.load_pem_x509_certificate(Path(path).read_bytes())
    return certificate.issuer == certificate.subject
