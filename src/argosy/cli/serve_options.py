"""The options of `argosy serve` and `argosy replica`: their names are those of the parameters."""

from __future__ import annotations

from typing import Annotated, Literal

from typer import Argument, Option

from argosy.cli.sizes import parse_size

LogLevelName = Literal["debug", "info", "warning", "error"]
MODEL_PANEL = "Model"
MEMORY_PANEL = "Memory"
ACCESS_PANEL = "Access"
ADVANCED_PANEL = "Advanced"

Model = Annotated[
    str | None, Argument(help="A directory in Hugging Face layout, or a name on the hub.")
]
Host = Annotated[str, Option(help="Address to listen on.")]
Port = Annotated[int, Option(min=0, max=65535, help="0 takes a free one.")]
UnixSocketPath = Annotated[
    str | None, Option(help="Listen on this Unix socket instead of host and port.")
]
ServedModelNames = Annotated[
    list[str] | None, Option(help="Name for requests to use; may be given several times.")
]

Revision = Annotated[str | None, Option(help="Branch, tag or commit.", rich_help_panel=MODEL_PANEL)]
DType = Annotated[
    Literal["auto", "bfloat16", "float32", "float16"],
    Option(help="How weights and KV are held.", rich_help_panel=MODEL_PANEL),
]
Device = Annotated[
    Literal["auto", "cpu", "cuda"],
    Option(help="What computes; auto takes a GPU where there is one.", rich_help_panel=MODEL_PANEL),
]
Quantize = Annotated[
    Literal["int8", "int4", "fp8"] | None,
    Option(
        help="Round weights as they are loaded; fp8 needs a CUDA device.",
        rich_help_panel=MODEL_PANEL,
    ),
]
ChatTemplatePath = Annotated[
    str | None,
    Option(help="Jinja file to use instead of the model's.", rich_help_panel=MODEL_PANEL),
]
MaxModelLen = Annotated[
    int | None, Option(min=1, help="Most tokens of prompt and answer.", rich_help_panel=MODEL_PANEL)
]

MaxSeqs = Annotated[
    int, Option(min=1, help="Most sequences at once.", rich_help_panel=MEMORY_PANEL)
]
KvMemory = Annotated[
    int | None,
    Option(
        parser=parse_size,
        metavar="SIZE",
        help="For each replica's KV cache, like 8GiB; by default a part of what is free.",
        rich_help_panel=MEMORY_PANEL,
    ),
]
KvDType = Annotated[
    Literal["auto", "fp8"],
    Option(
        help="How the KV cache is held: like the model, or in 8 bits (GPU only).",
        rich_help_panel=MEMORY_PANEL,
    ),
]
HostKvMemory = Annotated[
    int | None,
    Option(
        parser=parse_size,
        metavar="SIZE",
        help="Host memory for KV blocks that are evicted; by default none.",
        rich_help_panel=MEMORY_PANEL,
    ),
]
PackCache = Annotated[
    int | None,
    Option(
        parser=parse_size,
        metavar="SIZE",
        help="Disk for packed weights, so that starts are fast and replicas share memory;"
        " 32GiB by default, 0 is none.",
        rich_help_panel=MEMORY_PANEL,
    ),
]

Threads = Annotated[
    int | None,
    Option(min=1, max=1024, help="CPU threads; for each replica.", rich_help_panel=ADVANCED_PANEL),
]
MaxStepTokens = Annotated[
    int, Option(min=1, help="Token budget of a step.", rich_help_panel=ADVANCED_PANEL)
]
Batching = Annotated[
    Literal["continuous", "dynamic", "static"],
    Option(
        help="How requests share steps; the others are for comparison.",
        rich_help_panel=ADVANCED_PANEL,
    ),
]
PrefixCache = Annotated[
    bool,
    Option(
        "--prefix-cache/--no-prefix-cache",
        help="Reuse the KV of prompts that begin alike.",
        rich_help_panel=ADVANCED_PANEL,
    ),
]
RequestTimeout = Annotated[
    float, Option(min=0.001, help="Seconds for one request.", rich_help_panel=ADVANCED_PANEL)
]
DrainDeadline = Annotated[
    float,
    Option(
        min=0, help="Seconds to finish what runs after SIGTERM.", rich_help_panel=ADVANCED_PANEL
    ),
]
VllmMetrics = Annotated[
    bool,
    Option(
        "--vllm-metrics", help="Also under vLLM's metric names.", rich_help_panel=ADVANCED_PANEL
    ),
]
LogLevel = Annotated[
    LogLevelName, Option(help="How much the log says.", rich_help_panel=ADVANCED_PANEL)
]

AllowedOrigins = Annotated[
    list[str] | None,
    Option(
        metavar="ORIGIN",
        help="Web pages that may ask, like https://app.example.com, or * for all; may be given several times. "
        "By default those of this machine.",
        rich_help_panel=ACCESS_PANEL,
    ),
]
AuthModeOption = Annotated[
    Literal["auto", "required", "disabled"],
    Option(
        help="Who needs an API key: auto lets this machine in while there are no keys, and makes the first"
        " one when others can connect; keys asks everybody; off asks nobody.",
        rich_help_panel=ACCESS_PANEL,
    ),
]
ReplicaCount = Annotated[
    int,
    Option(
        min=1,
        help="Processes that serve the model, each on a GPU of its own; without GPUs they divide CPUs and memory.",
    ),
]
GpuSharingOption = Annotated[
    Literal["own", "shared"],
    Option(
        help="May several replicas share a GPU? By default each has its own.",
        rich_help_panel=ADVANCED_PANEL,
    ),
]
