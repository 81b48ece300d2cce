"""Clients that wait for a model, as their users run them: the SDKs of OpenAI and Anthropic, and LangChain.

Prints a JSON object with the text that each client received.

Arguments: the gateway's URL, the model, and two times in seconds: without data, and without an event that LangChain's
asynchronous client of OpenAI parses. Streaming clients give up after these.
"""

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import httpx2
import openai
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI

PROMPT = "Tell me a story"
MAX_TOKENS = 8


def main(url: str, model: str, read_timeout_s: str, event_timeout_s: str) -> None:
    results = asyncio.run(run_all(url, model, float(read_timeout_s), float(event_timeout_s)))
    print(json.dumps(results))  # noqa: T201 - the result


async def run_all(
    url: str, model: str, read_timeout_s: float, event_timeout_s: float
) -> dict[str, str]:
    sync_clients, async_clients = build_clients(url, model, read_timeout_s, event_timeout_s)
    with ThreadPoolExecutor(len(sync_clients)) as threads:
        loop = asyncio.get_running_loop()
        texts = await asyncio.gather(
            *(loop.run_in_executor(threads, client) for client in sync_clients),
            *(client() for client in async_clients),
        )
    names = [client.__name__ for client in (*sync_clients, *async_clients)]
    return dict(zip(names, texts, strict=True))


def build_clients(
    url: str, model: str, read_timeout_s: float, event_timeout_s: float
) -> tuple[Sequence[Callable[[], str]], Sequence[Callable[[], Coroutine[Any, Any, str]]]]:
    base, timeout = f"{url}/v1", httpx2.Timeout(60.0, read=read_timeout_s)
    chat: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": MAX_TOKENS,
    }
    sync_openai = openai.OpenAI(base_url=base, api_key="none", timeout=timeout, max_retries=0)
    async_openai = openai.AsyncOpenAI(base_url=base, api_key="none", timeout=timeout, max_retries=0)
    patient = openai.OpenAI(base_url=base, api_key="none", max_retries=0)
    sync_anthropic = anthropic.Anthropic(
        base_url=url, api_key="none", timeout=timeout, max_retries=0
    )
    async_anthropic = anthropic.AsyncAnthropic(
        base_url=url, api_key="none", timeout=timeout, max_retries=0
    )
    langchain = ChatOpenAI(
        model=model,
        base_url=base,
        api_key="none",
        max_tokens=MAX_TOKENS,
        timeout=timeout,
        max_retries=0,
        stream_chunk_timeout=event_timeout_s,
    )

    claude = ChatAnthropic(
        model=model,
        base_url=url,
        api_key="none",
        max_tokens=MAX_TOKENS,
        timeout=read_timeout_s,
        max_retries=0,
    )

    def openai_stream() -> str:
        chunks = sync_openai.chat.completions.create(stream=True, **chat)
        return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)

    async def openai_async_stream() -> str:
        chunks = await async_openai.chat.completions.create(stream=True, **chat)
        return "".join(
            [choice.delta.content or "" async for chunk in chunks for choice in chunk.choices]
        )

    def openai_whole() -> str:
        return patient.chat.completions.create(**chat).choices[0].message.content or ""

    def openai_completion() -> str:
        chunks = sync_openai.completions.create(
            model=model, prompt=PROMPT, max_tokens=MAX_TOKENS, stream=True
        )
        return "".join(choice.text for chunk in chunks for choice in chunk.choices)

    def openai_responses() -> str:
        with sync_openai.responses.stream(
            model=model, input=PROMPT, max_output_tokens=MAX_TOKENS
        ) as stream:
            return "".join(
                event.delta for event in stream if event.type == "response.output_text.delta"
            )

    def anthropic_stream() -> str:
        with sync_anthropic.messages.stream(**chat) as stream:
            return stream.get_final_text()

    async def anthropic_async_stream() -> str:
        async with async_anthropic.messages.stream(**chat) as stream:
            return await stream.get_final_text()

    def langchain_stream() -> str:
        return "".join(str(chunk.content) for chunk in langchain.stream(PROMPT))

    async def langchain_async_stream() -> str:
        return "".join([str(chunk.content) async for chunk in langchain.astream(PROMPT)])

    def langchain_anthropic_stream() -> str:
        return "".join(str(chunk.text) for chunk in claude.stream(PROMPT))

    async def langchain_anthropic_async_stream() -> str:
        return "".join([str(chunk.text) async for chunk in claude.astream(PROMPT)])

    return (
        openai_stream,
        openai_whole,
        openai_completion,
        openai_responses,
        anthropic_stream,
        langchain_stream,
        langchain_anthropic_stream,
    ), (
        openai_async_stream,
        anthropic_async_stream,
        langchain_async_stream,
        langchain_anthropic_async_stream,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
