"""What kind of server there is, from what it answers."""

from __future__ import annotations

import json

import pytest

from argosy.gateway.backends import DetectedBackend, detect_backend

INFO = {"model_id": "m", "max_total_tokens": 9, "max_concurrent_requests": 9}


def cards(*owners: str) -> tuple[int, object]:
    return 200, {"data": [{"id": f"m{at}", "owned_by": owner} for at, owner in enumerate(owners)]}


@pytest.mark.parametrize(
    ("answers", "kind"),
    [
        ({"/v1/models": cards("vllm")}, "vllm"),
        ({"/v1/models": cards("someone", "sglang")}, "sglang"),
        ({"/v1/models": cards("tensorrt_llm")}, "tensorrt-llm"),
        ({"/v1/models": cards("lmdeploy")}, "lmdeploy"),
        ({"/v1/models": cards("llamacpp")}, "llama.cpp"),
        ({"/v1/models": cards("argosy"), "/load": (200, {})}, "argosy"),
        ({"/v1/models": cards("argosy"), "/load": (503, {})}, "argosy"),
        ({"/v1/models": cards("argosy")}, "openai"),  # a gateway like this one
        ({"/v1/models": cards("m"), "/info": (200, INFO)}, "tgi"),
        ({"/v1/models": cards("m"), "/info": (200, {"model_id": "m"})}, "openai"),
        ({"/v1/models": cards("m"), "/info": (200, "nothing of the kind")}, "openai"),
        ({"/v1/models": (200, "no list")}, "openai"),
        ({"/v1/models": (200, {"data": [7]})}, "openai"),
        ({"/v1/models": (401, {})}, "openai"),
        ({}, "openai"),
        ({"/v1/models": (503, {})}, None),
        ({"/v1/models": (429, {})}, None),
    ],
)
async def test_each_kind_is_known_by_its_answers(
    answers: dict[str, tuple[int, object]], kind: str | None
) -> None:
    async def ask(path: bytes) -> tuple[int, bytes]:
        status, content = answers.get(path.decode(), (404, {}))
        return status, json.dumps(content).encode()

    found = await detect_backend(ask)
    assert (None if found is None else found.kind) == kind


async def test_the_models_context_is_noted_where_it_is_told() -> None:
    async def ask(path: bytes) -> tuple[int, bytes]:
        del path
        listed = [{"id": "a", "owned_by": "vllm", "max_model_len": 64}, {"id": "b"}]
        listed.append({"id": "c", "max_model_len": 0})
        return 200, json.dumps({"data": listed}).encode()

    assert await detect_backend(ask) == DetectedBackend("vllm", {"a": 64, "b": None, "c": None})


@pytest.mark.parametrize("path", [b"/v1/models", b"/info"])
async def test_what_is_no_text_is_of_no_kind(path: bytes) -> None:
    async def ask(asked: bytes) -> tuple[int, bytes]:
        return 200, b'{"data": [{"id": "\xff"}], "\xff": 1}' if asked == path else b"{}"

    assert await detect_backend(ask) == DetectedBackend("openai", {})
