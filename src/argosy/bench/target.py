"""Getting to know a server: which model it has, what it takes, how it counts tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from argosy.bench.client import Client
from argosy.bench.errors import BenchError
from argosy.bench.response import UNREADABLE, Plain, Reply
from argosy.bench.words import WORDS

Api = Literal["completions", "chat"]
PromptForm = Literal["auto", "tokens", "words"]
_SHORT, _LONG = 16, 16 + len(WORDS)


class Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """What the person who measures asked for."""

    url: str
    model: str | None = None
    api: Api = "completions"
    prompt_form: PromptForm = "auto"
    tokenizer: str | None = None
    """Directory or `tokenizer.json`, where the server has no `/tokenize`."""
    ignore_eos: bool = True
    chunk_usage: bool = True
    """Ask for a running token count in each chunk."""
    temperature: float = 0.0
    extra_body: dict[str, Any] = {}


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A server as it turned out to be."""

    model: str
    api: Api
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
    def path(self) -> str:
        """Of the API."""
        return "/v1/completions" if self.api == "completions" else "/v1/chat/completions"

    def fields(self, output_tokens: int) -> dict[str, Any]:
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

    def with_prompt(self, prompt: str | list[int]) -> dict[str, Any]:
        """What a body gets for a prompt."""
        if self.api == "completions":
            return {"prompt": prompt}
        return {"messages": [{"role": "user", "content": prompt}]}


class _Card(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Card]


class _Tokens(msgspec.Struct):
    tokens: list[int]


async def meet(client: Client, wishes: Wishes, *, conversations: bool) -> Target:
    """Ask the server what there is to know, with a few short requests.

    Conversations need prompts of words: their answers are text. Raises BenchError, saying why, when
    the server cannot be measured.
    """
    model = await _model(client, wishes)
    vocabulary: tuple[int, ...] = ()
    wordy = conversations or wishes.api == "chat"
    if wordy and wishes.prompt_form == "tokens":
        raise BenchError("Chats and conversations are text: leave --prompt-form tokens out.")
    if not wordy and wishes.prompt_form != "words":
        vocabulary = await _vocabulary(client, wishes, model)
        if not vocabulary and wishes.prompt_form == "tokens":
            raise BenchError("The server has no /tokenize: give --tokenizer, or prompts of words.")
    target = Target(
        model=model,
        api=wishes.api,
        ignore_eos=wishes.ignore_eos,
        chunk_usage=wishes.chunk_usage,
        temperature=wishes.temperature,
        extra_body=wishes.extra_body,
        vocabulary=vocabulary,
    )
    return await _adapt(client, target, fixed=wishes.prompt_form == "tokens")


async def _model(client: Client, wishes: Wishes) -> str:
    reply = await client.get("/v1/models", Plain())
    if reply.error == "connect":
        remedy = "Start the server, or correct --url."
        if "CERTIFICATE_VERIFY_FAILED" in reply.detail:
            remedy = "Have SSL_CERT_FILE name the PEM file of the authority that vouches for it."
        raise BenchError(f"{reply.detail}. {remedy}")
    if reply.status in {401, 403}:
        raise BenchError(f"The server refuses the key ({reply.detail}): give --api-key.")
    try:
        names = [card.id for card in msgspec.json.decode(reply.body, type=_Models).data]
    except UNREADABLE:
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


async def _vocabulary(client: Client, wishes: Wishes, model: str) -> tuple[int, ...]:
    text = " ".join(("", *WORDS))
    if wishes.tokenizer is not None:
        return tuple(sorted(set(_encode(Path(wishes.tokenizer), text))))
    body = {"model": model, "prompt": text, "add_special_tokens": False}
    reply = await client.post("/tokenize", msgspec.json.encode(body), Plain())
    if reply.status != 200:
        return ()
    try:
        return tuple(sorted(set(msgspec.json.decode(reply.body, type=_Tokens).tokens)))
    except UNREADABLE:
        return ()


def _encode(path: Path, text: str) -> list[int]:
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise BenchError(f"There is no tokenizer at {file}: --tokenizer takes a tokenizer.json.")
    try:
        ids: list[int] = Tokenizer.from_file(str(file)).encode(text, add_special_tokens=False).ids
    except Exception as error:  # the library raises nothing more precise
        raise BenchError(f"{file} is no tokenizer: {error}.") from error
    return ids


async def _adapt(client: Client, target: Target, *, fixed: bool) -> Target:
    """Leave out what the server does not take, then see how it counts words."""
    first = ""
    forms = [target]
    if target.vocabulary and not fixed:
        forms.append(msgspec.structs.replace(target, vocabulary=()))
    for form in forms:
        for ignore_eos, chunk_usage in ((True, True), (True, False), (False, True), (False, False)):
            tried = msgspec.structs.replace(
                form,
                ignore_eos=form.ignore_eos and ignore_eos,
                chunk_usage=form.chunk_usage and chunk_usage,
            )
            reply = await _probe(client, tried, _SHORT)
            if not reply.error:
                return tried if tried.vocabulary else await _count_words(client, tried, reply)
            first = first or f"{reply.error}: {reply.detail}"
            if reply.status not in {400, 422}:
                raise BenchError(f"The server refuses a request of 1 token ({first}).")
    raise BenchError(f"The server refuses a request of 1 token ({first}).")


async def _count_words(client: Client, target: Target, short: Reply) -> Target:
    """Two prompts of known numbers of words give the tokens of a word and what comes on top."""
    long = await _probe(client, target, _LONG)
    if short.input_tokens is None or long.input_tokens is None:
        return target  # no usage: a word is taken for a token
    slope = (long.input_tokens - short.input_tokens) / (_LONG - _SHORT)
    if slope <= 0:
        return target
    over = max(short.input_tokens - slope * _SHORT, 0.0)
    return msgspec.structs.replace(target, tokens_per_word=slope, overhead_tokens=over)


async def _probe(client: Client, target: Target, size: int) -> Reply:
    prompt: str | list[int] = " ".join((WORDS * 2)[:size])
    if target.vocabulary:
        prompt = list((target.vocabulary * size)[:size])
    body = target.fields(1) | target.with_prompt(prompt)
    return await client.post(target.path, msgspec.json.encode(body), Reply())
