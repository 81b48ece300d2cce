"""Proxies that the gateway's benchmark compares: their configuration, start on one core, and measurement."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx2
import msgspec
import psutil

from argosy.store import Price, open_store
from benchmarks.peers.catalog import interpreter
from benchmarks.processes import PeerError

MODEL = "mock"
KEY = "sk-none"
MAX_STREAMS = 100_000
"""Concurrency limit that no measurement reaches."""
PATIENCE_S = 90.0


@dataclass(frozen=True, slots=True)
class Place:
    """Ports, folder and interpreter of a proxy."""

    upstream: int
    """Port of the upstream."""
    port: int
    folder: Path
    """Folder of the proxy for its configuration and log."""
    python: Path
    """Interpreter of its environment."""

    @property
    def upstream_url(self) -> str:
        """URL of the upstream."""
        return f"http://127.0.0.1:{self.upstream}"

    def write(self, name: str, content: bytes) -> Path:
        """Write a file into the folder of the proxy."""
        path = self.folder / name
        path.write_bytes(content)
        return path


@dataclass(frozen=True, slots=True)
class Start:
    """Command of a proxy, and the API key for its clients."""

    command: list[str]
    key: str = KEY


@dataclass(frozen=True, slots=True)
class Proxy:
    """Definition of a proxy."""

    start: Callable[[Place], Start]
    environment: str | None = None
    """Environment below `.venv-peers`, or None for the one that runs the benchmark."""
    package: str | None = None
    """Package whose version is reported."""
    rival: bool = False
    """Whether it is a router built for speed, which Argosy is compared with."""
    slow: bool = False
    """Whether it is measured with small requests and few streams only."""


@dataclass(slots=True)
class Running:
    """Running proxy, or the upstream itself."""

    port: int
    key: str = KEY
    version: str = ""
    process: psutil.Process | None = None

    def cpu_s(self) -> float:
        """Return the processor time of the process and its children in seconds."""
        return sum(sum(each.cpu_times()[:2]) for each in self._family())

    def rss_mib(self) -> float:
        """Return the resident memory of the process and its children in MiB."""
        return sum(each.memory_info().rss for each in self._family()) / 2**20

    def _family(self) -> list[psutil.Process]:
        if self.process is None:
            return []
        return [self.process, *self.process.children(recursive=True)]


# --- start commands --------------------------------------------------------------------------------


def argosy_plain(place: Place) -> Start:
    """Argosy without accounts and keys, in front of another server."""
    return _argosy(place, {"kind": "openai", "max_requests": MAX_STREAMS}, {}, KEY)


def argosy(place: Place) -> Start:
    """Argosy with all features in front of its own engine: keys, limits, prices, and resumable streams."""
    return _argosy_with_accounts(place, {})


def argosy_without_series(place: Place) -> Start:
    """The same without time series, to measure what they cost."""
    return _argosy_with_accounts(place, {"series": {"enabled": False}})


def argosy_without_console(place: Place) -> Start:
    """The same without time series and console, to measure what both cost."""
    return _argosy_with_accounts(
        place, {"series": {"enabled": False}, "console": {"enabled": False}}
    )


def argosy_observed(place: Place) -> Start:
    """The same with objectives, a tenth of the traces, and notices, to measure what quiet nights cost."""
    slos = [
        {"name": "answers", "availability": "99.9%"},
        {
            "name": "fast",
            "model": MODEL,
            "ttft": {"below_s": 1.0, "share": "95%"},
            "itl": {"below_s": 0.1, "share": "95%"},
        },
    ]
    webhook = {"name": "bot", "webhook": {"url": {"env": "ALERT_WEBHOOK"}}}
    return _argosy_with_accounts(
        place,
        {
            "objectives": {"slos": slos},
            "tracing": {"endpoint": place.upstream_url, "protocol": "http/protobuf"},
            "alerting": {"receivers": [webhook], "route": {"receiver": "bot"}},
        },
    )


def _argosy_with_accounts(place: Place, settings: Mapping[str, object]) -> Start:
    url = store_url(place.folder)
    settings = {"store": {"url": url}, "auth": {"mode": "required"}, **settings}
    return _argosy(place, {"kind": "argosy"}, settings, _account(url))


def _argosy(
    place: Place, replica: Mapping[str, object], settings: Mapping[str, object], key: str
) -> Start:
    config = {
        "port": place.port,
        "log_format": "json",
        "models": [{"name": MODEL, "replicas": [{"url": place.upstream_url, **replica}]}],
        **settings,
    }
    path = place.write("gateway.yaml", msgspec.yaml.encode(config))
    return Start([str(place.python), "-m", "argosy.cli", "gateway", "--config", str(path)], key)


def store_url(folder: Path) -> str:
    """Return the store of a gateway with this folder."""
    return f"sqlite:///{folder}/store.db"


def _account(url: str) -> str:
    """Return the key of an account with a price and limits of every kind, none of which it reaches."""
    store = open_store(url)
    try:
        store.migrate()
        accounts, actor = store.accounts, "benchmark"
        organisation = accounts.create_organisation("payers", actor=actor).id
        project = accounts.create_project(organisation, "tenant", actor=actor).id
        key, secret = accounts.create_key(project, "key", actor=actor)
        unreachable = 10**15
        store.limits_and_prices.set_limit(
            "organisation", organisation, "nano_dollars", unreachable, window="month", actor=actor
        )
        store.limits_and_prices.set_limit(
            "project", project, "tokens", unreachable, window="minute", actor=actor
        )
        store.limits_and_prices.set_limit(
            "project", project, "concurrency", unreachable, actor=actor
        )
        store.limits_and_prices.set_limit(
            "key", key.id, "requests", unreachable, window="minute", actor=actor
        )
        price = Price(model=MODEL, input=100, cached_input=10, output=400)
        store.limits_and_prices.set_price(price, actor=actor)
        return secret
    finally:
        store.close()


def nginx(place: Place) -> Start:
    """Plain nginx that reuses upstream connections and buffers nothing."""
    program = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        raise FileNotFoundError("not installed: install the distribution's package nginx")
    config = f"""
