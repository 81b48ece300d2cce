"""What `argosy serve` shows: a progress bar while it starts, then a panel that says where it is and what to try."""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.text import Text


class StartupDisplay:
    """On standard error; the bar only where that is a terminal."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("starting the engine", total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def update_progress(self, description: str, fraction: float) -> None:
        """Move the bar; `done` is from 0 to 1."""
        self._bar.update(self._task, description=description, completed=fraction, total=1.0)

    def show_first_key(self, key: str) -> None:
        """Show an administrator's key, which was made just now and can never be shown again."""
        self._print(f"""The first key, an administrator's; it is not shown again:
              export ARGOSY_API_KEY={key}""")

    def show_ready(self, url: str, model: str, *, key_required: bool) -> None:
        """Replace the bar by the panel: requests for `model` are taken at `url`, `keyed` ones if so."""
        self._bar.stop()
        base = f"{url}/v1" if url.startswith("http") else url
        headline = Text.assemble((model, "bold"), " is ready at ", (base, "bold green"))
        self._console.print(Panel(headline, title="Argosy", expand=False))
        self._print(_usage_hint(url, model, key_required=key_required))

    def show_draining(self, drain_deadline_s: float) -> None:
        """Say what happens now, and how to have it over with."""
        self._print(
            f"Finishing what runs, for {drain_deadline_s:g} s at most; Ctrl-C leaves at once."
        )

    def _print(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)


def _usage_hint(url: str, model: str, *, key_required: bool) -> str:
    header = ' -H "authorization: Bearer $ARGOSY_API_KEY"' if key_required else ""
    if url.startswith("unix:"):
        socket = url.removeprefix("unix:")
        return f"""Talk to it:   argosy chat --url {url}
With curl:    curl --unix-socket {socket} http://localhost/v1/models{header}
Ctrl-C stops it."""
    argument = "" if url == "http://127.0.0.1:8000" else f" --url {url}"
    key = 'os.environ["ARGOSY_API_KEY"]' if key_required else '"none"'
    return f"""Talk to it:   argosy chat{argument}
OpenAI SDK:   client = OpenAI(base_url="{url}/v1", api_key={key})
With curl:    curl {url}/v1/chat/completions{header} -H 'content-type: application/json' \\
                -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
Ctrl-C stops it."""
