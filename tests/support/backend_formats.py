"""Wire formats of the supported backends with their quirks, as their versions of November 2026 send them.

The gateway also runs against real servers of vLLM and llama.cpp (`tests/integration/test_vllm.py`,
`test_llama_cpp.py`). The formats of the other backends were never compared with their servers.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace

from tests.support.fake_backend import FIRST_TOKEN_ID, FakeBackend, Generation, sse
from tests.support.fake_upstream import Json, UpstreamRequest

DONE = b"data: [DONE]\n\n"


def end_stream(request: UpstreamRequest, head: Json, generation: Generation) -> Iterator[bytes]:
    """Yield the usage in a chunk without choices, if it is requested, and the end."""
    if request.wants_usage:
        yield sse(head | {"choices": [], "usage": generation.usage})
    yield DONE


class Vllm(FakeBackend):
    """A role chunk, `token_ids` on request, and a usage chunk without choices. Fields without a value are null.

    The source is vLLM 0.32 (`entrypoints/openai/{completion,chat_completion}/serving.py`). An engine that shuts down
    ends its streams with `abort` and `[DONE]` (vllm-project/vllm#57082), or with an error event (#57089).
    """

    owner = "vllm"
    default_tokens = 16

    def load_pages(self) -> dict[str, object]:
        labels = '{engine="0",model_name="cat"}'
        return {
            "/v1/models": {
                "object": "list",
                "data": [{"id": "cat", "object": "model", "owned_by": "vllm", "max_model_len": 64}],
            },
            "/version": {"version": "0.32.0"},
            "/load": {"server_load": self.num_running},
            "/kv_event_sources": self.kv_event_sources,
            "/metrics": "\n".join(
                [
                    "# HELP vllm:num_requests_running Number of requests in model execution batches.",
                    "# TYPE vllm:num_requests_running gauge",
                    f"vllm:num_requests_running{labels} {self.num_running:.1f}",
                    f"vllm:num_requests_waiting{labels} {self.num_waiting:.1f}",
                    f'vllm:num_requests_waiting_by_reason{labels[:-1]},reason="capacity"}} 9.0',
                    f"vllm:kv_cache_usage_perc{labels} 0.25",
                    'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="40"} 1.0',
                    "",
                ]
            ),
        }

    def rejection(self, request: UpstreamRequest) -> str | None:
        if not request.is_chat and (request.body.get("max_tokens") or 0) > 64:
            return "max_tokens=65 cannot be greater than max_model_len=64."
        if request.body.get("seed", 0) is None:
            return "seed"
        return None

    def stream_events(self, request: UpstreamRequest, generation: Generation) -> Iterator[bytes]:
        ids = bool(request.body.get("return_token_ids"))
        prompt = [*self.prompt_ids] if ids else None
        head: Json = {"id": f"cmpl-{id(request)}", "created": 7, "model": "cat"}
        head["object"] = request.chunk_object
        if request.is_chat:
            delta: Json = {"role": "assistant", "content": ""}
            choice: Json = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
            yield sse(head | {"choices": [choice], "prompt_token_ids": prompt})
        for position, token in enumerate(self._visible_texts(request, generation)):
            last = position == len(generation.tokens) - 1
            token_ids = [FIRST_TOKEN_ID + generation.offset + position] if ids else None
            choice = {
                "index": 0,
                **({"delta": {"content": token}} if request.is_chat else {"text": token}),
            }
            choice |= {
                "logprobs": None,
                "finish_reason": generation.finish_reason if last else None,
            }
            if last or not request.is_chat:
                choice["stop_reason"] = generation.stop_string if last else None
            choice["token_ids"] = token_ids
            if not request.is_chat:
                choice["prompt_token_ids"] = prompt if position == 0 else None
            used = generation.usage | {"completion_tokens": position + 1}
            usage = {"usage": used} if request.wants_continuous_usage else {}
            yield sse(head | {"choices": [choice]} | usage)
        yield from end_stream(request, head, generation)

    def generate(self, request: UpstreamRequest) -> Generation:
        generation, text = super().generate(request), ""
        for count, token in enumerate(generation.tokens, 1):
            text += token
            for stop in request.body.get("stop") or []:
                if stop in text:
                    tokens = generation.tokens[:count]
                    return replace(
                        generation, tokens=tokens, finish_reason="stop", stop_string=stop
                    )
        return generation

    def _visible_texts(self, request: UpstreamRequest, generation: Generation) -> list[str]:
        """Return the text per token. Text that may become a stop string is held back unless the output keeps stops."""
        text, stops = "".join(generation.tokens), request.body.get("stop") or []
        keeps = bool(request.body.get("include_stop_str_in_output"))
        held = max(map(len, stops)) - 1 if stops and not keeps else 0
        if generation.stop_string is not None:
            text = text[: text.index(generation.stop_string) + len(generation.stop_string) * keeps]
        ends = itertools.accumulate(len(token) for token in generation.tokens[:-1])
        shown = [0, *(max(0, end - held) for end in ends), len(text)]
        return [text[a:b] for a, b in itertools.pairwise(shown)]


class Sglang(FakeBackend):
    """`matched_stop`, the finish reason in a chunk of its own, and usage in each chunk on request.

    Only completions support `return_token_ids`, and their choices have its fields only then. A chat stream with it is
    rejected (sgl-project/sglang#30917). An abort with a status is an error event, any other is a finish reason
    (`srt/entrypoints/openai/serving_completions.py`). The load report is that of #16976.
    """

    owner = "sglang"
    default_tokens = 16

    def load_pages(self) -> dict[str, object]:
        load = {
            "dp_rank": 0,
            "num_running_reqs": self.num_running,
            "num_waiting_reqs": self.num_waiting,
            "num_used_tokens": 10,
            "max_total_num_tokens": 4096,
            "token_usage": 0.5,
            "max_running_requests": 8,
        }
        return {"/v1/loads": {"timestamp": "x", "dp_rank_count": 1, "loads": [load]}}

    def rejection(self, request: UpstreamRequest) -> str | None:
        streams_ids = (
            request.is_chat and request.body.get("stream") and request.body.get("return_token_ids")
        )
        return "return_token_ids is not supported with streaming." if streams_ids else None

    def stream_events(self, request: UpstreamRequest, generation: Generation) -> Iterator[bytes]:
        head: Json = {"id": f"{id(request):x}", "created": 7, "model": "cat"}
        head["object"] = request.chunk_object
        if request.is_chat:
            yield sse(head | {"choices": [self._choice({"role": "assistant", "content": ""})]})
        for position, token in enumerate(generation.tokens):
            used = generation.usage | {"completion_tokens": position + 1}
            usage = {"usage": used} if request.wants_continuous_usage else {}
            if request.is_chat:
                yield sse(head | {"choices": [self._choice({"content": token})]} | usage)
                continue
            last = position == len(generation.tokens) - 1
            ids = bool(request.body.get("return_token_ids"))
            choice = {
                "index": 0,
                "text": token,
                "logprobs": None,
                "finish_reason": generation.finish_reason if last else None,
                "matched_stop": 2 if last else None,
                **({"token_ids": [FIRST_TOKEN_ID + generation.offset + position]} if ids else {}),
                **({"prompt_token_ids": [*self.prompt_ids]} if ids and position == 0 else {}),
            }
            yield sse(head | {"choices": [choice], "usage": None} | usage)
        if request.is_chat:
            yield sse(
                head | {"choices": [self._choice({}) | {"finish_reason": generation.finish_reason}]}
            )
        yield from end_stream(request, head, generation)

    def _choice(self, delta: Json) -> Json:
        return {
            "index": 0,
            "delta": delta,
            "logprobs": None,
            "finish_reason": None,
            "matched_stop": None,
        }


class TensorRtLlm(FakeBackend):
    """Rejects unknown fields, has flat errors, and reports its load as a list of iterations.

    Chunks of chats leave out null fields, and the first one ends in a space; those of completions do neither
    (`serve/postprocess_handlers.py`). A failure breaks the connection (`serve/openai_server.py`).
    """

    owner = "tensorrt_llm"
    known = frozenset(
        {
            "model",
            "messages",
            "prompt",
            "max_tokens",
            "n",
            "stream",
            "stream_options",
            "temperature",
            "seed",
            "stop",
            "tools",
            "add_generation_prompt",
        }
    )

    def load_pages(self) -> dict[str, object]:
        stats = {
            "iter": 3,
            "iterLatencyMS": 9.5,
            "numActiveRequests": self.num_running,
            "numQueuedRequests": self.num_waiting,
            "maxNumActiveRequests": 8,
            "kvCacheStats": {"usedNumBlocks": 30, "maxNumBlocks": 120, "tokensPerBlock": 32},
            "inflightBatchingStats": {"numGenRequests": self.num_running},
        }
        return {
            "/metrics": [{**stats, "numActiveRequests": 99}, stats],
            "/version": {"version": "1.0"},
        }

    def rejection(self, request: UpstreamRequest) -> str | None:
        unknown = request.body.keys() - self.known
        return f"Extra inputs are not permitted: {sorted(unknown)}" if unknown else None

    def build_error(self, status: int, message: str) -> Json:
        return {"object": "error", "message": message, "type": "X", "param": None, "code": status}

    def stream_events(self, request: UpstreamRequest, generation: Generation) -> Iterator[bytes]:
        head: Json = {"id": f"cmpl-{id(request)}", "created": 7, "model": "cat"}
        head["object"] = request.chunk_object
        if request.is_chat:
            role = sse(head | {"choices": [{"index": 0, "delta": {"role": "assistant"}}]})
            yield role.replace(b"\n\n", b" \n\n")
        for position, token in enumerate(generation.tokens):
            last = position == len(generation.tokens) - 1
            used = generation.usage | {"completion_tokens": position + 1}
            if request.is_chat:
                choice: Json = {"index": 0, "delta": {"content": token, "reasoning_content": ""}}
                choice |= {"finish_reason": generation.finish_reason} if last else {}
                usage: Json = {"usage": used} if request.wants_continuous_usage else {}
            else:
                choice = {"index": 0, "text": token, "token_ids": None, "stop_reason": None}
                choice["finish_reason"] = generation.finish_reason if last else None
                usage = {"usage": used if request.wants_continuous_usage else None}
            yield sse(head | {"choices": [choice]} | usage)
        yield from end_stream(request, head, generation)


class Tgi(FakeBackend):
    """No space after `data:`, the role in every chunk, and an empty finish reason in completions.

    The source is `router/src/{chat,lib}.rs` of TGI 3, which is in maintenance. Errors are events too (#2668).
    """

    owner = "some/cat"

    def load_pages(self) -> dict[str, object]:
        info = {
            "model_id": "some/cat",
            "max_concurrent_requests": 128,
            "max_input_tokens": 32,
            "max_total_tokens": 64,
            "version": "3.3.5",
            "router": "text-generation-router",
        }
        metrics = f"tgi_queue_size {self.num_waiting}\ntgi_batch_current_size {self.num_running}\n"
        return {"/info": info, "/metrics": "# TYPE tgi_queue_size gauge\n" + metrics}

    def build_error(self, status: int, message: str) -> Json:
        return {"error": message, "error_type": "generation"}

    def continues_last_message(self, body: Json) -> bool:
        return True

    def stream_events(self, request: UpstreamRequest, generation: Generation) -> Iterator[bytes]:
        head: Json = {"id": "", "created": 7, "model": "some/cat", "system_fingerprint": "3.3.5"}
        head["object"] = request.chunk_object
        for position, token in enumerate(generation.tokens):
            last = position == len(generation.tokens) - 1
            choice: Json = {"index": 0, "logprobs": None}
            if request.is_chat:
                choice["delta"] = {"role": "assistant", "content": token}
                choice["finish_reason"] = generation.finish_reason if last else None
                yield self._event(head | {"choices": [choice], "usage": None})
            else:
                choice |= {"text": token, "finish_reason": generation.finish_reason if last else ""}
                yield self._event(head | {"choices": [choice]})
        if request.wants_usage:
            yield self._event(head | {"choices": [], "usage": generation.usage})
        yield b"data:[DONE]\n\n"

    def _event(self, data: Json) -> bytes:
        return b"data:" + json.dumps(data).encode() + b"\n\n"


class Lmdeploy(FakeBackend):
    """A session is a number, and every chunk has the role. Null fields are left out, except for a pending usage.

    Usage has a chunk of its own since InternLM/lmdeploy#4616. Completions have no limit of their own since #4708. A
    failed request ends its stream with an error event and `[DONE]` (`serve/openai/chat_completions/serving.py`).
    """

    owner = "lmdeploy"

    def load_pages(self) -> dict[str, object]:
        labels = '{engine="0",model_name="a cat"}'
        lines = [
            f"lmdeploy:num_requests_running{labels} {self.num_running:.1f}",
            f"lmdeploy:num_api_requests_waiting{labels} {min(2, self.num_waiting):.1f}",
            f"lmdeploy:num_requests_waiting{labels} {max(0, self.num_waiting - 2):.1f}",
            f"lmdeploy:gpu_cache_usage_perc{labels} 0.125",
        ]
        return {"/metrics": "\n".join(lines)}

    def rejection(self, request: UpstreamRequest) -> str | None:
        return None if isinstance(request.body.get("session_id", -1), int) else "session_id"

    def build_error(self, status: int, message: str) -> Json:
        return {"object": "error", "message": message, "type": "X", "param": None, "code": status}

    def stream_events(self, request: UpstreamRequest, generation: Generation) -> Iterator[bytes]:
        head: Json = {"id": f"{id(request)}", "created": 7, "model": "cat"}
        head["object"] = request.chunk_object
        for position, token in enumerate(generation.tokens):
            last = position == len(generation.tokens) - 1
            content: Json = {"text": token}
            if request.is_chat:
                content = {"delta": {"role": "assistant", "content": token}}
            choice = {
                "index": 0,
                **content,
                **({"finish_reason": generation.finish_reason} if last else {}),
            }
            yield sse(
                head | {"choices": [choice]} | ({"usage": None} if request.wants_usage else {})
            )
        yield from end_stream(request, head, generation)


class LlamaCpp(FakeBackend):
    """A role chunk with null content and `timings`; the last chunk of a completion has usage and finish reason."""

    owner = "llamacpp"

    def load_pages(self) -> dict[str, object]:
        slots = [
            {"id": slot, "n_ctx": 64, "is_processing": slot < self.num_running} for slot in range(4)
        ]
        return {"/health": {"status": "ok"}, "/slots": slots, "/props": {"total_slots": 4}}

    def continues_last_message(self, body: Json) -> bool:
        return True

    def stream_events(self, request: UpstreamRequest, generation: Generation) -> Iterator[bytes]:
        timings = {"predicted_n": len(generation.tokens), "predicted_per_second": 50.0}
        head: Json = {"created": 7, "model": "cat", "system_fingerprint": "b9999"}
        head |= {"object": "chat.completion.chunk" if request.is_chat else "text_completion"}
        head |= {"id": f"chatcmpl-{id(request)}"}
        if request.is_chat:
            yield sse({"choices": [self._delta({"role": "assistant", "content": None})], **head})
            for token in generation.tokens:
                yield sse({"choices": [self._delta({"content": token})], **head})
            end = [{"finish_reason": generation.finish_reason, "index": 0, "delta": {}}]
            if request.wants_usage:
                yield sse({"choices": end, **head})
                yield sse({"choices": [], **head, "usage": generation.usage, "timings": timings})
            else:
                yield sse({"choices": end, **head, "timings": timings})
        else:
            for token in generation.tokens:
                yield sse({"choices": [self._text(token, None)], **head})
            end = [self._text("", generation.finish_reason)]
            yield sse({"choices": end, **head, "usage": generation.usage, "timings": timings})
        yield DONE

    def _delta(self, delta: Json) -> Json:
        return {"finish_reason": None, "index": 0, "delta": delta}

    def _text(self, text: str, finish: str | None) -> Json:
        return {"text": text, "index": 0, "logprobs": None, "finish_reason": finish}


class Hosted(FakeBackend):
    """Hosted API with keys, strict about fields, without health or load reports, with CRLF between events."""

    owner = "system"
    key = "sk-hosted"

    def rejection(self, request: UpstreamRequest) -> str | None:
        if request.headers.get("api-key") != f"Key {self.key}":
            return "Incorrect API key provided."
        unknown = request.body.keys() & {
            "session_id",
            "resume",
            "timeout_s",
            "cache_salt",
            "return_token_ids",
        }
        return f"Unrecognized request argument supplied: {sorted(unknown)}" if unknown else None

    def stream_events(self, request: UpstreamRequest, generation: Generation) -> Iterator[bytes]:
        for event in LlamaCpp().stream_events(request, generation):
            yield event.replace(b"\n\n", b"\r\n\r\n")


class KeylessHosted(Hosted):
    """Hosted API that needs no key."""

    def rejection(self, request: UpstreamRequest) -> str | None:
        return None


SELF_HOSTED = (Vllm, Sglang, TensorRtLlm, Tgi, Lmdeploy, LlamaCpp)
