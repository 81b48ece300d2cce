"""Compiles the kernels for Hopper at the shapes of real models, without a GPU; prints what each takes.

Run by test_compiled.py in a process of its own, since here Triton must compile what the other tests
let it interpret. One line of JSON a kernel: its name, shared memory, registers, stack (what had no
register) in bytes, and whether the matrix unit's asynchronous instructions and copies, and fused
multiply-adds, are in use.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from argosy.engine.execution.gpu import attention, attention_kernels, elementwise, linear, sampling
from argosy.engine.execution.sampling_ops import EXP2_COEFFICIENTS, FRACTION_BITS, MIN_EXPONENT

HOPPER = GPUTarget("cuda", 90, 32)
BFLOAT16, FLOAT32, FLOAT8 = "*bf16", "*fp32", "*fp8e4nv"
POINTERS = {
    "cu_q": "*i32",
    "seq_lens": "*i32",
    "page_table": "*i32",
    "slots": "*i64",
    "positions": "*i64",
    "tokens": "*i64",
    "masses": "*i64",
    "likeliest": "*i32",
    "options": "*fp64",
    "narrow": FLOAT8,
    **dict.fromkeys(
        (
            *("sums", "peaks", "totals", "first", "second", "scales", "scale"),
            *("x_scales", "weight_scales", "logits"),
        ),
        FLOAT32,
    ),
    **dict.fromkeys(
        ("q", "k", "v", "keys", "values", "out", "x", "mixed", "weight", "bias"), BFLOAT16
    ),
}
"""Types of parameters; what is not here, nor a constant, is an int32."""


def report(
    label: str,
    kernel: Any,
    constants: dict[str, Any],
    types: dict[str, str] | None = None,
    **options: int,
) -> None:
    """Compile and print one line."""
    signature: dict[str, str] = dict.fromkeys(kernel.arg_names, "i32")
    signature |= {name: POINTERS[name] for name in signature if name in POINTERS}
    signature |= {name: kind for name, kind in (types or {}).items() if name in signature}
    signature |= dict.fromkeys(constants, "constexpr")
    aligned = [["tt.divisibility", 16]]
    hints = {
        (i,): aligned
        for i, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or "stride" in name
    }
    source = ASTSource(kernel, signature, constants, hints)
    built = triton.compile(source, target=HOPPER, options=options)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "cubin"
        cubin.write_bytes(built.asm["cubin"])
        tool = triton.knobs.nvidia.cuobjdump.path
        usage = subprocess.run(
            [tool, "-res-usage", str(cubin)], capture_output=True, text=True, check=True
        ).stdout
    counts = {name: int(found) for name, found in re.findall(r"(REG|STACK):(\d+)", usage)}
    line = {
        "kernel": label,
        "shared": built.metadata.shared,
        "registers": counts["REG"],
        "stack": counts["STACK"],
        "wgmma": "wgmma.mma_async" in built.asm["ptx"],
        "cp_async": "cp.async.c" in built.asm["ptx"],
        "fused": "fma.rn" in built.asm["ptx"],
    }
    print(json.dumps(line), flush=True)  # noqa: T201 - what it is for


def attend(
    label: str,
    head_dim: int,
    heads: int,
    kv_heads: int,
    *,
    single: bool,
    alone: bool,
    dtype: str = BFLOAT16,
    cache: str = "",
    gemma: bool = False,
) -> None:
    """The attention of one model."""
    width = attention._padded_head_dim(head_dim)
    group = heads // kv_heads
    tile = attention._tile(group, width * (4 if dtype == FLOAT32 else 2), single=single)
    constants = {
        "HEADS": heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "WIDTH": width,
        "WINDOWED": gemma,
        "SINGLE": single,
        "TOKENS": tile.tokens,
        "ROWS": tile.rows,
        "BLOCK": 16,
        "ROTARY": head_dim,
        "SOFTCAP": gemma,
        "ALONE": alone,
        "PRECISION": "tf32x3",
    }
    types = {"q": dtype, "out": dtype, "keys": cache or dtype, "values": cache or dtype}
    types |= {"scale": "fp32", "cap": "fp32", "tokens": "i32"}
    report(
        f"attend {label}",
        attention_kernels.attend,
        constants,
        types,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def all_attention() -> None:
    """Llama, Qwen, Gemma and Phi shapes."""
    attend("128 decode, split", 128, 32, 8, single=True, alone=False)
    attend("128 decode", 128, 32, 8, single=True, alone=True)
    attend("128 prefill", 128, 32, 8, single=False, alone=True)
    attend("128 prefill, split", 128, 32, 8, single=False, alone=False)
    attend("128 decode, float8 cache", 128, 64, 8, single=True, alone=True, cache=FLOAT8)
    attend("128 prefill, float8 cache", 128, 64, 8, single=False, alone=True, cache=FLOAT8)
    attend("64 decode", 64, 14, 2, single=True, alone=False)
    attend("64 prefill", 64, 14, 2, single=False, alone=True)
    attend("80 prefill", 80, 32, 32, single=False, alone=True)
    attend("96 decode", 96, 32, 32, single=True, alone=True)
    attend("256 decode, Gemma", 256, 8, 4, single=True, alone=False, gemma=True)
    attend("256 prefill, Gemma", 256, 8, 4, single=False, alone=True, gemma=True)
    attend("128 prefill, float32", 128, 32, 8, single=False, alone=True, dtype=FLOAT32)
    shared = {"HEADS": 32, "GROUP": 4, "HEAD_DIM": 128, "WIDTH": 128}
    for cache in (BFLOAT16, FLOAT8):
        constants = {
            "KV_HEADS": 8,
            "ROWS": attention.STORE_TILE_ROWS,
            "HEAD_DIM": 128,
            "WIDTH": 128,
            "BLOCK": 16,
            "ROTARY": 128,
            "FLOAT8": cache == FLOAT8,
            "MOST": 448.0,
        }
        types = {"keys": cache, "values": cache, "tokens": "i32"}
        report(f"store {cache}", attention_kernels.store_kv, constants, types, num_warps=4)
    constants = {**shared, "ROWS": 4, "WINDOWED": False}
    types = {"tokens": "i32"}
    report("merge_ranges", attention_kernels.merge_ranges, constants, types, num_warps=4)


def all_linears() -> None:
    """Every tile, at a K of 4,096."""
    for kind, types in (
        ("bfloat16", {}),
        ("float8", {"x": FLOAT8, "weight": FLOAT8}),
        ("float32", dict.fromkeys(("x", "weight", "out", "bias"), FLOAT32)),
    ):
        size = {"bfloat16": 2, "float8": 1, "float32": 4}[kind]
        for outs, tokens, warps, stages in linear.TILES if size == 2 else linear.TILES[1:]:
            constants: dict[str, Any] = {
                "COLS": 4096,
                "OUTS_TILE": outs,
                "TOKENS_TILE": tokens,
                "COLS_TILE": linear.STAGE_BYTES // size,
                "BIAS": True,
                "SCALED": kind == "float8",
            }
            report(
                f"multiply {kind} {outs}x{tokens}",
                linear._matmul,
                constants,
                {"tokens": "i32"} | types,
                num_warps=warps,
                num_stages=stages,
            )
    constants = {"COLS": 4096, "WIDTH": 4096, "MOST": linear.FLOAT8_MAX}
    report("narrow", linear._quantize_float8, constants, {}, num_warps=8)


def all_rows() -> None:
    """Norms, gates and the draw."""
    for size, width, many, warps in ((4096, 4096, 1, 8), (128, 128, 8, 4)):
        constants: dict[str, Any] = {
            "SIZE": size,
            "WIDTH": width,
            "ROWS": many,
            "NARROW": True,
            "ADD": many == 1,
        }
        types = {"rows": "i32", "eps": "fp32"}
        report(f"norm {size}", elementwise._norm, constants, types, num_warps=warps)
    for activation in ("silu", "gelu_tanh"):
        constants = {"ACTIVATION": activation, "TILE": elementwise.GATE_TILE_OUTPUTS}
        report(f"gate {activation}", elementwise._gated_activation, constants, num_warps=4)
    constants = {"TILE": sampling.VOCAB_TILE}
    report("draw: survey", sampling._find_peaks, constants, {}, **sampling.KERNEL_OPTIONS)
    constants |= {
        "WIDTH": 64,
        "FACTORS": EXP2_COEFFICIENTS,
        "FRACTION": FRACTION_BITS,
        "NOTHING": MIN_EXPONENT,
    }
    report("draw: measure", sampling._sum_weights, constants, {}, **sampling.KERNEL_OPTIONS)
    constants |= {"TILES": 63}
    report("draw: pick", sampling._select_token, constants, {}, **sampling.KERNEL_OPTIONS)


if __name__ == "__main__":
    all_rows()
    all_linears()
    all_attention()
