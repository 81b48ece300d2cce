"""Getting to know a server: which model it has, what it takes, how it counts tokens."""

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
    """What the person who measures asked for."""

    url: str
    model: str | None = None
    api: BenchApi = "completions"
    prompt_form: PromptForm = "auto"
    tokenizer: str | None = None
    """Directory or `tokenizer.json`, where the server has no `/tokenize`."""
    ignore_eos: bool = True
    chunk_usage: bool = True
    """Ask for a running token count in each chunk."""
    temperature: float = 0.0
    extra_body: dict[str, Any] = {}


class BenchTarget(msgspec.Struct, frozen=True, kw_only=True):
    """A server as it turned out to be."""

    model: str
    api: BenchApi
    ignore_eos: bool
    """Answers go on to the planned length."""
    chunk_usage: bool
    """Each chunk says how many tokens there have been."""
    temperature: float
    extra_body: dict[str, Any]
    vocabulary: tuple[int, ...] = ()
    """Token ids to draw prompts from; empty: prompts are words."""
    tokens_per_word: float = 1.0
    overhead_tokens: float = 0.0
    """That the server adds to each prompt of words (template, special tokens)."""

    @property
    def api_path(self) -> str:
        """Of the API."""
        return "/v1/completions" if self.api == "completions" else "/v1/chat/completions"

    def build_body_fields(self, output_tokens: int) -> dict[str, Any]:
        """A body without its prompt."""
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
        """What a body gets for a prompt."""
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
    """Ask the server what there is to know, with a few short requests.

    Conversations need prompts of words: their answers are text. Raises BenchError, saying why, when
    the server cannot be measured.
    """
    model = await _resolve_model(client, options)
    vocabulary: tuple[int, ...] = ()
    wordy = has_conversations or options.api == "chat"
    if wordy and options.prompt_form == "tokens":
        raise BenchError("Chats and conversations are text: leave --prompt-form tokens out.")
    if not wordy and options.prompt_form != "words":
        vocabulary = await _fetch_vocabulary(client, options, model)
        if not vocabulary and options.prompt_form == "tokens":
            raise BenchError("The server has no /tokenize: give --tokenizer, or prompts of words.")
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


async def _resolve_model(client: BenchClient, wishes: TargetOptions) -> str:
    reply = await client.get("/v1/models", JsonResponse())
    if reply.error == "connect":
        remedy = "Start the server, or correct --url."
        if "CERTIFICATE_VERIFY_FAILED" in reply.error_detail:
            remedy = "Have SSL_CERT_FILE name the PEM file of the authority that vouches for it."
        raise BenchError(f"{reply.error_detail}. {remedy}")
    if reply.status in {401, 403}:
        raise BenchError(f"The server refuses the key ({reply.error_detail}): give --api-key.")
    try:
        names = [card.id for card in msgspec.json.decode(reply.body, type=_ModelList).data]
    except DECODE_ERRORS:
        names = []
    if reply.status == 200 and names:
        model = wishes.model or names[0]
        if model not in names:
            has = ", ".join(names[:10])
            raise BenchError(f"The server has no model {model!r}: it has {has}.")
        return model
    if wishes.model is not None and not reply.error.startswith(("cut", "timeout", "malformed")):
        return wishes.model
    what = reply.error or f"status {reply.status}"
    raise BenchError(f"{wishes.url} does not list its models ({what}): is it an OpenAI server?")


async def _fetch_vocabulary(
    client: BenchClient, wishes: TargetOptions, model: str
) -> tuple[int, ...]:
    text = " ".join(("", *WORDS))
    if wishes.tokenizer is not None:
        return tuple(sorted(set(_encode_locally(Path(wishes.tokenizer), text))))
    body = {"model": model, "prompt": text, "add_special_tokens": False}
    reply = await client.post("/tokenize", msgspec.json.encode(body), JsonResponse())
    if reply.status != 200:
        return ()
    try:
        return tuple(sorted(set(msgspec.json.decode(reply.body, type=_TokenizeResponse).tokens)))
    except DECODE_ERRORS:
        return ()


def _encode_locally(path: Path, text: str) -> list[int]:
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise BenchError(f"There is no tokenizer at {file}: --tokenizer takes a tokenizer.json.")
    try:
        ids: list[int] = Tokenizer.from_file(str(file)).encode(text, add_special_tokens=False).ids
    except Exception as error:  # the library raises nothing more precise
        raise BenchError(f"{file} is no tokenizer: {error}.") from error
    return ids


async def _detect_capabilities(
    client: BenchClient, target: BenchTarget, *, tokens_required: bool
) -> BenchTarget:
    """Leave out what the server does not take, then see how it counts words."""
    first = ""
    forms = [target]
    if target.vocabulary and not tokens_required:
        forms.append(msgspec.structs.replace(target, vocabulary=()))
    for form in forms:
        for ignore_eos, chunk_usage in ((True, True), (True, False), (False, True), (False, False)):
            tried = msgspec.structs.replace(
                form,
                ignore_eos=form.ignore_eos and ignore_eos,
                chunk_usage=form.chunk_usage and chunk_usage,
            )
            reply = await _send_probe(client, tried, _SHORT_PROBE_WORDS)
            if not reply.error:
                return tried if tried.vocabulary else await _calibrate_words(client, tried, reply)
            first = first or f"{reply.error}: {reply.error_detail}"
            if reply.status not in {400, 422}:
                raise BenchError(f"The server refuses a request of 1 token ({first}).")
    raise BenchError(f"The server refuses a request of 1 token ({first}).")


async def _calibrate_words(
    client: BenchClient, target: BenchTarget, short: BenchResponse
) -> BenchTarget:
    """Two prompts of known numbers of words give the tokens of a word and what comes on top."""
    long = await _send_probe(client, target, _LONG_PROBE_WORDS)
    if short.input_tokens is None or long.input_tokens is None:
        return target  # no usage: a word is taken for a token
    slope = (long.input_tokens - short.input_tokens) / (_LONG_PROBE_WORDS - _SHORT_PROBE_WORDS)
    if slope <= 0:
        return target
    over = max(short.input_tokens - slope * _SHORT_PROBE_WORDS, 0.0)
    return msgspec.structs.replace(target, tokens_per_word=slope, overhead_tokens=over)


async def _send_probe(
    client: BenchClient, target: BenchTarget, prompt_length: int
) -> BenchResponse:
    prompt: str | list[int] = " ".join((WORDS * 2)[:prompt_length])
    if target.vocabulary:
        prompt = list((target.vocabulary * prompt_length)[:prompt_length])
    body = target.build_body_fields(1) | target.build_prompt_fields(prompt)
    return await client.post(target.api_path, msgspec.json.encode(body), BenchResponse())
