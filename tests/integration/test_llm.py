"""`LLM` and `AsyncLLM` on the bundled model: order, n, stop strings, seeds, errors, and the arguments of vLLM."""

import itertools
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import structlog
import torch
from tests.engine.adapter_files import write_adapter
from tests.support.export_gguf import export

from argosy import (
    LLM,
    ApiError,
    AsyncLLM,
    EngineConfig,
    LoRARequest,
    RequestOutput,
    SamplingParams,
)
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
ACCEPTED_TOKENS = "argosy_accepted_draft_tokens_total"
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


def test_seeded_choices_differ_and_repeat(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=7)
    first = llm.generate("Once upon a time", params, n=4)[0]
    again = llm.generate("Once upon a time", params, n=4)[0]
    assert [choice.index for choice in first.outputs] == [0, 1, 2, 3]
    assert [a.token_ids for a in first.outputs] == [a.token_ids for a in again.outputs]
    assert len({tuple(choice.token_ids) for choice in first.outputs}) > 1


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
    choices = [output.outputs[0] for output in outputs]
    assert [len(choice.token_ids) for choice in choices] == [2, 5]
    assert {(c.finish_reason, c.logprobs, c.cumulative_logprob) for c in choices} == {
        ("length", None, None)
    }
    with pytest.raises(ValueError, match="2 SamplingParams for 3 prompts"):
        llm.generate(["One", "Two", "Three"], params)


def test_gguf_file_answers_as_its_checkpoint_does(llm: LLM, tmp_path: Path) -> None:
    """Weights, tokenizer, chat template and end of turn come from the file, and give the same text."""
    export(BUNDLED_MODEL, tmp_path / "mini.gguf")
    config = msgspec.structs.replace(CONFIG, model=str(tmp_path / "mini.gguf"))
    params = SamplingParams(max_tokens=100, temperature=0.0)
    (expected,) = llm.chat(CONVERSATION, params)
    assert expected.outputs[0].finish_reason == "stop"
    with LLM(config, progress="off") as gguf_llm:
        (output,) = gguf_llm.chat(CONVERSATION, params)
    assert output.outputs == expected.outputs


TOKEN_ID_SHAPES: dict[str, Callable[[list[int]], Any]] = {
    "numpy array": np.array,
    "numpy uint16": lambda ids: np.array(ids, np.uint16),
    "torch tensor": torch.tensor,
    "tuple": tuple,
    "iterator": iter,
    "numpy integers": lambda ids: [np.int64(token_id) for token_id in ids],
    "dictionary": lambda ids: {"prompt_token_ids": np.array(ids)},
    "dictionary with text": lambda ids: {
        "prompt_token_ids": ids,
        "prompt": "ignored",
        "multi_modal_data": None,
    },
    "two-dimensional tensor": lambda ids: torch.tensor([ids]),
    "generator of dictionaries": lambda ids: ({"prompt_token_ids": ids} for _ in range(1)),
}


@pytest.mark.parametrize("shape", TOKEN_ID_SHAPES)
def test_token_ids_have_any_shape(llm: LLM, shape: str) -> None:
    by_text = llm.generate("The sun is", GREEDY)[0]
    (output,) = llm.generate(TOKEN_ID_SHAPES[shape](by_text.prompt_token_ids), GREEDY)
    assert output.prompt_token_ids == by_text.prompt_token_ids
    assert output.outputs[0].text == by_text.outputs[0].text


def test_prompts_are_dictionaries_or_come_from_generators(llm: LLM) -> None:
    expected = texts(llm.generate(["The sun is", "One, two,"], GREEDY))
    for prompts in (
        (prompt for prompt in ("The sun is", "One, two,")),
        [{"prompt": "The sun is"}, {"prompt": "One, two,", "cache_salt": "mine"}],
        ({"prompt": "The sun is"}, "One, two,"),
        np.array(["The sun is", "One, two,"]),
    ):
        assert texts(llm.generate(prompts, GREEDY)) == expected
    assert texts(llm.generate({"prompt": "The sun is"}, GREEDY)) == expected[:1]
    assert llm.generate([], GREEDY) == []


