"""CPU time of the content filter per chunk, and how many characters it holds back, by kind of text and size of chunk.

    python -m benchmarks.content_filter [--chunks 20000]

All detectors of personal data and secrets are on. The texts are documentation (prose) and source (code) of this
repository, and lines that consist of what the detectors find (dense). Prints a JSON line for each case.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from argosy.policy.content import DETECTORS, Matcher, Rule, TextFilter

ROOT = Path(__file__).parents[1]
CHUNK_CHARS = (4, 20, 200)
DENSE = "Mail jo@example.com, card 4111 1111 1111 1111, call +49 170 1234567 or 10.0.0.1; AKIAIOSFODNN7EXAMPLE. "


def read_texts() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each kind."""
    for name, folder, pattern in (("prose", "docs", "*.md"), ("code", "src/argosy", "*.py")):
        yield name, "".join(path.read_text() for path in sorted((ROOT / folder).rglob(pattern)))
    yield "dense", DENSE * 20_000


def measure(matcher: Matcher, text: str, chunk_chars: int, max_chunks: int) -> dict[str, float]:
    """Return CPU times, in microseconds, and the mean of the held characters."""
    text_filter = TextFilter(matcher)
    times_us, held = [], []
    for start in range(0, min(len(text), max_chunks * chunk_chars), chunk_chars):
        chunk = text[start : start + chunk_chars]
        began_at = time.thread_time_ns()
        text_filter.feed(chunk)
        times_us.append((time.thread_time_ns() - began_at) / 1000)
        held.append(text_filter.held_chars)
    return {
        "chunks": len(times_us),
        "median_us": round(statistics.median(times_us), 2),
        "p99_us": round(statistics.quantiles(times_us, n=100)[98], 2),
        "held_chars": round(statistics.fmean(held), 2),
        "matches": sum(text_filter.counts.values()),
    }


def main() -> None:
    """Measure all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=20_000, help="chunks of each case")
    chunks = parser.parse_args().chunks
    matcher = Matcher([Rule(each, "redact") for group in DETECTORS.values() for each in group])
    for name, text in read_texts():
        for chunk_chars in CHUNK_CHARS:
            row = measure(matcher, text, chunk_chars, chunks)
            print(json.dumps({"text": name, "chunk_chars": chunk_chars} | row), flush=True)


if __name__ == "__main__":
    main()
