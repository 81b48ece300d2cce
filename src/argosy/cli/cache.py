"""`argosy cache`: figures and purges of caches of answers, and whether the semantic cache may be on."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from msgspec import Meta

from argosy.cli.embed import fetch_vectors
from argosy.cli.failure import fail
from argosy.cli.output import JsonOutput, print_records, print_result
from argosy.cli.server_client import (
    DEFAULT_URL,
    GatewayApiKey,
    GatewayUrl,
    ServerApiKey,
    ServerUrl,
    call_admin_api,
    fail_without_server,
    open_client,
    send_json,
)
from argosy.policy.paraphrase import (
    CacheEvaluation,
    GuardName,
    LabelledPair,
    count_hits,
    guard_version,
)

if TYPE_CHECKING:
    import httpx2

app = typer.Typer(help="Caches of answers.", no_args_is_help=True)
MAX_PAIRS = 100_000
MAX_PAIRS_BYTES = 256 << 20
"""Size of the largest file of pairs."""
BATCH_SIZE = 32
"""Texts of one request for embeddings."""
THRESHOLDS = (0.85, 0.88, 0.9, 0.92, 0.95)
GUARDS: tuple[GuardName, ...] = ("no_substitution", "no_residual")


class _Pair(LabelledPair, frozen=True):
    a: Annotated[str, Meta(min_length=1, max_length=2000)]
    b: Annotated[str, Meta(min_length=1, max_length=2000)]


@app.command()
def evaluate(
    *,
    pairs: Annotated[
        Path,
        typer.Option(
            help="JSON lines with two questions `a` and `b`, whether they have the `same` answer, and a `kind`."
        ),
    ],
    embedding_model: Annotated[str, typer.Option(help="Name of the model at the server.")],
    threshold: Annotated[
        float, typer.Option(min=0.85, max=1.0, help="Smallest similarity.")
    ] = 0.85,
    output: Annotated[
        Path | None, typer.Option(help="File for the report, with the pairs that went wrong.")
    ] = None,
    url: ServerUrl = DEFAULT_URL,
    api_key: ServerApiKey = None,
    json: JsonOutput = False,
) -> None:
    """Evaluate the semantic cache on labelled pairs of questions, and print what a cache rule needs to turn it on."""
    rows, pairs_digest = _read_pairs(pairs)
    with open_client(url, api_key) as client, fail_without_server(url):
        digest = _find_digest(client, embedding_model)
        similarities = _compute_similarities(client, embedding_model, rows)
    equal_pairs = sum(row.same for row in rows)
    evaluations = []
    for guard in GUARDS:
        for each in sorted({threshold, *THRESHOLDS}):
            hits, wrong = count_hits(rows, similarities, guard, each)
            evaluation = CacheEvaluation(
                embedding_digest=digest,
                pairs_digest=pairs_digest,
                guard=guard,
                guard_version=guard_version(),
                threshold=each,
                equal_pairs=equal_pairs,
                hits=hits,
                unequal_pairs=len(rows) - equal_pairs,
                wrong_answers=wrong,
            )
            evaluations.append(evaluation)
    unguarded = count_hits(rows, similarities, None, threshold)
    if output is not None:
        report = _build_report(rows, similarities, evaluations, threshold, unguarded)
        output.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    print_records(
        evaluations,
        ("Guard", "Threshold", "Hits", "Wrong answers", "Upper 95 % bound"),
        lambda row: (
            row.guard,
            f"{row.threshold:g}",
            f"{row.hits} of {row.equal_pairs}",
            f"{row.wrong_answers} of {row.unequal_pairs}",
            f"{row.wrong_bound:.2%}",
        ),
        "",
        json=json,
    )
    if not json:
        typer.echo(
            f"\nWithout a guard, {unguarded[0]} hits and {unguarded[1]} wrong answers at {threshold:g}. "
            "For a cache rule:\n"
        )
        chosen = [each for each in evaluations if each.threshold == threshold]
        for evaluation in chosen:
            typer.echo(f"  evaluation: {msgspec.json.encode(evaluation).decode()}")


@app.command()
def show(
    *, url: GatewayUrl = DEFAULT_URL, api_key: GatewayApiKey = None, json: JsonOutput = False
) -> None:
    """Show the hit rates of cache rules at one gateway since it started."""
    rules = call_admin_api(url, api_key, "GET", "/admin/cache")["data"]
    print_records(
        rules,
        ("Rule", "Hit rate", "Saved", "Requests", "Questions", "Wrong answers of a dry run"),
        lambda row: (
            row["rule"],
            "" if row["hit_rate"] is None else f"{row['hit_rate']:.1%}",
            f"{row['saved_s']:.1f} s",
            _format_counts(row["results"]),
            _format_counts(row["questions"]),
            "{:.1%} to {:.1%}".format(*row["wrong_answers"]) if row["wrong_answers"] else "",
        ),
        "No cache rule has matched a request.",
        json=json,
    )


@app.command()
def purge(
    *,
    project: Annotated[
        str | None, typer.Option(help="Id of the project that asked; by default all.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Name of the model that answered; by default all.")
    ] = None,
    url: GatewayUrl = DEFAULT_URL,
    api_key: GatewayApiKey = None,
    json: JsonOutput = False,
) -> None:
    """Remove kept answers at all gateways of the store."""
    body = {"project": project, "model": model}
    given = {name: value for name, value in body.items() if value is not None}
    result = call_admin_api(url, api_key, "POST", "/admin/cache/purge", given)
    missing = ", ".join(result["unreachable"])
    message = f"Removed {result['purged']} answers at {result['gateways']} gateways."
    print_result(result, message + (f" Repeat it for {missing}." if missing else ""), json=json)
    if missing:
        raise typer.Exit(1)


def _format_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def _read_pairs(path: Path) -> tuple[list[LabelledPair], str]:
    """Return the pairs of a file, and its digest. An invalid file ends the command."""
    decoder = msgspec.json.Decoder(_Pair)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_PAIRS_BYTES + 1)
    except OSError as error:
        fail(f"cannot read {path}: {error.strerror}")
    lines = content.splitlines()
    if len(content) > MAX_PAIRS_BYTES or len(lines) > MAX_PAIRS:
        fail(
            f"{path} has more than {MAX_PAIRS} pairs or {MAX_PAIRS_BYTES} bytes; take a part of it"
        )
    rows = list[LabelledPair]()
    for number, line in enumerate(lines, 1):
        try:
            rows.append(decoder.decode(line))
        except msgspec.DecodeError as error:
            fail(f"line {number} of {path} is no labelled pair: {error}")
    if len({row.same for row in rows}) != 2:
        fail(f"{path} needs pairs with the same answer and pairs with another one")
    return rows, hashlib.sha256(content).hexdigest()


def _find_digest(client: httpx2.Client, model: str) -> str:
    """Return the digest of a model at the server, or `unverified` if its replicas report none."""
    cards = send_json(client, "GET", "/v1/models").get("data") or ()
    digests = {str(card.get("id")): card.get("digest") for card in cards}
    if model not in digests:
        fail(f"the server has no model {model!r}; its models are {', '.join(digests) or 'none'}")
    return str(digests[model] or "unverified")


def _compute_similarities(
    client: httpx2.Client, model: str, rows: list[LabelledPair]
) -> list[float]:
    """Return the cosine similarity of each pair."""
    import numpy as np

    texts = list(dict.fromkeys(text for row in rows for text in (row.a, row.b)))
    vectors = dict[str, Any]()
    for start in range(0, len(texts), BATCH_SIZE):
        batch = texts[start : start + BATCH_SIZE]
        for text, vector in zip(
            batch, fetch_vectors(client, {"model": model, "input": batch}), strict=True
        ):
            array = np.array(vector, np.float32)
            vectors[text] = array / np.linalg.norm(array)
    return [float(vectors[row.a] @ vectors[row.b]) for row in rows]


def _build_report(
    rows: list[LabelledPair],
    similarities: list[float],
    evaluations: list[CacheEvaluation],
    threshold: float,
    unguarded: tuple[int, int],
) -> dict[str, Any]:
    """Return the report: all evaluations, what happens without a guard, and the pairs that get a wrong answer."""
    wrong = [
        {
            "guard": guard,
            "similarity": round(similarity, 4),
            "a": row.a,
            "b": row.b,
            "kind": row.kind,
        }
        for guard in GUARDS
        for row, similarity in zip(rows, similarities, strict=True)
        if count_hits([row], [similarity], guard, threshold)[1]
    ]
    return {
        "evaluations": [
            msgspec.to_builtins(each) | {"wrong_bound": round(each.wrong_bound, 6)}
            for each in evaluations
        ],
        "without_guard": {
            "threshold": threshold,
            "hits": unguarded[0],
            "wrong_answers": unguarded[1],
        },
        "wrong": wrong,
    }
