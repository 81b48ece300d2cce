"""Command-line options of `argosy bench`, named after the parameters that they set."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

_server = partial(Option, rich_help_panel="Server")
_load = partial(Option, rich_help_panel="Load")
_prompts = partial(Option, rich_help_panel="Prompts")
_results = partial(Option, rich_help_panel="Results")

MAX_PLANNED = 10_000_000
"""Largest number of planned requests or tokens. The whole plan is held in memory."""

ArrivalName = Literal["poisson", "gamma", "constant"]

ResultFiles = Annotated[
    str,
    Argument(
        metavar="FILE[,FILE...]", help="Result files of one side, or patterns like 'old-*.json'."
    ),
]

Url = Annotated[str, _server(help="URL of the server, or unix:PATH.", envvar="ARGOSY_URL")]
Model = Annotated[str | None, _server(help="Model name; by default the server's first model.")]
ApiOption = Annotated[Literal["completions", "chat"], _server(help="API to measure.")]
ApiKey = Annotated[
    str | None, _server(help="Sent as a bearer token.", envvar=["ARGOSY_API_KEY", "OPENAI_API_KEY"])
]
Header = Annotated[list[str] | None, _server(help="`NAME: VALUE`; may be given several times.")]
ExtraBody = Annotated[
    str | None, _server(help="JSON object whose fields are added to each request.")
]
Temperature = Annotated[float, _server(min=0.0, help="0 is greedy.")]
IgnoreEos = Annotated[
    bool,
    _server(
        "--ignore-eos/--no-ignore-eos",
        help="Generate up to the planned length, if the server supports it.",
    ),
]
ChunkUsage = Annotated[
    bool,
    _server(
        "--chunk-usage/--no-chunk-usage",
        help="Request a token count in each chunk, if the server supports it.",
    ),
]
Timeout = Annotated[float, _server(min=0.001, help="Timeout of one request in seconds.")]

Rate = Annotated[
    str | None,
    _load(
        metavar="R[,R...]",
        help="Requests per second, sent on schedule even if the server is slow; `inf` sends all at once."
        " Several are a sweep.",
    ),
]
ArrivalKind = Annotated[ArrivalName, _load("--arrival", help="Distribution of the arrivals.")]
Burstiness = Annotated[
    float, _load(help="Burstiness of gamma arrivals: 1 is Poisson, less is burstier.")
]
Concurrency = Annotated[
    str | None,
    _load(
        metavar="N[,N...]",
        help="Requests in flight: without --rate exactly this number, with --rate at most.",
    ),
]
Requests = Annotated[
    int | None, _load(min=1, max=MAX_PLANNED, help="Number of requests; 200 without a duration.")
]
Duration = Annotated[float | None, _load(min=0.001, help="Seconds in which requests are started.")]
Warmup = Annotated[
    int, _load(min=0, max=MAX_PLANNED, help="Number of warm-up requests, which are not measured.")
]
Ramp = Annotated[float, _load(min=0.0, help="Seconds in which the load grows; not measured.")]
FindRate = Annotated[
    bool,
    _load(
        "--find-rate", help="Find the highest rate that meets the objectives, starting at --rate."
    ),
]
MinAttainment = Annotated[
    float, _load(min=0.0, max=1.0, help="Share of requests that must meet the objectives.")
]
Precision = Annotated[float, _load(min=0.001, help="Relative precision of the found rate.")]
Seed = Annotated[int, _load(min=0, help="Seed of the plan; the same seed plans the same requests.")]

InputLen = Annotated[
    str,
    _prompts(
        metavar="LENGTHS",
        help="Prompt tokens: 128, uniform:32-512, normal:256,64 or lognormal:200,0.8.",
    ),
]
OutputLen = Annotated[str, _prompts(metavar="LENGTHS", help="Output tokens, in the same syntax.")]
PrefixLen = Annotated[
    int, _prompts(min=0, max=MAX_PLANNED, help="Tokens of a shared prompt prefix.")
]
PrefixGroups = Annotated[
    int, _prompts(min=1, max=MAX_PLANNED, help="Number of different prefixes.")
]
Turns = Annotated[int, _prompts(min=1, help="Requests per conversation.")]
ThinkTime = Annotated[float, _prompts(min=0.0, help="Seconds between two turns.")]
Prompts = Annotated[
    Path | None, _prompts(help="File of prompts: JSON lines, or text with one prompt per line.")
]
Trace = Annotated[
    Path | None,
    _prompts(help="Mooncake, BurstGPT or Azure trace for lengths, and for times without --rate."),
]
TraceSpeed = Annotated[float, _prompts(min=0.001, help="Speed factor of the trace's times.")]
PromptForm = Annotated[
    Literal["auto", "tokens", "words"], _prompts(help="Content of synthetic prompts.")
]
Tokenizer = Annotated[
    str | None,
    _prompts(
        metavar="PATH", help="A tokenizer.json for token prompts if the server has no /tokenize."
    ),
]

Goodput = Annotated[
    str | None,
    _results(
        metavar="OBJECTIVES", help="Objectives of a good request in ms: ttft:200,tpot:50,e2el:4000."
    ),
]
Save = Annotated[Path | None, _results(help="JSON file for the result, with a row per request.")]
Html = Annotated[Path | None, _results(help="HTML file for a report with plots.")]
Csv = Annotated[Path | None, _results(help="CSV file with a row per request.")]
Prometheus = Annotated[
    Path | None,
    _results(
        help="File for the summaries in the format of node_exporter's textfile collector (NAME.prom)."
    ),
]
SelfCheck = Annotated[
    bool, _results("--self-check", help="Measure the noise of this client and exit.")
]
