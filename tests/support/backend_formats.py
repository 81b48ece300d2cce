"""The engines' shapes, quirks included, each as its own version of November 2026 sends them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace

from tests.support.fake_backend import (
    FIRST_ID,
    Asked,
    Double,
    Json,
    Part,
    sse,
)

DONE = b"data: [DONE]\n\n"


class Vllm(Double):
    """A role chunk, `token_ids` when asked, a usage chunk without choices; fields that were set are sent as null.

    As vLLM 0.32's server sends them (`entrypoints/openai/{completion,chat_completion}/serving.py`). An engine that
    shuts down ends its streams with `abort` and `[DONE]` (vllm-project/vllm#57082), or with an error event (#57089).
    """

    owner = "vllm"
    default_tokens = 16

    def pages(self) -> dict[str, object]:
        labels = '{engine="0",model_name="cat"}'
        return {
            "/v1/models": {
                "object": "list",
                "data": [{"id": "cat", "object": "model", "owned_by": "vllm", "max_model_len": 64}],
            },
            "/version": {"version": "0.32.0"},
            "/load": {"server_load": self.running},
            "/kv_event_sources": self.kv_sources,
            "/metrics": "\n".join(
                [
                    "# HELP vllm:num_requests_running Number of requests in model execution batches.",
                    "# TYPE vllm:num_requests_running gauge",
                    f"vllm:num_requests_running{labels} {self.running:.1f}",
                    f"vllm:num_requests_waiting{labels} {self.waiting:.1f}",
                    f'vllm:num_requests_waiting_by_reason{labels[:-1]},reason="capacity"}} 9.0',
                    f"vllm:kv_cache_usage_perc{labels} 0.25",
                    'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="40"} 1.0',
                    "",
                ]
            ),
        }

    def refusal(self, asked: Asked) -> str | None:
        if not asked.chat and (asked.body.get("max_tokens") or 0) > 64:
            return "max_tokens=65 cannot be greater than max_model_len=64."
        if asked.body.get("seed", 0) is None:
            return "seed"
        return None

    def events(self, asked: Asked, part: Part) -> Iterator[bytes]:
        ids = bool(asked.body.get("return_token_ids"))
        prompt = [*self.prompt_ids] if ids else None
        kind = "chat.completion.chunk" if asked.chat else "text_completion"
        head: Json = {"id": f"cmpl-{id(asked)}", "object": kind, "created": 7, "model": "cat"}
        if asked.chat:
            delta: Json = {"role": "assistant", "content": ""}
            choice: Json = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
            yield sse(head | {"choices": [choice], "prompt_token_ids": prompt})
        for at, token in enumerate(self._texts(asked, part)):
            last = at == len(part.tokens) - 1
            told = [FIRST_ID + part.start + at] if ids else None
            choice = {
                "index": 0,
                **({"delta": {"content": token}} if asked.chat else {"text": token}),
            }
            choice |= {"logprobs": None, "finish_reason": part.finish if last else None}
            if last or not asked.chat:
                choice["stop_reason"] = part.stop if last else None
            choice["token_ids"] = told
            if not asked.chat:
                choice["prompt_token_ids"] = prompt if at == 0 else None
            used = part.usage | {"completion_tokens": at + 1}
            usage = {"usage": used} if asked.usage_with_each else {}
            yield sse(head | {"choices": [choice]} | usage)
        if asked.usage:
            yield sse(head | {"choices": [], "usage": part.usage})
        yield DONE

    def part(self, asked: Asked) -> Part:
        part, text = super().part(asked), ""
        for count, token in enumerate(part.tokens, 1):
            text += token
            for stop in asked.body.get("stop") or []:
                if stop in text:
                    return replace(part, tokens=part.tokens[:count], finish="stop", stop=stop)
        return part

    def _texts(self, asked: Asked, part: Part) -> list[str]:
        """The text of each token, held back by what may become a stop string unless those are to be left in."""
        text, stops = "".join(part.tokens), asked.body.get("stop") or []
        keeps = bool(asked.body.get("include_stop_str_in_output"))
        held = max(map(len, stops)) - 1 if stops and not keeps else 0
        if part.stop is not None:
            text = text[: text.index(part.stop) + len(part.stop) * keeps]
        ends = itertools.accumulate(len(token) for token in part.tokens[:-1])
        shown = [0, *(max(0, end - held) for end in ends), len(text)]
        return [text[a:b] for a, b in itertools.pairwise(shown)]


class Sglang(Double):
    """`matched_stop`, the finish in a chunk of its own, usage with each chunk when asked.

    `return_token_ids` is for completions, whose choices have the fields only then; a chat's stream is refused with it
    (sgl-project/sglang#30917). An abort that has a status comes as an error event, another one as a finish reason
    (`srt/entrypoints/openai/serving_completions.py`). Loads as in #16976.
    """

    owner = "sglang"
    default_tokens = 16

    def pages(self) -> dict[str, object]:
        load = {
            "dp_rank": 0,
            "num_running_reqs": self.running,
            "num_waiting_reqs": self.waiting,
            "num_used_tokens": 10,
            "max_total_num_tokens": 4096,
            "token_usage": 0.5,
            "max_running_requests": 8,
        }
        return {"/v1/loads": {"timestamp": "x", "dp_rank_count": 1, "loads": [load]}}

    def refusal(self, asked: Asked) -> str | None:
        streams_ids = asked.chat and asked.body.get("stream") and asked.body.get("return_token_ids")
        return "return_token_ids is not supported with streaming." if streams_ids else None

    def events(self, asked: Asked, part: Part) -> Iterator[bytes]:
        head: Json = {"id": f"{id(asked):x}", "created": 7, "model": "cat"}
        head["object"] = "chat.completion.chunk" if asked.chat else "text_completion"
        if asked.chat:
            yield sse(head | {"choices": [self._choice({"role": "assistant", "content": ""})]})
        for at, token in enumerate(part.tokens):
            used = part.usage | {"completion_tokens": at + 1}
            usage = {"usage": used} if asked.usage_with_each else {}
            if asked.chat:
                yield sse(head | {"choices": [self._choice({"content": token})]} | usage)
                continue
            last = at == len(part.tokens) - 1
            ids = bool(asked.body.get("return_token_ids"))
            choice = {
                "index": 0,
                "text": token,
                "logprobs": None,
                "finish_reason": part.finish if last else None,
                "matched_stop": 2 if last else None,
                **({"token_ids": [FIRST_ID + part.start + at]} if ids else {}),
                **({"prompt_token_ids": [*self.prompt_ids]} if ids and at == 0 else {}),
            }
            yield sse(head | {"choices": [choice], "usage": None} | usage)
        if asked.chat:
            yield sse(head | {"choices": [self._choice({}) | {"finish_reason": part.finish}]})
        if asked.usage:
            yield sse(head | {"choices": [], "usage": part.usage})
        yield DONE

    def _choice(self, delta: Json) -> Json:
        return {
            "index": 0,
            "delta": delta,
            "logprobs": None,
            "finish_reason": None,
            "matched_stop": None,
        }


class TensorRtLlm(Double):
    """Refuses fields that it does not know; flat errors; load as a list of iterations.

    A chat's chunks leave out what is null, and the first ends in a space; a completion's do not
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

    def pages(self) -> dict[str, object]:
        stats = {
            "iter": 3,
            "iterLatencyMS": 9.5,
            "numActiveRequests": self.running,
            "numQueuedRequests": self.waiting,
            "maxNumActiveRequests": 8,
            "kvCacheStats": {"usedNumBlocks": 30, "maxNumBlocks": 120, "tokensPerBlock": 32},
            "inflightBatchingStats": {"numGenRequests": self.running},
        }
        return {
            "/metrics": [{**stats, "numActiveRequests": 99}, stats],
            "/version": {"version": "1.0"},
        }

    def refusal(self, asked: Asked) -> str | None:
        unknown = asked.body.keys() - self.known
        return f"Extra inputs are not permitted: {sorted(unknown)}" if unknown else None

    def error(self, status: int, message: str) -> Json:
        return {"object": "error", "message": message, "type": "X", "param": None, "code": status}

    def events(self, asked: Asked, part: Part) -> Iterator[bytes]:
        head: Json = {"id": f"cmpl-{id(asked)}", "created": 7, "model": "cat"}
        head["object"] = "chat.completion.chunk" if asked.chat else "text_completion"
        if asked.chat:
            role = sse(head | {"choices": [{"index": 0, "delta": {"role": "assistant"}}]})
            yield role.replace(b"\n\n", b" \n\n")
        for at, token in enumerate(part.tokens):
            last = at == len(part.tokens) - 1
            used = part.usage | {"completion_tokens": at + 1}
            if asked.chat:
                choice: Json = {"index": 0, "delta": {"content": token, "reasoning_content": ""}}
                choice |= {"finish_reason": part.finish} if last else {}
                usage: Json = {"usage": used} if asked.usage_with_each else {}
            else:
                choice = {"index": 0, "text": token, "token_ids": None, "stop_reason": None}
                choice["finish_reason"] = part.finish if last else None
                usage = {"usage": used if asked.usage_with_each else None}
            yield sse(head | {"choices": [choice]} | usage)
        if asked.usage:
            yield sse(head | {"choices": [], "usage": part.usage})
        yield DONE


class Tgi(Double):
    """No space after `data:`, the role in every chunk, an empty finish reason in completions, owned by nobody.

    As `router/src/{chat,lib}.rs` of TGI 3, which is in maintenance; errors are events too (#2668).
    """

    owner = "some/cat"

    def pages(self) -> dict[str, object]:
        info = {
            "model_id": "some/cat",
            "max_concurrent_requests": 128,
            "max_input_tokens": 32,
            "max_total_tokens": 64,
            "version": "3.3.5",
            "router": "text-generation-router",
        }
        metrics = f"tgi_queue_size {self.waiting}\ntgi_batch_current_size {self.running}\n"
        return {"/info": info, "/metrics": "# TYPE tgi_queue_size gauge\n" + metrics}

    def error(self, status: int, message: str) -> Json:
        return {"error": message, "error_type": "generation"}

    def continues(self, body: Json) -> bool:
        return True

    def events(self, asked: Asked, part: Part) -> Iterator[bytes]:
        head: Json = {"id": "", "created": 7, "model": "some/cat", "system_fingerprint": "3.3.5"}
        head["object"] = "chat.completion.chunk" if asked.chat else "text_completion"
        for at, token in enumerate(part.tokens):
            last = at == len(part.tokens) - 1
            choice: Json = {"index": 0, "logprobs": None}
            if asked.chat:
                choice["delta"] = {"role": "assistant", "content": token}
                choice["finish_reason"] = part.finish if last else None
                yield self._event(head | {"choices": [choice], "usage": None})
            else:
                choice |= {"text": token, "finish_reason": part.finish if last else ""}
                yield self._event(head | {"choices": [choice]})
        if asked.usage:
            yield self._event(head | {"choices": [], "usage": part.usage})
        yield b"data:[DONE]\n\n"

    def _event(self, data: Json) -> bytes:
        return b"data:" + json.dumps(data).encode() + b"\n\n"


class Lmdeploy(Double):
    """A session is a number, the role in every chunk; what is null is left out, but for the usage that is to come.

    Usage in a chunk of its own since InternLM/lmdeploy#4616, completions without an own limit since #4708; a request
    that fails ends its stream with an error event and `[DONE]` (`serve/openai/chat_completions/serving.py`).
    """

    owner = "lmdeploy"

    def pages(self) -> dict[str, object]:
        labels = '{engine="0",model_name="a cat"}'
        lines = [
            f"lmdeploy:num_requests_running{labels} {self.running:.1f}",
            f"lmdeploy:num_api_requests_waiting{labels} {min(2, self.waiting):.1f}",
            f"lmdeploy:num_requests_waiting{labels} {max(0, self.waiting - 2):.1f}",
            f"lmdeploy:gpu_cache_usage_perc{labels} 0.125",
        ]
        return {"/metrics": "\n".join(lines)}

    def refusal(self, asked: Asked) -> str | None:
        return None if isinstance(asked.body.get("session_id", -1), int) else "session_id"

    def error(self, status: int, message: str) -> Json:
        return {"object": "error", "message": message, "type": "X", "param": None, "code": status}

    def events(self, asked: Asked, part: Part) -> Iterator[bytes]:
        head: Json = {"id": f"{id(asked)}", "created": 7, "model": "cat"}
        head["object"] = "chat.completion.chunk" if asked.chat else "text_completion"
        for at, token in enumerate(part.tokens):
            last = at == len(part.tokens) - 1
            said: Json = {"text": token}
            if asked.chat:
                said = {"delta": {"role": "assistant", "content": token}}
            choice = {"index": 0, **said, **({"finish_reason": part.finish} if last else {})}
            yield sse(head | {"choices": [choice]} | ({"usage": None} if asked.usage else {}))
        if asked.usage:
            yield sse(head | {"choices": [], "usage": part.usage})
        yield DONE


class LlamaCpp(Double):
    """A role chunk with null content, `timings`, usage and finish in the last chunk of a completion."""

    owner = "llamacpp"

    def pages(self) -> dict[str, object]:
        slots = [{"id": at, "n_ctx": 64, "is_processing": at < self.running} for at in range(4)]
        return {"/health": {"status": "ok"}, "/slots": slots, "/props": {"total_slots": 4}}

    def continues(self, body: Json) -> bool:
        return True

    def events(self, asked: Asked, part: Part) -> Iterator[bytes]:
        timings = {"predicted_n": len(part.tokens), "predicted_per_second": 50.0}
        head: Json = {"created": 7, "model": "cat", "system_fingerprint": "b9999"}
        head |= {"object": "chat.completion.chunk" if asked.chat else "text_completion"}
        head |= {"id": f"chatcmpl-{id(asked)}"}
        if asked.chat:
            yield sse({"choices": [self._delta({"role": "assistant", "content": None})], **head})
            for token in part.tokens:
                yield sse({"choices": [self._delta({"content": token})], **head})
            end = [{"finish_reason": part.finish, "index": 0, "delta": {}}]
            if asked.usage:
                yield sse({"choices": end, **head})
                yield sse({"choices": [], **head, "usage": part.usage, "timings": timings})
            else:
                yield sse({"choices": end, **head, "timings": timings})
        else:
            for token in part.tokens:
                yield sse({"choices": [self._text(token, None)], **head})
            end = [self._text("", part.finish)]
            yield sse({"choices": end, **head, "usage": part.usage, "timings": timings})
        yield DONE

    def _delta(self, delta: Json) -> Json:
        return {"finish_reason": None, "index": 0, "delta": delta}

    def _text(self, text: str, finish: str | None) -> Json:
        return {"text": text, "index": 0, "logprobs": None, "finish_reason": finish}


class Hosted(Double):
    """A hosted API: keys, strict about fields, no health, no load, CRLF between events."""

    owner = "system"
    key = "sk-hosted"

    def refusal(self, asked: Asked) -> str | None:
        if asked.headers.get("api-key") != f"Key {self.key}":
            return "Incorrect API key provided."
        unknown = asked.body.keys() & {
            "session_id",
            "resume",
            "timeout_s",
            "cache_salt",
            "return_token_ids",
        }
        return f"Unrecognized request argument supplied: {sorted(unknown)}" if unknown else None

    def events(self, asked: Asked, part: Part) -> Iterator[bytes]:
        for event in LlamaCpp().events(asked, part):
            yield event.replace(b"\n\n", b"\r\n\r\n")


SELF_HOSTED = (Vllm, Sglang, TensorRtLlm, Tgi, Lmdeploy, LlamaCpp)
