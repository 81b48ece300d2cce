"""The door: what can be refused is refused here, and what passes becomes engine requests."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import msgspec

from argosy.engine.engine_config import EngineConfig
from argosy.engine.serving.core_messages import CoreReady, EngineRequest
from argosy.engine.serving.preprocessing import parameter_rules, sampling_params
from argosy.engine.serving.preprocessing.prompt_tokenizer import PromptTokenizer, TokenizedPrompt
from argosy.engine.serving.text.chat_template import ChatTemplate
from argosy.engine.serving.text.detokenizer import Detokenizer
from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    SamplingParams,
    TokenizeRequest,
    invalid_request,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayHeaders:
    """What trusted headers say about a request."""

    request_id: str
    tenant: str = ""
    cache_domain: str = ""
    """Cache domain of the tenant."""
    tier: int = 1
    weight: float = 1.0
    created_at: int | None = None
    """Unix time in seconds that the answer is to carry; None: now."""
    wants_resume_metadata: bool = False
    """The answer's stream is to tell the gateway where it can be carried on."""
    resumed_cached_tokens: int | None = None
    """Cached tokens that were told of the prompts of a stream that this one carries on; None: it carries on none."""
    resume_given_tokens: tuple[int, ...] = ()
    """How many of the tokens that each choice goes on after its client gave itself; of what is not said, none."""

    def delivered_tokens(self, choice: int, tokens: int) -> int:
        """How many of so many tokens that a choice goes on after a stream has told, which this one carries on."""
        given = self.resume_given_tokens[choice] if choice < len(self.resume_given_tokens) else 0
        return max(0, tokens - given) if self.wants_resume_metadata else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """What one HTTP request asks of the engine, and what its answer needs beside the tokens."""

    requests: list[EngineRequest]
    """Choice i of prompt p at p * n + i, which is also its `index` in the answer. Log-probabilities
    of a prompt come with the first of its choices that has something to go on with."""
    n: int
    logprobs: int | None
    """How many likeliest tokens to list beside each token; None for no log-probabilities."""
    echo_texts: list[str]
    """The text of each prompt when the answer is to begin with it, else empty."""
    completed_choices: frozenset[int]
    """Choices whose whole answer was given before (only of a stream that is carried on)."""
    is_scoring: bool
    """No answer is wanted (`max_tokens` 0): the one token that the engine samples is left out."""

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens as the usage counts them: each prompt once, however many choices."""
        return sum(len(request.prompt) for request in self.requests[:: self.n])


class RequestProcessor:
    """Checks and lowers request bodies for one model. Immutable; may be used from many threads.

    The methods are pure but for the seed drawn where a body has none. Their time is that of
    rendering and tokenizing, bounded by the model's context whatever the size of the body: call
    them in a worker thread. Whatever is wrong is an ApiError (400) that names the parameter.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, ready: CoreReady, config: EngineConfig
    ) -> None:
        self.tokenization_digest = hashlib.sha256(
            f"{tokenizer.digest} {template.digest}".encode()
        ).hexdigest()
        """Doors that make the same tokens of the same text have the same."""
        self._tokenizer = tokenizer
        self._prompt_tokenizer = PromptTokenizer(tokenizer, template, ready)
        self._vocab_size = ready.vocab_size
        self._eos_token_ids = frozenset((*ready.eos_token_ids, *tokenizer.eos_token_ids))
        self._eos_unknown_to_core = self._eos_token_ids.difference(ready.eos_token_ids)
        self._timeout_s = config.request_timeout_s

    @property
    def max_context_tokens(self) -> int:
        """Most tokens of one sequence, prompt and answer."""
        return self._prompt_tokenizer.max_context_tokens

    def prepare_chat(self, body: ChatCompletionRequest, headers: GatewayHeaders) -> PreparedRequest:
        """Lower a chat: one prompt, rendered by the model's template."""
        self._check_parameters(body)
        if body.echo:
            raise parameter_rules.unsupported_parameter(
                "echo", "Chats are not echoed; use /v1/completions."
            )
        logprobs = sampling_params.chat_logprobs(body)
        prompts = [self._prompt_tokenizer.tokenize_chat(body, headers.created_at)]
        max_tokens = sampling_params.chat_max_tokens(
            body, self._prompt_tokenizer.remaining_tokens(prompts, "messages")
        )
        self._prompt_tokenizer.check_fit(prompts, max_tokens, "messages")
        params = self._sampling_params(body, max_tokens, logprobs, body.prompt_logprobs)
        requests = self._build_engine_requests(body, headers, prompts, params)
        return PreparedRequest(
            requests=requests,
            n=body.n or 1,
            logprobs=logprobs,
            echo_texts=[],
            completed_choices=self._completed_choices(requests, headers),
            is_scoring=False,
        )

    def prepare_completion(
        self, body: CompletionRequest, headers: GatewayHeaders
    ) -> PreparedRequest:
        """Lower a completion: one or several prompts of text or token ids."""
        self._check_parameters(body)
        n = body.n or 1
        if body.best_of not in {None, n}:
            raise parameter_rules.unsupported_parameter(
                "best_of", f"All choices are returned; it must be {n}, as 'n'."
            )
        logprobs = sampling_params.completion_logprobs(body)
        prompts = self._prompt_tokenizer.tokenize_completion(body)
        max_tokens = sampling_params.completion_max_tokens(
            body, self._prompt_tokenizer.remaining_tokens(prompts, "prompt")
        )
        self._prompt_tokenizer.check_fit(prompts, max_tokens, "prompt")
        asked = [body.prompt_logprobs, logprobs if body.echo else None]
        prompt_logprobs = max((k for k in asked if k is not None), default=None)
        params = self._sampling_params(body, max(max_tokens, 1), logprobs, prompt_logprobs)
        requests = self._build_engine_requests(body, headers, prompts, params)
        told = self._completed_choices(requests, headers)
        return PreparedRequest(
            requests=_reassign_parents(requests, told, n),
            n=n,
            logprobs=logprobs,
            echo_texts=[prompt.text for prompt in prompts] if body.echo else [],
            completed_choices=told,
            is_scoring=max_tokens == 0,
        )

    def tokenize(self, body: TokenizeRequest) -> list[int]:
        """Token ids of a prompt, or of messages, as a completion or a chat would have them."""
        parameter_rules.check_parameters(msgspec.structs.asdict(body))
        return self._prompt_tokenizer.tokenize(body)

    def detokenize(self, body: DetokenizeRequest) -> str:
        """The text of token ids, special tokens included."""
        parameter_rules.check_token_ids("tokens", body.tokens, self._vocab_size)
        return self._tokenizer.decode(body.tokens, skip_special_tokens=False)

    def _check_parameters(self, body: GenerationRequest) -> None:
        parameter_rules.check_parameters(msgspec.structs.asdict(body))
        if body.timeout_s is not None:
            allowed = parameter_rules.NumericRange(0, self._timeout_s, exclusive_minimum=True)
            parameter_rules.check_range("timeout_s", body.timeout_s, allowed)
        if body.stream and body.prompt_logprobs is not None:
            raise parameter_rules.unsupported_parameter(
                "prompt_logprobs", "Streams do not carry them; do not stream."
            )
        if body.truncation_side is not None and body.truncate_prompt_tokens is None:
            raise invalid_request(
                "'truncation_side' says nothing without 'truncate_prompt_tokens'. Give both.",
                "truncation_side",
            )

    def _sampling_params(
        self,
        body: GenerationRequest,
        max_tokens: int,
        logprobs: int | None,
        prompt_logprobs: int | None,
    ) -> SamplingParams:
        params = sampling_params.build_sampling_params(
            body,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            vocab_size=self._vocab_size,
            eos_token_ids=self._eos_token_ids,
        )
        if params.ignore_eos or not self._eos_unknown_to_core:
            return params
        stops = sorted(self._eos_unknown_to_core.union(params.stop_token_ids))
        return msgspec.structs.replace(params, stop_token_ids=tuple(stops))

    def _build_engine_requests(
        self,
        body: GenerationRequest,
        headers: GatewayHeaders,
        prompts: list[TokenizedPrompt],
        params: SamplingParams,
    ) -> list[EngineRequest]:
        n = body.n or 1
        seed = sampling_params.request_seed(body)
        requests = []
        resumed = self._resumed_tokens(body, n * len(prompts))
        for index, output in enumerate(resumed):
            choice = index % n
            own = msgspec.structs.replace(
                params,
                seed=sampling_params.choice_seed(seed, choice),
                prompt_logprobs=None if choice else params.prompt_logprobs,
            )
            request = EngineRequest(
                id=f"{headers.request_id}-{index}",
                prompt=prompts[index // n].token_ids,
                resumed_tokens=output,
                params=own,
                parent_id=f"{headers.request_id}-{index - choice}" if choice else None,
                cache_domain=_salted_domain(headers.cache_domain, body.cache_salt),
                tenant=headers.tenant,
                tier=headers.tier + (body.priority or 0),
                weight=headers.weight,
                timeout_s=body.timeout_s or self._timeout_s,
            )
            requests.append(request)
        return requests

    def _resumed_tokens(self, body: GenerationRequest, choices: int) -> list[list[int]]:
        """The tokens that each choice goes on from."""
        if body.resume is None:
            return [[] for _ in range(choices)]
        given = body.resume.token_ids
        lists = [item for item in given if isinstance(item, list)]
        if not lists:
            lists = [[item for item in given if isinstance(item, int)]]
        elif len(lists) < len(given):
            raise invalid_request(
                "'resume.token_ids' mixes ids and lists. Give one list for each choice.",
                "resume.token_ids",
            )
        if len(lists) != choices:
            raise invalid_request(
                f"'resume.token_ids' has {len(lists)} lists for {choices} choices. Give one each.",
                "resume.token_ids",
            )
        for ids in lists:
            parameter_rules.check_token_ids("resume.token_ids", ids, self._vocab_size)
        return lists

    def _completed_choices(
        self, requests: list[EngineRequest], headers: GatewayHeaders
    ) -> frozenset[int]:
        """The choices that have nothing to go on with; refused unless a stream is carried on."""
        told = set()
        for index, request in enumerate(requests):
            ended = (
                self._end_reason(request.resumed_tokens, request.params)
                if request.resumed_tokens
                else ""
            )
            if ended and not headers.delivered_tokens(index, len(request.resumed_tokens)):
                raise invalid_request(
                    f"'resume.token_ids' of choice {index} is a finished answer ({ended}): "
                    "there is nothing to go on with. Do not ask for it again.",
                    "resume.token_ids",
                    "resume_finished",
                )
            if ended:
                told.add(index)
        return frozenset(told)

    def _end_reason(self, ids: list[int], params: SamplingParams) -> str:
        """Why an answer of these tokens is finished, or nothing."""
        if len(ids) >= params.max_tokens:
            return f"it has {params.max_tokens} tokens, the most"
        endings = set(params.stop_token_ids)
        if not params.ignore_eos:
            endings |= self._eos_token_ids
        if not endings.isdisjoint(ids[params.min_tokens :]):
            return "it has a token that ends it"
        if Detokenizer(self._tokenizer, params, ids).stop_string is not None:
            return "it has a stop string"
        return ""


def _reassign_parents(
    requests: list[EngineRequest], completed_choices: frozenset[int], n: int
) -> list[EngineRequest]:
    """The same; of a prompt whose first choice has nothing to go on with, the next one that has leads the others.

    Else nobody would compute the prompt's log-probabilities.
    """
    led = list(requests)
    for first in range(0, len(led), n):
        going = [index for index in range(first, first + n) if index not in completed_choices]
        if first not in completed_choices or not going:
            continue
        heir, *others = going
        scored = led[first].params.prompt_logprobs
        own = msgspec.structs.replace(led[heir].params, prompt_logprobs=scored)
        led[heir] = msgspec.structs.replace(led[heir], parent_id=None, params=own)
        for other in others:
            led[other] = msgspec.structs.replace(led[other], parent_id=led[heir].id)
    return led


def _salted_domain(domain: str, salt: str | None) -> str:
    """The tenant's cache domain, or the part of it that only requests with the salt share."""
    if salt is None:
        return domain
    return "salted:" + hashlib.sha256(msgspec.json.encode([domain, salt])).hexdigest()
