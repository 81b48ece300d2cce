"""Parser of `quantization_config` in config.json, which says how a checkpoint's matrices are stored."""

from __future__ import annotations

from dataclasses import dataclass

from argosy.engine.execution.config.checkpoint_config import CheckpointConfig

LOADABLE_FORMATS = (
    "GPTQ, AWQ, compressed-tensors, FP8, MXFP4, bitsandbytes or GGUF, or unquantized weights"
)
_KNOWN_METHODS = {
    "aqlm": "AQLM",
    "auto-round": "AutoRound",
    "bitnet": "BitNet",
    "eetq": "EETQ",
    "fp_quant": "FP-Quant",
    "higgs": "HIGGS",
    "hqq": "HQQ",
    "mxfp8": "MXFP8",
    "nvfp4": "NVFP4",
    "quanto": "Quanto",
    "quark": "Quark",
    "quip": "QuIP",
    "spqr": "SpQR",
    "torchao": "torchao",
    "vptq": "VPTQ",
}
_COMPRESSED_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "naive-quantized",
    "float-quantized",
    "mixed-precision",
    "dense",
)


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """How the matrices of a checkpoint are quantized."""

    method: str
    """Name of the method in `quant_method`: gptq, awq, compressed-tensors, fp8, mxfp4 or bitsandbytes."""
    bits: int | None = None
    """Bits of a weight if all matrices have the same number."""
    group_size: int | None = None
    """Elements along K that share a scale. None is a whole row, or what the shapes say."""
    zero_point_shift: int = 0
    """Number that is added to stored zero points, 1 for GPTQ's first layout."""
    block_size: tuple[int, int] | None = None
    """Rows and columns of a block that shares a scale, for FP8."""

    def describe(self) -> str:
        """Return a description for the log, such as `gptq, 4 bits`."""
        return self.method if self.bits is None else f"{self.method}, {self.bits} bits"


def parse_quantization(config: CheckpointConfig) -> QuantizationConfig | None:
    """Parse the `quantization_config` of a model's config.json, or return None if it has none.

    Raises:
        ValueError: The method or a setting of it is not supported. The message names formats that load.
    """
    if config.get("quantization_config") is None:
        return None
    section = config.with_values(config.section("quantization_config"))
    method = section.string("quant_method")
    if method is None and section.get("load_in_4bit") is not None:
        method = "bitsandbytes"  # before the key existed
    if method == "gptq":
        return _parse_gptq(section)
    if method == "awq":
        return _parse_awq(section)
    if method == "compressed-tensors":
        return _parse_compressed(section)
    if method in ("fp8", "fbgemm_fp8", "modelopt"):
        return _parse_fp8(section, method)
    if method == "mxfp4":
        return QuantizationConfig("mxfp4", bits=4)
    if method == "bitsandbytes":
        return QuantizationConfig("bitsandbytes")
    name = "without quant_method" if method is None else _KNOWN_METHODS.get(method, repr(method))
    raise _unsupported(section, f"quantization {name}")


def _parse_gptq(section: CheckpointConfig) -> QuantizationConfig:
    layout = section.string("checkpoint_format") or "gptq"
    if layout not in ("gptq", "gptq_v2") or section.flag("is_marlin_format"):
        raise _unsupported(section, f"GPTQ in the layout {layout!r}")
    bits = section.integer("bits")
    if bits not in (2, 4, 8):
        raise _unsupported(section, f"GPTQ with {bits} bits")
    return QuantizationConfig(
        "gptq",
        bits=bits,
        group_size=_group_size(section, "group_size"),
        zero_point_shift=1 if layout == "gptq" else 0,
    )


def _parse_awq(section: CheckpointConfig) -> QuantizationConfig:
    layout = (section.string("version") or "gemm").lower()
    if layout != "gemm":
        raise _unsupported(section, f"AWQ in the layout {layout!r}")
    bits = section.optional_integer("bits") or section.optional_integer("w_bit") or 4
    if bits != 4:
        raise _unsupported(section, f"AWQ with {bits} bits")
    key = "group_size" if section.get("group_size") is not None else "q_group_size"
    return QuantizationConfig("awq", bits=4, group_size=_group_size(section, key))


def _group_size(section: CheckpointConfig, key: str) -> int | None:
    """Return the group size, or None for -1, a whole row."""
    size = section.optional_integer(key, minimum=-1)
    if size == 0:
        raise section.error(key, "-1 or above 0")
    return None if size in (None, -1) else size


def _parse_compressed(section: CheckpointConfig) -> QuantizationConfig:
    sparsity = section.with_values(section.section("sparsity_config")).string("format")
    if sparsity not in (None, "dense"):
        raise _unsupported(section, f"compressed-tensors with sparsity {sparsity!r}")
    bits: set[int] = set()
    group_sizes: set[int | None] = set()
    formats = {section.string("format") or "dense"}
    for name in section.section("config_groups"):
        group = section.with_values(section.section("config_groups")).section(name)
        view = section.with_values(group)
        formats.add(view.string("format") or "dense")
        weights = view.with_values(view.section("weights"))
        if weights.values:
            bits.add(weights.integer("num_bits"))
            group_sizes.add(_group_size(weights, "group_size"))
    unknown = sorted(formats.difference(_COMPRESSED_FORMATS))
    if unknown:
        raise _unsupported(section, f"compressed-tensors in the format {unknown[0]!r}")
    if not bits <= {2, 4, 8}:
        raise _unsupported(section, f"compressed-tensors with {max(bits)} bits")
    return QuantizationConfig(
        "compressed-tensors",
        bits=bits.pop() if len(bits) == 1 else None,
        group_size=group_sizes.pop() if len(group_sizes) == 1 else None,
    )


def _parse_fp8(section: CheckpointConfig, method: str) -> QuantizationConfig:
    algorithm = section.string("quant_algo")
    if method == "modelopt" and algorithm != "FP8":
        raise _unsupported(section, f"ModelOpt's {algorithm}")
    layout = section.string("fmt") or "e4m3"
    if layout != "e4m3":
        raise _unsupported(section, f"FP8 in the layout {layout!r}")
    block = section.get("weight_block_size")
    if block is None:
        return QuantizationConfig("fp8", bits=8)
    if (
        not isinstance(block, list)
        or len(block) != 2
        or not all(isinstance(size, int) and 0 < size <= 1 << 20 for size in block)
    ):
        raise section.error("weight_block_size", "two whole numbers above 0")
    return QuantizationConfig("fp8", bits=8, block_size=(block[0], block[1]))


def _unsupported(section: CheckpointConfig, what: str) -> ValueError:
    return ValueError(
        f"{section.path}: {what} is not supported; use a checkpoint of the model in {LOADABLE_FORMATS}"
    )
