"""Command-line options of `argosy serve` besides those of its replicas."""

from __future__ import annotations

from typing import Annotated, Literal

from typer import Option

LogContent = Annotated[
    bool,
    Option(
        "--log-content",
        help="Keep prompts and raw outputs for `argosy explain`; all users who may explain a request can read them.",
        rich_help_panel="Advanced",
    ),
]
AllowedOrigins = Annotated[
    list[str] | None,
    Option(
        metavar="ORIGIN",
        help="Origin of web pages that may send requests, like https://app.example.com, or * for all; may be given"
        " several times. By default origins on this machine.",
        rich_help_panel="Access",
    ),
]
AuthModeOption = Annotated[
    Literal["auto", "required", "disabled"],
    Option(
        help="Which requests need an API key: all (required), none (disabled), or all once a key exists (auto)."
        " With auto, the first key is created if the server listens on a public address.",
        rich_help_panel="Access",
    ),
]
ReplicaCount = Annotated[
    int,
    Option(
        min=1,
        help="Number of replica processes, each on its own GPU; without GPUs they share CPUs and memory.",
    ),
]
EmbeddingModels = Annotated[
    list[str] | None,
    Option(
        "--embedding-model",
        metavar="[NAME=]MODEL",
        help="Embedding model or reranker to serve at the same address, on the CPU; may be given several times.",
    ),
]
GpuSharingOption = Annotated[
    Literal["own", "shared"],
    Option(
        help="Whether several replicas may share a GPU; by default each has its own.",
        rich_help_panel="Advanced",
    ),
]
