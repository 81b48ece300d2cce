"""Offline use on the bundled model: order, n, stop strings, seeds, refusals, and the async twin."""

from contextlib import aclosing

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
TALK = [{"role": "user", "content": "Hello! How are you?"}]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(CONFIG, progress="off")


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["Once upon a time", "One, two, three,", "The sun is", "A cat"]
    together = llm.generate(prompts, GREEDY)
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in prompts]
    assert [output.prompt for output in together] == prompts
    assert texts(together) == texts(alone)
    assert len(set(texts(together))) == len(prompts)


def test_token_ids_are_a_prompt_as_their_text_is(llm: LLM) -> None:
    by_text = llm.generate("The sun is", GREEDY)[0]
    by_ids = llm.generate(by_text.prompt_token_ids, GREEDY)
    by_list = llm.generate([by_text.prompt_token_ids, by_text.prompt_token_ids], GREEDY)
    assert texts(by_ids) == [by_text.outputs[0].text]
    assert texts(by_list) == [by_text.outputs[0].text] * 2


def test_length_and_counts(llm: LLM) -> None:
    params = SamplingParams(max_tokens=7, temperature=0.0, ignore_eos=True)
    answer = llm.generate("The sun is", params)[0].outputs[0]
    assert answer.finish_reason == "length"
    assert len(answer.token_ids) == 7
    assert answer.logprobs is None
    assert answer.cumulative_logprob is None


def test_several_continuations_are_different_and_repeatable(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=7)
    first = llm.generate("Once upon a time", params, n=4)[0]
    again = llm.generate("Once upon a time", params, n=4)[0]
    assert [answer.index for answer in first.outputs] == [0, 1, 2, 3]
    assert [a.token_ids for a in first.outputs] == [a.token_ids for a in again.outputs]
    assert len({tuple(answer.token_ids) for answer in first.outputs}) > 1


def test_without_a_seed_each_run_draws_its_own(llm: LLM) -> None:
    params = SamplingParams(max_tokens=30, temperature=2.0, ignore_eos=True)
    runs = {tuple(llm.generate("Once", params)[0].outputs[0].token_ids) for _ in range(4)}
    assert len(runs) > 1


def test_stop_string_ends_the_text_before_it_and_frees_the_engine(llm: LLM) -> None:
    whole = llm.generate("Once upon a time", GREEDY)[0].outputs[0].text
    stop = whole.split()[3]
    params = SamplingParams(max_tokens=100, temperature=0.0, stop=(stop,))
    answer = llm.generate("Once upon a time", params)[0].outputs[0]
    assert answer.text == whole[: whole.index(stop)]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    assert texts(llm.generate("Once upon a time", GREEDY)) == [whole]


def test_logprobs(llm: LLM) -> None:
    params = SamplingParams(max_tokens=5, temperature=0.0, logprobs=2, prompt_logprobs=0)
    output = llm.generate("The sun is", params)[0]
    answer = output.outputs[0]
    assert answer.logprobs is not None
    assert [entry.token for entry in answer.logprobs] == answer.token_ids
    assert [entry.rank for entry in answer.logprobs] == [1] * 5
    assert answer.cumulative_logprob == pytest.approx(sum(e.logprob for e in answer.logprobs))
    assert output.prompt_logprobs is not None
    assert [entry.token for entry in output.prompt_logprobs] == output.prompt_token_ids[1:]


def test_parameters_for_each_prompt(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=k, temperature=0.0, ignore_eos=True) for k in (2, 5)]
    outputs = llm.generate(["One", "Two"], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 5]
    with pytest.raises(ValueError, match="2 SamplingParams for 3 prompts"):
        llm.generate(["One", "Two", "Three"], params)


def test_chat_renders_the_template(llm: LLM) -> None:
    one = llm.chat(TALK, GREEDY)
    two = llm.chat([TALK, TALK], GREEDY)
    assert "Hello! How are you?" in one[0].prompt
    assert one[0].prompt != "Hello! How are you?"
    assert texts(two) == texts(one) * 2


def test_refusal_names_the_prompt_and_leaves_the_engine_usable(llm: LLM) -> None:
    with pytest.raises(ApiError, match="prompt 1"):
        llm.generate([[5, 6], [10**6]], GREEDY)
    with pytest.raises(ApiError):
        llm.generate("x " * 2000, GREEDY)
    with pytest.raises(ApiError, match="temperature"):
        llm.generate("x", SamplingParams(temperature=float("nan")))
    with pytest.raises(ApiError, match="conversation"):
        llm.chat([{"content": "no role"}], GREEDY)
    with pytest.raises(ValueError, match="mix"):
        llm.generate(["text", 1], GREEDY)  # type: ignore[arg-type]
    assert texts(llm.generate("fine", GREEDY))


def test_missing_model_is_one_clear_sentence() -> None:
    with pytest.raises(ValueError, match="no directory"):
        LLM("/no/such/model")


async def test_async_twin_gives_the_same_and_streams(llm: LLM) -> None:
    expected = llm.generate("Once upon a time", GREEDY)[0]
    async with AsyncLLM(CONFIG) as engine:
        whole = await engine.generate("Once upon a time", GREEDY)
        assert whole.outputs[0] == expected.outputs[0]
        seen = [o.outputs[0].text async for o in engine.stream("Once upon a time", GREEDY)]
        assert seen[-1] == expected.outputs[0].text
        assert all(seen[-1].startswith(text) for text in seen)
        pairs = [o.outputs async for o in engine.stream("Once upon a time", GREEDY, n=2)]
        lengths = [tuple(len(answer.token_ids) for answer in pair) for pair in pairs]
        assert lengths == sorted(set(lengths))  # each tells more than the one before
        assert [answer.text for answer in pairs[-1]] == [expected.outputs[0].text] * 2
        async with aclosing(engine.stream_chat(TALK, GREEDY)) as answer:
            await anext(answer)
        stop = expected.outputs[0].text.split()[2]
        stopped = await engine.generate(
            "Once upon a time", SamplingParams(max_tokens=100, temperature=0.0, stop=(stop,)), n=2
        )
        assert [answer.stop_reason for answer in stopped.outputs] == [stop, stop]
        with pytest.raises(ApiError, match="temperature"):
            await engine.generate("x", SamplingParams(temperature=-1.0))
