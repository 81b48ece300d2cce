"""The door: what can be refused is refused here, and what passes becomes engine requests."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import msgspec

from argosy.engine.engine_config import EngineConfig
from argosy.engine.serving.core_messages import EngineRequest, Ready
from argosy.engine.serving.preprocessing import parameter_rules, sampling_params
from argosy.engine.serving.preprocessing.prompt_tokenizer import Prompt, Prompts
from argosy.engine.serving.text.chat_template import ChatTemplate
from argosy.engine.serving.text.detokenizer import TextStream
from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    SamplingParams,
    TokenizeRequest,
    invalid,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What trusted headers say about a request."""

    request_id: str
    tenant: str = ""
    domain: str = ""
    """Cache domain of the tenant."""
    tier: int = 1
    weight: float = 1.0
    created: int | None = None
    """Unix time in seconds that the answer is to carry; None: now."""
    journal: bool = False
    """The answer's stream is to tell the gateway where it can be carried on."""
    cached: int | None = None
    """Cached tokens that were told of the prompts of a stream that this one carries on; None: it carries on none."""
    given: tuple[int, ...] = ()
    """How many of the tokens that each choice goes on after its client gave itself; of what is not said, none."""

    def told(self, choice: int, tokens: int) -> int:
        """How many of so many tokens that a choice goes on after a stream has told, which this one carries on."""
        given = self.given[choice] if choice < len(self.given) else 0
        return max(0, tokens - given) if self.journal else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one HTTP request asks of the engine, and what its answer needs beside the tokens."""

    requests: list[EngineRequest]
    """Choice i of prompt p at p * n + i, which is also its `index` in the answer. Log-probabilities
    of a prompt come with the first of its choices that has something to go on with."""
    n: int
    logprobs: int | None
    """How many likeliest tokens to list beside each token; None for no log-probabilities."""
    echo: list[str]
    """The text of each prompt when the answer is to begin with it, else empty."""
    told: frozenset[int]
    """Choices whose whole answer was given before (only of a stream that is carried on)."""
    scoring: bool
    """No answer is wanted (`max_tokens` 0): the one token that the engine samples is left out."""

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens as the usage counts them: each prompt once, however many choices."""
        return sum(len(request.prompt) for request in self.requests[:: self.n])


