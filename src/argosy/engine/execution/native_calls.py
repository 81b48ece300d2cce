"""Argument structures of the C++ kernels in csrc/, with the same fields as in C++."""

from __future__ import annotations

import ctypes


class AttentionCall(ctypes.Structure):
    """Arguments of an attention call (`ArgosyAttention` in attention_call.h), with sizes in elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "cos", "sin")),
        *((name, ctypes.c_void_p) for name in ("out", "keys", "values")),
        *((name, ctypes.c_void_p) for name in ("positions", "slots", "cu_q", "seq_lens", "pages")),
        *((name, ctypes.c_int64) for name in ("tokens", "sequences", "page_stride")),
        *((name, ctypes.c_int64) for name in ("q_stride", "k_stride", "v_stride")),
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "head_dim", "block_size")),
        *((name, ctypes.c_int64) for name in ("turning", "window", "threads")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    )


class LinearCall(ctypes.Structure):
    """Arguments of a linear call (`ArgosyLinear` in linear.cpp), with sizes in elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "packed", "bias", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "cols", "outs", "x_stride", "threads")),
    )


class NormCall(ctypes.Structure):
    """Arguments of a norm call (`ArgosyNorm` in elementwise.cpp)."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "add", "weight", "out")),
        *((name, ctypes.c_int64) for name in ("outer", "inner", "size", "x_stride")),
        *((name, ctypes.c_int64) for name in ("narrow", "threads")),
        ("eps", ctypes.c_float),
    )


class GatedActivationCall(ctypes.Structure):
    """Arguments of a gated activation call (`ArgosyGate` in elementwise.cpp)."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "size", "threads")),
    )


class SampleCall(ctypes.Structure):
    """Arguments of a sampling call (`ArgosyDraw` in sampling.cpp)."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "scale", "top_k", "top_p")),
        *((name, ctypes.c_void_p) for name in ("least", "chance", "tokens")),
        *((name, ctypes.c_int64) for name in ("rows", "vocab", "stride", "threads")),
    )


class LogprobCall(ctypes.Structure):
    """Arguments of a log-probability call (`ArgosyTelling` in sampling.cpp)."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "which", "tokens", "counts", "ranks")),
        *((name, ctypes.c_void_p) for name in ("masses", "own", "largest", "ids", "likeliest")),
        *((name, ctypes.c_int64) for name in ("rows", "vocab", "stride", "most", "threads")),
    )
