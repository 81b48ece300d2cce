"""`LLM` and `AsyncLLM` on the bundled model: order, n, stop strings, seeds, errors."""

import itertools
from contextlib import aclosing
from types import SimpleNamespace

import pytest

from argosy import LLM, ApiError, AsyncLLM, EngineConfig, RequestOutput, SamplingParams
from argosy.models import BUNDLED_MODEL

CONFIG = EngineConfig(
    model=str(BUNDLED_MODEL),
    dtype="float32",
    threads=1,
    max_model_len=256,
    num_blocks=256,
    warmup=False,
)
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
CONVERSATION = [{"role": "user", "content": "Hello! How are you?"}]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(CONFIG, progress="off")


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_outputs_have_order_of_prompts(llm: LLM) -> None:
    prompts = ["Once upon a time", "One, two, three,", "The sun is", "A cat"]
    together = llm.generate(prompts, GREEDY)
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in prompts]
    assert [output.prompt for output in together] == prompts
    assert texts(together) == texts(alone)
    assert len(set(texts(together))) == len(prompts)


def test_token_ids_equal_their_text_as_prompt(llm: LLM) -> None:
    by_text = llm.generate("The sun is", GREEDY)[0]
    by_ids = llm.generate(by_text.prompt_token_ids, GREEDY)
    by_list = llm.generate([by_text.prompt_token_ids, by_text.prompt_token_ids], GREEDY)
    assert texts(by_ids) == [by_text.outputs[0].text]
    assert texts(by_list) == [by_text.outputs[0].text] * 2


def test_max_tokens_sets_length_and_finish_reason(llm: LLM) -> None:
    params = SamplingParams(max_tokens=7, temperature=0.0, ignore_eos=True)
    choice = llm.generate("The sun is", params)[0].outputs[0]
    assert choice.finish_reason == "length"
    assert len(choice.token_ids) == 7
    assert choice.logprobs is None
    assert choice.cumulative_logprob is None


def test_seeded_choices_differ_and_repeat(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=7)
    first = llm.generate("Once upon a time", params, n=4)[0]
    again = llm.generate("Once upon a time", params, n=4)[0]
    assert [choice.index for choice in first.outputs] == [0, 1, 2, 3]
    assert [a.token_ids for a in first.outputs] == [a.token_ids for a in again.outputs]
    assert len({tuple(choice.token_ids) for choice in first.outputs}) > 1


def test_unseeded_runs_differ(llm: LLM) -> None:
    params = SamplingParams(max_tokens=30, temperature=2.0, ignore_eos=True)
    runs = {tuple(llm.generate("Once", params)[0].outputs[0].token_ids) for _ in range(4)}
    assert len(runs) > 1


def test_stop_string_truncates_text(llm: LLM) -> None:
    complete = llm.generate("Once upon a time", GREEDY)[0].outputs[0].text
    stop = complete.split()[3]
    params = SamplingParams(max_tokens=100, temperature=0.0, stop=(stop,))
    choice = llm.generate("Once upon a time", params)[0].outputs[0]
    assert choice.text == complete[: complete.index(stop)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    assert texts(llm.generate("Once upon a time", GREEDY)) == [complete]


def test_logprobs_cover_prompt_and_output(llm: LLM) -> None:
    params = SamplingParams(max_tokens=5, temperature=0.0, logprobs=2, prompt_logprobs=0)
    output = llm.generate("The sun is", params)[0]
    choice = output.outputs[0]
    assert choice.logprobs is not None
    assert [entry.token for entry in choice.logprobs] == choice.token_ids
    assert [entry.rank for entry in choice.logprobs] == [1] * 5
    assert choice.cumulative_logprob == pytest.approx(sum(e.logprob for e in choice.logprobs))
    assert output.prompt_logprobs is not None
    assert [entry.token for entry in output.prompt_logprobs] == output.prompt_token_ids[1:]


def test_sampling_params_per_prompt(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=k, temperature=0.0, ignore_eos=True) for k in (2, 5)]
    outputs = llm.generate(["One", "Two"], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 5]
    with pytest.raises(ValueError, match="2 SamplingParams for 3 prompts"):
        llm.generate(["One", "Two", "Three"], params)


def test_chat_renders_template(llm: LLM) -> None:
    one = llm.chat(CONVERSATION, GREEDY)
    two = llm.chat([CONVERSATION, CONVERSATION], GREEDY)
    assert "Hello! How are you?" in one[0].prompt
    assert one[0].prompt != "Hello! How are you?"
    assert texts(two) == texts(one) * 2


def test_invalid_input_is_named_and_engine_stays_usable(llm: LLM) -> None:
    with pytest.raises(ApiError, match="prompt 1"):
        llm.generate([[5, 6], [10**6]], GREEDY)
    with pytest.raises(ApiError):
        llm.generate("x " * 2000, GREEDY)
    with pytest.raises(ApiError, match="temperature"):
        llm.generate("x", SamplingParams(temperature=float("nan")))
    with pytest.raises(ApiError, match=r"messages\[0\]"):
        llm.chat([{"content": "no role"}], GREEDY)
    with pytest.raises(ValueError, match="mix"):
        llm.generate(["text", 1], GREEDY)  # type: ignore[arg-type]
    assert texts(llm.generate("fine", GREEDY))


@pytest.mark.parametrize("timeout_s", [None, 1500.0])
def test_run_of_hours_has_no_deadline_unless_asked_for(
    timeout_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock advances by 1,000 seconds each time that it is read."""
    clock = itertools.count(step=1000.0)
    monkeypatch.setattr("argosy.engine.llm.time", SimpleNamespace(monotonic=lambda: next(clock)))
    llm = LLM(CONFIG, progress="off")
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    outputs = llm.generate(["The sun is"] * 3, params, timeout_s=timeout_s)
    expected = "length" if timeout_s is None else "timeout"
    assert [output.outputs[0].finish_reason for output in outputs] == [expected] * 3


def test_missing_model_raises_value_error() -> None:
    with pytest.raises(ValueError, match="no directory"):
        LLM("/no/such/model")


async def test_async_llm_equals_llm_and_streams(llm: LLM) -> None:
    expected = llm.generate("Once upon a time", GREEDY)[0]
    async with AsyncLLM(CONFIG) as engine:
        complete = await engine.generate("Once upon a time", GREEDY)
        assert complete.outputs[0] == expected.outputs[0]
        texts_so_far = [o.outputs[0].text async for o in engine.stream("Once upon a time", GREEDY)]
        assert texts_so_far[-1] == expected.outputs[0].text
        assert all(texts_so_far[-1].startswith(text) for text in texts_so_far)
        pairs = [o.outputs async for o in engine.stream("Once upon a time", GREEDY, n=2)]
        lengths = [tuple(len(choice.token_ids) for choice in pair) for pair in pairs]
        assert lengths == sorted(set(lengths))  # each output is longer than the previous one
        assert [choice.text for choice in pairs[-1]] == [expected.outputs[0].text] * 2
        async with aclosing(engine.stream_chat(CONVERSATION, GREEDY)) as choice:
            await anext(choice)
        stop = expected.outputs[0].text.split()[2]
        stopped = await engine.generate(
            "Once upon a time", SamplingParams(max_tokens=100, temperature=0.0, stop=(stop,)), n=2
        )
        assert [choice.stop_reason for choice in stopped.outputs] == [stop, stop]
        with pytest.raises(ApiError, match="temperature"):
            await engine.generate("x", SamplingParams(temperature=-1.0))
