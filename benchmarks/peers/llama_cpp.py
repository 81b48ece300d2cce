"""llama.cpp: `llama-server`, which gets the offline workloads over HTTP too."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import gguf

from benchmarks.peers.gguf_model import (
    add_sizes,
    add_word_tokens,
    pair_neighbours,
    tensors,
    write,
)
from benchmarks.peers.worker import MAX_SEQS, Request, Settings, Stamps, main

CACHE_TOKENS = 65536
"""KV cache of all sequences in tokens. For the 0.5B shape it has 0.8 GB in float16."""
TYPES = {"bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}


def convert(settings: Settings) -> Path:
    """Return the model as GGUF, which is written unless it exists."""
    if settings.model.endswith(".gguf"):
        return Path(settings.model)
    path = settings.converted("gguf")
    if path.exists():
        return path
    config = json.loads((Path(settings.model) / "config.json").read_text())
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, config["model_type"])
    add_sizes(writer, config)
    add_word_tokens(writer, config)
    kind = gguf.GGMLQuantizationType[TYPES[settings.weights]]
    for name, values in tensors(Path(settings.model) / "model.safetensors"):
        if values.ndim == 1:
            writer.add_tensor(name, values)
            continue
        is_llama = config["model_type"] == "llama"
        matrix = pair_neighbours(name, values, config) if is_llama else values
        writer.add_tensor(name, gguf.quants.quantize(matrix, kind), raw_dtype=kind)
    write(writer)
    return partial.rename(path)


def server(settings: Settings, port: int) -> list[str]:
    """Return the command of `llama-server`, with a slot for each sequence and a unified KV cache."""
    cache = "--cache-prompt" if settings.prefix_cache else "--no-cache-prompt"
    drafts = ["--spec-type", "ngram-simple"] if settings.speculation == "auto" else []
    if settings.draft is not None:
        drafts = ["--spec-draft-model", str(convert(replace(settings, model=settings.draft)))]
    return [
        *(str(Path(sys.prefix) / "build" / "bin" / "llama-server"), "-m", str(convert(settings))),
        *("--port", str(port), "--threads", str(settings.threads)),
        *("--parallel", str(MAX_SEQS), "--ctx-size", str(CACHE_TOKENS), "--kv-unified"),
        *("--flash-attn", "on", "--cache-ram", "0", cache, "--no-webui", "--log-disable"),
        *drafts,
    ]


class LlamaCpp:
    """Server process. A single request is streamed, several requests get whole answers."""

    def __init__(self, settings: Settings) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port: int = free.getsockname()[1]
        self._process = subprocess.Popen(server(settings, self._port))
        while not self._is_ready():
            if self._process.poll() is not None:
                raise SystemExit(f"llama-server ended with status {self._process.returncode}")
            time.sleep(0.1)
        weights = TYPES.get(settings.weights, settings.weights)
        self.version = f"{_version()}, {weights} weights, float16 KV cache, over HTTP"

    def run(self, requests: list[Request]) -> Stamps:
        """Send all requests at once, each on its own connection."""
        begin = time.perf_counter()
        with ThreadPoolExecutor(len(requests)) as pool:
            is_single = len(requests) == 1
            futures = [
                pool.submit(self._send_request, request, begin, stream=is_single)
                for request in requests
            ]
            return [future.result() for future in futures]

    def _send_request(self, request: Request, begin: float, *, stream: bool) -> list[float]:
        body = {
            "prompt": request.prompt,
            "max_tokens": request.output,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": stream,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        connection.request("POST", "/v1/completions", json.dumps(body))
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            raise RuntimeError(response.read().decode())
        stamps = [
            time.perf_counter() - begin
            for line in response
            if not stream or (line.startswith(b"data: {") and b'"finish_reason":null' in line)
        ]
        connection.close()
        return stamps

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.HTTPStatus.OK
        except OSError:
            return False
        finally:
            connection.close()


def _version() -> str:
    """Return the version of the Python package that contained the source."""
    info = (Path(sys.prefix) / "src" / "PKG-INFO").read_text().splitlines()
    return next(line.split()[1] for line in info if line.startswith("Version:"))


if __name__ == "__main__":
    main(LlamaCpp, server)
