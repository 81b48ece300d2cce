"""Request processor: validates a request body and converts it to engine requests and the choices of the response."""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from argosy.constraints import read_constraint, read_tools
from argosy.engine.engine_config import EngineConfig
from argosy.engine.engine_request import AdapterSource, EngineRequest
from argosy.engine.serving.core_messages import CoreReady
from argosy.engine.serving.output_parsing import OutputFormat
from argosy.engine.serving.preprocessing import sampling_params
from argosy.engine.serving.preprocessing.output_planner import (
    GrammarCheck,
    OutputPlanner,
    template_variables,
)
from argosy.engine.serving.preprocessing.prompt_tokenizer import PromptTokenizer
from argosy.engine.serving.preprocessing.response_spec import ResponseSpec
from argosy.engine.serving.preprocessing.sampling_defaults import (
    NO_SAMPLING_DEFAULTS,
    SamplingDefaults,
)
from argosy.engine.serving.preprocessing.sampling_params import check_token_ids
from argosy.engine.serving.text.chat_template import ChatTemplate
from argosy.engine.serving.text.choice import (
    Choice,
    OutputPlan,
    ParsedChoice,
    PromptState,
    ScoringChoice,
)
from argosy.engine.serving.text.detokenizer import Detokenizer
from argosy.engine.serving.text.logprob_formatter import LogprobFormatter
from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.protocol import (
    ApiError,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    NumericRange,
    SamplingParams,
    StreamOptions,
    TokenizeRequest,
    check_parameters,
    check_range,
    ignored_parameters,
    invalid_request,
    unsupported_parameter,
)

DEFAULT_SERVICE_TIER = "default"
"""Service tier of every response whose request names one. There is no other."""
_FINGERPRINT_CHARS = 10
_TOKEN_ID = re.compile("-?[0-9]+")
_MAX_ID_CHARS = 20
"""Longer numbers are no ids of any vocabulary, and so are their beginnings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayHeaders:
    """Request properties from the gateway's trusted headers."""

    request_id: str
    tenant: str = ""
    cache_domain: str = ""
    """Cache domain of the tenant."""
    tier: int = 1
    weight: float = 1.0
    created_at: int | None = None
    """Unix time in seconds for the response's `created` field. None means now."""
    wants_resume_metadata: bool = False
    """Whether the stream includes the metadata that the gateway needs to resume it on another replica."""
    resumed_cached_tokens: int | None = None
    """Cached prompt tokens that the resumed stream reported. None if this request resumes no stream."""
    resume_given_tokens: tuple[int, ...] = ()
    """Number of resumed tokens of each choice that the client itself supplied. Missing entries count as 0."""
    refuse_unknown: bool = False
    """Whether what would be ignored in a conversation is refused."""
    adapter: AdapterSource | None = None
    """Adapter whose name or digest the request gives as its model."""
    public_model: str = ""
    """Name of the adapter for clients; empty if it is the one in the request."""

    @property
    def shares_cache(self) -> bool:
        """Whether the cache domain is that of several tenants, or there are none."""
        return not self.tenant or self.cache_domain != self.tenant

    def delivered_tokens(self, choice: int, resumed_tokens: int) -> int:
        """Return how many resumed tokens of a choice the resumed stream delivered to the client.

        Args:
            choice: Index of the choice.
            resumed_tokens: Number of tokens that the choice continues from.
        """
        given_tokens = (
            self.resume_given_tokens[choice] if choice < len(self.resume_given_tokens) else 0
        )
        return max(0, resumed_tokens - given_tokens) if self.wants_resume_metadata else 0