def test_sampling_params_accept_vllm_arguments(llm: LLM) -> None:
    text = texts(llm.generate("Once upon a time", GREEDY))[0]
    stop = text.split()[3]
    count: Any = np.int64(2)
    no_effect: dict[str, Any] = {"detokenize": True, "best_of": None, "bad_words": []}
    for params in (
        SamplingParams(max_tokens=100, temperature=0, stop=stop, n=count),
        SamplingParams(max_tokens=100, temperature=0, stop=[stop], n=2, **no_effect),
    ):
        (output,) = llm.generate("Once upon a time", sampling_params=params, use_tqdm=False)
        assert [choice.text for choice in output.outputs] == [text[: text.index(stop)]] * 2
        assert [choice.stop_reason for choice in output.outputs] == [stop] * 2
        assert output.finished
        assert all(choice.finished() for choice in output.outputs)
    banned = llm.generate("Once upon a time", GREEDY)[0].outputs[0].token_ids[0]
    bias: dict[Any, Any] = {np.int64(banned): np.float32(-100)}
    params = SamplingParams(temperature=0, logit_bias=bias)
    assert llm.generate("Once upon a time", params)[0].outputs[0].token_ids[0] != banned
    complete = llm.generate("Once", SamplingParams(max_tokens=None, temperature=0, ignore_eos=True))
    assert len(complete[0].outputs[0].token_ids) == 256 - len(complete[0].prompt_token_ids)


def test_seed_of_llm_makes_unseeded_requests_repeatable() -> None:
    def run() -> list[str]:
        with LLM(CONFIG, seed=3, progress="off") as llm:
            return texts(llm.generate(["Once", "Once"], SamplingParams(temperature=1.5)))

    first = run()
    assert first[0] != first[1]
    assert run() == first


def test_adapters_follow_their_prompt_and_their_files(tmp_path: Path) -> None:
    folders = [
        write_adapter(tmp_path / "a", BUNDLED_MODEL, seed=1),
        write_adapter(tmp_path / "b", BUNDLED_MODEL, seed=2),
    ]
    (tmp_path / "b" / "chat_template.jinja").write_text(
        "{% for message in messages %}<{{ message.content }}>{% endfor %}"
    )
    a, b = (LoRARequest(path.name, n, str(path)) for n, path in enumerate(folders, 1))
    with LLM(CONFIG, progress="off") as llm:
        plain = texts(llm.generate(["Once"] * 2, GREEDY))
        with pytest.raises(ValueError, match="enable_lora"):
            llm.generate("Once", GREEDY, lora_request=a)
    config = msgspec.structs.replace(CONFIG, enable_lora=True)
    with LLM(config, progress="off") as llm:
        mixed = texts(llm.generate(["Once"] * 4, GREEDY, lora_request=[None, a, b, a]))
        assert mixed[0] == plain[0]
        assert mixed[1] == mixed[3]
        assert len(set(mixed)) == 3
        assert texts(llm.generate(["Once"], GREEDY, lora_request=b)) == [mixed[2]]
        (templated,) = llm.chat(CONVERSATION, GREEDY, lora_request=b)
        assert templated.prompt == "<Hello! How are you?>"
        (untemplated,) = llm.chat(CONVERSATION, GREEDY, lora_request=a)
        assert untemplated.prompt == llm.chat(CONVERSATION, GREEDY)[0].prompt
        with pytest.raises(ValueError, match="lora_request needs LoRARequest"):
            llm.generate("Once", GREEDY, lora_request=object())  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="has no adapter_config"):
            llm.generate("Once", GREEDY, lora_request=LoRARequest("x", 3, str(BUNDLED_MODEL)))


def test_chat_accepts_vllm_arguments(llm: LLM) -> None:
    no_effect: dict[str, Any] = {"chat_template_content_format": "auto", "lora_request": None}
    (plain,) = llm.chat(CONVERSATION, GREEDY)
    assert "Hello! How are you?" in plain.prompt
    assert plain.prompt != "Hello! How are you?"
    by_name, again = llm.chat(
        messages=iter([CONVERSATION, CONVERSATION]),
        sampling_params=GREEDY,
        use_tqdm=False,
        add_generation_prompt=True,
        tools=None,
        **no_effect,
    )
    assert by_name.outputs == again.outputs == plain.outputs
    (unprompted,) = llm.chat(CONVERSATION, GREEDY, add_generation_prompt=False)
    assert plain.prompt.startswith(unprompted.prompt)
    assert plain.prompt != unprompted.prompt
    begun = [*CONVERSATION, {"role": "assistant", "content": "I am"}]
    (continued,) = llm.chat(begun, GREEDY, add_generation_prompt=False, continue_final_message=True)
    assert continued.prompt.endswith("I am")
    template = "{% for message in messages %}<{{ message.content }}>{% endfor %}"
    (templated,) = llm.chat(CONVERSATION, GREEDY, chat_template=template)
    assert templated.prompt == "<Hello! How are you?>"
    assert texts(llm.chat(CONVERSATION, GREEDY)) == texts([plain])


