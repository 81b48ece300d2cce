"""Request processor: valid bodies become the right engine requests, others are 400 errors that name the parameter."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.vocabularies import TEMPLATE, byte_level, byte_level_backend, sentencepiece

from argosy.engine import EngineConfig, EngineRequest
from argosy.engine.serving.core_messages import CoreReady, Delta
from argosy.engine.serving.preprocessing.request_processor import (
    GatewayHeaders,
    RequestProcessor,
)
from argosy.engine.serving.preprocessing.response_spec import ResponseSpec
from argosy.engine.serving.preprocessing.sampling_defaults import (
    NO_SAMPLING_DEFAULTS,
    SamplingDefaults,
    read_sampling_defaults,
)
from argosy.engine.serving.preprocessing.sampling_params import choice_seed
from argosy.engine.serving.preprocessing.text_processing import TextProcessing
from argosy.engine.serving.text.chat_template import ChatTemplate
from argosy.engine.serving.text.choice import Choice, PromptState, ScoringChoice
from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.models import BUNDLED_MODEL
from argosy.protocol import (
    PARAMETER_RANGES,
    ApiError,
    ChatCompletionRequest,
    ChatMessageParam,
    CompletionRequest,
    DetokenizeRequest,
    SamplingParams,
    TokenizeRequest,
    ignored_parameters,
    parse_body,
)
from argosy.protocol.openai_responses import CompletionTokenUsageInfo
from argosy.protocol.parameter_rules import (
    IGNORED_PARAMETERS,
    RESTRICTED_PARAMETERS,
)

TOKENIZER = byte_level()
VOCAB = TOKENIZER.vocab_size
MAX_LEN = 128
HEADERS = GatewayHeaders(request_id="r", tenant="acme", cache_domain="d", tier=2, weight=3.0)
USER = [{"role": "user", "content": "hello world"}]
CHAT_MESSAGES = msgspec.convert(USER, list[ChatMessageParam])
IDS: list[str | int | list[int]] = [10, 11, 12]


class CountingTokenizer(Tokenizer):
    """Tokenizer that counts the encoded characters."""

    encoded = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        CountingTokenizer.encoded += len(text)
        return super().encode(text, add_special_tokens)


def ready_core(tokenizer: Tokenizer, **overrides: int) -> CoreReady:
    return CoreReady(
        max_model_len=overrides.get("max_model_len", MAX_LEN),
        vocab_size=tokenizer.vocab_size,
        eos_token_ids=[overrides["eos"]] if "eos" in overrides else tokenizer.eos_token_ids,
        block_size=16,
        num_blocks=64,
        max_seqs=4,
        kv_capacity_tokens=1,
        load_s=0.0,
        backend="test",
        fingerprint="",
    )


def make_processor(
    tokenizer: Tokenizer = TOKENIZER,
    source: str = TEMPLATE,
    defaults: SamplingDefaults = NO_SAMPLING_DEFAULTS,
    **overrides: int,
) -> RequestProcessor:
    text_processing = TextProcessing(tokenizer, ChatTemplate(source, {}), None, defaults)
    ready = ready_core(tokenizer, **overrides)
    return text_processing.create_processor(ready, EngineConfig(model="m", request_timeout_s=60))


PROCESSOR = make_processor()


def chat(processor: RequestProcessor = PROCESSOR, **body: Any) -> ResponseSpec:  # noqa: ANN401 - any JSON
    raw = msgspec.json.encode({"model": "m", "messages": USER, **body})
    return processor.prepare_chat(parse_body(ChatCompletionRequest, raw), HEADERS)


def complete(processor: RequestProcessor = PROCESSOR, **body: Any) -> ResponseSpec:  # noqa: ANN401 - any JSON
    raw = msgspec.json.encode({"model": "m", "prompt": IDS, **body})
    return processor.prepare_completion(parse_body(CompletionRequest, raw), HEADERS)


def params(prepared: ResponseSpec) -> SamplingParams:
    return prepared.requests[0].params


def echo_texts(prepared: ResponseSpec) -> list[str]:
    return [prompt.text for prompt in prepared.prompts if prompt.is_echoed]


def rejection(call: Any, **body: Any) -> ApiError:  # noqa: ANN401 - any JSON
    with pytest.raises(ApiError) as caught:
        call(**body)
    assert caught.value.status == 400
    assert caught.value.message.endswith((".", ")"))
    return caught.value


# --- engine requests -------------------------------------------------------------------------------


def test_chat_becomes_one_engine_request() -> None:
    prepared = chat(seed=7)
    rendered = "<|user|>user: hello world<|end|>\n<|user|>assistant:"
    prompt = TOKENIZER.encode(rendered, add_special_tokens=False)
    assert prepared.requests == [
        EngineRequest(
            id="r-0",
            prompt=prompt,
            params=SamplingParams(max_tokens=MAX_LEN - len(prompt), seed=7),
            cache_domain="d",
            tenant="acme",
            tier=2,
            weight=3.0,
            timeout_s=60,
            shares_outputs=True,
        )
    ]
    assert TOKENIZER.decode(prompt, skip_special_tokens=False) == rendered
    assert prepared.logprob_formatter is None
    assert prepared.prompts == [PromptState(prompt)]
    assert prepared.usage().prompt_tokens == len(prompt)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("the cat", [TOKENIZER.encode("the cat")]),
        (["the", "cat"], [TOKENIZER.encode("the"), TOKENIZER.encode("cat")]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_prompt_types_give_their_token_ids(prompt: object, expected: list[list[int]]) -> None:
    assert [r.prompt for r in complete(prompt=prompt).requests] == expected


def test_top_p_of_zero_is_greedy_and_bias_may_name_texts() -> None:
    found = params(complete(top_p=0, temperature=0.7, logit_bias={"cat": -5, "3": 2}))
    assert (found.temperature, found.top_p) == (0, 1)
    ids = TOKENIZER.encode("cat", add_special_tokens=False)
    assert found.logit_bias == {**dict.fromkeys(ids, -5.0), 3: 2.0}


def test_every_sampling_parameter_reaches_the_engine() -> None:
    prepared = complete(
        max_tokens=9, min_tokens=2, temperature=0.5, top_k=5, top_p=0.9, min_p=0.1,
        repetition_penalty=1.1, presence_penalty=-2, frequency_penalty=2, logit_bias={"3": -100},
        allowed_token_ids=[9, 3, 9], seed=1, stop="x", stop_token_ids=[8],
        include_stop_str_in_output=True, ignore_eos=True, logprobs=3, prompt_logprobs=2,
        skip_special_tokens=False, cache_salt="s", priority=3, timeout_s=1.5,
    )  # fmt: skip
    assert params(prepared) == SamplingParams(
        max_tokens=9, min_tokens=2, temperature=0.5, top_k=5, top_p=0.9, min_p=0.1,
        repetition_penalty=1.1, presence_penalty=-2, frequency_penalty=2, logit_bias={3: -100},
        allowed_token_ids=(3, 9), seed=1, stop=("x",), stop_token_ids=(8,),
        include_stop_str_in_output=True, ignore_eos=True, logprobs=3, prompt_logprobs=2,
        skip_special_tokens=False,
    )  # fmt: skip
    assert (prepared.requests[0].tier, prepared.requests[0].timeout_s) == (5, 1.5)


@pytest.mark.parametrize(
    ("body", "field", "value"),
    [
        ({"temperature": 0}, "temperature", 0.0),
        ({"temperature": 1e-9}, "temperature", 0.0),
        ({"top_k": -1}, "top_k", 0),
        ({"top_k": 10**6}, "top_k", 0),
        ({"stop": ["b", "a", "b"]}, "stop", ("b", "a")),
        ({"seed": -1}, "seed", 2**63 - 1),
        ({"seed": -(2**63)}, "seed", 0),
        ({"logprobs": 0}, "logprobs", 0),
    ],
)
def test_parameter_values_are_normalized(body: dict[str, Any], field: str, value: object) -> None:
    assert msgspec.structs.asdict(params(complete(**body)))[field] == value


def test_chat_logprobs_and_token_limits() -> None:
    assert params(chat(logprobs=True)).logprobs == 0
    assert params(chat(logprobs=True, top_logprobs=20)).logprobs == 20
    assert params(chat(logprobs=False, top_logprobs=0)).logprobs is None
    assert params(chat(max_tokens=4)).max_tokens == 4
    assert params(chat(max_completion_tokens=5)).max_tokens == 5
    assert params(chat(max_completion_tokens=5, max_tokens=5)).max_tokens == 5


def test_choices_are_siblings_with_own_seeds() -> None:
    prepared = complete(prompt=[[1, 2], [3]], n=3, seed=11, echo=True, logprobs=1)
    assert [r.id for r in prepared.requests] == ["r-0", "r-1", "r-2", "r-3", "r-4", "r-5"]
    assert [r.parent_id for r in prepared.requests] == [None, "r-0", "r-0", None, "r-3", "r-3"]
    assert [r.prompt for r in prepared.requests] == [[1, 2]] * 3 + [[3]] * 3
    seeds = [r.params.seed for r in prepared.requests]
    assert seeds == [choice_seed(11, i) for i in range(3)] * 2
    assert [r.params.prompt_logprobs for r in prepared.requests] == [1, None, None] * 2
    assert prepared.usage().prompt_tokens == 3


@given(seed=st.integers(-(2**63), 2**63 - 1))
def test_choice_seeds_are_valid_distinct_and_deterministic(seed: int) -> None:
    seeds = [choice_seed(seed, i) for i in range(64)]
    assert all(0 <= s < 2**63 for s in seeds)
    assert len(set(seeds)) == 64
    assert seeds[0] == seed % 2**63
    assert choice_seed(seeds[0], 0) == seeds[0]


def test_choice_seeds_never_change() -> None:
    assert [choice_seed(0, i) for i in range(3)] == [
        0,
        0xE220A8397B1DCDAF >> 1,
        0x6E789E6AA1B965F4 >> 1,
    ]


def test_missing_seed_is_drawn_at_random() -> None:
    drawn = {params(complete()).seed for _ in range(8)}
    assert len(drawn) == 8
    assert all(seed is not None and 0 <= seed < 2**63 for seed in drawn)


def test_cache_salt_divides_the_tenants_cache_domain() -> None:
    salts = [None, "a", "b"]
    domains = [complete(cache_salt=salt).requests[0].cache_domain for salt in salts]
    assert domains[0] == "d"
    assert len(set(domains)) == 3
    assert complete(cache_salt="a").requests[0].cache_domain == domains[1]
    raw = msgspec.json.encode({"model": "m", "prompt": IDS, "cache_salt": "a"})
    other = PROCESSOR.prepare_completion(
        parse_body(CompletionRequest, raw), GatewayHeaders(request_id="r", cache_domain="e")
    )
    assert other.requests[0].cache_domain not in domains


# --- scoring, echo, truncation, special tokens ---------------------------------------------------


def test_scoring_request_of_lm_eval() -> None:
    prepared = complete(prompt=[[1, 2, 3]], echo=True, max_tokens=0, logprobs=1)
    assert (params(prepared).max_tokens, params(prepared).prompt_logprobs) == (1, 1)
    assert type(prepared.choices[0]) is ScoringChoice
    assert echo_texts(prepared) == [TOKENIZER.decode([1, 2, 3])]
    prepared = complete(prompt=[[40, 41]], echo=True, max_tokens=1, logprobs=1)
    assert params(prepared).max_tokens == 1
    assert type(prepared.choices[0]) is Choice


def test_echo_returns_the_prompt_text_as_sent() -> None:
    prompts = ["<|user|>the", "cat"]
    assert echo_texts(complete(prompt=prompts, echo=True)) == prompts
    assert echo_texts(complete(prompt="the")) == []


def test_truncation_keeps_the_end_or_the_beginning() -> None:
    ids = list(range(20, 40))
    assert complete(prompt=ids, truncate_prompt_tokens=3).requests[0].prompt == [37, 38, 39]
    right = complete(prompt=ids, truncate_prompt_tokens=3, truncation_side="right", echo=True)
    assert right.requests[0].prompt == [20, 21, 22]
    assert echo_texts(right) == [TOKENIZER.decode([20, 21, 22])]
    text = "hello world, " * 10_000 + "the cat"
    truncated = complete(prompt=text, truncate_prompt_tokens=5).requests[0].prompt
    assert truncated == TOKENIZER.encode("hello world, hello world, the cat")[-5:]


def call(number: int) -> dict[str, Any]:
    function = {"name": "f", "arguments": "{}"}
    return {"id": f"c{number}", "type": "function", "function": function}


WORDS = st.integers(1, 9).map(lambda count: "the " * count)
TURNS = st.lists(
    st.one_of(
        st.builds(lambda role, text: [(role, text)], st.sampled_from(["user", "assistant"]), WORDS),
        st.builds(lambda text: [("system", text)], WORDS),
        st.builds(
            lambda texts: [("call", ""), *(("tool", text) for text in texts)],
            st.lists(WORDS, min_size=1, max_size=3),
        ),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=30)
@given(TURNS, st.sampled_from([None, 5, 100]))
def test_oldest_messages_are_dropped_until_the_conversation_fits(
    turns: list[list[tuple[str, str]]], max_tokens: int | None
) -> None:
    messages: list[dict[str, Any]] = []
    for role, text in [pair for turn in turns for pair in turn]:
        number = len(messages)
        if role == "call":
            messages.append({"role": "assistant", "content": "", "tool_calls": [call(number)]})
        elif role == "tool":
            messages.append({"role": role, "content": text, "tool_call_id": f"c{number - 1}"})
        else:
            messages.append({"role": role, "content": text})
    questions = [index for index, message in enumerate(messages) if message["role"] == "user"]
    systems = {i for i, m in enumerate(messages) if m["role"] == "system"}
    starts = [i for i, m in enumerate(messages) if m["role"] not in {"tool", "system"}]
    last = range(max(starts, default=0), len(messages))
    protected = sorted({*systems, *last, *questions[-1:]})

    def prepare(indexes: Iterable[int], truncation: str = "disabled") -> ResponseSpec:
        given = [messages[index] for index in indexes]
        return chat(messages=given, max_tokens=max_tokens, truncation=truncation)

    try:
        prepared = prepare(range(len(messages)), "auto")
    except ApiError:
        with pytest.raises(ApiError, match="maximum context length"):
            prepare(protected)
        return
    dropped = [
        index
        for name in prepared.ignored_fields
        for start, end in re.findall(r"messages\[(\d+):(\d+)\]", name)
        for index in range(int(start), int(end))
    ]
    kept = [index for index in range(len(messages)) if index not in dropped]
    assert prepared.requests[0].prompt == prepare(kept).requests[0].prompt
    assert not set(protected) & set(dropped)
    units = [index for index in range(len(messages)) if index not in protected]
    assert dropped == units[: len(dropped)]
    assert all(messages[index]["role"] != "tool" for index in units[len(dropped) :][:1])
    spoken = [messages[index]["role"] for index in kept if index not in systems]
    assert not dropped or spoken[0] == "user" or "user" not in spoken
    if dropped:
        with pytest.raises(ApiError, match="maximum context length"):
            prepare(range(len(messages)))


def test_truncation_of_a_long_conversation_renders_few_prompts() -> None:
    rendered: list[int] = []

    class RecordingTemplate(ChatTemplate):
        def render(self, messages: Any, **options: Any) -> str:  # noqa: ANN401 - those of the method
            rendered.append(len(messages))
            return super().render(messages, **options)

    template = RecordingTemplate(TEMPLATE, {})
    processor = TextProcessing(TOKENIZER, template, None).create_processor(
        ready_core(TOKENIZER), EngineConfig(model="m")
    )
    rendered.clear()
    conversation = [*(USER * 1000), {"role": "user", "content": "the cat"}]
    prepared = chat(processor, messages=conversation, truncation="auto")
    text = TOKENIZER.decode(prepared.requests[0].prompt)
    assert text.endswith("user: hello world\nuser: the cat\nassistant:")
    assert len(rendered) < 12
    assert max(rendered) <= MAX_LEN


def test_special_tokens_are_added_to_prompts_but_not_to_chats() -> None:
    tokenizer = sentencepiece()
    processor = make_processor(tokenizer)
    begin = tokenizer.encode("")[0]
    assert complete(processor, prompt="the").requests[0].prompt[0] == begin
    assert (
        begin not in complete(processor, prompt="the", add_special_tokens=False).requests[0].prompt
    )
    assert begin not in chat(processor).requests[0].prompt
    assert chat(processor, add_special_tokens=True).requests[0].prompt[0] == begin
    assert complete(processor, prompt="").requests[0].prompt == [begin]


ANSWER = {"role": "assistant", "content": "the cat"}
MARK = {"cache_control": {"type": "ephemeral"}}
EXTRA_FIELDS: list[dict[str, Any]] = [
    {"annotations": []},
    {"annotations": None, "audio": None, "function_call": None, "tool_calls": None},
    {"refusal": None, "parsed": None},
    {"parsed": {"name": "x"}},
    {"provider_specific_fields": {"refusal": None}},
    {"thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "s"}]},
    {"reasoning_details": [{"type": "reasoning.text", "text": "hm"}]},
]


@pytest.mark.parametrize(
    ("message", "equivalent"),
    [
        (
            {"role": "user", "content": [{"type": "text", "text": t} for t in ("hello", "world")]},
            {"role": "user", "content": "hello\nworld"},
        ),
        # LiteLLM forwards these hints, which are meant for APIs that cache marked parts only.
        (
            {"role": "user", "content": [{"type": "text", "text": "hello"} | MARK]} | MARK,
            {"role": "user", "content": "hello"},
        ),
        *((ANSWER | extra_fields, ANSWER) for extra_fields in EXTRA_FIELDS),
    ],
)
def test_equivalent_messages_give_the_same_prompt(
    message: dict[str, Any], equivalent: dict[str, Any]
) -> None:
    prompts = [
        chat(messages=[*USER, each, *USER]).requests[0].prompt for each in (message, equivalent)
    ]
    assert prompts[0] == prompts[1]


def test_final_message_is_continued() -> None:
    messages = [*USER, {"role": "assistant", "content": "the cat"}]
    prompt = chat(messages=messages, continue_final_message=True).requests[0].prompt
    assert TOKENIZER.decode(prompt).endswith("assistant: the cat")
    error = rejection(
        chat, messages=messages, continue_final_message=True, add_generation_prompt=True
    )
    assert error.param == "continue_final_message"


def test_resumed_chat_is_rendered_with_its_original_time() -> None:
    processor = make_processor(
        source="{{ strftime_now('%d %b %Y %H:%M:%S') }}: {{ messages[0].content }}"
    )
    body = parse_body(ChatCompletionRequest, msgspec.json.encode({"model": "m", "messages": USER}))
    created_at = datetime(2024, 2, 28, 23, 59, 58).astimezone()
    headers = dataclasses.replace(
        HEADERS, created_at=int(created_at.timestamp()), wants_resume_metadata=True
    )
    (request,) = processor.prepare_chat(body, headers).requests
    assert TOKENIZER.decode(request.prompt, skip_special_tokens=False) == (
        "28 Feb 2024 23:59:58: hello world"
    )


def test_tokenize_and_detokenize() -> None:
    def ids(**body: object) -> list[int]:
        return PROCESSOR.tokenize(parse_body(TokenizeRequest, msgspec.json.encode(body))).token_ids

    assert ids(prompt="the cat") == TOKENIZER.encode("the cat")
    assert ids(messages=USER) == chat().requests[0].prompt
    assert rejection(ids).param == "prompt"
    assert rejection(ids, prompt="a", messages=USER).param == "prompt"
    assert rejection(ids, messages=USER, chat_template="x").param == "chat_template"
    tokens = TOKENIZER.encode("the<|end|>")
    assert PROCESSOR.detokenize(DetokenizeRequest(tokens=tokens)) == "the<|end|>"
    with pytest.raises(ApiError):
        PROCESSOR.detokenize(DetokenizeRequest(tokens=[VOCAB]))


# --- resuming ------------------------------------------------------------------------------------


def test_resumed_tokens_reach_the_engine() -> None:
    assert complete(resume={"token_ids": [4, 5]}).requests[0].resumed_tokens == [4, 5]
    assert complete(resume={"token_ids": []}).requests[0].resumed_tokens == []
    prepared = complete(n=2, resume={"token_ids": [[4], []]})
    assert [r.resumed_tokens for r in prepared.requests] == [[4], []]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"resume": {"token_ids": [VOCAB]}}, "invalid_value"),
        ({"resume": {"token_ids": [-1]}}, "invalid_value"),
        ({"resume": {"token_ids": [[1], [2]]}}, "invalid_value"),
        ({"resume": {"token_ids": [1, [2]]}, "n": 2}, "invalid_value"),
        ({"resume": {"token_ids": [5, 6]}, "max_tokens": 2}, "resume_finished"),
        ({"resume": {"token_ids": [5, TOKENIZER.eos_token_ids[0]]}}, "resume_finished"),
        ({"resume": {"token_ids": [5, 6]}, "stop_token_ids": [6]}, "resume_finished"),
        ({"resume": {"token_ids": TOKENIZER.encode("a stop")}, "stop": "sto"}, "resume_finished"),
    ],
)
def test_invalid_or_finished_resume_is_rejected(body: dict[str, Any], code: str) -> None:
    error = rejection(complete, **body)
    assert (error.param, error.code) == ("resume.token_ids", code)


def test_ignored_stop_token_can_be_resumed() -> None:
    end = TOKENIZER.eos_token_ids[0]
    assert complete(resume={"token_ids": [end]}, ignore_eos=True).requests[0].resumed_tokens == [
        end
    ]
    stop = complete(resume={"token_ids": [end]}, stop_token_ids=[end], min_tokens=3)
    assert stop.requests[0].resumed_tokens == [end]


# --- rejections ----------------------------------------------------------------------------------


def prepare_with(name: str, value: object) -> ResponseSpec:
    """Prepare a chat, or a completion if chats lack the field, with a value of any type."""
    if name in ChatCompletionRequest.__struct_fields__:
        chat_body = ChatCompletionRequest(model="m", messages=CHAT_MESSAGES, seed=1)
        return PROCESSOR.prepare_chat(msgspec.structs.replace(chat_body, **{name: value}), HEADERS)
    body = CompletionRequest(model="m", prompt=IDS, seed=1)
    return PROCESSOR.prepare_completion(msgspec.structs.replace(body, **{name: value}), HEADERS)


@pytest.mark.parametrize(("speculation", "expected"), [(None, True), (True, True), (False, False)])
def test_speculation_is_on_unless_the_request_says_no(
    *, speculation: bool | None, expected: bool
) -> None:
    (request,) = chat(speculation=speculation).requests
    assert request.speculation is expected


def test_a_prediction_is_encoded_and_counted() -> None:
    text = "the cat and the dog"
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    parts = [{"type": "text", "text": text[:7]}, {"type": "text", "text": text[7:]}]
    for content in (text, parts):
        prepared = chat(prediction={"type": "content", "content": content}, n=2)
        assert [request.prediction for request in prepared.requests] == [tokens] * 2
    for choice, output in zip(prepared.choices, (tokens[:3], tokens), strict=True):
        choice.push(Delta(id="r", tokens=output))
    usage = prepared.usage()
    assert usage.completion_tokens == len(tokens) + 3
    assert usage.completion_tokens_details == CompletionTokenUsageInfo(
        accepted_prediction_tokens=len(tokens) + 3, rejected_prediction_tokens=len(tokens) - 3
    )
    assert chat().usage().completion_tokens_details is msgspec.UNSET


@pytest.mark.parametrize(
    ("prediction", "code"),
    [
        ("text", "invalid_type"),
        ({"type": "other", "content": ""}, "invalid_type"),
        (
            {"type": "content", "content": [{"type": "image_url", "image_url": "x"}]},
            "invalid_value",
        ),
        ({"type": "content", "content": "a b " * MAX_LEN}, "context_length_exceeded"),
    ],
)
def test_a_wrong_prediction_is_rejected(prediction: object, code: str) -> None:
    error = rejection(chat, prediction=prediction)
    assert (error.code, (error.param or "").partition(".")[0]) == (code, "prediction")


@pytest.mark.parametrize(
    ("tenant", "domain", "salt", "shares"),
    [
        ("", "", None, True),
        ("project", "organisation", None, True),
        ("project", "organisation", "salt", False),
        ("project", "project", None, False),
    ],
)
def test_outputs_are_shared_where_tenants_share_prompts(
    tenant: str, domain: str, salt: str | None, *, shares: bool
) -> None:
    headers = GatewayHeaders(request_id="r", tenant=tenant, cache_domain=domain)
    body = CompletionRequest(model="m", prompt=IDS, cache_salt=salt)
    (request,) = PROCESSOR.prepare_completion(body, headers).requests
    assert request.shares_outputs == shares


@pytest.mark.parametrize("name", RESTRICTED_PARAMETERS)
def test_unsupported_parameter_is_rejected_by_name(name: str) -> None:
    with pytest.raises(ApiError) as caught:
        prepare_with(name, -1)  # no restricted parameter supports this number
    assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")


NEUTRAL_PARAMETERS = (
    *("user", "metadata", "safety_identifier", "request_id", "session_id"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    "spaces_between_special_tokens",
)
"""Parameters that have no effect on the answer by their meaning."""


def test_values_without_effect_are_accepted() -> None:
    expected = chat(seed=1).requests
    bodies: list[dict[str, Any]] = [
        {"tools": [], "documents": []},
        {"tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"]},
        {"store": False, "service_tier": "auto", "length_penalty": 1.0, "echo": False},
        {"metadata": {"k": "v"}, "user": "u"},
    ]
    for body in bodies:
        assert chat(seed=1, **body).requests == expected
    for name in (*NEUTRAL_PARAMETERS, *IGNORED_PARAMETERS):
        assert prepare_with(name, "x").requests == expected


def test_parameters_that_ask_for_an_effect_they_do_not_have_are_named() -> None:
    body: dict[str, Any] = dict.fromkeys((*IGNORED_PARAMETERS, *NEUTRAL_PARAMETERS), "x")
    assert ignored_parameters(body) == tuple(IGNORED_PARAMETERS)
    neutral = {"store": False, "service_tier": "default", "verbosity": "medium", "moderation": None}
    assert not ignored_parameters(neutral)


@pytest.mark.parametrize("name", sorted(PARAMETER_RANGES))
def test_number_outside_its_range_is_rejected_by_name(name: str) -> None:
    call = chat if name in {"top_logprobs", "max_completion_tokens"} else complete
    allowed = PARAMETER_RANGES[name]
    for value in (
        allowed.minimum if allowed.exclusive_minimum else allowed.minimum - 1,
        allowed.maximum + 1,
    ):
        assert rejection(call, **{name: value}).param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 10**300),
        ("max_tokens", 10**40),
        ("logprobs", 21),
        ("timeout_s", 0),
        ("timeout_s", 61),
        ("logit_bias", {str(VOCAB): 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1": 100.5}),
        ("logit_bias", {"1": 1e300}),
        ("logit_bias", {str(i): 1 for i in range(2000)}),
        ("stop_token_ids", [VOCAB]),
        ("stop_token_ids", [1] * 2000),
        ("stop_token_ids", [-1]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [10**30]),
        ("stop", [""]),
        ("stop", ""),
        ("stop", [str(i) for i in range(65)]),
        ("stop", ["x" * 1025]),
        ("stop", [chr(65 + i) * 1024 for i in range(9)]),
        ("min_tokens", 17),
        ("best_of", 2),
        ("prompt", ""),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", ["a", ""]),
        ("prompt", ["a", 1]),
        ("prompt", [[1], 1]),
        ("prompt", [VOCAB]),
        ("prompt", [-1]),
        ("prompt", [[1], [2**70]]),
        ("prompt", ["a"] * 1025),
        ("prompt", [1] * 1_000_000),
    ],
)
def test_invalid_value_is_rejected_by_name(name: str, value: object) -> None:
    assert rejection(complete, **{name: value}).param == name


@pytest.mark.parametrize(
    ("call", "body", "param"),
    [
        (chat, {"echo": True}, "echo"),
        (chat, {"stream_options": {"include_usage": False}}, "stream_options"),
        (chat, {"priority": 9}, "priority"),
        (chat, {"top_logprobs": 3}, "top_logprobs"),
        (chat, {"max_tokens": 0}, "max_tokens"),
        (chat, {"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        (complete, {"max_tokens": 0}, "max_tokens"),
        (complete, {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        (complete, {"truncation_side": "left"}, "truncation_side"),
        (
            complete,
            {"allowed_token_ids": TOKENIZER.eos_token_ids, "min_tokens": 1},
            "min_tokens",
        ),
        (complete, {"prompt": ["a"] * 20, "n": 64}, "prompt"),
        (chat, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        (chat, {"messages": []}, "messages"),
        (chat, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (
            chat,
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]},
            "messages[0].tool_calls[0].function.name",
        ),
        (
            chat,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
        ),
        (
            chat,
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0]",
        ),
    ],
)
def test_invalid_combination_is_rejected(call: Any, body: dict[str, Any], param: str) -> None:  # noqa: ANN401 - `chat` or `complete`
    assert rejection(call, **body).param == param


# --- lengths -------------------------------------------------------------------------------------


def test_prompt_and_output_are_limited_to_the_context() -> None:
    assert params(complete()).max_tokens == 16
    assert params(complete(prompt=[5] * (MAX_LEN - 3))).max_tokens == 3
    assert params(complete(prompt=[5] * 100, max_tokens=28)).max_tokens == 28
    error = rejection(complete, prompt=[5] * 100, max_tokens=29)
    assert (error.code, error.param) == ("context_length_exceeded", "prompt")
    assert params(complete(prompt=[5] * 127, max_tokens=0, echo=True)).max_tokens == 1
    error = rejection(complete, prompt=[5] * 128, max_tokens=0, echo=True)
    assert error.code == "context_length_exceeded"
    remaining = chat().requests[0].max_tokens
    assert params(chat(max_tokens=remaining)).max_tokens == remaining
    assert rejection(chat, max_tokens=remaining + 1).code == "context_length_exceeded"
    for limit, allowed in ((remaining + 1, remaining), (3, 3)):
        assert params(chat(max_tokens=limit, clamp_max_tokens=True)).max_tokens == allowed
    clamped = complete(prompt=[5] * 100, max_tokens=29, clamp_max_tokens=True)
    assert params(clamped).max_tokens == 28


def test_more_messages_than_context_tokens_are_rejected() -> None:
    messages = [{"role": "user", "content": ""}] * 100_000
    assert rejection(chat, messages=messages).code == "context_length_exceeded"


def test_eos_ids_of_the_tokenizer_become_stop_tokens() -> None:
    tokenizer = Tokenizer(byte_level_backend(), [2, 7])
    processor = make_processor(tokenizer, eos=2)
    assert params(complete(processor, stop_token_ids=[9])).stop_token_ids == (7, 9)
    assert params(complete(processor, ignore_eos=True)).stop_token_ids == ()
    assert params(complete(make_processor(tokenizer))).stop_token_ids == ()


@pytest.mark.parametrize("text", ["x", "the ", "你", "<|end|>", "hello world "])
def test_huge_prompt_is_rejected_without_full_encoding(text: str) -> None:
    tokenizer = CountingTokenizer(byte_level_backend())
    processor = make_processor(tokenizer)
    CountingTokenizer.encoded = 0
    huge = text * (10_000_000 // len(text))
    for call, body in (
        (complete, {"prompt": huge}),
        (complete, {"prompt": [huge]}),
        (chat, {"messages": [{"role": "user", "content": huge}]}),
    ):
        assert rejection(partial(call, processor), **body).code == "context_length_exceeded"
    assert CountingTokenizer.encoded < 3 * MAX_LEN * 20
    tokenizer.max_token_chars = 10_000  # a text within the bound of characters is probed
    CountingTokenizer.encoded = 0
    assert rejection(partial(complete, processor), prompt="x " * 500_000).param == "prompt"
    assert CountingTokenizer.encoded <= MAX_LEN * 8


@given(
    body=st.fixed_dictionaries(
        {},
        optional={
            "max_tokens": st.integers(-2, 200),
            "min_tokens": st.integers(-2, 40),
            "temperature": st.floats(),
            "top_p": st.floats(-0.5, 1.5) | st.just(math.nan),
            "top_k": st.integers(-3, 2**70),
            "min_p": st.floats(),
            "n": st.integers(-1, 66),
            "seed": st.integers(-(2**70), 2**70),
            "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3),
            "logit_bias": st.dictionaries(st.integers(-1, VOCAB), st.floats(), max_size=3),
            "stop_token_ids": st.lists(st.integers(-1, VOCAB), max_size=3),
            "allowed_token_ids": st.lists(st.integers(-1, VOCAB), max_size=3),
            "logprobs": st.integers(-1, 22),
            "echo": st.booleans(),
            "repetition_penalty": st.floats(),
            "truncate_prompt_tokens": st.integers(-1, 200),
            "presence_penalty": st.floats(),
            "timeout_s": st.floats(),
        },
    ),
    prompt=st.text(max_size=200)
    | st.lists(st.integers(-1, VOCAB), max_size=140)
    | st.lists(st.text(max_size=5), max_size=3)
    | st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=4), max_size=3),
)
def test_any_body_gives_valid_requests_or_an_api_error(body: dict[str, Any], prompt: Any) -> None:  # noqa: ANN401 - JSON
    request_body = CompletionRequest(model="m", prompt=prompt, **body)
    refusal: ApiError | None = None
    try:
        prepared = PROCESSOR.prepare_completion(request_body, HEADERS)
    except ApiError as error:
        refusal = error
    if refusal is not None:
        assert (refusal.status, refusal.param in {"prompt", *body}) == (400, True)
        return
    for request in prepared.requests:
        params_ = request.params
        assert request.max_tokens >= 1
        assert 0 <= params_.min_tokens <= request.max_tokens
        assert 1 <= len(request.prompt) <= MAX_LEN - request.max_tokens
        ids = [
            *request.prompt,
            *params_.logit_bias,
            *params_.stop_token_ids,
            *(params_.allowed_token_ids or ()),
        ]
        assert all(0 <= i < VOCAB for i in ids)
        numbers = [
            params_.temperature,
            params_.top_p,
            params_.min_p,
            params_.repetition_penalty,
            params_.presence_penalty,
            request.timeout_s or 0.0,
            *params_.logit_bias.values(),
        ]
        assert all(math.isfinite(x) for x in numbers)
        assert params_.top_p > 0
        assert params_.repetition_penalty > 0
        assert params_.seed is not None
        assert 0 <= params_.seed < 2**63


# --- the bundled model ---------------------------------------------------------------------------


def test_bundled_model_accepts_chats_and_prompts() -> None:
    tokenizer = Tokenizer.load(BUNDLED_MODEL)
    assert tokenizer.eos_token_ids
    ready = ready_core(tokenizer, max_model_len=512)
    text_processing = TextProcessing.load(BUNDLED_MODEL)
    processor = text_processing.create_processor(ready, EngineConfig(model="m"))
    prompt = chat(processor).requests[0].prompt
    assert "hello world" in tokenizer.decode(prompt)
    assert tokenizer.decode(tokenizer.encode("the cat, 你好", add_special_tokens=False)) == (
        "the cat, 你好"
    )


# --- sampling defaults of generation_config.json ---

RECOMMENDED: dict[str, Any] = {
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "min_p": 0.05,
    "repetition_penalty": 1.05,
    "max_new_tokens": 40,
    "eos_token_id": [1, 2],
    "transformers_version": "4.51.0",
}


def write_generation_config(path: Path, **values: object) -> Path:
    path.mkdir(exist_ok=True)
    (path / "generation_config.json").write_text(json.dumps(values))
    return path


@pytest.fixture
def processor(tmp_path: Path) -> RequestProcessor:
    return make_processor(
        source="{{ messages[0].content }}",
        defaults=read_sampling_defaults(write_generation_config(tmp_path, **RECOMMENDED)),
    )


@pytest.mark.parametrize("send", [chat, complete])
def test_requests_get_the_defaults_that_they_leave_open(
    processor: RequestProcessor, send: Callable[..., ResponseSpec]
) -> None:
    sampling = params(send(processor, top_p=0.5, seed=1))
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 0.5, 20)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.05, 1.05)
    assert sampling.max_tokens == 40
    assert params(send(processor, max_tokens=3, temperature=0)).max_tokens == 3
    assert params(send(processor, temperature=0)).temperature == 0


def test_default_length_leaves_room_for_the_prompt(processor: RequestProcessor) -> None:
    prepared = chat(processor, messages=[{"role": "user", "content": "the cat " * 50}])
    prompt = len(prepared.requests[0].prompt)
    assert prompt > 128 - 40
    assert params(prepared).max_tokens == 128 - prompt


@pytest.mark.parametrize(
    ("source", "overrides", "expected"),
    [
        ("auto", {}, {"temperature": 0.7, "top_k": 20}),
        ("none", {}, {}),
        ("vllm", {}, {}),
        ("{other}", {}, {"top_p": 0.9}),
        ("auto", {"top_k": None, "min_p": 0.1}, {"temperature": 0.7, "min_p": 0.1}),
        ("none", {"max_new_tokens": 5}, {"max_tokens": 5}),
    ],
)
def test_options_select_the_defaults(
    tmp_path: Path, source: str, overrides: dict[str, float | None], expected: dict[str, float]
) -> None:
    path = write_generation_config(tmp_path / "model", temperature=0.7, top_k=20)
    other = write_generation_config(tmp_path / "other", top_p=0.9)
    defaults = read_sampling_defaults(path, source.format(other=other), overrides)
    assert defaults.values == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1}, r"generation_config\.json: temperature is -1"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"top_p": -1}, "top_p is -1"),
        ({"top_p": 1.5}, r"top_p is 1\.5"),
        ({"top_k": 2.5}, r"top_k is 2\.5"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
    ],
)
def test_default_out_of_range_is_refused(
    tmp_path: Path, values: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_sampling_defaults(write_generation_config(tmp_path, **values))


def test_invalid_option_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"generation-config is 'absent'.*auto, none"):
        read_sampling_defaults(tmp_path, "absent")
    for override, message in (
        ({"temprature": 1.0}, "'temprature'; it may have temperature, top_p"),
        ({"top_p": 3}, "override-generation-config: top_p is 3"),
    ):
        with pytest.raises(ValueError, match=message):
            read_sampling_defaults(tmp_path, "auto", override)


def test_unapplied_settings_are_named(tmp_path: Path) -> None:
    path = write_generation_config(
        tmp_path, do_sample=False, no_repeat_ngram_size=3, num_beams=1, pad_token_id=0
    )
    defaults = read_sampling_defaults(path)
    assert (defaults.values, defaults.unapplied) == ({}, ("do_sample", "no_repeat_ngram_size"))


def test_bundled_model_recommends_nothing() -> None:
    assert read_sampling_defaults(BUNDLED_MODEL).values == {}
