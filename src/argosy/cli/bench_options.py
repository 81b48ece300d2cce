"""The options of `argosy bench`: their names are those of the parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

SERVER_PANEL = "Server"
LOAD_PANEL = "Load"
PROMPTS_PANEL = "Prompts"
RESULTS_PANEL = "Results"

MAX_PLANNED = 10_000_000
"""Of what is planned before the run, all of it in memory."""

ArrivalName = Literal["poisson", "gamma", "constant"]

ResultFiles = Annotated[
    str,
    Argument(metavar="FILE[,FILE...]", help="Results of one side; patterns like 'old-*.json' too."),
]

Url = Annotated[
    str,
    Option(help="Of the server, or unix:PATH.", envvar="ARGOSY_URL", rich_help_panel=SERVER_PANEL),
]
Model = Annotated[
    str | None,
    Option(help="By default the first that the server has.", rich_help_panel=SERVER_PANEL),
]
ApiOption = Annotated[
    Literal["completions", "chat"], Option(help="Which API to ask.", rich_help_panel=SERVER_PANEL)
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
    str | None, Option(help="A JSON object that goes into each body.", rich_help_panel=SERVER_PANEL)
]
Temperature = Annotated[float, Option(min=0.0, help="0 is greedy.", rich_help_panel=SERVER_PANEL)]
IgnoreEos = Annotated[
    bool,
    Option(
        "--ignore-eos/--no-ignore-eos",
        help="Answers go on to the planned length, where the server can.",
        rich_help_panel=SERVER_PANEL,
    ),
]
ChunkUsage = Annotated[
    bool,
    Option(
        "--chunk-usage/--no-chunk-usage",
        help="Ask for a token count in each chunk, where the server can.",
        rich_help_panel=SERVER_PANEL,
    ),
]
Timeout = Annotated[
    float, Option(min=0.001, help="Seconds for one request.", rich_help_panel=SERVER_PANEL)
]

Rate = Annotated[
    str | None,
    Option(
        metavar="R[,R...]",
        help="Requests per second, sent on time whatever the server does; `inf` sends all at once."
        " Several are a sweep.",
        rich_help_panel=LOAD_PANEL,
    ),
]
ArrivalKind = Annotated[
    ArrivalName, Option("--arrival", help="How requests are spread.", rich_help_panel=LOAD_PANEL)
]
Burstiness = Annotated[
    float,
    Option(help="Of gamma arrivals: 1 is Poisson, less is burstier.", rich_help_panel=LOAD_PANEL),
]
Concurrency = Annotated[
    str | None,
    Option(
        metavar="N[,N...]",
        help="Without a rate: always so many at once. With one: at most so many.",
        rich_help_panel=LOAD_PANEL,
    ),
]
Requests = Annotated[
    int | None,
    Option(
        min=1, max=MAX_PLANNED, help="How many; 200 without a duration.", rich_help_panel=LOAD_PANEL
    ),
]
Duration = Annotated[
    float | None,
    Option(min=0.001, help="Seconds in which requests begin.", rich_help_panel=LOAD_PANEL),
]
Warmup = Annotated[
    int,
    Option(
        min=0,
        max=MAX_PLANNED,
        help="Requests to send first and leave out.",
        rich_help_panel=LOAD_PANEL,
    ),
]
Ramp = Annotated[
    float,
    Option(
        min=0.0, help="Seconds in which the load grows; left out too.", rich_help_panel=LOAD_PANEL
    ),
]
FindRate = Annotated[
    bool,
    Option(
        "--find-rate",
        help="Find the highest rate that holds the objectives, from --rate on.",
        rich_help_panel=LOAD_PANEL,
    ),
]
MinAttainment = Annotated[
    float,
    Option(
        min=0.0,
        max=1.0,
        help="Share of requests that has to keep them.",
        rich_help_panel=LOAD_PANEL,
    ),
]
Precision = Annotated[
    float, Option(min=0.001, help="Of the rate that is found.", rich_help_panel=LOAD_PANEL)
]
Seed = Annotated[
    int, Option(min=0, help="The same seed plans the same requests.", rich_help_panel=LOAD_PANEL)
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
    str, Option(metavar="LENGTHS", help="Answer tokens, likewise.", rich_help_panel=PROMPTS_PANEL)
]
PrefixLen = Annotated[
    int,
    Option(
        min=0, max=MAX_PLANNED, help="Tokens of a shared beginning.", rich_help_panel=PROMPTS_PANEL
    ),
]
PrefixGroups = Annotated[
    int,
    Option(
        min=1,
        max=MAX_PLANNED,
        help="How many such beginnings there are.",
        rich_help_panel=PROMPTS_PANEL,
    ),
]
Turns = Annotated[
    int, Option(min=1, help="Requests of a conversation.", rich_help_panel=PROMPTS_PANEL)
]
ThinkTime = Annotated[
    float, Option(min=0.0, help="Seconds between the turns.", rich_help_panel=PROMPTS_PANEL)
]
Prompts = Annotated[
    Path | None,
    Option(help="File of prompts: JSON lines, or a prompt a line.", rich_help_panel=PROMPTS_PANEL),
]
Trace = Annotated[
    Path | None,
    Option(
        help="Mooncake, BurstGPT or Azure trace: lengths, and times if there is no --rate.",
        rich_help_panel=PROMPTS_PANEL,
    ),
]
TraceSpeed = Annotated[
    float, Option(min=0.001, help="Play the trace so much faster.", rich_help_panel=PROMPTS_PANEL)
]
PromptForm = Annotated[
    Literal["auto", "tokens", "words"],
    Option(help="What synthetic prompts are made of.", rich_help_panel=PROMPTS_PANEL),
]
Tokenizer = Annotated[
    str | None,
    Option(
        metavar="PATH",
        help="A tokenizer.json, for token prompts where the server has no /tokenize.",
        rich_help_panel=PROMPTS_PANEL,
    ),
]

Goodput = Annotated[
    str | None,
    Option(
        metavar="OBJECTIVES",
        help="What a good request keeps, in ms: ttft:200,tpot:50,e2el:4000.",
        rich_help_panel=RESULTS_PANEL,
    ),
]
Save = Annotated[
    Path | None,
    Option(help="Write the result, with a row per request.", rich_help_panel=RESULTS_PANEL),
]
Html = Annotated[
    Path | None, Option(help="Write a report with plots.", rich_help_panel=RESULTS_PANEL)
]
Csv = Annotated[
    Path | None, Option(help="Write a row per request as CSV.", rich_help_panel=RESULTS_PANEL)
]
Prometheus = Annotated[
    Path | None,
    Option(
        help="Write the summaries for node_exporter's textfile collector (NAME.prom).",
        rich_help_panel=RESULTS_PANEL,
    ),
]
SelfCheck = Annotated[
    bool,
    Option(
        "--self-check",
        help="Measure this client's own noise, and leave.",
        rich_help_panel=RESULTS_PANEL,
    ),
]
