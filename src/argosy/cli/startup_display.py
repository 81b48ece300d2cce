"""Terminal output of `argosy serve`: a progress bar during start-up, then the address and commands to try."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.panel import Panel
from rich.text import Text

from argosy.cli.client_commands import api_url, client_url, key_hint, usage_hint
from argosy.progress_bar import ProgressBar

if TYPE_CHECKING:
    from argosy.http_server import TlsConfig


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
        key_required: bool,
        tls: TlsConfig | None = None,
        store_url: str | None = None,
        has_console: bool = False,
    ) -> None:
        """Replace the bar by a panel with the address, and print commands that send a request.

        Args:
            url: URL at which the server listens.
            model: Public name of the model.
            embedding_models: Public names of the embedding models beside it.
            key_required: Whether requests need an API key.
            tls: TLS settings of the server.
            store_url: Store URL, unless it is the default.
            has_console: Whether the server has a console for browsers.
        """
        self.stop()
        headline = Text.assemble(
            (model, "bold"), " is ready at ", (api_url(url, tls), "bold green")
        )
        self.console.print(Panel(headline, title="Argosy", expand=False))
        if key_required and not self._first_key_shown:
            self._print(key_hint(store_url))
        self._print(usage_hint(client_url(url, tls), model, key_required=key_required, tls=tls))
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