daemon off; worker_processes 1; pid {place.folder}/pid; error_log stderr error; worker_rlimit_nofile 65536;
events {{ worker_connections 32768; }}
http {{
  access_log off; client_body_temp_path {place.folder}; proxy_temp_path {place.folder};
  fastcgi_temp_path {place.folder}; uwsgi_temp_path {place.folder}; scgi_temp_path {place.folder};
  keepalive_requests 1000000000;
  upstream engine {{ server 127.0.0.1:{place.upstream}; keepalive 8192; keepalive_requests 1000000000; }}
  server {{
    listen 127.0.0.1:{place.port} backlog=4096;
    location / {{
      proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}
"""
    path = place.write("nginx.conf", config.encode())
    return Start([program, "-c", str(path), "-p", str(place.folder)])


def sglang_router(policy: str) -> Callable[[Place], Start]:
    """Return the start function of sglang-router with a policy."""

    def start(place: Place) -> Start:
        arguments = ["--worker-urls", place.upstream_url, "--policy", policy]
        arguments += ["--host", "127.0.0.1", "--port", str(place.port), "--log-level", "error"]
        arguments += ["--prometheus-port", str(free_port()), "--max-concurrent-requests", "-1"]
        return Start([str(place.python), "-m", "sglang_router.launch_router", *arguments])

    return start


def litellm(place: Place) -> Start:
    """LiteLLM's proxy with one worker and without a database."""
    parameters = {
        "model": f"openai/{MODEL}",
        "api_base": f"{place.upstream_url}/v1",
        "api_key": KEY,
    }
    key = f"sk-{secrets.token_urlsafe(32)}"  # the proxy accepts no other master key
    models = [{"model_name": MODEL, "litellm_params": parameters}]
    config = {"model_list": models, "general_settings": {"master_key": key}}
    path = place.write("litellm.yaml", json.dumps(config).encode())
    program = str(place.python.parent / "litellm")
    address = ["--host", "127.0.0.1", "--port", str(place.port)]
    return Start([program, "--config", str(path), *address], key)


PROXIES = {
    "argosy": Proxy(argosy, package="argosy"),
    "argosy-observed": Proxy(argosy_observed, package="argosy"),
    "argosy-plain": Proxy(argosy_plain, package="argosy"),
    "argosy-without-series": Proxy(argosy_without_series, package="argosy"),
    "argosy-without-console": Proxy(argosy_without_console, package="argosy"),
    "nginx": Proxy(nginx),
    "sglang-router": Proxy(
        sglang_router("round_robin"), "sglang-router", "sglang-router", rival=True
    ),
    "sglang-router-cache-aware": Proxy(
        sglang_router("cache_aware"), "sglang-router", "sglang-router", rival=True
    ),
    "litellm": Proxy(litellm, "litellm", "litellm", slow=True),
}
DEFAULT = ("argosy", "nginx", "sglang-router", "litellm")


# --- processes -------------------------------------------------------------------------------------


@contextlib.contextmanager
def running(
    proxy: Proxy, upstream: int, core: int, folder: Path, environments: Path
) -> Iterator[Running]:
    """Run a proxy on one core, and yield it after it has answered.

    Raises:
        PeerError: The proxy does not answer.
        FileNotFoundError: The proxy is not installed.
    """
    folder.mkdir(parents=True)
    python = interpreter(proxy.environment, environments)
    place = Place(upstream, free_port(), folder, python)
    start = proxy.start(place)
    log = folder / "log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            ["taskset", "-c", str(core), *start.command],
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            env=os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "127.0.0.1"},
            start_new_session=True,
        )
    try:
        _wait(process, place.port, start.key, log)
        version = _version(proxy, place.python, start.command[0])
        yield Running(place.port, start.key, version, psutil.Process(process.pid))
    finally:
        _end(process)


def free_port() -> int:
    """Return a free TCP port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def _wait(process: subprocess.Popen[bytes], port: int, key: str, log: Path) -> None:
    end = time.monotonic() + PATIENCE_S
    body = {"model": MODEL, "messages": [{"role": "user", "content": "ready?"}], "max_tokens": 1}
    headers = {"authorization": f"Bearer {key}"}
    problem = "no answer"
    while process.poll() is None and time.monotonic() < end:
        try:
            url = f"http://127.0.0.1:{port}/v1/chat/completions"
            answer = httpx2.post(url, json=body, headers=headers, timeout=20)
        except httpx2.TransportError:
            time.sleep(0.1)
            continue
        if answer.status_code == httpx2.codes.OK:
            return
        problem = f"status {answer.status_code}: {answer.text[:100]}"
        time.sleep(0.1)
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    raise PeerError(f"{problem}; {(lines or ['the log is empty'])[-1].strip()[:200]}")


def _version(proxy: Proxy, python: Path, program: str) -> str:
    if proxy.package is None:
        printed = subprocess.run([program, "-v"], capture_output=True, text=True, check=True)
        match = re.search(r"\d[\d.]+", printed.stderr + printed.stdout)
        return match[0] if match else ""
    code = f"import importlib.metadata as m; print(m.version({proxy.package!r}))"
    printed = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return printed.stdout.strip()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Terminate the process and its children, and kill them if they do not exit."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
