"""Draft heads: their drafts are those of a reference in torch, and change no output."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from argosy.engine.engine_config import SpeculativeConfig
from argosy.engine.engine_request import EngineRequest
from argosy.engine.execution.architectures.draft_head import (
    DraftHeadMethod,
    create_mtp_head,
    read_eagle_head,
)
from argosy.engine.execution.checkpoint_formats.reader import CheckpointReader, StoredPart
from argosy.engine.execution.decoders.decoder import Decoder
from argosy.engine.execution.executor.draft_head import HeadDrafter
from argosy.engine.execution.kernels.cpu.device import create_cpu_device
from argosy.engine.execution.loading.sleep_handler import DROPS_WEIGHTS
from argosy.engine.execution.loading.weight_loader import load_draft_head
from argosy.engine.scheduling import AdmittedSequence, Scheduler, Sequence, StepPlan
from argosy.models import DRAFT_MODEL
from argosy.protocol import SamplingParams
from tests.engine.core_driver import RequestOutput, create_core, run_requests
from tests.engine.decoder_driver import DecoderDriver, load_checkpoint
from tests.engine.draft_head_reference import (
    MTP_CASES,
    make_bigram_model,
    make_eagle_head,
    make_mtp_head,
)
from tests.engine.test_draft_model import SCENARIOS
from tests.engine.test_equivalence import requests, shared_core
from tests.engine.transformers_reference import VOCAB

MAPS = {"d2t", "t2d"}
PREFILLS = [(5, 50, 0), (70, 20, 0), (61, 9, 0), (70, 100, 37), (67, 9, 48)]
"""Lengths of a prompt and of the chunks in which it is computed, and of the prefix that the drafter does not see."""
EAGLE_FORMS = ["eagle 3", "early", "speculators"]
LAYOUTS = [*EAGLE_FORMS, *MTP_CASES]


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.inference_mode()
def test_drafts_equal_reference(layout: str, tmp_path: Path) -> None:
    """After prefills in one chunk and in several, and after windows of which some drafts were rejected."""
    is_mtp = layout in MTP_CASES
    reference = (
        make_mtp_head(tmp_path, MTP_CASES[layout]) if is_mtp else make_eagle_head(tmp_path, layout)
    )
    device, target = create_cpu_device(1), load_checkpoint(reference.target)
    reader = CheckpointReader(reference.head)
    read = create_mtp_head if is_mtp else read_eagle_head
    architecture = read(reference.head, reader.files.keys(), target.architecture)
    assert target.architecture.has_head
    head = load_draft_head(reader, architecture, target, device, torch.float32, lambda _: None)
    stored = (name for name in reader.files if name.startswith(architecture.tensor_prefix))
    sizes = [math.prod(reader.part_shape(StoredPart(name))) for name in stored if name not in MAPS]
    assert architecture.num_parameters == sum(sizes)
    limits = shared_core().scheduler.limits
    drafter = HeadDrafter(head, device, limits, torch.float32)
    record = drafter.watch_target()
    driver = DecoderDriver(target)
    rng = torch.Generator().manual_seed(4)

    def compute(seq: Sequence, start: int, chunk: list[int]) -> StepPlan:
        driver.forward([(seq.id, chunk)])
        return StepPlan(0, rows=[seq.row], starts=[start], counts=[len(chunk)])

    for row, (prompt_len, chunk_len, first_state) in enumerate(PREFILLS):
        tokens = torch.randint(3, VOCAB, (prompt_len + 40,), generator=rng).tolist()
        params = SamplingParams(temperature=0.0, max_tokens=100)
        request = EngineRequest(id=str(row), prompt=tokens[:prompt_len], params=params)
        seq = Scheduler(limits).add(request, now=0.0)
        seq.row, seq.block_tables = row % 2, [list(range(10 * row, 10 * row + 9))]
        admission = AdmittedSequence(seq.row, [], prompt_len, params, seq.block_tables)
        if first_state:
            compute(seq, 0, tokens[:first_state])
        for start in range(first_state, prompt_len, chunk_len):
            end = min(prompt_len, start + chunk_len)
            plan = compute(seq, start, tokens[start:end])
            plan.admissions.extend([admission] if start == first_state else [])
            record(plan)
            seq.is_prefilled = end == prompt_len
            seq.tokens = tokens[: prompt_len + seq.is_prefilled]
            drafter.catch_up([seq])
        for limit, accepted in [(1, 0), (3, 1), (8, 6), (2, 0), (9, 9), (5, 2)]:
            expected = reference.draft(seq.tokens, limit, first_state)
            assert drafter.propose([seq], [limit]) == [expected]
            length = len(seq.tokens)
            record(compute(seq, length - 1, tokens[length - 1 : length + accepted]))
            seq.tokens = tokens[: length + accepted + 1]


@pytest.fixture(scope="module")
def bigram_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_bigram_model(tmp_path_factory.mktemp("heads"))


@pytest.fixture(scope="module")
def expected(bigram_model: tuple[Path, Path]) -> dict[str, RequestOutput]:
    """Outputs without drafts, of each request alone."""
    core = create_core(bigram_model[0], dtype="bfloat16", prefix_cache=False)
    outputs: dict[str, RequestOutput] = {}
    for request in requests():
        outputs |= run_requests(core, [request])
    return outputs


@pytest.mark.usefixtures("all_drafts")
@pytest.mark.parametrize(
    ("method", "scenario"),
    [
        ("mtp", "cached"),
        ("mtp", "preempted"),
        ("eagle3", "chunked"),
        ("eagle3", "host tier"),
        ("eagle3", "short blocks"),
    ],
)
def test_heads_change_no_output_and_give_several_tokens_a_step(
    method: DraftHeadMethod,
    scenario: str,
    bigram_model: tuple[Path, Path],
    expected: dict[str, RequestOutput],
) -> None:
    """A head that knows the target guesses every token that depends on nothing but the text."""
    model, head = bigram_model
    config = SpeculativeConfig(method=method, model=str(head) if method == "eagle3" else None)
    core = create_core(
        model, dtype="bfloat16", warmup=True, speculative_config=config, **SCENARIOS[scenario]
    )
    speculation = core.speculation
    assert speculation is not None
    speculation.drafters = []
    if scenario == "preempted":
        core.scheduler.output_estimator.fraction = 0.0
    for number in range(3):
        outputs = run_requests(core, requests() if number < 2 else requests()[:2])
        assert outputs == {
            request_id: replace(expected[request_id], cached_tokens=output.cached_tokens)
            for request_id, output in outputs.items()
        }
        if number == 1:
            assert (
                speculation.stats.accepted_tokens[method] < speculation.stats.draft_tokens[method]
            )
            for counter in (speculation.stats.accepted_tokens, speculation.stats.draft_tokens):
                counter.clear()
            speculation.stats.drafts.clear()
            if scenario == "cached":
                for level in (DROPS_WEIGHTS, 0):
                    core.set_sleep_level(level)
    assert (core.scheduler.preemptions > 0) >= (scenario == "preempted")
    drafts = speculation.stats.draft_tokens[method]
    assert (
        speculation.stats.accepted_tokens[method]
        == drafts
        > 2 * speculation.stats.drafts[method] / 3
    )


def test_target_keeps_nothing_for_a_head_that_raised(
    bigram_model: tuple[Path, Path],
    expected: dict[str, RequestOutput],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mtp = SpeculativeConfig(method="mtp")
    core = create_core(bigram_model[0], dtype="bfloat16", warmup=True, speculative_config=mtp)
    target = core.executor._model  # noqa: SLF001 - a decoder
    assert isinstance(target, Decoder)
    assert target.watched_layers
    speculation = core.speculation
    assert speculation is not None
    monkeypatch.setattr(speculation.draft_model, "catch_up", Mock(side_effect=RuntimeError))
    assert run_requests(core, requests()[:1])["0"].tokens == expected["0"].tokens
    assert (speculation.draft_model, core.executor.on_computed) == (None, None)
    assert not target.watched_layers
    assert not target.hidden_states


def test_heads_of_other_models_are_refused_by_name(
    bigram_model: tuple[Path, Path], tmp_path: Path
) -> None:
    make_eagle_head(tmp_path, EAGLE_FORMS[0])
    other = str(tmp_path / "head")
    mtp = SpeculativeConfig(method="mtp")
    no_head = SpeculativeConfig(method="eagle3", model=str(DRAFT_MODEL))
    refusals: dict[str, tuple[Path, dict[str, object]]] = {
        r"head/config.json: the head belongs to a model with hidden_size 64 .* not to this MiMo": (
            bigram_model[0],
            {"draft_model": other},
        ),
        r"argosy-mini-draft has no head for multi-token": (
            DRAFT_MODEL,
            {"speculative_config": mtp},
        ),
        r"mini-draft is no EAGLE-3 head": (bigram_model[0], {"speculative_config": no_head}),
    }
    for message, (model, options) in refusals.items():
        with pytest.raises(ValueError, match=message):
            create_core(model, warmup=True, **options)


def test_head_shares_the_memory_of_the_kv_cache(bigram_model: tuple[Path, Path]) -> None:
    """Without a warm-up, there are no drafts and no head."""
    options = {"num_blocks": None, "kv_memory_bytes": 1 << 22}
    mtp = SpeculativeConfig(method="mtp")
    plain, drafting = (
        create_core(bigram_model[0], warmup=warmup, speculative_config=mtp, **options)
        for warmup in (False, True)
    )
    assert plain.speculation is None
    assert drafting.scheduler.limits.num_blocks == plain.scheduler.limits.num_blocks * 4 // 5