class Door:
    """Checks and lowers request bodies for one model. Immutable; may be used from many threads.

    The methods are pure but for the seed drawn where a body has none. Their time is that of
    rendering and tokenizing, bounded by the model's context whatever the size of the body: call
    them in a worker thread. Whatever is wrong is an ApiError (400) that names the parameter.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, ready: Ready, config: EngineConfig
    ) -> None:
        self.digest = hashlib.sha256(f"{tokenizer.digest} {template.digest}".encode()).hexdigest()
        """Doors that make the same tokens of the same text have the same."""
        self._tokenizer = tokenizer
        self._prompts = Prompts(tokenizer, template, ready)
        self._vocab_size = ready.vocab_size
        self._eos = frozenset((*ready.eos_token_ids, *tokenizer.eos_token_ids))
        self._eos_unknown_to_core = self._eos.difference(ready.eos_token_ids)
        self._timeout_s = config.request_timeout_s

    @property
    def context_tokens(self) -> int:
        """Most tokens of one sequence, prompt and answer."""
        return self._prompts.context_tokens

    def chat(self, body: ChatCompletionRequest, context: Context) -> Job:
        """Lower a chat: one prompt, rendered by the model's template."""
        self._check(body)
        if body.echo:
            raise parameter_rules.unsupported("echo", "Chats are not echoed; use /v1/completions.")
        logprobs = sampling_params.chat_logprobs(body)
        prompts = [self._prompts.chat(body, context.created)]
        max_tokens = sampling_params.chat_max_tokens(body, self._prompts.left(prompts, "messages"))
        self._prompts.fit(prompts, max_tokens, "messages")
        params = self._params(body, max_tokens, logprobs, body.prompt_logprobs)
        requests = self._requests(body, context, prompts, params)
        return Job(
            requests=requests,
            n=body.n or 1,
            logprobs=logprobs,
            echo=[],
            told=self._told(requests, context),
            scoring=False,
        )

    def completion(self, body: CompletionRequest, context: Context) -> Job:
        """Lower a completion: one or several prompts of text or token ids."""
        self._check(body)
        n = body.n or 1
        if body.best_of not in {None, n}:
            raise parameter_rules.unsupported(
                "best_of", f"All choices are returned; it must be {n}, as 'n'."
            )
        logprobs = sampling_params.completion_logprobs(body)
        prompts = self._prompts.completion(body)
        max_tokens = sampling_params.completion_max_tokens(
            body, self._prompts.left(prompts, "prompt")
        )
        self._prompts.fit(prompts, max_tokens, "prompt")
        asked = [body.prompt_logprobs, logprobs if body.echo else None]
        prompt_logprobs = max((k for k in asked if k is not None), default=None)
        params = self._params(body, max(max_tokens, 1), logprobs, prompt_logprobs)
        requests = self._requests(body, context, prompts, params)
        told = self._told(requests, context)
        return Job(
            requests=_led(requests, told, n),
            n=n,
            logprobs=logprobs,
            echo=[prompt.text for prompt in prompts] if body.echo else [],
            told=told,
            scoring=max_tokens == 0,
        )

    def tokenize(self, body: TokenizeRequest) -> list[int]:
        """Token ids of a prompt, or of messages, as a completion or a chat would have them."""
        parameter_rules.check(msgspec.structs.asdict(body))
        return self._prompts.tokenize(body)

    def detokenize(self, body: DetokenizeRequest) -> str:
        """The text of token ids, special tokens included."""
        parameter_rules.token_ids("tokens", body.tokens, self._vocab_size)
        return self._tokenizer.decode(body.tokens, skip_special_tokens=False)

    def _check(self, body: GenerationRequest) -> None:
        parameter_rules.check(msgspec.structs.asdict(body))
        if body.timeout_s is not None:
            allowed = parameter_rules.Range(0, self._timeout_s, above_low=True)
            parameter_rules.in_range("timeout_s", body.timeout_s, allowed)
        if body.stream and body.prompt_logprobs is not None:
            raise parameter_rules.unsupported(
                "prompt_logprobs", "Streams do not carry them; do not stream."
            )
        if body.truncation_side is not None and body.truncate_prompt_tokens is None:
            raise invalid(
                "'truncation_side' says nothing without 'truncate_prompt_tokens'. Give both.",
                "truncation_side",
            )

    def _params(
        self,
        body: GenerationRequest,
        max_tokens: int,
        logprobs: int | None,
        prompt_logprobs: int | None,
    ) -> SamplingParams:
        params = sampling_params.sampling(
            body,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            vocab_size=self._vocab_size,
            eos_token_ids=self._eos,
        )
        if params.ignore_eos or not self._eos_unknown_to_core:
            return params
        stops = sorted(self._eos_unknown_to_core.union(params.stop_token_ids))
        return msgspec.structs.replace(params, stop_token_ids=tuple(stops))

    def _requests(
        self,
        body: GenerationRequest,
        context: Context,
        prompts: list[Prompt],
        params: SamplingParams,
    ) -> list[EngineRequest]:
        n = body.n or 1
        seed = sampling_params.request_seed(body)
        requests = []
        resumed = self._resumed(body, n * len(prompts))
        for index, output in enumerate(resumed):
            choice = index % n
            own = msgspec.structs.replace(
                params,
                seed=sampling_params.choice_seed(seed, choice),
                prompt_logprobs=None if choice else params.prompt_logprobs,
            )
            request = EngineRequest(
                id=f"{context.request_id}-{index}",
                prompt=prompts[index // n].ids,
                output=output,
                params=own,
                lead=f"{context.request_id}-{index - choice}" if choice else None,
                domain=_domain(context.domain, body.cache_salt),
                tenant=context.tenant,
                tier=context.tier + (body.priority or 0),
                weight=context.weight,
                timeout_s=body.timeout_s or self._timeout_s,
            )
            requests.append(request)
        return requests

    def _resumed(self, body: GenerationRequest, choices: int) -> list[list[int]]:
        """The tokens that each choice goes on from."""
        if body.resume is None:
            return [[] for _ in range(choices)]
        given = body.resume.token_ids
        lists = [item for item in given if isinstance(item, list)]
        if not lists:
            lists = [[item for item in given if isinstance(item, int)]]
        elif len(lists) < len(given):
            raise invalid(
                "'resume.token_ids' mixes ids and lists. Give one list for each choice.",
                "resume.token_ids",
            )
        if len(lists) != choices:
            raise invalid(
                f"'resume.token_ids' has {len(lists)} lists for {choices} choices. Give one each.",
                "resume.token_ids",
            )
        for ids in lists:
            parameter_rules.token_ids("resume.token_ids", ids, self._vocab_size)
        return lists

    def _told(self, requests: list[EngineRequest], context: Context) -> frozenset[int]:
        """The choices that have nothing to go on with; refused unless a stream is carried on."""
        told = set()
        for index, request in enumerate(requests):
            ended = self._ended(request.output, request.params) if request.output else ""
            if ended and not context.told(index, len(request.output)):
                raise invalid(
                    f"'resume.token_ids' of choice {index} is a finished answer ({ended}): "
                    "there is nothing to go on with. Do not ask for it again.",
                    "resume.token_ids",
                    "resume_finished",
                )
            if ended:
                told.add(index)
        return frozenset(told)

    def _ended(self, ids: list[int], params: SamplingParams) -> str:
        """Why an answer of these tokens is finished, or nothing."""
        if len(ids) >= params.max_tokens:
            return f"it has {params.max_tokens} tokens, the most"
        endings = set(params.stop_token_ids)
        if not params.ignore_eos:
            endings |= self._eos
        if not endings.isdisjoint(ids[params.min_tokens :]):
            return "it has a token that ends it"
        if TextStream(self._tokenizer, params, ids).stop is not None:
            return "it has a stop string"
        return ""


def _led(requests: list[EngineRequest], told: frozenset[int], n: int) -> list[EngineRequest]:
    """The same; of a prompt whose first choice has nothing to go on with, the next one that has leads the others.

    Else nobody would compute the prompt's log-probabilities.
    """
    led = list(requests)
    for first in range(0, len(led), n):
        going = [index for index in range(first, first + n) if index not in told]
        if first not in told or not going:
            continue
        heir, *others = going
        scored = led[first].params.prompt_logprobs
        own = msgspec.structs.replace(led[heir].params, prompt_logprobs=scored)
        led[heir] = msgspec.structs.replace(led[heir], lead=None, params=own)
        for other in others:
            led[other] = msgspec.structs.replace(led[other], lead=led[heir].id)
    return led


def _domain(domain: str, salt: str | None) -> str:
    """The tenant's cache domain, or the part of it that only requests with the salt share."""
    if salt is None:
        return domain
    return "salted:" + hashlib.sha256(msgspec.json.encode([domain, salt])).hexdigest()
