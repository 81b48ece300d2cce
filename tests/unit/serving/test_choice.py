"""Choices: output does not depend on how deltas are grouped, nor the input of custom tools on how it is split."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.engine import EngineRequest
from argosy.engine.scheduling import Logprob
from argosy.engine.serving.core_messages import Delta
from argosy.engine.serving.text.choice import Choice, PromptState, ScoringChoice
from argosy.engine.serving.text.custom_tool_input import CustomInputDecoder
from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.models import BUNDLED_MODEL
from argosy.protocol import ApiError, SamplingParams

TOKENIZER = Tokenizer.load(BUNDLED_MODEL)
EOS = TOKENIZER.eos_token_ids[0]


def new_choice(params: SamplingParams, output: list[int] | None = None) -> Choice:
    request = EngineRequest(id="r", prompt=[1], resumed_tokens=output or [], params=params)
    return Choice(0, request, PromptState([1]), TOKENIZER)


def run(choice: Choice, tokens: list[int], cuts: list[int]) -> tuple[str, list[int], list[int]]:
    """Push tokens in groups that end at `cuts`. Return the text, the tokens and the tokens with log-probabilities."""
    text, tokens_out, logprob_tokens = "", list[int](), list[int]()
    boundaries = sorted({0, len(tokens), *(cut % (len(tokens) + 1) for cut in cuts)})
    for start, end in zip(boundaries, [*boundaries[1:], len(tokens)], strict=True):
        group = tokens[start:end]
        last = end == len(tokens)
        choice.push(
            Delta(
                id="r",
                tokens=group,
                logprobs=[Logprob(token, -1.0, 1, []) for token in group],
                finish_reason="length" if last else None,
            )
        )
        text += choice.new_text
        tokens_out += choice.new_tokens
        logprob_tokens += [logprob.token for logprob in choice.new_logprobs]
        choice.clear_output()
        if choice.finish_reason is not None:
            break
    return text, tokens_out, logprob_tokens


@given(
    st.lists(st.integers(0, TOKENIZER.vocab_size - 1), min_size=1, max_size=30),
    st.lists(st.integers(0, 100), max_size=5),
    st.sampled_from([(), ("e",), ("the", "an")]),
)
def test_grouping_of_deltas_does_not_change_the_output(
    tokens: list[int], cuts: list[int], stop: tuple[str, ...]
) -> None:
    params = SamplingParams(stop=stop, max_tokens=100)
    single = new_choice(params)
    split = new_choice(params)
    expected = run(single, tokens, [])
    assert run(split, tokens, cuts) == expected
    assert split.finish_reason == single.finish_reason
    assert split.stop_reason == single.stop_reason
    assert split.generated_tokens == single.generated_tokens == len(expected[1]) == len(expected[2])
    for stop_string in stop:
        assert stop_string not in expected[0]


def test_usage_counts_resumed_tokens() -> None:
    choice = new_choice(SamplingParams(max_tokens=100), output=[300, 301])
    choice.push(Delta(id="r", tokens=[302], finish_reason="length"))
    assert choice.output_tokens == 3
    assert choice.new_tokens == [302]


@pytest.mark.parametrize(("token", "reason"), [(EOS, None), (300, 300)])
def test_stop_reason_is_a_requested_stop_token_only(token: int, reason: int | None) -> None:
    choice = new_choice(SamplingParams(stop_token_ids=(300,)))
    choice.push(Delta(id="r", tokens=[301, token], finish_reason="stop", stop_token=token))
    assert (choice.finish_reason, choice.stop_reason) == ("stop", reason)
    assert choice.new_text == TOKENIZER.decode([301])


@pytest.mark.parametrize(("finish", "status"), [("error", 500), ("cancelled", 499)])
def test_failed_and_cancelled_choices_raise_api_errors(finish: str, status: int) -> None:
    choice = new_choice(SamplingParams())
    with pytest.raises(ApiError) as caught:
        choice.push(Delta(id="r", finish_reason="error" if finish == "error" else "cancelled"))
    assert caught.value.status == status


def test_scoring_drops_the_sampled_token() -> None:
    request = EngineRequest(id="r", prompt=[1, 2], params=SamplingParams(max_tokens=1))
    prompt = PromptState([1, 2], "x", is_echoed=True)
    choice = ScoringChoice(0, request, prompt, TOKENIZER)
    logprob = Logprob(2, -1.0, 1, [])
    choice.push(Delta(id="r", tokens=[EOS], prompt_logprobs=[logprob], finish_reason="stop"))
    assert (choice.new_text, choice.new_tokens, choice.finish_reason) == ("", [], "length")
    assert prompt.logprobs == [logprob]
    assert choice.output_tokens == 0


def decode_input(text: str, size: int) -> str:
    decoder = CustomInputDecoder()
    return "".join(decoder.feed(text[i : i + size]) for i in range(0, len(text), size))


@given(st.text(), st.booleans(), st.sampled_from([(", ", ": "), (",", ":")]), st.integers(1, 7))
def test_the_text_equals_the_json_string(
    text: str, ascii_only: bool, separators: tuple[str, str], size: int
) -> None:
    text = text.encode("utf-8", "replace").decode()
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only, separators=separators)
    assert decode_input(arguments, size) == text


@given(st.text(alphabet='{}":, \\ainputud8c0', max_size=40), st.integers(1, 5))
def test_the_text_does_not_depend_on_the_split(arguments: str, size: int) -> None:
    assert decode_input(arguments, size) == decode_input(arguments, len(arguments) or 1)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"other": 1}', '{"other": 1}'),
        ("plain", "plain"),
        ('{"input": "a\\ud83d\\ude00"}', "a😀"),
        ('{"input": "a\\ud83dx"}', "a\ufffdx"),
        ('{"input": "cut', "cut"),
        ("", ""),
    ],
)
def test_arguments_of_another_shape_are_kept(arguments: str, text: str) -> None:
    assert decode_input(arguments, 1) == text
