"""Argument structures of the C++ kernels in csrc/, with the same fields as in C++."""

from __future__ import annotations

import ctypes


class AttentionCall(ctypes.Structure):
    """Arguments of an attention call (`ArgosyAttention` in attention_call.h), with sizes in elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "cos", "sin", "sinks")),
        *((name, ctypes.c_void_p) for name in ("out", "keys", "values")),
        *(
            (name, ctypes.c_void_p)
            for name in ("positions", "slot_mapping", "query_start_loc", "seq_lens", "block_table")
        ),
        *((name, ctypes.c_int64) for name in ("tokens", "sequences", "block_table_stride")),
        *((name, ctypes.c_int64) for name in ("q_stride", "k_stride", "v_stride")),
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "head_dim", "value_dim")),
        *((name, ctypes.c_int64) for name in ("block_size", "rotary_dim", "window", "threads")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    )


class LinearCall(ctypes.Structure):
    """Arguments of a linear call (`ArgosyLinear` in linear_call.h), with sizes in elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "packed", "bias", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "cols", "outs", "x_stride", "threads")),
    )


class LinearGroupCall(LinearCall):
    """Arguments of a linear call with a grouped weight (`ArgosyLinearGroup` in linear_call.h)."""

    _fields_ = (
        ("table", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("group", "has_offsets")),
    )


class NormCall(ctypes.Structure):
    """Arguments of a norm call (`ArgosyNorm` in elementwise.cpp)."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "delta", "weight", "out")),
        *((name, ctypes.c_int64) for name in ("outer_size", "inner_size", "size", "x_stride")),
        *((name, ctypes.c_int64) for name in ("round_before_weight", "threads")),
        ("eps", ctypes.c_float),
    )


class GatedActivationCall(ctypes.Structure):
    """Arguments of a gated activation call (`ArgosyGatedActivation` in elementwise.cpp)."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "size", "threads")),
    )


class DeltaRuleCall(ctypes.Structure):
    """Arguments of a call of the gated delta rule (`ArgosyDeltaRule` in delta_rule.cpp)."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qkv", "factors", "conv")),
        *((name, ctypes.c_void_p) for name in ("decay_rate", "decay_bias", "states")),
        *((name, ctypes.c_void_p) for name in ("mixed", "scratch", "out")),
        *((name, ctypes.c_void_p) for name in ("rows", "positions", "save_slots")),
        ("query_start_loc", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("tokens", "sequences", "qkv_stride", "state_stride")),
        *((name, ctypes.c_int64) for name in ("key_heads", "value_heads", "key_dim", "value_dim")),
        *((name, ctypes.c_int64) for name in ("width", "threads")),
    )


class SampleCall(ctypes.Structure):
    """Arguments of a sampling call (`ArgosySample` in sampling.cpp)."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "logit_scale", "top_k", "top_p")),
        *((name, ctypes.c_void_p) for name in ("log2_min_p", "random_values", "tokens")),
        *((name, ctypes.c_int64) for name in ("rows", "vocab", "stride", "threads")),
    )


class LogprobCall(ctypes.Structure):
    """Arguments of a log-probability call (`ArgosyLogprobs` in sampling.cpp)."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("logits", "logit_rows", "tokens", "top_counts", "ranks")
        ),
        *(
            (name, ctypes.c_void_p)
            for name in ("weight_sums", "token_logits", "largest", "top_ids", "top_logits")
        ),
        *((name, ctypes.c_int64) for name in ("rows", "vocab", "stride", "max_top", "threads")),
    )
