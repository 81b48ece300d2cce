"""From the text of `argosy bench`'s options to what they mean."""

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
    """Each rate with each concurrency; at 1 request per second when nothing is said."""
    from argosy.bench import ArrivalProcess, BenchError, LoadSpec

    if any(limit != int(limit) or limit < 1 for limit in concurrencies if math.isfinite(limit)):
        raise BenchError("A concurrency is a whole number of at least 1.")
    if not rates and not concurrencies and not has_trace:
        rates = [1.0]
    arrivals: list[ArrivalProcess | None] = [
        ArrivalProcess(
            rate=None if math.isinf(rate) else rate, burstiness=burstiness, ramp_s=ramp_s
        )
        for rate in rates
    ]
    most = [None if math.isinf(limit) else int(limit) for limit in concurrencies]
    return tuple(
        LoadSpec(
            arrivals=each,
            concurrency=limit,
            requests=requests,
            duration_s=duration_s,
            warmup=warmup,
            ramp_s=ramp_s,
        )
        for each in arrivals or [None]
        for limit in most or [None]
    )


def resolve_request_count(
    requests: int | None, duration_s: float | None, trace: Path | None
) -> int | None:
    """How many requests: what was said, else the default where nothing else ends the run."""
    return DEFAULT_REQUESTS if requests is None and duration_s is None and not trace else requests


def parse_positive_numbers(option: str, text: str | None) -> list[float]:
    """Numbers above 0 with commas between them. Raises BenchError."""
    from argosy.bench import BenchError

    try:
        found = [float(part) for part in text.split(",")] if text else []
    except ValueError:
        found = [math.nan]
    if not all(number > 0 for number in found):
        raise BenchError(f"{option} takes numbers above 0, with commas between them, not {text!r}.")
    return found


def parse_object(text: str | None) -> dict[str, Any]:
    """The JSON object that goes into each body. Raises BenchError."""
    from argosy.bench import BenchError

    try:
        parsed = json.loads(text) if text else {}
    except ValueError as error:
        raise BenchError(f"--extra-body is no JSON: {error}.") from error
    if not isinstance(parsed, dict):
        raise BenchError("--extra-body takes a JSON object, like '{\"top_p\": 0.9}'.")
    return parsed


def build_headers(api_key: str | None, header_lines: list[str]) -> dict[str, str]:
    """Those of each request. Raises BenchError."""
    from argosy.bench import BenchError

    if api_key and not (api_key.isascii() and api_key.isprintable()):
        raise BenchError("This is no key: it has characters that no header may have.")
    found = {"authorization": f"Bearer {api_key}"} if api_key else {}
    for line in header_lines:
        name, colon, value = line.partition(":")
        if not colon or not name.strip() or not line.replace("\t", " ").isprintable():
            raise BenchError(f"{line!r} is no header: write NAME: VALUE.")
        found[name.strip().lower()] = value.strip()
    return found