def test_tokenizer_metrics_and_prefix_cache(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode("The sun is")
    assert ids == llm.generate("The sun is", GREEDY)[0].prompt_token_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "The sun is"
    (chat,) = llm.chat(CONVERSATION, GREEDY)
    rendered = tokenizer.apply_chat_template(CONVERSATION, add_generation_prompt=True)
    assert rendered == chat.prompt_token_ids
    prompt = "It was a dark and stormy night. " * 6
    assert llm.reset_prefix_cache()
    cached = [llm.generate(prompt, GREEDY)[0].cached_tokens for _ in range(2)]
    assert cached[0] == 0 < cached[1]
    assert llm.reset_prefix_cache()
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 0
    metrics = {metric.name: metric.value for metric in llm.get_metrics()}
    assert metrics["argosy_generation_tokens_total"] > 24
    assert metrics["argosy_requests_running"] == 0


def test_prompt_lookup_changes_no_result(llm: LLM) -> None:
    """Stop strings end a text in the middle of the tokens of one step."""
    prompts = ["a b c d " * 5, "The brown fox jumps over the lazy dog. " * 2]
    greedy = SamplingParams(max_tokens=80, temperature=0.0, logprobs=2, ignore_eos=True)
    stops = [
        text[size : size + 3] for text in texts(llm.generate(prompts, greedy)) for size in (9, 40)
    ]
    assert all(stops)
    sampled = SamplingParams(max_tokens=40, temperature=0.3, seed=3, n=3, logprobs=0)
    stopped = [msgspec.structs.replace(greedy, stop=[stop]) for stop in stops]
    with LLM(msgspec.structs.replace(CONFIG, warmup=True), progress="off") as drafting:
        for params in (greedy, sampled, *stopped):
            expected = [output.outputs for output in llm.generate(prompts, params)]
            assert [output.outputs for output in drafting.generate(prompts, params)] == expected
        values = [m.value for m in drafting.get_metrics() if m.name == ACCEPTED_TOKENS]
    assert sum(values) > 20


def test_progress_bar_of_the_caller_counts_prompts(llm: LLM) -> None:
    calls: list[object] = []

    class Bar:
        def __init__(self, **options: object) -> None:
            calls.append(options["total"])

        def update(self, prompts: int) -> None:
            calls.append(prompts)

        def close(self) -> None:
            calls.append("closed")

    llm.generate(["One", "Two"], GREEDY, use_tqdm=Bar)
    assert calls == [2, 1, 1, "closed"]


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
    with pytest.raises(ApiError, match="unknown field `tools`"):
        llm.generate("x", GREEDY, tools=[])  # type: ignore[call-arg]
    assert texts(llm.generate("fine", GREEDY))


INVALID_PROMPTS: dict[str, Any] = {
    "prompt_embeds": {"prompt_embeds": 1},
    "multi_modal_data": {"prompt": "x", "multi_modal_data": {"image": 1}},
    "'prompts'": {"prompts": "x"},
    "'prompt' or 'prompt_token_ids'": {},
    "must be integers": np.array([1.5, 2.5]),
    "integers, in a flat list": torch.zeros(1, 2, 3),
    "type bool": [[True, False]],
    "bytes": b"bytes",
    "None": [None],
    "int": 7,
}
"""Pattern of the error -> prompt."""


@pytest.mark.parametrize("reason", INVALID_PROMPTS)
def test_invalid_prompt_fails_alone_when_asked_to(llm: LLM, reason: str) -> None:
    prompt = INVALID_PROMPTS[reason]
    with pytest.raises((ApiError, TypeError), match=reason):
        llm.generate(prompt, GREEDY)
    if not isinstance(prompt, dict):
        return
    good, bad, too_long = llm.generate(
        ["fine", prompt, "x " * 2000], SamplingParams(n=2, ignore_eos=True), on_error="return"
    )
    assert [choice.error for choice in good.outputs] == [None, None]
    assert len(good.outputs[1].token_ids) == 16
    for output in (bad, too_long):
        assert [choice.text for choice in output.outputs] == ["", ""]
        assert all(choice.error for choice in output.outputs)
    assert reason in (bad.outputs[0].error or "")
    assert "context" in (too_long.outputs[0].error or "")


INVALID_SAMPLING_PARAMS: dict[str, dict[str, Any]] = {
    "best_of.*n": {"best_of": 3},
    "logits_processors.*logit_bias": {"logits_processors": [1]},
    "temprature.*temperature": {"temprature": 1},
}
INVALID_CALLS: dict[str, Callable[[Any], object]] = {
    "SamplingParams": lambda llm: llm.generate("x", {"temperature": 1}),
    "bad_words": lambda llm: llm.generate("x", SamplingParams(bad_words=["x"])),
    "lora_request.*enable_lora": lambda llm: llm.generate("x", lora_request=object()),
    "tokenization_kwargs": lambda llm: llm.generate("x", tokenization_kwargs={"x": 1}),
    "token_ids.*dictionaries": lambda llm: llm.generate("x", prompt_token_ids=[[1]]),
    "beam_search": lambda llm: llm.beam_search(["x"]),
    "sleep.*close": lambda llm: llm.sleep(),
    "no attribute 'generat'": lambda llm: llm.generat("x"),
}
INVALID_OPTIONS: dict[str, dict[str, Any]] = {
    "dtype.*EngineConfig": {"model": CONFIG, "dtype": "half"},
    "dtype.*bfloat16": {"dtype": "int3"},
    "block_size.*1": {"block_size": 0},
    "max_seqs.*1": {"max_num_seqs": 0},
    "tensor_parallel_size": {"tensor_parallel_size": 2},
    "eagle3 needs a model": {"speculative_config": {"method": "eagle3"}},
    "mtp has no model": {"speculative_config": {"method": "mtp", "model": "x"}},
    "two drafters": {"draft_model": "x", "speculative_config": {"method": "mtp"}},
    "medusa.*method": {"speculative_config": {"method": "medusa"}},
    "parallel_drafting": {"speculative_config": {"parallel_drafting": True}},
    "awq": {"quantization": "awq"},
    "max_modellen.*max_model_len": {"max_modellen": 5},
    "tokenizer": {"tokenizer": "other"},
    "model_impl.*transformers": {"model_impl": "terratorch"},
    "no directory": {"model": "/no/such/model"},
}


@pytest.mark.parametrize("reason", [*INVALID_SAMPLING_PARAMS, *INVALID_CALLS, *INVALID_OPTIONS])
def test_unsupported_argument_is_refused_by_name(llm: LLM, reason: str) -> None:
    """The keys of the tables are the patterns of the messages."""
    call: Callable[[], object]
    if reason in INVALID_SAMPLING_PARAMS:
        call = partial(SamplingParams, **INVALID_SAMPLING_PARAMS[reason])
    elif reason in INVALID_CALLS:
        call = partial(INVALID_CALLS[reason], llm)
    else:
        call = partial(LLM, **INVALID_OPTIONS[reason])
    with pytest.raises((ValueError, TypeError, ApiError, AttributeError), match=reason):
        call()


def test_vllm_constructor_arguments_are_mapped_or_named(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structlog, "is_configured", lambda: False)
    options: dict[str, Any] = {
        "tokenizer": str(BUNDLED_MODEL),
        "dtype": torch.float32,
        "max_model_len": 64,
        "max_num_seqs": 2,
        "kv_cache_memory_bytes": np.int64(8 << 20),
        "gpu_memory_utilization": 0.5,
        "tensor_parallel_size": 1,
        "enforce_eager": True,
        "trust_remote_code": True,
        "model_impl": "vllm",
        "seed": 0,
        "threads": 1,
        "warmup": False,
    }
    llm = LLM(model=str(BUNDLED_MODEL), **options)
    with llm:
        assert len(llm.generate("Hello", GREEDY)[0].outputs[0].token_ids) > 0
        with pytest.raises(ApiError, match="64 tokens"):
            llm.generate("Hello " * 100, GREEDY)
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("Hello")
    llm.close()
    logged = capfd.readouterr().err
    assert "gpu_memory_utilization" in logged
    assert "kv_memory_bytes" in logged
    assert "trust_remote_code" not in logged


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
    choices = [output.outputs[0] for output in outputs]
    assert [choice.finish_reason for choice in choices] == ["length"] * 3
    expected = None if timeout_s is None else "deadline"
    assert [choice.stop_reason for choice in choices] == [expected] * 3


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
