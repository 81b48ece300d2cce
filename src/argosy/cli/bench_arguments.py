"""From the text of `argosy bench`'s options to what they mean."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argosy.bench import Arrivals, Load

DEFAULT_REQUESTS = 200


def loads(
    *,
    rates: list[float],
    limits: list[float],
    shape: float | None,
    requests: int | None,
    duration_s: float | None,
    warmup: int,
    ramp_s: float,
    traced: bool,
) -> tuple[Load, ...]:
    """Each rate with each concurrency; at 1 request per second when nothing is said."""
    from argosy.bench import Arrivals, BenchError, Load

    if any(limit != int(limit) or limit < 1 for limit in limits if math.isfinite(limit)):
        raise BenchError("A concurrency is a whole number of at least 1.")
    if not rates and not limits and not traced:
        rates = [1.0]
    arrivals: list[Arrivals | None] = [
        Arrivals(rate=None if math.isinf(rate) else rate, burstiness=shape, ramp_s=ramp_s)
        for rate in rates
    ]
    most = [None if math.isinf(limit) else int(limit) for limit in limits]
    return tuple(
        Load(
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


def count(requests: int | None, duration_s: float | None, trace: Path | None) -> int | None:
    """How many requests: what was said, else the default where nothing else ends the run."""
    return DEFAULT_REQUESTS if requests is None and duration_s is None and not trace else requests


def numbers(option: str, text: str | None) -> list[float]:
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


def headers(api_key: str | None, given: list[str]) -> dict[str, str]:
    """Those of each request. Raises BenchError."""
    from argosy.bench import BenchError

    if api_key and not (api_key.isascii() and api_key.isprintable()):
        raise BenchError("This is no key: it has characters that no header may have.")
    found = {"authorization": f"Bearer {api_key}"} if api_key else {}
    for line in given:
        name, colon, value = line.partition(":")
        if not colon or not name.strip() or not line.replace("\t", " ").isprintable():
            raise BenchError(f"{line!r} is no header: write NAME: VALUE.")
        found[name.strip().lower()] = value.strip()
    return found
