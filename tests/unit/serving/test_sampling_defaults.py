"""Sampling defaults of generation_config.json: which values apply, and to which requests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.vocabularies import byte_level
from tests.unit.serving.test_request_processor import chat, complete, params, ready_core

from argosy.engine.engine_config import EngineConfig
from argosy.engine.serving.preprocessing.request_processor import (
    RequestProcessor,
)
from argosy.engine.serving.preprocessing.response_spec import ResponseSpec
from argosy.engine.serving.preprocessing.sampling_defaults import (
    SamplingDefaults,
    read_sampling_defaults,
)
from argosy.engine.serving.preprocessing.text_processing import TextProcessing
from argosy.engine.serving.text.chat_template import ChatTemplate
from argosy.models import BUNDLED_MODEL

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


def make_processor(defaults: SamplingDefaults) -> RequestProcessor:
    tokenizer = byte_level()
    text = TextProcessing(tokenizer, ChatTemplate("{{ messages[0].content }}", {}), None, defaults)
    return text.create_processor(ready_core(tokenizer), EngineConfig(model="m"))


@pytest.fixture
def processor(tmp_path: Path) -> RequestProcessor:
    return make_processor(read_sampling_defaults(write_generation_config(tmp_path, **RECOMMENDED)))


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
        ({"top_p": 0}, "top_p is 0"),
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
    with pytest.raises(ValueError, match="'temprature'; it may have temperature, top_p"):
        read_sampling_defaults(tmp_path, "auto", {"temprature": 1.0})
    with pytest.raises(ValueError, match="override-generation-config: top_p is 3"):
        read_sampling_defaults(tmp_path, "auto", {"top_p": 3})


def test_unapplied_settings_are_named(tmp_path: Path) -> None:
    path = write_generation_config(
        tmp_path, do_sample=False, no_repeat_ngram_size=3, num_beams=1, pad_token_id=0
    )
    defaults = read_sampling_defaults(path)
    assert (defaults.values, defaults.unapplied) == ({}, ("do_sample", "no_repeat_ngram_size"))


def test_bundled_model_recommends_nothing() -> None:
    assert read_sampling_defaults(BUNDLED_MODEL).values == {}
