"""Probing of a server: its model, its supported options, and how it counts tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from argosy.bench.client import BenchClient
from argosy.bench.errors import BenchError
from argosy.bench.response import DECODE_ERRORS, BenchResponse, JsonResponse
from argosy.bench.words import WORDS

BenchApi = Literal["completions", "chat"]
PromptForm = Literal["auto", "tokens", "words"]
_SHORT_PROBE_WORDS, _LONG_PROBE_WORDS = 16, 16 + len(WORDS)


class TargetOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Command-line options about the server."""

    url: str
    model: str | None = None
    api: BenchApi = "completions"
    prompt_form: PromptForm = "auto"
    tokenizer: str | None = None
    """Directory or `tokenizer.json`, for servers without `/tokenize`."""
    ignore_eos: bool = True
    chunk_usage: bool = True
    """Whether to request a running token count in each chunk."""
    temperature: float = 0.0
    extra_body: dict[str, Any] = {}


class BenchTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a probed server, and how requests to it are built."""

    model: str
    api: BenchApi
    ignore_eos: bool
    """Whether outputs continue to the planned length."""
    chunk_usage: bool
    """Whether each chunk contains the token count so far."""
    temperature: float
    extra_body: dict[str, Any]
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
    client: BenchClient, options: TargetOptions, *, has_conversations: bool
) -> BenchTarget:
    """Probe the server with a few short requests.

    Conversations need prompts of words, because their responses are text.

    Raises:
        BenchError: The server cannot be measured.
    """
    model = await _resolve_model(client, options)
    vocabulary: tuple[int, ...] = ()
    needs_words = has_conversations or options.api == "chat"
    if needs_words and options.prompt_form == "tokens":
        raise BenchError("Chats and conversations are text: leave out --prompt-form tokens.")
    if not needs_words and options.prompt_form != "words":
        vocabulary = await _fetch_vocabulary(client, options, model)
        if not vocabulary and options.prompt_form == "tokens":
            raise BenchError(
                "The server has no /tokenize: give --tokenizer, or --prompt-form words."
            )
    target = BenchTarget(
        model=model,
        api=options.api,
        ignore_eos=options.ignore_eos,
        chunk_usage=options.chunk_usage,
        temperature=options.temperature,
        extra_body=options.extra_body,
        vocabulary=vocabulary,
    )
    return await _detect_capabilities(
        client, target, tokens_required=options.prompt_form == "tokens"
    )


async def _resolve_model(client: BenchClient, options: TargetOptions) -> str:
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


async def _fetch_vocabulary(
    client: BenchClient, options: TargetOptions, model: str
) -> tuple[int, ...]:
    text = " ".join(("", *WORDS))
    if options.tokenizer is not None:
        return tuple(sorted(set(_encode_locally(Path(options.tokenizer), text))))
    body = {"model": model, "prompt": text, "add_special_tokens": False}
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


async def _detect_capabilities(
    client: BenchClient, target: BenchTarget, *, tokens_required: bool
) -> BenchTarget:
    """Drop options that the server rejects, then calibrate prompts of words."""
    first_error = ""
    candidates = [target]
    if target.vocabulary and not tokens_required:
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