class RequestProcessor:
    """Validates request bodies for one model and converts them to engine requests.

    The methods are pure except for the random seed of a body without one and the time of a new response. They render
    and tokenize, so call them in a worker thread. Their run time is bounded by the model's context, whatever the size
    of the body. Each invalid body raises an `ApiError` (400) that names the parameter. Immutable and thread-safe.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        ready: CoreReady,
        config: EngineConfig,
        *,
        output_format: OutputFormat | None,
        check_grammar: GrammarCheck,
        sampling_defaults: SamplingDefaults = NO_SAMPLING_DEFAULTS,
    ) -> None:
        self.tokenization_digest = hashlib.sha256(
            f"{tokenizer.digest} {template.digest}".encode()
        ).hexdigest()
        """Equal for processors that produce the same tokens from the same text."""
        self.sampling_defaults = sampling_defaults
        """Sampling parameters of requests that do not set them."""
        self._tokenizer = tokenizer
        self._template = template
        self.check_grammar = check_grammar
        """Check of a grammar, which another processor with the same tokenizer may share."""
        self._output_planner = OutputPlanner(tokenizer, template, output_format, check_grammar)
        self._prompt_tokenizer = PromptTokenizer(
            tokenizer, template, ready, self._output_planner.map_call_id
        )
        self._vocab_size = ready.vocab_size
        self._eos_token_ids = frozenset((*ready.eos_token_ids, *tokenizer.eos_token_ids))
        self._arithmetic_id: str | None = None
        if ready.arithmetic is not None:
            self._arithmetic_id = msgspec.structs.replace(
                ready.arithmetic, tokenization=self.tokenization_digest
            ).id
        self._eos_unknown_to_core = self._eos_token_ids.difference(ready.eos_token_ids)
        self._timeout_s = config.request_timeout_s
        self._generates = ready.pooling is None

    def prepare_chat(self, body: ChatCompletionRequest, headers: GatewayHeaders) -> ResponseSpec:
        """Convert a chat body. Its one prompt is rendered by the model's template."""
        fields = self._check_parameters(body)
        body = self.sampling_defaults.apply(body)
        if body.echo and not body.continue_final_message:
            remedy = "Only a message that is continued is echoed. Set continue_final_message."
            raise unsupported_parameter("echo", remedy)
        logprobs = sampling_params.chat_logprobs(body)
        tools, answer = read_tools(fields), read_constraint(fields)
        variables = template_variables(body, self._template)
        prompt = self._prompt_tokenizer.tokenize_chat(
            body,
            tools=self._output_planner.template_tools(tools),
            variables=variables,
            created_at=headers.created_at,
            refuse_media=headers.refuse_unknown,
        )
        max_tokens = sampling_params.chat_max_tokens(
            body,
            self._prompt_tokenizer.remaining_tokens([prompt], "messages"),
            self.sampling_defaults.max_tokens,
        )
        self._prompt_tokenizer.check_fit([prompt], max_tokens, "messages")
        plan = self._output_planner.plan(
            body, tools, answer, variables=variables, prompt_text=prompt.text
        )
        params = self._sampling_params(body, plan, max_tokens, logprobs, body.prompt_logprobs)
        prediction = self._prompt_tokenizer.encode_prediction(body.prediction)
        spec = self._build_spec(
            body, fields, headers, [prompt], plan, params, prediction=prediction
        )
        if body.echo:
            content = body.messages[-1].content or ""
            parts = [content] if isinstance(content, str) else [each.text for each in content]
            text = "".join(filter(None, parts))
            for choice in spec.choices:
                if not spec.is_resumed(choice):
                    choice.add_text(text)
        return spec

    def prepare_completion(self, body: CompletionRequest, headers: GatewayHeaders) -> ResponseSpec:
        """Convert a completion body with one or several prompts of text or token ids."""
        fields = self._check_parameters(body)
        body = self.sampling_defaults.apply(body)
        n = body.n or 1
        if body.best_of not in {None, n}:
            raise unsupported_parameter(
                "best_of", f"All choices are returned. Set it to {n}, as 'n'."
            )
        logprobs = sampling_params.completion_logprobs(body)
        prompts = self._prompt_tokenizer.tokenize_completion(body)
        max_tokens = sampling_params.completion_max_tokens(
            body,
            self._prompt_tokenizer.remaining_tokens(prompts, "prompt"),
            self.sampling_defaults.max_tokens,
        )
        self._prompt_tokenizer.check_fit(prompts, max_tokens, "prompt")
        requested = [body.prompt_logprobs, logprobs if body.echo else None]
        prompt_logprobs = max((k for k in requested if k is not None), default=None)
        plan = self._plan_completion(fields)
        params = self._sampling_params(body, plan, max(max_tokens, 1), logprobs, prompt_logprobs)
        is_scoring = max_tokens == 0
        return self._build_spec(body, fields, headers, prompts, plan, params, is_scoring=is_scoring)

    def tokenize(self, body: TokenizeRequest, *, refuse_unknown: bool = False) -> PromptState:
        """Return the prompt that a completion or a chat would have for the prompt or the messages."""
        check_parameters(msgspec.structs.asdict(body))
        tools = read_tools({"tools": body.tools})
        return self._prompt_tokenizer.tokenize(
            body, self._output_planner.template_tools(tools), refuse_media=refuse_unknown
        )

    def detokenize(self, body: DetokenizeRequest) -> str:
        """Return the text of token ids, special tokens included."""
        check_token_ids("tokens", body.tokens, self._vocab_size)
        return self._tokenizer.decode(body.tokens, skip_special_tokens=False)

    def _check_parameters(self, body: GenerationRequest) -> dict[str, Any]:
        """Check the parameters whose rules do not depend on the prompt, and return those that the body sets."""
        if not self._generates:
            raise ApiError(
                400,
                "unsupported_task",
                "This model computes embeddings, scores or labels and generates no text. Use another model.",
            )
        fields = {
            name: value for name, value in msgspec.structs.asdict(body).items() if value is not None
        }
        check_parameters(fields)
        if body.timeout_s is not None:
            maximum = math.inf if self._timeout_s is None else self._timeout_s
            allowed_range = NumericRange(0, maximum, exclusive_minimum=True)
            check_range("timeout_s", body.timeout_s, allowed_range)
        if body.stream_options is not None and not body.stream:
            message = "'stream_options' needs 'stream'. Set 'stream' to true, or remove it."
            raise invalid_request(message, "stream_options")
        if body.stream and body.prompt_logprobs is not None:
            raise unsupported_parameter(
                "prompt_logprobs", "Streams do not include them. Set stream to false."
            )
        if body.truncation_side is not None and body.truncate_prompt_tokens is None:
            raise invalid_request(
                "'truncation_side' has no effect without 'truncate_prompt_tokens'. Set both.",
                "truncation_side",
            )
        return fields

    def _plan_completion(self, fields: dict[str, Any]) -> OutputPlan:
        """Plan a completion's output. Schemas must be enforced completely, as if they were strict."""
        answer = read_constraint(fields)
        if answer is None:
            return OutputPlan()
        if answer.relaxations:
            item = answer.relaxations[0]
            raise invalid_request(
                f"The keyword '{item.keyword}' at {item.pointer or '/'} cannot be enforced: {item.reason}. "
                "Remove it, or use /v1/chat/completions, which reports what it relaxes.",
                answer.param,
                "unsupported_schema",
            )
        grammar = answer.grammar_text
        return OutputPlan(grammar=grammar, compile_s=self.check_grammar(grammar, answer.param))

    def _sampling_params(
        self,
        body: GenerationRequest,
        plan: OutputPlan,
        max_tokens: int,
        logprobs: int | None,
        prompt_logprobs: int | None,
    ) -> SamplingParams:
        params = sampling_params.build_sampling_params(
            body,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            logit_bias=self._logit_bias(body.logit_bias or {}),
            vocab_size=self._vocab_size,
            eos_token_ids=self._eos_token_ids,
        )
        stop_token_ids = params.stop_token_ids
        if self._eos_unknown_to_core and not params.ignore_eos:
            stop_token_ids = tuple(sorted(self._eos_unknown_to_core.union(stop_token_ids)))
        return msgspec.structs.replace(
            params,
            stop_token_ids=stop_token_ids,
            grammar=plan.grammar,
            reasoning=plan.reasoning,
            banned_token_ids=plan.banned_token_ids,
        )

    def _logit_bias(self, bias: Mapping[int | str, float]) -> dict[int, float]:
        """Return the bias of each token. A key is an id in decimal, or a text, whose tokens all get the bias.

        Raises:
            ApiError: 400 for a text that is too long or not valid Unicode.
        """
        by_id: dict[int, float] = {}
        for key, value in bias.items():
            if isinstance(key, int) or _TOKEN_ID.fullmatch(key):
                by_id[int(str(key)[:_MAX_ID_CHARS])] = value
            else:
                by_id |= dict.fromkeys(self._prompt_tokenizer.encode_bias(key), value)
        return by_id

    def _build_spec(
        self,
        body: GenerationRequest,
        fields: dict[str, Any],
        headers: GatewayHeaders,
        prompts: list[PromptState],
        plan: OutputPlan,
        params: SamplingParams,
        *,
        prediction: Sequence[int] = (),
        is_scoring: bool = False,
    ) -> ResponseSpec:
        """Build the engine requests and the choices of a valid body.

        If `is_scoring`, `max_tokens` is 0, and the one token that the engine samples is dropped.
        """
        n = body.n or 1
        requests = self._build_engine_requests(body, headers, prompts, params, prediction)
        completed = self._completed_choices(requests, headers)
        requests = _reassign_parents(requests, completed, n)
        delivered = [
            headers.delivered_tokens(index, len(request.resumed_tokens))
            for index, request in enumerate(requests)
        ]
        if headers.resumed_cached_tokens is not None:
            for index, tokens in enumerate(delivered):
                prompts[index // n].is_resumed |= tokens > 0
        for prompt in prompts:
            if not prompt.is_echoed:
                prompt.text = ""  # it may be long, and nothing reads it any more
        formatter = self._create_formatter(body, params)
        options = body.stream_options or StreamOptions()
        return ResponseSpec(
            id=headers.request_id,
            created_at=int(time.time()) if headers.created_at is None else headers.created_at,
            model=headers.public_model or body.model or "",
            system_fingerprint=self._find_fingerprint(headers.adapter),
            service_tier=DEFAULT_SERVICE_TIER if fields.get("service_tier") else None,
            choices=[
                self._create_choice(
                    index,
                    request,
                    prompts[index // n],
                    plan,
                    is_scoring=is_scoring,
                    is_complete=index in completed,
                )
                for index, request in enumerate(requests)
            ],
            prompts=prompts,
            plan=plan,
            ignored_fields=ignored_parameters(fields)
            + prompts[0].ignored_fields
            + plan.ignored_fields,
            logprob_formatter=None if params.logprobs is None else formatter,
            prompt_logprob_formatter=None if body.prompt_logprobs is None else formatter,
            include_token_ids=bool(body.return_token_ids),
            include_usage=bool(options.include_usage),
            continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
            include_resume_metadata=headers.wants_resume_metadata,
            resumed_cached_tokens=headers.resumed_cached_tokens or 0,
            delivered_tokens=delivered,
        )

    def _find_fingerprint(self, adapter: AdapterSource | None) -> str | None:
        """Return the `system_fingerprint` of responses, or None if the arithmetic is unknown."""
        if self._arithmetic_id is None:
            return None
        identity = self._arithmetic_id
        if adapter is not None:
            identity = hashlib.sha256(f"{identity} {adapter.digest}".encode()).hexdigest()
        return f"fp_{identity[:_FINGERPRINT_CHARS]}"

    def _create_formatter(
        self, body: GenerationRequest, params: SamplingParams
    ) -> LogprobFormatter:
        tokenizer = self._tokenizer
        return LogprobFormatter(
            tokenizer,
            tokenizer.special_ids if params.skip_special_tokens else frozenset(),
            "token_id:{}".format if body.return_tokens_as_token_ids else tokenizer.token_text,
        )

    def _create_choice(
        self,
        index: int,
        request: EngineRequest,
        prompt: PromptState,
        plan: OutputPlan,
        *,
        is_scoring: bool,
        is_complete: bool,
    ) -> Choice:
        if plan.output_format is not None:
            return ParsedChoice(
                index, request, prompt, self._tokenizer, plan=plan, is_complete=is_complete
            )
        choice_type = ScoringChoice if is_scoring else Choice
        return choice_type(index, request, prompt, self._tokenizer, is_complete=is_complete)

    def _build_engine_requests(
        self,
        body: GenerationRequest,
        headers: GatewayHeaders,
        prompts: list[PromptState],
        params: SamplingParams,
        prediction: Sequence[int],
    ) -> list[EngineRequest]:
        n = body.n or 1
        seed = sampling_params.request_seed(body)
        requests = []
        resumed_by_choice = self._resumed_tokens(body, n * len(prompts))
        for index, resumed_tokens in enumerate(resumed_by_choice):
            choice = index % n
            choice_params = msgspec.structs.replace(
                params,
                seed=sampling_params.choice_seed(seed, choice),
                prompt_logprobs=None if choice else params.prompt_logprobs,
            )
            request = EngineRequest(
                id=f"{headers.request_id}-{index}",
                prompt=prompts[index // n].token_ids,
                resumed_tokens=resumed_tokens,
                params=choice_params,
                parent_id=f"{headers.request_id}-{index - choice}" if choice else None,
                group_id=headers.request_id if len(resumed_by_choice) > 1 else "",
                cache_domain=salt_cache_domain(headers.cache_domain, body.cache_salt),
                tenant=headers.tenant,
                tier=headers.tier + (body.priority or 0),
                weight=headers.weight,
                timeout_s=body.timeout_s or self._timeout_s,
                speculation=body.speculation is not False,
                adapter=headers.adapter,
                prediction=list(prediction),
                shares_outputs=body.cache_salt is None and headers.shares_cache,
            )
            requests.append(request)
        return requests

    def _resumed_tokens(self, body: GenerationRequest, choices: int) -> list[list[int]]:
        """Return the tokens that each choice continues from."""
        if body.resume is None:
            return [[] for _ in range(choices)]
        token_ids = body.resume.token_ids
        id_lists = [item for item in token_ids if isinstance(item, list)]
        if not id_lists:
            id_lists = [[item for item in token_ids if isinstance(item, int)]]
        elif len(id_lists) < len(token_ids):
            raise invalid_request(
                "'resume.token_ids' mixes ids and lists. Send one list for each choice.",
                "resume.token_ids",
            )
        if len(id_lists) != choices:
            raise invalid_request(
                f"'resume.token_ids' has {len(id_lists)} lists for {choices} choices. Send one list for each choice.",
                "resume.token_ids",
            )
        for ids in id_lists:
            check_token_ids("resume.token_ids", ids, self._vocab_size)
        return id_lists

    def _completed_choices(
        self, requests: list[EngineRequest], headers: GatewayHeaders
    ) -> frozenset[int]:
        """Return the choices that are already complete.

        Raises:
            ApiError: 400 if a complete choice was not delivered by a resumed stream.
        """
        completed = set()
        for index, request in enumerate(requests):
            end_reason = self._end_reason(request) if request.resumed_tokens else ""
            if end_reason and not headers.delivered_tokens(index, len(request.resumed_tokens)):
                raise invalid_request(
                    f"'resume.token_ids' of choice {index} is a finished answer ({end_reason}), so it "
                    "cannot be resumed. Do not request it again.",
                    "resume.token_ids",
                    "resume_finished",
                )
            if end_reason:
                completed.add(index)
        return frozenset(completed)

    def _end_reason(self, request: EngineRequest) -> str:
        """Return why the answer that a request resumes is complete, or an empty string if it is not."""
        token_ids, params = request.resumed_tokens, request.params
        if len(token_ids) >= request.max_tokens:
            return f"it has reached the limit of {request.max_tokens} tokens"
        end_token_ids = set(params.stop_token_ids)
        if not params.ignore_eos:
            end_token_ids |= self._eos_token_ids
        if not end_token_ids.isdisjoint(token_ids[params.min_tokens :]):
            return "it has an end-of-sequence or stop token"
        if Detokenizer(self._tokenizer, params, token_ids).stop_string is not None:
            return "it has a stop string"
        return ""


def _reassign_parents(
    requests: list[EngineRequest], completed_choices: frozenset[int], n: int
) -> list[EngineRequest]:
    """Reassign each prompt whose first choice is complete to its first unfinished choice.

    Without a parent that runs, the prompt's log-probabilities would not be computed.
    """
    reassigned = list(requests)
    for first in range(0, len(reassigned), n):
        unfinished = [index for index in range(first, first + n) if index not in completed_choices]
        if first not in completed_choices or not unfinished:
            continue
        parent, *siblings = unfinished
        prompt_logprobs = reassigned[first].params.prompt_logprobs
        params = msgspec.structs.replace(reassigned[parent].params, prompt_logprobs=prompt_logprobs)
        reassigned[parent] = msgspec.structs.replace(
            reassigned[parent], parent_id=None, params=params
        )
        for sibling in siblings:
            reassigned[sibling] = msgspec.structs.replace(
                reassigned[sibling], parent_id=reassigned[parent].id
            )
    return reassigned


def salt_cache_domain(domain: str, salt: str | None) -> str:
    """Return the tenant's cache domain, or the part of it that requests with the same salt share."""
    if salt is None:
        return domain
    return "salted:" + hashlib.sha256(msgspec.json.encode([domain, salt])).hexdigest()
