"""What hosted APIs, and what stands before them, answer that is no answer: another gives one, and nobody pays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from tests.integration.gateway.test_gateway import BODY, STREAM, events, gateway, whole
from tests.support.metered_gateway import books
from tests.support.scripted_server import Answer, Asked, Rough, rough_server

from argosy.gateway.upstream import upstream_response as attempts
from argosy.protocol import format_event

ANSWER = {"id": "x", "choices": [{"index": 0, "text": "something", "finish_reason": "stop"}]}
TEXT = json.dumps(ANSWER).encode()
PROCESSING = b": PROCESSING\n\n"


def answering(status: int, body: bytes, *headers: str) -> Answer:
    """A server that answers everything so."""
    lines = (f"HTTP/1.1 {status} X", f"content-length: {len(body)}", *headers)

    async def answer(asked: Asked) -> None:
        asked.writer.write("\r\n".join((*lines, "", "")).encode() + body)

    return answer


def failing(error: dict[str, object]) -> bytes:
    return format_event(json.dumps({"error": error}).encode())


@pytest.mark.parametrize(
    "then",
    [
        None,
        failing({"code": 502, "message": "the provider failed"}),
        failing({"code": 429, "message": "the provider is full"}),
    ],
    ids=["cut", "error", "full"],
)
async def test_a_stream_of_nothing_but_comments_is_given_by_another(then: bytes | None) -> None:
    async def processing(asked: Asked) -> None:
        asked.stream()
        asked.send(PROCESSING)
        if then is None:
            asked.writer.close()
        else:
            asked.send(then)
            asked.end()

    async with (
        rough_server(processing) as bad,
        rough_server() as good,
        gateway(bad, good) as client,
    ):
        for _ in range(2):  # in turn
            *told, done = await events(client, BODY)
            assert [json.loads(one)["choices"][0]["text"] for one in told] == [" 0", " 1", " 2"]
            assert done == "[DONE]"
        assert bad.asked


async def test_nobody_is_asked_to_go_on_with_what_nobody_can() -> None:
    """A server that is full has told whose turn it is: another would say so again."""

    async def full(asked: Asked) -> None:
        asked.stream()
        asked.send(format_event(json.dumps({"choices": [{"index": 0, "text": ""}]}).encode()))
        asked.send(failing({"code": 429, "message": "the provider is full"}))
        asked.end()

    async with rough_server(full) as one, rough_server(full) as two, gateway(one, two) as client:
        answer = await client.post("/v1/completions", json=STREAM)
        assert "overloaded" in answer.text
        name = answer.headers["x-argosy-request"]
        explained = (await client.get(f"/admin/requests/{name}")).json()
        assert [tried["outcome"] for tried in explained["attempts"]] == ["backpressure"]


async def test_who_asks_for_more_than_can_be_kept_takes_no_server_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Log-probabilities of a long prompt, say: three such requests took out servers that had answered."""
    monkeypatch.setattr(attempts, "MAX_BUFFERED_BYTES", 1 << 16)
    large = answering(200, TEXT.ljust(1 << 17))

    async def some(asked: Asked) -> None:
        await (large if asked.body["prompt"] == "All" else answering(200, TEXT))(asked)

    async with rough_server(some) as one, rough_server(some) as two, gateway(one, two) as client:
        for _ in range(4):
            answer = await client.post("/v1/completions", json=BODY | {"prompt": "All"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (
                413,
                "request_too_large",
            )
        assert len(one.asked) + len(two.asked) == 8  # another may have less to say
        for _ in range(2):
            assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        assert len(one.asked) == len(two.asked) == 5


async def test_a_server_that_always_answers_with_too_much_costs_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attempts, "MAX_BUFFERED_BYTES", 1 << 16)
    large = answering(200, TEXT.ljust(1 << 17))
    async with rough_server(large) as bad, rough_server() as good, gateway(bad, good) as client:
        for _ in range(4):
            assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        assert bad.asked


@pytest.mark.parametrize(
    "bad",
    [
        answering(301, b"", "location: https://127.0.0.1:1/v1/completions"),
        answering(307, b"moved", "location: /v1/completions/"),
        answering(204, b""),
        answering(202, b'{"id": "queued"}'),
        answering(402, b'{"error": {"message": "Insufficient credits", "code": 402}}'),
        answering(403, b'{"error": {"message": "No access", "code": "model_not_found"}}'),
        answering(404, b'{"error": {"message": "No access", "code": "model_not_found"}}'),
        answering(
            404, b'{"object": "error", "message": "The model `a` does not exist.", "code": 404}'
        ),
        answering(404, b"""{"error": {"message": "model 'a' not found, try pulling it first"}}"""),
    ],
    ids=[
        "moved",
        "elsewhere",
        "nothing",
        "queued",
        "credit",
        "forbidden",
        "unknown",
        "vllm",
        "ollama",
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_neither_an_answer_nor_the_requests_fault_is_the_servers(
    bad: Answer, stream: bool
) -> None:
    good = Rough().script if stream else whole
    async with rough_server(bad) as one, rough_server(good) as two, gateway(one, two) as client:
        for _ in range(2):
            answer = await client.post("/v1/completions", json=STREAM if stream else BODY)
            assert answer.status_code == 200, answer.text
            assert "choices" in answer.text
        assert one.asked
        assert len(two.asked) == 2
    async with rough_server(bad) as one, gateway(one) as client:
        answer = await client.post("/v1/completions", json=STREAM if stream else BODY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_failed")


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (403, "model-a requires moderation: your input was flagged"),
        (404, "This is a chat model and not supported in the v1/completions endpoint."),
        (404, "No endpoints found that support image input"),
    ],
)
async def test_what_a_server_has_against_the_request_passes_as_it_came(
    status: int, message: str
) -> None:
    """Held against the server, anybody could keep it from all others."""
    told = json.dumps({"error": {"message": message, "code": status}}).encode()
    bad = answering(status, told)
    async with rough_server(bad) as one, rough_server(whole) as two, gateway(one, two) as client:
        while not one.asked:
            answer = await client.post("/v1/completions", json=BODY)
        assert (answer.status_code, answer.content) == (status, told)


@pytest.mark.parametrize(
    "bad",
    [
        answering(200, b""),
        answering(200, b"upstream connect error", "content-type: text/plain"),
        answering(200, b" <html></html>", "content-type: Text/HTML"),
        answering(200, TEXT[:-9]),
        answering(200, b"\x1f\x8b\x08{}", "content-encoding: gzip"),
    ],
    ids=["nothing", "text", "page", "half", "compressed"],
)
async def test_what_is_no_json_is_no_answer_and_is_not_billed(tmp_path: Path, bad: Answer) -> None:
    async with rough_server(bad) as one, books(tmp_path, one.url) as here:
        await here.ask()
        row = await here.agree()
        assert (row.status, row.input_tokens, row.output_tokens) == ("failed", 0, 0)
    async with rough_server(bad) as one, rough_server(whole) as two, gateway(one, two) as client:
        for _ in range(2):
            answer = await client.post("/v1/completions", json=BODY)
            assert answer.json()["choices"][0]["text"] == "something"
        assert one.asked


async def test_an_error_that_comes_with_200_and_is_the_requests_own_fault_is_refused_as_such(
    tmp_path: Path,
) -> None:
    told = b'{"error": {"message": "the prompt is too long", "code": 400}}'
    bad = answering(200, told)
    async with rough_server(bad) as one, rough_server(bad) as two, gateway(one, two) as client:
        answer = await client.post("/v1/completions", json=BODY)
        assert (answer.status_code, answer.content) == (400, told)
        assert len(one.asked) + len(two.asked) == 1
    async with rough_server(bad) as one, books(tmp_path, one.url) as here:
        await here.ask()
        row = await here.agree()
        assert (row.status, row.input_tokens, row.output_tokens) == ("refused", 0, 0)


@pytest.mark.parametrize("status", [401, 402, 429, 500])
async def test_the_log_says_what_a_server_says_and_nobody_else_is_told(status: int) -> None:
    told = "You exceeded your quota, org-1"
    bad = answering(status, json.dumps({"error": {"message": told}}).encode())
    async with rough_server(bad) as one, gateway(one) as client:
        with capture_logs() as logs:
            answer = await client.post("/v1/completions", json=BODY)
        assert {line.get("upstream_message") for line in logs if line["event"] == "attempt_failed"} == {told}
        name = answer.headers["x-argosy-request"]
        explanation = (await client.get(f"/admin/requests/{name}")).text
        assert f"status {status}" in explanation
        assert told not in explanation + answer.text


@pytest.mark.parametrize(
    ("status", "body"),
    [(201, TEXT), (200, b"\n" * 500 + TEXT + b"\r\n"), (200, b"\xef\xbb\xbf" + TEXT)],
    ids=["created", "empty lines", "byte order mark"],
)
async def test_an_answer_is_one_as_some_frameworks_and_apis_give_it(
    tmp_path: Path, status: int, body: bytes
) -> None:
    """DeepSeek and OpenRouter send empty lines while they compute."""
    async with rough_server(answering(status, body)) as one, books(tmp_path, one.url) as here:
        assert "something" in await here.ask()
        row = await here.agree()
        assert row.status == "completed"
        assert row.output_tokens
