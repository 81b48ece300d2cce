"""Arithmetic identity: what changes a byte of the output changes the id, and nothing else does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from argosy.engine.engine_config import WeightFormat
from argosy.engine.execution.architectures.decoder_config import read_architecture
from argosy.engine.execution.architectures.rope import RopeParams
from argosy.engine.execution.kernels.cpu.device import create_cpu_device
from argosy.engine.execution.kernels.cpu.isa import ISA_VARIABLE
from argosy.engine.execution.loading.arithmetic import describe_arithmetic
from argosy.models import BUNDLED_MODEL
from argosy.protocol import ArithmeticIdentity


def describe(
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype = torch.bfloat16,
    quantize: WeightFormat | None = None,
    threads: int = 1,
    rope: RopeParams | None = None,
    max_model_len: int | None = None,
    *,
    attention: str = "native",
) -> ArithmeticIdentity:
    architecture = read_architecture(BUNDLED_MODEL)
    ropes = architecture.ropes if rope is None else (rope,)
    architecture = replace(
        architecture, ropes=ropes, max_model_len=max_model_len or architecture.max_model_len
    )
    before = torch.get_num_threads()
    try:
        return describe_arithmetic(
            BUNDLED_MODEL,
            architecture,
            create_cpu_device(threads),
            dtype,
            kv_dtype,
            quantize,
            attention=attention,
        )
    finally:
        torch.set_num_threads(before)


def test_every_part_that_changes_bytes_changes_the_id(monkeypatch: pytest.MonkeyPatch) -> None:
    default = describe()
    (rope,) = read_architecture(BUNDLED_MODEL).ropes
    others = [
        describe(dtype=torch.float32),
        describe(kv_dtype=torch.float8_e4m3fn),
        describe(quantize="int8"),
        describe(quantize="int4"),
        describe(attention="torch"),
        describe(rope=replace(rope, kind="linear", factor=2.0)),
    ]
    monkeypatch.setenv(ISA_VARIABLE, "torch")
    others.append(describe())
    assert len({identity.id for identity in (default, *others)}) == 1 + len(others)
    assert "torch" in others[-1].instruction_set
    assert torch.__version__ in default.kernels


def test_threads_and_context_length_do_not_change_the_id() -> None:
    assert describe(threads=2, max_model_len=64).id == describe().id


def test_context_length_that_selects_other_rope_factors_changes_the_id() -> None:
    rope = RopeParams(
        kind="longrope",
        theta=10_000.0,
        rotary_dim=4,
        original_max_len=128,
        short_factors=(1.0, 1.0),
        long_factors=(2.0, 2.0),
    )
    assert describe(rope=rope, max_model_len=128).id != describe(rope=rope, max_model_len=256).id
