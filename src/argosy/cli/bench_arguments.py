"""Parsing of `argosy bench`'s option values. All functions raise BenchError for an invalid one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argosy.bench import ArrivalProcess, LoadSpec

DEFAULT_REQUESTS = 200


def parse_loads(
    *,
    rates: list[float],
    concurrencies: list[float],
    burstiness: float | None,
    requests: int | None,
    duration_s: float | None,
    warmup: int,
    ramp_s: float,
    has_trace: bool,
) -> tuple[LoadSpec, ...]:
    """Return one load for each combination of rate and concurrency. The default rate is 1 request per second."""
    from argosy.bench import ArrivalProcess, BenchError, LoadSpec

    if any(limit != int(limit) or limit < 1 for limit in concurrencies if math.isfinite(limit)):
        raise BenchError("A concurrency must be a whole number of at least 1.")
    if not rates and not concurrencies and not has_trace:
        rates = [1.0]
    arrivals: list[ArrivalProcess | None] = [
        ArrivalProcess(
            rate=None if math.isinf(rate) else rate, burstiness=burstiness, ramp_s=ramp_s
        )
        for rate in rates
    ]
    max_concurrencies = [None if math.isinf(limit) else int(limit) for limit in concurrencies]
    return tuple(
        LoadSpec(
            arrivals=arrival_process,
            concurrency=limit,
            requests=requests,
            duration_s=duration_s,
            warmup=warmup,
            ramp_s=ramp_s,
        )
        for arrival_process in arrivals or [None]
        for limit in max_concurrencies or [None]
    )


def resolve_request_count(
    requests: int | None, duration_s: float | None, trace: Path | None
) -> int | None:
    """Return the given number of requests, or the default of 200 if neither a duration nor a trace ends the run."""
    return DEFAULT_REQUESTS if requests is None and duration_s is None and not trace else requests


def parse_positive_numbers(option: str, text: str | None) -> list[float]:
    """Parse comma-separated numbers above 0."""
    from argosy.bench import BenchError

    try:
        parsed = [float(part) for part in text.split(",")] if text else []
    except ValueError:
        parsed = [math.nan]
    if not all(number > 0 for number in parsed):
        raise BenchError(f"{option} takes comma-separated numbers above 0, not {text!r}.")
    return parsed


def parse_object(text: str | None) -> dict[str, Any]:
    """Parse the JSON object of `--extra-body`."""
    from argosy.bench import BenchError

    try:
        parsed = json.loads(text) if text else {}
    except ValueError as error:
        raise BenchError(f"--extra-body is not JSON: {error}.") from error
    if not isinstance(parsed, dict):
        raise BenchError("--extra-body takes a JSON object, like '{\"top_p\": 0.9}'.")
    return parsed


def build_headers(api_key: str | None, header_lines: list[str]) -> dict[str, str]:
    """Return the headers of every request, with names in lower case."""
    from argosy.bench import BenchError

    if api_key and not (api_key.isascii() and api_key.isprintable()):
        raise BenchError("The API key contains characters that no header may have; copy it again.")
    parsed = {"authorization": f"Bearer {api_key}"} if api_key else {}
    for line in header_lines:
        name, colon, value = line.partition(":")
        if not colon or not name.strip() or not line.replace("\t", " ").isprintable():
            raise BenchError(f"{line!r} is not a header: write NAME: VALUE.")
        parsed[name.strip().lower()] = value.strip()
    return parsed
