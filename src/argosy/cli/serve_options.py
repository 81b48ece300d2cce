"""Command-line options of `argosy serve` and `argosy replica`, named after the parameters that they set."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import typer
from typer import Argument, Option

from argosy.cli.failure import fail
from argosy.cli.sizes import parse_size

LogLevelName = Literal["debug", "info", "warning", "error"]
MODEL_PANEL = "Model"
MEMORY_PANEL = "Memory"
ACCESS_PANEL = "Access"
ADVANCED_PANEL = "Advanced"


def check_tool_format(name: str) -> str:
    """Return the name of a tool format. The name `list` prints the known ones and ends the command."""
    if name in {"auto", "none"}:
        return name
    from argosy.engine import tool_format_names

    names = tool_format_names()
    if name == "list":
        typer.echo("\n".join(names))
        raise typer.Exit
    if name not in names:
        fail(f"the tool format {name!r} is unknown; `--tool-format list` prints the known ones")
    return name


def check_labels(labels: list[str] | None) -> list[str] | None:
    """Return labels that have the form KEY=VALUE. Others end the command."""
    for label in labels or ():
        key, separator, _ = label.partition("=")
        if not (key and separator and label.isprintable()):
            fail(f"the label {label!r} has no key; write it as --label KEY=VALUE")
    return labels


def parse_overrides(text: str) -> dict[str, float | None]:
    """Parse the JSON object of `--override-generation-config`.

    Raises:
        typer.BadParameter: `text` is not an object of numbers.
    """
    try:
        return msgspec.json.decode(text, type=dict[str, float | None])
    except msgspec.DecodeError as error:
        raise typer.BadParameter(
            f'{error}; write an object of numbers, like {{"temperature": 0.6}}'
        ) from error


Model = Annotated[
    str | None,
    Argument(
        help="A directory in Hugging Face layout, a GGUF file, a name on the hub (owner/name, owner/name:Q4_K_M), or"
        " the name of a bundled model (argosy-mini). Also store:NAME or sha256:DIGEST for a model of the store, or a"
        " URL (s3://...)."
    ),
]
Host = Annotated[str, Option(help="Address to listen on.")]
Port = Annotated[int, Option(min=0, max=65535, help="Port to listen on; 0 selects a free port.")]
UnixSocketPath = Annotated[
    str | None, Option(help="Listen on this Unix socket instead of host and port.")
]
ServedModelNames = Annotated[
    list[str] | None, Option(help="Model name for requests; may be given several times.")
]

Revision = Annotated[str | None, Option(help="Branch, tag or commit.", rich_help_panel=MODEL_PANEL)]
Digest = Annotated[
    str | None,
    Option(
        help="Digest that the model must have (sha256:...). Its files are verified before they are loaded.",
        rich_help_panel=MODEL_PANEL,
    ),
]
DType = Annotated[
    Literal["auto", "bfloat16", "float32", "float16"],
    Option(help="Data type of weights and KV cache.", rich_help_panel=MODEL_PANEL),
]
Device = Annotated[
    Literal["auto", "cpu", "cuda"],
    Option(
        help="Device that runs the model; auto selects a GPU if there is one.",
        rich_help_panel=MODEL_PANEL,
    ),
]
Quantize = Annotated[
    Literal["int8", "int4", "fp8", "none"] | None,
    Option(
        help="Quantize weights while they are loaded; fp8 needs a CUDA device. By default, a quantized checkpoint "
        "computes with its own integers, and `none` dequantizes it.",
        rich_help_panel=MODEL_PANEL,
    ),
]
Task = Annotated[
    Literal["auto", "generate", "embed", "score"],
    Option(
        help="Use of the model: generate text, embed texts or score pairs of texts. auto follows the files of the"
        " checkpoint.",
        rich_help_panel=MODEL_PANEL,
    ),
]
ModelImplName = Annotated[
    Literal["auto", "argosy", "transformers"],
    Option(
        help="Implementation of the model: Argosy's own decoder, that of transformers, or auto: the own one for the"
        " families that it knows.",
        rich_help_panel=MODEL_PANEL,
    ),
]
TrustRemoteCode = Annotated[
    bool,
    Option(
        "--trust-remote-code",
        help="Run Python code in the model's directory, if transformers does not know it. It may do anything.",
        rich_help_panel=MODEL_PANEL,
    ),
]
ChatTemplatePath = Annotated[
    str | None,
    Option(help="Jinja file to use instead of the model's template.", rich_help_panel=MODEL_PANEL),
]
ToolFormat = Annotated[
    str,
    Option(
        help="Format of tool calls and reasoning: auto (from the chat template), none, or a name that "
        "`--tool-format list` prints.",
        callback=check_tool_format,
        rich_help_panel=MODEL_PANEL,
    ),
]
GenerationConfig = Annotated[
    str,
    Option(
        metavar="auto|none|FOLDER",
        help="Source of sampling defaults: the model's generation_config.json (auto), none, or that of a folder.",
        rich_help_panel=MODEL_PANEL,
    ),
]
OverrideGenerationConfig = Annotated[
    dict[str, float | None] | None,
    Option(
        parser=parse_overrides,
        metavar="JSON",
        help='Sampling defaults that replace those of the generation config, like {"temperature": 0.6}.',
        rich_help_panel=MODEL_PANEL,
    ),
]
MaxModelLen = Annotated[
    int | None,
    Option(min=1, help="Maximum tokens of prompt and output.", rich_help_panel=MODEL_PANEL),
]

MaxSeqs = Annotated[
    int,
    Option(min=1, help="Maximum number of running sequences.", rich_help_panel=MEMORY_PANEL),
]
KvMemory = Annotated[
    int | None,
    Option(
        parser=parse_size,
        metavar="SIZE",
        help="KV cache memory of each replica, like 8GiB; by default a part of the free memory.",
        rich_help_panel=MEMORY_PANEL,
    ),
]
KvDType = Annotated[
    Literal["auto", "fp8"],
    Option(
        help="Data type of the KV cache: auto is the model's, fp8 needs a GPU.",
        rich_help_panel=MEMORY_PANEL,
    ),
]
HostKvMemory = Annotated[
    int | None,
    Option(
        parser=parse_size,
        metavar="SIZE",
        help="Host memory for evicted KV blocks; by default none.",
        rich_help_panel=MEMORY_PANEL,
    ),
]
PackCache = Annotated[
    int | None,
    Option(
        parser=parse_size,
        metavar="SIZE",
        help="Disk space for packed weights, which make starts fast and let replicas share memory;"
        " 32GiB by default, 0 disables it.",
        rich_help_panel=MEMORY_PANEL,
    ),
]

Threads = Annotated[
    int | None,
    Option(
        min=1,
        max=1024,
        help="CPU threads of each replica. By default OMP_NUM_THREADS, or else as many as other processes leave free.",
        rich_help_panel=ADVANCED_PANEL,
    ),
]
MaxStepTokens = Annotated[
    int, Option(min=1, help="Token budget of an engine step.", rich_help_panel=ADVANCED_PANEL)
]
Batching = Annotated[
    Literal["continuous", "dynamic", "static"],
    Option(
        help="How requests share steps; dynamic and static are for comparison.",
        rich_help_panel=ADVANCED_PANEL,
    ),
]
PrefixCache = Annotated[
    bool,
    Option(
        "--prefix-cache/--no-prefix-cache",
        help="Reuse the KV blocks of prompts with a common prefix.",
        rich_help_panel=ADVANCED_PANEL,
    ),
]
RequestTimeout = Annotated[
    float,
    Option(min=0.001, help="Timeout of one request in seconds.", rich_help_panel=ADVANCED_PANEL),
]
UnknownFields = Annotated[
    Literal["ignore", "refuse"],
    Option(
        help="Unknown request fields: ignored and named in a response header, or refused.",
        rich_help_panel=ADVANCED_PANEL,
    ),
]
DrainDeadline = Annotated[
    float,
    Option(
        min=0,
        help="Seconds for running requests to finish after SIGTERM.",
        rich_help_panel=ADVANCED_PANEL,
    ),
]
Zone = Annotated[
    str,
    Option(
        help="Failure domain of the replica, such as a rack or an availability zone, for `argosy replicas list`.",
        rich_help_panel=ADVANCED_PANEL,
    ),
]
Labels = Annotated[
    list[str] | None,
    Option(
        "--label",
        metavar="KEY=VALUE",
        callback=check_labels,
        help="Label of the replica, for `argosy replicas list`; may be given several times.",
        rich_help_panel=ADVANCED_PANEL,
    ),
]
VllmMetrics = Annotated[
    bool,
    Option(
        "--vllm-metrics",
        help="Export metrics under vLLM's names too.",
        rich_help_panel=ADVANCED_PANEL,
    ),
]
ColocatedReplicas = Annotated[
    int,
    Option(
        min=0,
        help="Number of other replicas on the same CPUs or GPU, with which it shares cores and memory.",
        rich_help_panel=MEMORY_PANEL,
    ),
]
LogName = Annotated[
    str,
    Option(
        help="Log in the console format instead of JSON, with this name in each line.",
        rich_help_panel=ADVANCED_PANEL,
    ),
]
LogContent = Annotated[
    bool,
    Option(
        "--log-content",
        help="Keep prompts and raw outputs for `argosy explain`; all users who may explain a request can read them.",
        rich_help_panel=ADVANCED_PANEL,
    ),
]
LogLevel = Annotated[
    LogLevelName, Option(help="Lowest level that is logged.", rich_help_panel=ADVANCED_PANEL)
]

AllowedOrigins = Annotated[
    list[str] | None,
    Option(
        metavar="ORIGIN",
        help="Origin of web pages that may send requests, like https://app.example.com, or * for all; may be given"
        " several times. By default origins on this machine.",
        rich_help_panel=ACCESS_PANEL,
    ),
]
AuthModeOption = Annotated[
    Literal["auto", "required", "disabled"],
    Option(
        help="Which requests need an API key: all (required), none (disabled), or all once a key exists (auto)."
        " With auto, the first key is created if the server listens on a public address.",
        rich_help_panel=ACCESS_PANEL,
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
        rich_help_panel=ADVANCED_PANEL,
    ),
]
