"""Clients that wait for a model, as their users run them: the SDKs of OpenAI and Anthropic, and LangChain.

Prints a JSON object with the text that each client received.

Arguments: the gateway's URL, the model, and two times in seconds: without data, and without an event that LangChain's
asynchronous client of OpenAI parses. Streaming clients give up after these.
"""

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import anthropic
import httpx2
import openai
from langchain_openai import ChatOpenAI

PROMPT = "Tell me a story"
MAX_TOKENS = 8


def main(url: str, model: str, read_timeout_s: str, event_timeout_s: str) -> None:
    results = asyncio.run(run_all(url, model, float(read_timeout_s), float(event_timeout_s)))
    print(json.dumps(results))  # noqa: T201 - the result


async def run_all(
    url: str, model: str, read_timeout_s: float, event_timeout_s: float
) -> dict[str, str]:
    clients = build_clients(url, model, read_timeout_s, event_timeout_s)
    texts = await asyncio.gather(*(client() for client in clients))
    return {client.__name__: text for client, text in zip(clients, texts, strict=True)}


def build_clients(
    url: str, model: str, read_timeout_s: float, event_timeout_s: float
) -> Sequence[Callable[[], Coroutine[Any, Any, str]]]:
    timeout = httpx2.Timeout(60.0, read=read_timeout_s)
    chat: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": MAX_TOKENS,
    }
    server: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
    sdk = openai.AsyncOpenAI(**server, timeout=timeout)
    patient = openai.OpenAI(**server)
    anthropic_sdk = anthropic.AsyncAnthropic(**server | {"base_url": url}, timeout=timeout)
    langchain = ChatOpenAI(
        **server,
        model=model,
        max_tokens=MAX_TOKENS,
        timeout=timeout,
        stream_chunk_timeout=event_timeout_s,
    )

    async def openai_stream() -> str:
        chunks = await sdk.chat.completions.create(stream=True, **chat)
        return "".join(
            [choice.delta.content or "" async for chunk in chunks for choice in chunk.choices]
        )

    async def openai_whole() -> str:
        response = await asyncio.to_thread(partial(patient.chat.completions.create, **chat))
        return response.choices[0].message.content or ""

    async def openai_completion() -> str:
        chunks = await sdk.completions.create(
            model=model, prompt=PROMPT, max_tokens=MAX_TOKENS, stream=True
        )
        return "".join([choice.text async for chunk in chunks for choice in chunk.choices])

    async def openai_responses() -> str:
        async with sdk.responses.stream(
            model=model, input=PROMPT, max_output_tokens=MAX_TOKENS
        ) as stream:
            return "".join(
                [
                    event.delta
                    async for event in stream
                    if event.type == "response.output_text.delta"
                ]
            )

    async def anthropic_stream() -> str:
        async with anthropic_sdk.messages.stream(**chat) as stream:
            return await stream.get_final_text()

    async def langchain_stream() -> str:
        return "".join([str(chunk.content) async for chunk in langchain.astream(PROMPT)])

    return (
        openai_stream,
        openai_whole,
        openai_completion,
        openai_responses,
        anthropic_stream,
        langchain_stream,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
