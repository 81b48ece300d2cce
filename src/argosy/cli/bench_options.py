"""Command-line options of `argosy bench`, named after the parameters that they set."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

SERVER_PANEL = "Server"
LOAD_PANEL = "Load"
PROMPTS_PANEL = "Prompts"
RESULTS_PANEL = "Results"

MAX_PLANNED = 10_000_000
"""Largest number of planned requests or tokens. The whole plan is held in memory."""

ArrivalName = Literal["poisson", "gamma", "constant"]

ResultFiles = Annotated[
    str,
    Argument(
        metavar="FILE[,FILE...]", help="Result files of one side, or patterns like 'old-*.json'."
    ),
]

Url = Annotated[
    str,
    Option(
        help="URL of the server, or unix:PATH.",
        envvar="ARGOSY_URL",
        rich_help_panel=SERVER_PANEL,
    ),
]
Model = Annotated[
    str | None,
    Option(help="Model name; by default the server's first model.", rich_help_panel=SERVER_PANEL),
]
ApiOption = Annotated[
    Literal["completions", "chat"], Option(help="API to measure.", rich_help_panel=SERVER_PANEL)
]
ApiKey = Annotated[
    str | None,
    Option(
        help="Sent as a bearer token.",
        envvar=["ARGOSY_API_KEY", "OPENAI_API_KEY"],
        rich_help_panel=SERVER_PANEL,
    ),
]
Header = Annotated[
    list[str] | None,
    Option(help="`NAME: VALUE`; may be given several times.", rich_help_panel=SERVER_PANEL),
]
ExtraBody = Annotated[
    str | None,
    Option(
        help="JSON object whose fields are added to each request.", rich_help_panel=SERVER_PANEL
    ),
]
Temperature = Annotated[float, Option(min=0.0, help="0 is greedy.", rich_help_panel=SERVER_PANEL)]
IgnoreEos = Annotated[
    bool,
    Option(
        "--ignore-eos/--no-ignore-eos",
        help="Generate up to the planned length, if the server supports it.",
        rich_help_panel=SERVER_PANEL,
    ),
]
ChunkUsage = Annotated[
    bool,
    Option(
        "--chunk-usage/--no-chunk-usage",
        help="Request a token count in each chunk, if the server supports it.",
        rich_help_panel=SERVER_PANEL,
    ),
]
Timeout = Annotated[
    float,
    Option(min=0.001, help="Timeout of one request in seconds.", rich_help_panel=SERVER_PANEL),
]

Rate = Annotated[
    str | None,
    Option(
        metavar="R[,R...]",
        help="Requests per second, sent on schedule even if the server is slow; `inf` sends all at once."
        " Several are a sweep.",
        rich_help_panel=LOAD_PANEL,
    ),
]
ArrivalKind = Annotated[
    ArrivalName,
    Option("--arrival", help="Distribution of the arrivals.", rich_help_panel=LOAD_PANEL),
]
Burstiness = Annotated[
    float,
    Option(
        help="Burstiness of gamma arrivals: 1 is Poisson, less is burstier.",
        rich_help_panel=LOAD_PANEL,
    ),
]
Concurrency = Annotated[
    str | None,
    Option(
        metavar="N[,N...]",
        help="Requests in flight: without --rate exactly this number, with --rate at most.",
        rich_help_panel=LOAD_PANEL,
    ),
]
Requests = Annotated[
    int | None,
    Option(
        min=1,
        max=MAX_PLANNED,
        help="Number of requests; 200 without a duration.",
        rich_help_panel=LOAD_PANEL,
    ),
]
Duration = Annotated[
    float | None,
    Option(min=0.001, help="Seconds in which requests are started.", rich_help_panel=LOAD_PANEL),
]
Warmup = Annotated[
    int,
    Option(
        min=0,
        max=MAX_PLANNED,
        help="Number of warm-up requests, which are not measured.",
        rich_help_panel=LOAD_PANEL,
    ),
]
Ramp = Annotated[
    float,
    Option(
        min=0.0,
        help="Seconds in which the load grows; not measured.",
        rich_help_panel=LOAD_PANEL,
    ),
]
FindRate = Annotated[
    bool,
    Option(
        "--find-rate",
        help="Find the highest rate that meets the objectives, starting at --rate.",
        rich_help_panel=LOAD_PANEL,
    ),
]
MinAttainment = Annotated[
    float,
    Option(
        min=0.0,
        max=1.0,
        help="Share of requests that must meet the objectives.",
        rich_help_panel=LOAD_PANEL,
    ),
]
Precision = Annotated[
    float,
    Option(min=0.001, help="Relative precision of the found rate.", rich_help_panel=LOAD_PANEL),
]
Seed = Annotated[
    int,
    Option(
        min=0,
        help="Seed of the plan; the same seed plans the same requests.",
        rich_help_panel=LOAD_PANEL,
    ),
]

InputLen = Annotated[
    str,
    Option(
        metavar="LENGTHS",
        help="Prompt tokens: 128, uniform:32-512, normal:256,64 or lognormal:200,0.8.",
        rich_help_panel=PROMPTS_PANEL,
    ),
]
OutputLen = Annotated[
    str,
    Option(
        metavar="LENGTHS", help="Output tokens, in the same syntax.", rich_help_panel=PROMPTS_PANEL
    ),
]
PrefixLen = Annotated[
    int,
    Option(
        min=0,
        max=MAX_PLANNED,
        help="Tokens of a shared prompt prefix.",
        rich_help_panel=PROMPTS_PANEL,
    ),
]
PrefixGroups = Annotated[
    int,
    Option(
        min=1,
        max=MAX_PLANNED,
        help="Number of different prefixes.",
        rich_help_panel=PROMPTS_PANEL,
    ),
]
Turns = Annotated[
    int, Option(min=1, help="Requests per conversation.", rich_help_panel=PROMPTS_PANEL)
]
ThinkTime = Annotated[
    float, Option(min=0.0, help="Seconds between two turns.", rich_help_panel=PROMPTS_PANEL)
]
Prompts = Annotated[
    Path | None,
    Option(
        help="File of prompts: JSON lines, or text with one prompt per line.",
        rich_help_panel=PROMPTS_PANEL,
    ),
]
Trace = Annotated[
    Path | None,
    Option(
        help="Mooncake, BurstGPT or Azure trace for lengths, and for times without --rate.",
        rich_help_panel=PROMPTS_PANEL,
    ),
]
TraceSpeed = Annotated[
    float,
    Option(min=0.001, help="Speed factor of the trace's times.", rich_help_panel=PROMPTS_PANEL),
]
PromptForm = Annotated[
    Literal["auto", "tokens", "words"],
    Option(help="Content of synthetic prompts.", rich_help_panel=PROMPTS_PANEL),
]
Tokenizer = Annotated[
    str | None,
    Option(
        metavar="PATH",
        help="A tokenizer.json for token prompts if the server has no /tokenize.",
        rich_help_panel=PROMPTS_PANEL,
    ),
]

Goodput = Annotated[
    str | None,
    Option(
        metavar="OBJECTIVES",
        help="Objectives of a good request in ms: ttft:200,tpot:50,e2el:4000.",
        rich_help_panel=RESULTS_PANEL,
    ),
]
Save = Annotated[
    Path | None,
    Option(help="JSON file for the result, with a row per request.", rich_help_panel=RESULTS_PANEL),
]
Html = Annotated[
    Path | None, Option(help="HTML file for a report with plots.", rich_help_panel=RESULTS_PANEL)
]
Csv = Annotated[
    Path | None, Option(help="CSV file with a row per request.", rich_help_panel=RESULTS_PANEL)
]
Prometheus = Annotated[
    Path | None,
    Option(
        help="File for the summaries in the format of node_exporter's textfile collector (NAME.prom).",
        rich_help_panel=RESULTS_PANEL,
    ),
]
SelfCheck = Annotated[
    bool,
    Option(
        "--self-check",
        help="Measure the noise of this client and exit.",
        rich_help_panel=RESULTS_PANEL,
    ),
]
