"""Server that is measured: probing of its model, its options and its tokens, and the bodies of requests to it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from argosy.bench.client import BenchClient
from argosy.bench.errors import BenchError
from argosy.bench.plan import (
    ChatPrompt,
    PlannedPrompt,
    PlannedRequest,
    SyntheticPrompt,
    SyntheticSpan,
    TextPrompt,
)
from argosy.bench.response import DECODE_ERRORS, BenchResponse, JsonResponse

_WORD_LIST = """
    the of and to in is was for that on as with by at from his it an are which this be or had first not one
    their has its new after but who they two her she been other when time during there into all may more
    year over only up out most would about where used part well long great high old small large next early
    young few public same able people way day man thing woman life child world school state family student
    group country hand place case week company system program question work night point home water room
    mother area money story fact month lot right study book eye job word business issue side kind head
    house service friend father power hour game line end member law car city community name team minute
    idea body back parent face level office door health person art war history party result change morning
    reason research girl guy moment air teacher force order field road light music
"""
WORDS: tuple[str, ...] = tuple(_WORD_LIST.split())
"""Short common English words, which are single tokens for most tokenizers."""
BenchApi = Literal["completions", "chat"]
PromptForm = Literal["auto", "tokens", "words"]
_SHORT_PROBE_WORDS, _LONG_PROBE_WORDS = 16, 16 + len(WORDS)
_MAX_CACHED_SPANS = 4096
"""Size of the caches for generated spans. Prefixes and trace blocks repeat, but the last span of a prompt is unique."""


class BenchTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Server, and how requests to it are built: as the options say, and then as the probe has found."""

    url: str = ""
    """Where it listens. Empty if a client is connected to it already."""
    model: str | None = None
    """Name of the model. None is the first one that the server lists, until the probe."""
    api: BenchApi = "completions"
    prompt_form: PromptForm = "auto"
    tokenizer: str | None = None
    """Directory or `tokenizer.json`, for servers without `/tokenize`."""
    ignore_eos: bool = True
    """Whether outputs continue to the planned length."""
    chunk_usage: bool = True
    """Whether to request a running token count in each chunk."""
    temperature: float = 0.0
    extra_body: dict[str, Any] = {}
    vocabulary: tuple[int, ...] = ()
    """Token ids to draw prompts from. Empty if prompts are words."""
    tokens_per_word: float = 1.0
    overhead_tokens: float = 0.0
    """Tokens that the server adds to each prompt of words (template, special tokens)."""

    @property
    def api_path(self) -> str:
        """Path of the API."""
        return "/v1/completions" if self.api == "completions" else "/v1/chat/completions"

    def build_body_fields(self, output_tokens: int) -> dict[str, Any]:
        """Return the fields of a body without its prompt."""
        options: dict[str, bool] = {"include_usage": True}
        if self.chunk_usage:
            options["continuous_usage_stats"] = True
        body: dict[str, Any] = {
            "model": self.model,
            "stream": True,
            "stream_options": options,
            "max_tokens": output_tokens,
            "temperature": self.temperature,
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        return body | self.extra_body

    def build_prompt_fields(self, prompt: str | list[int]) -> dict[str, Any]:
        """Return the fields of a body for a prompt."""
        if self.api == "completions":
            return {"prompt": prompt}
        return {"messages": [{"role": "user", "content": prompt}]}


class _ModelCard(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_ModelCard]


class _TokenizeResponse(msgspec.Struct):
    tokens: list[int]


async def probe_target(
    client: BenchClient, options: BenchTarget, *, has_conversations: bool
) -> BenchTarget:
    """Probe the server with a few short requests.

    Conversations need prompts of words, because their responses are text.

    Raises:
        BenchError: The server cannot be measured.
    """
    target = msgspec.structs.replace(options, model=await _resolve_model(client, options))
    needs_words = has_conversations or options.api == "chat"
    needs_tokens = options.prompt_form == "tokens"
    if needs_words and needs_tokens:
        raise BenchError("Chats and conversations are text: leave out --prompt-form tokens.")
    if not needs_words and options.prompt_form != "words":
        vocabulary = await _fetch_vocabulary(client, target)
        if not vocabulary and needs_tokens:
            raise BenchError(
                "The server has no /tokenize: give --tokenizer, or --prompt-form words."
            )
        target = msgspec.structs.replace(target, vocabulary=vocabulary)
    return await _detect_capabilities(client, target)


async def _resolve_model(client: BenchClient, options: BenchTarget) -> str:
    response = await client.get("/v1/models", JsonResponse())
    if response.error == "connect":
        remedy = "Start the server, or correct --url."
        if "CERTIFICATE_VERIFY_FAILED" in response.error_detail:
            remedy = (
                "Set SSL_CERT_FILE to the PEM file of the authority that signed the certificate."
            )
        raise BenchError(f"{response.error_detail}. {remedy}")
    if response.status in {401, 403}:
        raise BenchError(f"The server rejects the key ({response.error_detail}): give --api-key.")
    try:
        names = [card.id for card in msgspec.json.decode(response.body, type=_ModelList).data]
    except DECODE_ERRORS:
        names = []
    if response.status == 200 and names:
        model = options.model or names[0]
        if model not in names:
            listed = ", ".join(names[:10])
            raise BenchError(f"The server has no model {model!r}, only {listed}.")
        return model
    if options.model is not None and not response.error.startswith(("cut", "timeout", "malformed")):
        return options.model
    problem = response.error or f"status {response.status}"
    raise BenchError(
        f"{options.url} does not list its models ({problem}): give the --url of an OpenAI-compatible server."
    )


async def _fetch_vocabulary(client: BenchClient, target: BenchTarget) -> tuple[int, ...]:
    text = " ".join(("", *WORDS))
    if target.tokenizer is not None:
        return tuple(sorted(set(_encode_locally(Path(target.tokenizer), text))))
    body = {"model": target.model, "prompt": text, "add_special_tokens": False}
    response = await client.post("/tokenize", msgspec.json.encode(body), JsonResponse())
    if response.status != 200:
        return ()
    try:
        return tuple(sorted(set(msgspec.json.decode(response.body, type=_TokenizeResponse).tokens)))
    except DECODE_ERRORS:
        return ()


def _encode_locally(path: Path, text: str) -> list[int]:
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise BenchError(f"{file} does not exist: --tokenizer takes a tokenizer.json.")
    try:
        ids: list[int] = Tokenizer.from_file(str(file)).encode(text, add_special_tokens=False).ids
    except Exception as error:  # the library raises no specific exception
        raise BenchError(f"{file} is not a tokenizer: {error}.") from error
    return ids


async def _detect_capabilities(client: BenchClient, target: BenchTarget) -> BenchTarget:
    """Drop options that the server rejects, then calibrate prompts of words."""
    first_error = ""
    candidates = [target]
    if target.vocabulary and target.prompt_form != "tokens":
        candidates.append(msgspec.structs.replace(target, vocabulary=()))
    for candidate in candidates:
        for ignore_eos, chunk_usage in ((True, True), (True, False), (False, True), (False, False)):
            attempt = msgspec.structs.replace(
                candidate,
                ignore_eos=candidate.ignore_eos and ignore_eos,
                chunk_usage=candidate.chunk_usage and chunk_usage,
            )
            response = await _send_probe(client, attempt, _SHORT_PROBE_WORDS)
            if not response.error:
                return (
                    attempt
                    if attempt.vocabulary
                    else await _calibrate_words(client, attempt, response)
                )
            first_error = first_error or f"{response.error}: {response.error_detail}"
            if response.status not in {400, 422}:
                raise BenchError(f"The server rejects a request of 1 token ({first_error}).")
    raise BenchError(f"The server rejects a request of 1 token ({first_error}).")


async def _calibrate_words(
    client: BenchClient, target: BenchTarget, short: BenchResponse
) -> BenchTarget:
    """Fit the tokens per word and the overhead from two prompts with known numbers of words."""
    long = await _send_probe(client, target, _LONG_PROBE_WORDS)
    if short.input_tokens is None or long.input_tokens is None:
        return target  # without usage a word counts as a token
    tokens_per_word = (long.input_tokens - short.input_tokens) / (
        _LONG_PROBE_WORDS - _SHORT_PROBE_WORDS
    )
    if tokens_per_word <= 0:
        return target
    overhead = max(short.input_tokens - tokens_per_word * _SHORT_PROBE_WORDS, 0.0)
    return msgspec.structs.replace(
        target, tokens_per_word=tokens_per_word, overhead_tokens=overhead
    )


async def _send_probe(
    client: BenchClient, target: BenchTarget, prompt_length: int
) -> BenchResponse:
    prompt: str | list[int] = " ".join((WORDS * 2)[:prompt_length])
    if target.vocabulary:
        prompt = list((target.vocabulary * prompt_length)[:prompt_length])
    body = target.build_body_fields(1) | target.build_prompt_fields(prompt)
    return await client.post(target.api_path, msgspec.json.encode(body), BenchResponse())


ConversationTurn = tuple[str, str]
"""Text of the user, and of the assistant that answered."""


class RequestBodyBuilder:
    """Builds bodies for one server. A body depends only on the request, the history and the server."""

    def __init__(self, target: BenchTarget) -> None:
        self.target = target
        self._vocabulary = np.asarray(target.vocabulary, dtype=np.int64)
        self._draw_ids = functools.lru_cache(_MAX_CACHED_SPANS)(self._generate_ids)
        self._draw_words = functools.lru_cache(_MAX_CACHED_SPANS)(self._generate_words)

    def build_body(self, request: PlannedRequest, history: list[ConversationTurn]) -> bytes:
        """Return the JSON body of the request, sent after the turns of `history`."""
        fields = self.target.build_body_fields(request.output_tokens)
        return msgspec.json.encode(fields | self._build_prompt(request.prompt, history))

    def prompt_text(self, prompt: PlannedPrompt) -> str:
        """Return the prompt as text."""
        match prompt:
            case TextPrompt(text):
                return text
            case ChatPrompt(messages):
                return "\n".join(str(message.get("content", "")) for message in messages)
            case SyntheticPrompt(spans):
                *shared, own = self._subtract_overhead(spans)
                return " ".join([*map(self._draw_words, shared), self._generate_words(own)])

    def _build_prompt(
        self, prompt: PlannedPrompt, history: list[ConversationTurn]
    ) -> dict[str, Any]:
        target = self.target
        if target.api == "chat":
            messages: list[dict[str, Any]] = [
                {"role": role, "content": text}
                for turn in history
                for role, text in zip(("user", "assistant"), turn, strict=True)
            ]
            if isinstance(prompt, ChatPrompt):
                return {"messages": [*messages, *prompt.messages]}
            return {"messages": [*messages, {"role": "user", "content": self.prompt_text(prompt)}]}
        if isinstance(prompt, SyntheticPrompt) and target.vocabulary and not history:
            *shared, own = prompt.spans
            span_ids = [*map(self._draw_ids, shared), self._generate_ids(own)]
            return {"prompt": [token for ids in span_ids for token in ids]}
        history_text = "".join(f"{user}{assistant}\n" for user, assistant in history)
        return {"prompt": history_text + self.prompt_text(prompt)}

    def _subtract_overhead(self, spans: tuple[SyntheticSpan, ...]) -> tuple[SyntheticSpan, ...]:
        """Shorten the last span by the tokens that the server adds."""
        last = spans[-1]
        tokens = max(last.tokens - round(self.target.overhead_tokens), 1)
        return (*spans[:-1], SyntheticSpan(last.seed, tokens))

    def _generate_ids(self, span: SyntheticSpan) -> list[int]:
        indices = np.random.default_rng(span.seed).integers(len(self._vocabulary), size=span.tokens)
        ids: list[int] = self._vocabulary[indices].tolist()
        return ids

    def _generate_words(self, span: SyntheticSpan) -> str:
        count = max(round(span.tokens / self.target.tokens_per_word), 1)
        indices = np.random.default_rng(span.seed).integers(len(WORDS), size=count)
        return " ".join(WORDS[index] for index in indices.tolist())
