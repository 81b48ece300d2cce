"""Models that transformers implements, over paged attention and packed weights, against transformers itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from argosy.engine.execution.device import create_cpu_device
from argosy.engine.execution.generic_loader import load_generic_decoder
from argosy.engine.execution.model_architecture import summarize_model
from argosy.engine.execution.model_selection import build_transformers_model
from tests.engine.decoder_driver import DecoderDriver
from tests.engine.generic_cases import EVERY_CHANGE, GENERIC_FAMILIES, GENERIC_MODELS
from tests.engine.transformers_reference import VOCAB, Reference, make_reference

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from argosy.engine.execution.generic_decoder import GenericDecoder

LENGTHS = (1, 7, 17, 40)


@pytest.fixture
def create_reference(tmp_path: Path) -> Callable[..., Reference]:
    def build(name: str, **settings: Any) -> Reference:  # noqa: ANN401
        family, options = GENERIC_FAMILIES[name]
        model = GENERIC_MODELS.get(family, "")
        return make_reference(tmp_path, family, options, model=model, **settings)

    return build


def load(path: Path, dtype: torch.dtype = torch.float32) -> GenericDecoder:
    model = build_transformers_model(path, dtype)
    return load_generic_decoder(model, create_cpu_device(1), dtype, lambda _: None)


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def assert_batch_independent(driver: DecoderDriver) -> None:
    """Compare the logits of sequences alone, together and in chunks, bit for bit."""
    alone = [driver.logits_in_one_chunk(prompt) for prompt in prompts()]
    together = driver.forward([(f"t{i}", prompt) for i, prompt in enumerate(prompts())])
    assert all(map(torch.equal, alone, together))
    longest = prompts()[-1]
    chunks = [longest[:1], longest[1:9], longest[9:]]
    parts = [driver.forward([("n", [7]), ("c", chunk)])[1] for chunk in chunks]
    assert torch.equal(torch.cat(parts), alone[-1])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in EVERY_CHANGE else pytest.mark.exhaustive)
        for name in GENERIC_FAMILIES
    ],
)
def test_family_matches_transformers(create_reference: Callable[..., Reference], name: str) -> None:
    reference = create_reference(name)
    decoder = load(reference.path)
    driver = DecoderDriver(decoder)
    for prompt in prompts():
        actual, expected = driver.logits_in_one_chunk(prompt), reference.logits(prompt)
        torch.testing.assert_close(
            actual.log_softmax(-1), expected.log_softmax(-1), rtol=0, atol=1e-4
        )
    prompt = prompts()[2]
    assert driver.greedy([prompt], 6) == [reference.greedy(prompt, 6)]
    assert_batch_independent(driver)
    num_parameters = sum(parameter.numel() for parameter in reference.model.parameters())
    assert summarize_model(decoder.architecture, 2).num_parameters == num_parameters


@pytest.mark.parametrize("name", ["nemotron", "glm 4 moe", "seed oss", "qwen 2 moe"])
def test_bfloat16_results_do_not_depend_on_the_batch(
    create_reference: Callable[..., Reference], name: str
) -> None:
    reference = create_reference(name, dtype=torch.bfloat16)
    assert_batch_independent(DecoderDriver(load(reference.path, torch.bfloat16)))
