"""Translation of Cohere's, text-embeddings-inference's and Ollama's requests, and of the responses to them."""

from __future__ import annotations

import json
import struct
from base64 import b64encode
from typing import Any

import pytest

from argosy.protocol import ApiError
from argosy.protocol.dialects import (
    RenderedRequest,
    is_tei_request,
    translate_cohere_embed,
    translate_cohere_rerank,
    translate_ollama_embed,
    translate_ollama_embeddings,
    translate_tei_rerank,
)

VECTORS = [[0.5, -1.0], [0.25, 2.0]]
BASE64 = [b64encode(struct.pack("<2f", *vector)).decode() for vector in VECTORS]
RANKING = {
    "id": "rerank-1",
    "results": [{"index": 1, "relevance_score": 0.75}, {"index": 0, "relevance_score": 0.5}],
    "usage": {"prompt_tokens": 9, "total_tokens": 9},
}


def encode(**body: object) -> bytes:
    return json.dumps(body).encode()


def embeddings(vectors: list[Any]) -> dict[str, Any]:
    """Return a response whose vectors are not in order."""
    data = [{"index": index, "embedding": vector} for index, vector in enumerate(vectors)]
    return {"id": "embd-1", "data": data[::-1], "usage": {"prompt_tokens": 7}}


def render(translated: RenderedRequest, response: dict[str, Any]) -> Any:  # noqa: ANN401 - JSON
    return json.loads(translated.render(json.dumps(response).encode()))


@pytest.mark.parametrize("vectors", [BASE64, VECTORS], ids=["base64", "lists"])
def test_cohere_embeddings_have_all_requested_types(vectors: list[Any]) -> None:
    translated = translate_cohere_embed(
        encode(
            model="m",
            texts=["a", "b"],
            input_type="search_query",
            embedding_types=["float", "base64"],
            output_dimension=2,
        )
    )
    assert translated.body == {
        "model": "m",
        "input": ["a", "b"],
        "input_type": "search_query",
        "dimensions": 2,
        "encoding_format": "base64",
        "truncate_prompt_tokens": -1,
    }
    assert render(translated, embeddings(vectors)) == {
        "id": "embd-1",
        "embeddings": {"float": VECTORS, "base64": BASE64},
        "texts": ["a", "b"],
        "meta": {
            "api_version": {"version": "2"},
            "tokens": {"input_tokens": 7},
            "billed_units": {"input_tokens": 7, "image_tokens": 0},
        },
        "response_type": "embeddings_by_type",
    }


def test_cohere_inputs_may_have_text_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    translated = translate_cohere_embed(
        encode(model="m", inputs=[{"content": parts}], truncate="NONE")
    )
    assert translated.body == {"model": "m", "input": ["ab"], "encoding_format": "base64"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "texts"),
        ({"images": ["data:"]}, "images"),
        ({"inputs": [{"content": [{"type": "image_url"}]}]}, "inputs[0].content"),
    ],
)
def test_what_cohere_has_and_models_lack_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as raised:
        translate_cohere_embed(encode(model="m", **fields))
    assert (raised.value.status, raised.value.param) == (400, param)


def test_cohere_ranking_has_no_documents() -> None:
    translated = translate_cohere_rerank(
        encode(model="m", query="q", documents=["a", {"text": "b"}], top_n=2)
    )
    assert translated.body == {
        "model": "m",
        "query": "q",
        "documents": ["a", "b"],
        "top_n": 2,
        "return_documents": False,
        "truncate_prompt_tokens": -1,
    }
    rendered = render(translated, RANKING)
    assert (rendered["id"], rendered["results"]) == ("rerank-1", RANKING["results"])
    assert rendered["meta"]["billed_units"] == {"search_units": 1}


def test_tei_ranking_is_a_list() -> None:
    body = encode(query="q", texts=["a", "b"], return_text=True, raw_scores=True)
    assert is_tei_request(body)
    assert not is_tei_request(encode(query="q", documents=["a"]))
    assert not is_tei_request(b"[]")
    translated = translate_tei_rerank(body)
    assert translated.body == {
        "query": "q",
        "documents": ["a", "b"],
        "use_activation": False,
        "return_documents": False,
    }
    assert render(translated, RANKING) == [
        {"index": 1, "text": "b", "score": 0.75},
        {"index": 0, "text": "a", "score": 0.5},
    ]


def test_ollama_embeds_lists_and_single_texts() -> None:
    times = iter([1.0, 3.5])
    translated = translate_ollama_embed(
        encode(model="m:latest", input=["a", "b"], options={"num_ctx": 8}, dimensions=2),
        times.__next__,
    )
    assert translated.body == {
        "model": "m",
        "input": ["a", "b"],
        "dimensions": 2,
        "encoding_format": "base64",
        "truncate_prompt_tokens": -1,
    }
    assert translated.ignored == ("options.num_ctx",)
    assert render(translated, embeddings(BASE64)) == {
        "model": "m:latest",
        "embeddings": VECTORS,
        "total_duration": 2_500_000_000,
        "load_duration": 0,
        "prompt_eval_count": 7,
    }
    single = translate_ollama_embeddings(encode(model="m", prompt="a"))
    assert single.body["input"] == ["a"]
    assert render(single, embeddings(BASE64[:1])) == {"embedding": VECTORS[0]}


def test_ollama_may_ask_for_no_embeddings() -> None:
    translated = translate_ollama_embed(encode(model="m"), lambda: 0.0)
    assert translated.body["input"] == []
    assert render(translated, {"data": []})["embeddings"] == []
    assert render(translate_ollama_embeddings(encode(model="m")), {"data": []}) == {"embedding": []}
    with pytest.raises(ApiError, match="'prompt'"):
        translate_ollama_embed(encode(model="m", prompt="a"), lambda: 0.0)


@pytest.mark.parametrize(
    "response", [b"[]", b'{"data": [{}]}', b'{"data":[{"index":0,"embedding":"!"}]}']
)
def test_malformed_vectors_are_errors(response: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - any message
        translate_ollama_embeddings(encode(model="m", prompt="a")).render(response)
