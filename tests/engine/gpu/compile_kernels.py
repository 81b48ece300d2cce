"""Compiles the GPU kernels for Hopper at the shapes of real models, without a GPU, and prints their resource usage.

test_compiled.py runs this module in a separate process, because Triton compiles here what other tests let it interpret.
The output has a line of JSON per kernel: its name, the bytes of shared memory, the number of registers, and the bytes
of stack for spilled registers. Flags show the use of asynchronous matrix instructions and copies, and of fused
multiply-adds. With the argument `all`, every shape is compiled, and else one representative of each kernel.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from argosy.engine.execution.architectures.decoder import DeltaNetArchitecture
from argosy.engine.execution.checkpoint_formats.float_formats import FP4_DOUBLED
from argosy.engine.execution.checkpoint_formats.grouped_weight import GroupFormat
from argosy.engine.execution.kernels.gpu import (
    attention,
    attention_kernels,
    block_copies,
    delta_rule,
    elementwise,
    latent_attention,
    linear,
    logit_edits,
    lora,
    sampling,
)
from argosy.engine.execution.kernels.gpu import experts as expert_kernels

HOPPER = GPUTarget("cuda", 90, 32)
BFLOAT16, FLOAT32, FLOAT8, INT8 = "*bf16", "*fp32", "*fp8e4nv", "*i8"
POINTERS = {
    "query_start_loc": "*i32",
    "work": "*i32",
    "seq_lens": "*i32",
    "block_table": "*i32",
    "slot_mapping": "*i64",
    "save_slots": "*i64",
    "positions": "*i64",
    "tokens": "*i64",
    "weight_sums": "*i64",
    **dict.fromkeys(("digit_sums", "cut_states"), "*i64"),
    **dict.fromkeys(("best_tokens", "tie_counts"), "*i32"),
    "row_options": "*fp64",
    "narrow": FLOAT8,
    **dict.fromkeys(
        (
            *("sums", "peaks", "totals", "cos", "sin", "sinks", "scales", "scale"),
            *("x_scales", "weight_scales", "weight_offsets", "logits", "q_weight", "k_weight"),
            *("conv", "decay_rate", "decay_bias", "states", "mixed", "gates"),
        ),
        FLOAT32,
    ),
    **dict.fromkeys(
        (
            *("q", "k", "v", "queries", "keys", "values", "out", "x", "delta", "weight", "bias"),
            *("qkv", "factors"),
        ),
        BFLOAT16,
    ),
}
"""Types of kernel parameters. All others are constants or int32."""

ALL_SHAPES = "all" in sys.argv[1:]
"""Whether to compile every shape."""
REPRESENTATIVES = {
    "attend 128 decode",
    "attend 128 prefill, float8 cache",
    "attend 64 decode, int8 cache",
    "list_work",
    f"store {FLOAT8}",
    f"store {INT8}",
    "merge_ranges",
    "gather blocks",
    "attend latents 16 heads",
    "store latents",
    "matmul bfloat16 128x256",
    "matmul float8 64x16",
    "matmul int4 per 32 128x256",
    "matmul float4 per 32 64x32, 160 experts",
    "sort pairs",
    "add choices",
    "select experts",
    "quantize",
    "norm 4096",
    "gated activation gelu_tanh",
    "edit: add values",
    "edit: penalties and masks",
    "edit: count tokens",
    "sample: find peaks",
    "sample: sum digits",
    "sample: sum weights",
    "sample: select token",
    "sample: rank tokens",
    "sample: collect log-probabilities",
    "delta rule: convolve",
    "delta rule: recurrence",
    "adapter: A",
    "adapter: B",
}
"""Labels of one or two variants of each kernel."""


def report(
    label: str,
    kernel: Any,
    constants: dict[str, Any],
    types: dict[str, str] | None = None,
    **options: int,
) -> None:
    """Compile a kernel and print its line. Without ALL_SHAPES, only representatives are compiled."""
    if not ALL_SHAPES and label not in REPRESENTATIVES:
        return
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
    counts = {name: int(count) for name, count in re.findall(r"(REG|STACK):(\d+)", usage)}
    line = {
        "kernel": label,
        "shared": built.metadata.shared,
        "registers": counts["REG"],
        "stack": counts["STACK"],
        "wgmma": "wgmma.mma_async" in built.asm["ptx"],
        "cp_async": "cp.async.c" in built.asm["ptx"],
        "fused": "fma.rn" in built.asm["ptx"],
    }
    print(json.dumps(line), flush=True)  # noqa: T201 - the output of this program


LLAMA, LLAMA_70B, QWEN, PHI = (128, 32, 8), (128, 64, 8), (64, 14, 2), (96, 32, 32)
GPT_OSS, GEMMA = (64, 64, 8), (256, 8, 4)
"""Sizes of heads, and numbers of heads and of KV heads."""
ATTENTION: dict[str, tuple[tuple[int, int, int], str]] = {
    "128 decode": (LLAMA, BFLOAT16),
    "128 prefill": (LLAMA, BFLOAT16),
    "128 decode, float8 cache": (LLAMA_70B, FLOAT8),
    "128 prefill, float8 cache": (LLAMA_70B, FLOAT8),
    "64 decode": (QWEN, BFLOAT16),
    "64 decode, int8 cache": (QWEN, INT8),
    "128 prefill, int8 cache": (LLAMA, INT8),
    "64 prefill": (QWEN, BFLOAT16),
    "64 decode, gpt-oss": (GPT_OSS, BFLOAT16),
    "64 prefill, gpt-oss": (GPT_OSS, BFLOAT16),
    "80 prefill": ((80, 32, 32), BFLOAT16),
    "96 decode": (PHI, BFLOAT16),
    "256 decode, Gemma": (GEMMA, BFLOAT16),
    "256 prefill, Gemma": (GEMMA, BFLOAT16),
    "128 prefill, float32": (LLAMA, FLOAT32),
}
"""Shapes of models, with the type of the cache. The label states what a kernel does."""


def report_attention_kernels() -> None:
    """Report the attention kernels for the shapes of Llama, Qwen, Gemma, Phi and gpt-oss."""
    for label, ((head_dim, heads, kv_heads), cache) in ATTENTION.items():
        dtype = FLOAT32 if cache == FLOAT32 else BFLOAT16
        is_short, has_sinks, softcap = ("decode" in label, "gpt-oss" in label, "Gemma" in label)
        width = attention._padded_head_dim(head_dim)
        group = heads // kv_heads
        tile = attention._tile(group, width * (4 if dtype == FLOAT32 else 2), is_short=is_short)
        constants = {
            "HEADS": heads,
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "WIDTH": width,
            "WINDOWED": softcap or has_sinks,
            "SINKS": has_sinks,
            "TOKENS": tile.tokens,
            "ROWS": tile.rows,
            "BLOCK": 16,
            "SOFTCAP": softcap,
            "INT8": cache == INT8,
            "PRECISION": "tf32x3",
        }
        types = {"q": dtype, "out": dtype, "keys": cache, "values": cache}
        types |= {"scale": "fp32", "softcap": "fp32"}
        report(
            f"attend {label}",
            attention_kernels.attend,
            constants,
            types,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    shared = {"HEADS": 32, "GROUP": 4, "HEAD_DIM": 128, "WIDTH": 128}
    for cache in (BFLOAT16, FLOAT8, INT8):
        constants = {
            "HEADS": 32,
            "KV_HEADS": 8,
            "ROWS": attention.ROTATE_TILE_ROWS,
            "HEAD_DIM": 128,
            "WIDTH": 128,
            "BLOCK": 16,
            "ROTARY": 128,
            "NORMED": cache == FLOAT8,
            "ROUND_BEFORE_WEIGHT": True,
            "FLOAT8": cache == FLOAT8,
            "MAX_VALUE": 448.0,
            "INT8": cache == INT8,
        }
        types = {"keys": cache, "values": cache, "tokens": "i32", "eps": "fp32"}
        report(f"store {cache}", attention_kernels.rotate_and_store, constants, types, num_warps=4)
    constants = {**shared, "TOKENS": 16, "ROWS": 8, "SINKS": False}
    report("merge_ranges", attention_kernels.merge_ranges, constants, num_warps=4)
    constants = {"TOKENS": 16, "WINDOWED": True, "LANES": attention.WORK_LANES}
    report("list_work", attention_kernels.list_work, constants, num_warps=4)
    for gather in (True, False):
        constants = {"GATHER": gather, "TILE": block_copies.TILE_BYTES}
        types = {"cache": "*u8", "staged": "*u8", "blocks": "*i64", "layer_stride": "i64"}
        label = "gather blocks" if gather else "scatter blocks"
        report(label, block_copies.move_blocks, constants, types, num_warps=4)


def report_latent_attention_kernels() -> None:
    """Report the kernels of latent attention for the shapes of DeepSeek V2 Lite and V3."""
    for heads in (16, 128):
        tile = latent_attention.latent_tile(heads, 512)
        constants = {
            "HEADS": heads,
            "ROPE_DIM": 64,
            "ROPE_WIDTH": 64,
            "VALUE_DIM": 512,
            "BLOCK": 16,
            "ROTARY": 64,
            "PRECISION": "tf32x3",
            **tile.constants,
        }
        report(
            f"attend latents {heads} heads",
            latent_attention.attend_latents,
            constants,
            {"scale": "fp32"},
            num_warps=8,
            num_stages=3,
        )
    constants = {"HEAD_DIM": 576, "WIDTH": 1024, "ROWS": latent_attention.STORE_TILE_ROWS}
    constants |= {"ROTARY": 64}
    types = {"tokens": "i32"}
    report("store latents", latent_attention.store_latents, constants, types, num_warps=4)


EXPERT_TYPES = {
    **dict.fromkeys(("weights", "total", "correction"), FLOAT32),
    **dict.fromkeys(("ids", "expert_ids"), "*i64"),
    **dict.fromkeys(("order", "ends"), "*i32"),
    "outputs": BFLOAT16,
}
LINEAR: dict[str, tuple[int, dict[str, str], GroupFormat | None]] = {
    "bfloat16": (2, {}, None),
    "float8": (1, {"x": FLOAT8, "weight": FLOAT8}, None),
    "float32": (4, dict.fromkeys(("x", "weight", "out", "bias"), FLOAT32), None),
    "int8 per 256": (2, {"weight": "*u8"}, GroupFormat(8, 256, has_offsets=False)),
    "float8 per 128": (2, {"weight": "*u8"}, GroupFormat(8, 128, False, is_float8=True)),
    "int8 per 16": (2, {"weight": "*u8"}, GroupFormat(8, 16, has_offsets=True)),
    "int4 per 128": (2, {"weight": "*u8"}, GroupFormat(4, 128, has_offsets=False)),
    "int4 per 32": (2, {"weight": "*u8"}, GroupFormat(4, 32, has_offsets=True)),
    "table per 64": (2, {"weight": "*u8"}, GroupFormat(4, 64, False, (*range(-15, 0), 99))),
    "float4 per 32": (2, {"weight": "*u8"}, GroupFormat(4, 32, False, FP4_DOUBLED)),
}
"""Formats of weights, with the bytes of an input."""


def report_linear_kernels() -> None:
    """Report the linear kernels for every tile, with K = 4,096, and one of each format for experts."""
    for kind, (size, types, group_format) in LINEAR.items():
        tiles = [*linear.TILES, (32, 16, 4, 8)] if size == 2 else linear.TILES[1:]
        for experts, (outs, tokens, warps, stages) in (
            *((0, tile) for tile in tiles),
            *((experts, (64, 32, 4, 8)) for experts in (8, 160) if kind != "float32"),
        ):
            constants: dict[str, Any] = {
                "COLS": 4096,
                "OUTS_TILE": outs,
                "TOKENS_TILE": tokens,
                "COLS_TILE": linear.STAGE_BYTES // size,
                "BIAS": True,
                "SCALED": kind == "float8",
                "EXPERTS": experts,
                "PAIRS_PER_ROW": 4 if experts else 1,
                **linear.format_constants(group_format),
                "UNROLL": 2 if tokens <= 32 else 1,
            }
            label = f"matmul {kind} {outs}x{tokens}" + f", {experts} experts" * (experts > 0)
            report(
                label,
                linear._matmul,
                constants,
                {"order": "*i32", "ends": "*i32"} | types,
                num_warps=warps,
                num_stages=stages,
                enable_fp_fusion=False,
            )
    constants = {"CHOICES": 8, "TILE": expert_kernels.SUM_TILE}
    options = {"num_warps": 4, "enable_fp_fusion": False}
    report("add choices", expert_kernels._add_choices, constants, EXPERT_TYPES, **options)
    constants = {"TILE": expert_kernels.SORT_TILE}
    report("sort pairs", expert_kernels._sort_pairs, constants, EXPERT_TYPES, num_warps=4)
    constants = {"SIZE": 160, "WIDTH": 256, "COUNT": 6, "SIGMOID": True, "CORRECTED": True}
    constants |= {"GROUPS": 8, "ACTIVE_GROUPS": 3, "SCORED": 2, "NORMALIZED": True}
    constants |= {"ROUNDED": tl.bfloat16}
    types = EXPERT_TYPES | {"logits": BFLOAT16, "weight_factor": "fp32"}
    report("select experts", expert_kernels._select_experts, constants, types, num_warps=1)
    constants = {"COLS": 4096, "WIDTH": 4096, "MAX_VALUE": linear.FLOAT8_MAX}
    report("quantize", linear._quantize_float8, constants, {}, num_warps=8)


def report_adapters() -> None:
    """Report the kernels of adapters."""
    types = dict.fromkeys(("records", "row_tiles", "rows"), "*i64") | {"hidden": BFLOAT16}
    constants = {"TOKENS_TILE": 64, "COLS": 4096, "COLS_TILE": 64}
    report("adapter: A", lora._project, constants, types, num_warps=4)
    report("adapter: B", lora._expand, {"TOKENS_TILE": 64}, types, num_warps=4)


def report_row_kernels() -> None:
    """Report the kernels of norms, gated activations and sampling."""
    for size, width, rows, warps in ((4096, 4096, 1, 8), (128, 128, 8, 4)):
        constants: dict[str, Any] = {
            "SIZE": size,
            "WIDTH": width,
            "ROWS": rows,
            "ROUND_BEFORE_WEIGHT": True,
            "ADD": rows == 1,
        }
        types = {"rows": "i32", "eps": "fp32"}
        report(f"norm {size}", elementwise._norm, constants, types, num_warps=warps)
    for activation in ("silu", "gelu_tanh", "clamped_swiglu"):
        constants = {"ACTIVATION": activation, "TILE": elementwise.GATE_TILE_OUTPUTS}
        report(
            f"gated activation {activation}", elementwise._gated_activation, constants, num_warps=4
        )
    constants = {"TILE": sampling.VOCAB_TILE}
    report("sample: find peaks", sampling._find_peaks, constants, {}, **sampling.KERNEL_OPTIONS)
    constants = sampling.CONSTANTS | {"TILES": 63, "WIDTH": 64}
    types = dict.fromkeys(("sampled_rows", "keys", "top_ids"), "*i64")
    types |= {"num_larger": "*i32", "result": "*fp64"}
    for name, kernel in (
        ("sum digits", sampling._sum_digits),
        ("sum weights", sampling._sum_weights),
        ("select token", sampling._select_token),
        ("rank tokens", sampling._rank_tokens),
    ):
        report(f"sample: {name}", kernel, constants, types, **sampling.KERNEL_OPTIONS)
    report(
        "sample: collect log-probabilities",
        sampling._collect_logprobs,
        {"TILES": 63, "WIDTH": 64},
        types,
        **sampling.KERNEL_OPTIONS,
    )
    tables = dict.fromkeys(("pairs", "counts", "masks", "allowed"), "*i32")
    for name, kernel, tile in (
        ("add values", logit_edits._add_values, logit_edits.PAIR_TILE),
        ("penalties and masks", logit_edits._edit_logits, sampling.VOCAB_TILE),
        ("count tokens", logit_edits._count_tokens, logit_edits.COUNT_TILE),
    ):
        report(f"edit: {name}", kernel, {"TILE": tile}, tables, **sampling.KERNEL_OPTIONS)


def report_delta_rule_kernels() -> None:
    """Report the kernels of gated delta nets for the shape of Qwen3-Next."""
    net = DeltaNetArchitecture(16, 32, 128, 128, 4)
    constants: dict[str, Any] = dict(delta_rule.delta_rule_constants(net))
    types, options = {"rows": "*i64"}, {"enable_fp_fusion": False}
    tile = {"TOKENS": delta_rule.CONV_TILE_TOKENS, "SIZE": 128, "MAX_SOFTPLUS_INPUT": 20.0}
    report(
        "delta rule: convolve",
        delta_rule._convolve,
        constants | tile | {"EPS": 1e-6},
        types,
        num_warps=4,
        **options,
    )
    tile = {"ROWS": 128, "COLUMNS": delta_rule.COLUMNS, "PARTS": 16, "INPUTS": 16}
    for saves in (False, True):
        report(
            "delta rule: recurrence" + ", saves" * saves,
            delta_rule._run_recurrence,
            constants | tile | {"SAVES": saves},
            types,
            num_warps=1,
            **options,
        )


if __name__ == "__main__":
    report_row_kernels()
    report_adapters()
    report_delta_rule_kernels()
    report_linear_kernels()
    report_attention_kernels()
    report_latent_attention_kernels()
