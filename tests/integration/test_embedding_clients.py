"""Official clients and `argosy embed` get equal vectors through the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
from collections.abc import AsyncIterator

import httpx2
import numpy as np
import ollama
import openai
from pydantic import SecretStr
from tests.support.gateway_client import run_gateway_server
from tests.support.pooling_engine import EMBEDDER, pooling_engine
from tests.support.replica_servers import MODEL, serve

from argosy.deployment import GatewayConfig, ModelConfig, ReplicaConfig

QUERY = "Where does the cat sit?"
TEXTS = ["Stocks fell on Monday.", "The cat sits on the mat.", "A dog barks at night."]


@contextlib.asynccontextmanager
async def serve_embedder() -> AsyncIterator[str]:
    """Serve a scripted model behind a gateway, and yield the gateway's URL."""
    async with serve(pooling_engine(EMBEDDER)) as replica:
        endpoint = ReplicaConfig(url=replica.url, model=MODEL)
        model = ModelConfig(name=MODEL, aliases=("text-embedding-*",), replicas=[endpoint])
        async with run_gateway_server(GatewayConfig(port=0, models=[model])) as (_, client):
            yield str(client.base_url).rstrip("/")


async def run_embed(url: str, *arguments: str, lines: str = "") -> str:
    """Run `argosy embed` and return what it prints."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "argosy.cli", "embed", "--url", url, *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate(lines.encode())
    assert process.returncode == 0
    return output.decode()


async def test_clients_get_equal_vectors() -> None:
    # The import takes a second, and every worker imports this file.
    from langchain_openai import OpenAIEmbeddings

    async with serve_embedder() as url, httpx2.AsyncClient(base_url=url, timeout=30) as http:
        client = openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http
        )
        response = await client.embeddings.create(model="text-embedding-3-small", input=TEXTS)
        vectors = np.array([each.embedding for each in response.data])
        lists = await client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
        short = await client.embeddings.create(model=MODEL, input=TEXTS[0], dimensions=2)
        chain = OpenAIEmbeddings(
            model=MODEL,
            base_url=f"{url}/v1",
            api_key=SecretStr("none"),
            check_embedding_ctx_length=False,
            http_async_client=http,
        )
        documents = await chain.aembed_documents(TEXTS)
        ollama_client = ollama.AsyncClient(url)
        embedded = await ollama_client.embed(f"{MODEL}:latest", TEXTS)
        await ollama_client._client.aclose()  # noqa: SLF001 - the client has no method for it
        types = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
        body: dict[str, object] = {"model": MODEL, "texts": TEXTS, "truncate": "START"}
        by_type = await http.post("/v2/embed", json={**body, "embedding_types": types})
        body = {"model": MODEL, "query": QUERY, "documents": TEXTS, "top_n": 2}
        tei_body = {"query": QUERY, "texts": TEXTS, "top_n": 1, "truncation_direction": "left"}
        top = await http.post("/rerank", json={**tei_body, "truncate": True})
        ranking = await http.post("/v2/rerank", json=body)
        printed, table = await asyncio.gather(
            run_embed(url, "--json", *TEXTS), run_embed(url, lines="A line.\n\n")
        )
    assert vectors.shape == (3, 4)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert vectors.tolist() == [each.embedding for each in lists.data]
    assert response.usage.prompt_tokens == lists.usage.prompt_tokens > len(TEXTS)
    head = vectors[0][:2]
    assert np.allclose(short.data[0].embedding, head / np.linalg.norm(head), atol=1e-5)
    assert vectors.tolist() == [*map(list, embedded.embeddings)]
    assert vectors.tolist() == documents
    found = by_type.json()
    assert found["meta"]["billed_units"]["image_tokens"] == 0
    assert vectors.tolist() == found["embeddings"]["float"]
    scaled = 127 * vectors / np.abs(vectors).max(1, keepdims=True)
    assert np.abs(scaled - found["embeddings"]["int8"]).max() <= 0.501
    assert (np.array(found["embeddings"]["uint8"]) - found["embeddings"]["int8"] == 128).all()
    assert (np.packbits(vectors > 0, axis=1) == found["embeddings"]["ubinary"]).all()
    assert (np.array(found["embeddings"]["binary"]) + 128 == found["embeddings"]["ubinary"]).all()
    (best,) = top.json()
    assert best["index"] == ranking.json()["results"][0]["index"]
    assert vectors.tolist() == [each["embedding"] for each in json.loads(printed)]
    assert re.search(r"A line\..* 4 ", table)
    assert len(ranking.json()["results"]) == 2
