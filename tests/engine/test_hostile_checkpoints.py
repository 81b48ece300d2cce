"""Damaged, mislabelled and hostile checkpoints: refused by name with a remedy, nothing run, nothing left behind."""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import struct
import tempfile
import warnings
import zipfile
from base64 import b64encode
from collections import OrderedDict
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save

from argosy.engine.execution.architectures.architecture_config import read_architecture
from argosy.engine.execution.checkpoint_formats.checkpoint import resolve_model_path
from argosy.engine.execution.checkpoint_formats.checkpoint_reader import CheckpointReader
from argosy.engine.execution.decoders.generic_loader import load_generic_decoder
from argosy.engine.execution.kernels.device import create_cpu_device
from argosy.engine.execution.loading.model_selection import build_transformers_model
from argosy.engine.execution.loading.weight_loader import load_decoder
from argosy.engine.serving.text.tokenizer import Tokenizer
from tests.engine.stored_formats import (
    FORMATS,
    StoredFormat,
    awq,
    bitsandbytes_4bit,
    compressed_int,
    fp8,
    gptq,
    mxfp4_experts,
)
from tests.engine.test_checkpoint import CONFIG, create_tensors

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Change = Callable[[Path], object]

HUGE = 1 << 60
MAX_GROWTH_BYTES = 300 << 20
MAX_MESSAGE_CHARS = 2000
MARKER = "argosy_hostile_checkpoint_ran"
NAME = "model.layers.0.mlp.down_proj"
GGUF_KEYS = {"block_count": 2, "embedding_length": 32, "feed_forward_length": 64}


def load(path: Path) -> object:
    """Load the model with Argosy's own decoder."""
    resolved = resolve_model_path(str(path), None)
    return load_decoder(
        CheckpointReader(resolved),
        read_architecture(resolved),
        create_cpu_device(1),
        torch.float32,
        lambda _: None,
    )


# --- safetensors ---------------------------------------------------------------------------------


@cache
def plain_file() -> bytes:
    return save(create_tensors())


def raw_file(change: Callable[[bytes], bytes]) -> Change:
    def apply(path: Path) -> None:
        (path / "model.safetensors").write_bytes(change(plain_file()))

    return apply


def header(change: Callable[[dict[str, Any]], object]) -> Change:
    """Change the header of the file, whose data stays as it is."""

    def apply(data: bytes) -> bytes:
        (length,) = struct.unpack("<Q", data[:8])
        entries = json.loads(data[8 : 8 + length])
        changed = json.dumps(change(entries) or entries).encode()
        return struct.pack("<Q", len(changed)) + changed + data[8 + length :]

    return raw_file(apply)


def entry(**values: object) -> Change:
    return header(lambda entries: entries["model.norm.weight"].update(values))


def index(weight_map: object) -> Change:
    def apply(path: Path) -> None:
        (path / "model.safetensors").rename(path / "one.safetensors")
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return apply


def config(**values: object) -> Change:
    def apply(path: Path) -> None:
        (path / "config.json").write_text(json.dumps(CONFIG | values))

    return apply


def config_text(text: str) -> Change:
    return lambda path: (path / "config.json").write_text(text)


def remote_code(path: Path) -> None:
    (path / "modeling_evil.py").write_text(f"import os; open({MARKER!r}, 'w')")
    config(architectures=["EvilForCausalLM"], auto_map={"AutoModel": "modeling_evil.Evil"})(path)


PLAIN: dict[str, tuple[Change, str]] = {
    "empty file": (raw_file(lambda _: b""), "header length is 0"),
    "web page": (raw_file(lambda _: b"<html>" * 99), "header length"),
    "header of 8 EB": (raw_file(lambda data: b"\xff" * 8 + data[8:]), "header length"),
    "header cut": (raw_file(lambda data: data[:100]), r"cannot read .*fetch it again"),
    "header no JSON": (raw_file(lambda data: data[:8] + b"x" * 5000), r"cannot read .*fetch"),
    "header a list": (header(lambda entries: [entries]), "not an object"),
    "header nested": (
        raw_file(lambda _: struct.pack("<Q", 200_000) + b'{"a":' * 40_000),
        "cannot read",
    ),
    "data cut": (raw_file(lambda data: data[:-7]), r"model\.safetensors.*fetch it again"),
    "data too long": (raw_file(lambda data: data + b"\0" * 9), r"model\.safetensors.*fetch"),
    "offset beyond end": (entry(data_offsets=[0, HUGE]), r"model\.safetensors.*fetch"),
    "offset negative": (entry(data_offsets=[-128, 0]), r"model\.safetensors.*fetch"),
    "offsets reversed": (entry(data_offsets=[128, 0]), r"model\.safetensors.*fetch"),
    "offsets absent": (
        header(lambda entries: entries["model.norm.weight"].pop("data_offsets") and None),
        r"model\.safetensors.*fetch",
    ),
    "shape of 1 EB": (entry(shape=[HUGE]), r"model\.safetensors.*fetch"),
    "shape overflows": (entry(shape=[1 << 32, 1 << 32]), r"model\.safetensors.*fetch"),
    "shape negative": (entry(shape=[-32]), r"model\.safetensors.*fetch"),
    "dtype unknown": (entry(dtype="F3"), r"model\.safetensors.*fetch"),
    "dtype shorter": (entry(dtype="F16"), r"model\.safetensors.*fetch"),
    "complex numbers": (entry(dtype="C64", shape=[16]), r"model\.norm\.weight.*model\.safetensors"),
    "shard above folder": (index({"a": "../one.safetensors"}), "not the name of a file next"),
    "shard absolute": (index({"a": "/etc/passwd"}), "not the name of a file next"),
    "shard is folder": (index({"a": "."}), "not the name of a file next"),
    "shard name NUL": (index({"a": "one\0.safetensors"}), "not the name of a file next"),
    "shard a number": (index({"a": 7}), "not the name of a file next"),
    "map a list": (index([["a", "one.safetensors"]]), "has no weight_map"),
    "shards absent": (index({f"t{i}": f"{i}.safetensors" for i in range(999)}), "lacks 0.safe"),
    "config nested": (config_text('{"a":' * 100_000), r"config\.json"),
    "config number": (config_text('{"hidden_size": 1e999}'), r"config\.json"),
    "sizes huge": (config(hidden_size=1 << 30), r"hidden_size is 1073741824; it must be"),
    "sizes large": (
        config(hidden_size=1 << 18, intermediate_size=1 << 24, vocab_size=1 << 30),
        "should have shape",
    ),
    "heads wide": (config(hidden_size=1 << 24), "num_attention_heads is 4; it must be at least"),
    "rotations huge": (config(hidden_size=1 << 18, max_position_embeddings=1 << 20), "the context"),
    "vocabulary huge": (config(vocab_size=(1 << 31) - 1), r"embed_tokens.* should have shape"),
    "context huge": (config(max_position_embeddings=(1 << 31) - 1), "max_position_embeddings is"),
    "experts huge": (
        config(architectures=["MixtralForCausalLM"], num_local_experts=8192, num_hidden_layers=999),
        "num_hidden_layers.* experts",
    ),
    "remote code": (remote_code, r"architectures is \['EvilForCausalLM'\]"),
    "adapter": (
        lambda path: (path / "config.json").rename(path / "adapter_config.json"),
        r"holds an adapter .*merge.*merge_and_unload",
    ),
}


# --- special files -------------------------------------------------------------------------------


def linked(name: str, target: str) -> Change:
    """Replace a file by a link."""

    def apply(path: Path) -> None:
        (path / name).unlink(missing_ok=True)
        (path / name).symlink_to(target)

    return apply


def pipe(name: str, *, only: bool = False) -> Change:
    """Replace a file by a pipe without a writer, alone in the folder if `only`."""

    def apply(path: Path) -> None:
        for file in path.iterdir() if only else (path / name,):
            file.unlink(missing_ok=True)
        os.mkfifo(path / name)

    return apply


def sparse_file(path: Path) -> None:
    os.truncate(path / "model.safetensors", 1 << 40)


def shard_pipe(path: Path) -> None:
    index({"a": "other.safetensors"})(path)
    os.mkfifo(path / "other.safetensors")


SPECIAL: dict[str, tuple[Change, str]] = {
    "weights are a device": (linked("model.safetensors", "/dev/zero"), "fetch the model's weights"),
    "weights link to themselves": (linked("model.safetensors", "model.safetensors"), "fetch the"),
    "weights link to the folder": (linked("model.safetensors", "."), "fetch the model's weights"),
    "weights are a pipe": (pipe("model.safetensors"), "fetch the model's weights"),
    "index is a pipe": (pipe("model.safetensors.index.json", only=True), r"no config\.json"),
    "shard is a pipe": (shard_pipe, "lacks other"),
    "config is a device": (linked("config.json", "/dev/zero"), r"no config\.json"),
    "config is a pipe": (pipe("config.json"), r"no config\.json"),
    "config links in a circle": (linked("config.json", "../model/config.json"), r"no config\.json"),
    "GGUF is a pipe": (pipe("model.gguf", only=True), "holds 0 GGUF models"),
    "sparse file of 1 TB": (sparse_file, r"model\.safetensors.*fetch"),
}


# --- quantized -----------------------------------------------------------------------------------


def quantized(
    stored_format: StoredFormat, change: Callable[[dict[str, Tensor]], object], **values: object
) -> Change:
    """Store one matrix in a format, change its tensors, and write the checkpoint."""

    def apply(path: Path) -> None:
        shapes = {"down_proj": (32, 192), "gate_proj": (192, 32), "up_proj": (192, 32)}
        tensors = create_tensors() | {
            f"model.layers.{layer}.mlp.{name}.weight": torch.full(shape, 0.01)
            for layer in range(2)
            for name, shape in shapes.items()
        }
        weight = tensors.pop(f"{NAME}.weight").numpy() + np.arange(192, dtype=np.float32)
        encoded = stored_format.encode(NAME, weight)
        change(encoded)
        tensors |= {name: tensor.clone().contiguous() for name, tensor in encoded.items()}
        (path / "model.safetensors").write_bytes(save(tensors))
        config(intermediate_size=192, quantization_config=stored_format.config | values)(path)

    return apply


def put(part: str, value: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({f"{NAME}.{part}": value(tensors[f"{NAME}.{part}"])})


def drop(part: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(f"{NAME}.{part}")


def state(text: str) -> Callable[[dict[str, Tensor]], object]:
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    return put("weight.quant_state.bitsandbytes__nf4", lambda _: data)


def mxfp4(change: Callable[[Tensor], Tensor]) -> Change:
    def apply(path: Path) -> None:
        blocks, scales = mxfp4_experts((2, 4, 64), 1)
        tensors = create_tensors() | {"x_blocks": change(blocks).contiguous(), "x_scales": scales}
        (path / "model.safetensors").write_bytes(save(tensors))
        config(quantization_config={"quant_method": "mxfp4"})(path)

    return apply


def keep(_: object) -> None:
    """Change nothing."""


QUANTIZED: dict[str, tuple[Change, str]] = {
    "not quantized": (
        config(quantization_config=FORMATS["gptq"].config),
        "no stored tensor is; remove quantization_config",
    ),
    "wrong method": (quantized(gptq(), keep, quant_method="bitsandbytes"), "no stored tensor is"),
    "method a list": (quantized(gptq(), keep, quant_method=["gptq"]), "quant_method is"),
    "method unknown": (quantized(gptq(), keep, quant_method="quip"), "QuIP.* use a .*AWQ"),
    "bits text": (quantized(gptq(), keep, bits="4"), "bits is '4'"),
    "group size 0": (quantized(gptq(), keep, group_size=0), "group_size is 0"),
    "group size huge": (quantized(gptq(), keep, group_size=HUGE), "group_size is"),
    "values cut": (quantized(gptq(), put("qweight", lambda t: t[:3])), "down_proj"),
    "values flat": (quantized(gptq(), put("qweight", torch.flatten)), "should be a matrix"),
    "values empty": (quantized(gptq(), put("qweight", lambda t: t[:0])), "should be a matrix"),
    "values float": (quantized(gptq(), put("qweight", torch.Tensor.float)), "int32"),
    "scales absent": (quantized(gptq(), drop("scales")), r"no tensor .*scales"),
    "zeros absent": (quantized(gptq(), drop("qzeros")), r"down_proj\.qzeros"),
    "scales wide": (quantized(gptq(), put("scales", lambda t: t.repeat(1, 2))), "should have"),
    "scales infinite": (quantized(gptq(), put("scales", lambda t: t * 1e9)), "not finite"),
    "group beyond": (quantized(gptq(), put("g_idx", lambda t: t + 99)), r"g_idx has groups"),
    "group negative": (quantized(gptq(), put("g_idx", lambda t: t - 1)), r"g_idx has groups -1"),
    "AWQ as GPTQ": (quantized(awq(), keep, **gptq().config), "down_proj"),
    "GPTQ as AWQ": (quantized(gptq(), keep, **awq().config), "down_proj"),
    "shape huge": (
        quantized(compressed_int(4, 32), put("weight_shape", lambda t: t * (1 << 40))),
        "weight_shape",
    ),
    "FP8 scale absent": (quantized(fp8("block"), drop("weight_scale_inv")), "no stored tensor"),
    "FP8 scale short": (
        quantized(fp8("block"), put("weight_scale_inv", lambda t: t[:, :1])),
        "weight_scale_inv has shape",
    ),
    "FP8 block 0": (quantized(fp8("block"), keep, weight_block_size=[0, 128]), "above 0"),
    "FP8 not FP8": (quantized(fp8("tensor"), put("weight", torch.Tensor.float)), "float8_e4m3fn"),
    "NF4 state noise": (quantized(bitsandbytes_4bit(), state("\1\2{")), "not a description"),
    "NF4 state list": (quantized(bitsandbytes_4bit(), state("[]")), "not a description"),
    "NF4 shape huge": (
        quantized(
            bitsandbytes_4bit(),
            state(json.dumps({"shape": [HUGE, HUGE], "blocksize": 64, "quant_type": "nf4"})),
        ),
        "describes",
    ),
    "NF4 scales absent": (quantized(bitsandbytes_4bit(), drop("weight.absmax")), "absmax"),
    "MXFP4 shape": (mxfp4(lambda t: t[..., :8]), r"x_blocks has shape"),
    "MXFP4 dtype": (mxfp4(torch.Tensor.float), "should be uint8"),
}


# --- archives of torch.save ----------------------------------------------------------------------


class Exploit:
    """Object whose unpickling runs a command."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {MARKER}",)


def archive(content: object, **options: Any) -> Change:  # noqa: ANN401
    def apply(path: Path) -> None:
        (path / "model.safetensors").unlink()
        torch.save(
            content() if callable(content) else content, path / "pytorch_model.bin", **options
        )

    return apply


def rewritten(change: Callable[[str, bytes], bytes], compression: int = 0) -> Change:
    """Change the members of an archive."""

    def apply(path: Path) -> None:
        archive(create_tensors)(path)
        file = path / "pytorch_model.bin"
        with zipfile.ZipFile(file) as source:
            members = {name: source.read(name) for name in source.namelist()}
        with zipfile.ZipFile(file, "w", compression) as target:
            for name, data in members.items():
                target.writestr(name, change(name, data))

    return apply


def raw_archive(data: bytes) -> Change:
    def apply(path: Path) -> None:
        (path / "model.safetensors").unlink()
        (path / "pytorch_model.bin").write_bytes(data)

    return apply


def cut_archive(path: Path) -> None:
    archive(create_tensors)(path)
    file = path / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:-2000])


def pickled(value: object) -> Callable[[str, bytes], bytes]:
    return lambda name, data: pickle.dumps(value, 2) if name.endswith("data.pkl") else data


def expanded() -> dict[str, Tensor]:
    """Tensors that claim terabytes with one stored number."""
    return create_tensors() | {"lm_head.weight": torch.zeros(1).expand(1 << 20, 1 << 20)}


class Storage:
    """Storage of a crafted tensor."""


@dataclass
class CraftedTensor:
    """Tensor whose pickle states any sizes."""

    numbers: int = 8
    offset: int = 0
    size: tuple[int, ...] = (8,)
    stride: tuple[int, ...] = (1,)
    key: str = "0"

    def __reduce__(self) -> tuple[Any, ...]:
        storage = Storage()
        storage.__dict__ |= {"key": self.key, "numbers": self.numbers}
        parts: tuple[Any, ...] = (
            storage,
            self.offset,
            self.size,
            self.stride,
            False,
            OrderedDict(),
        )
        return torch._utils._rebuild_tensor_v2, parts  # noqa: SLF001 - as torch.save writes it


class CraftedPickler(pickle.Pickler):
    """Pickler that writes storages as torch.save does."""

    def persistent_id(self, value: object) -> tuple[object, ...] | None:
        if not isinstance(value, Storage):
            return None
        return "storage", torch.FloatStorage, vars(value)["key"], "cpu", vars(value)["numbers"]


def crafted(**sizes: Any) -> Change:  # noqa: ANN401
    stream = io.BytesIO()
    CraftedPickler(stream, 2).dump({"model.norm.weight": CraftedTensor(**sizes)})
    return rewritten(lambda name, data: stream.getvalue() if name.endswith("data.pkl") else data)


def members(change: Callable[[dict[str, bytes]], list[tuple[str, bytes]]]) -> Change:
    """Change the list of an archive's members."""

    def apply(path: Path) -> None:
        archive(create_tensors)(path)
        file = path / "pytorch_model.bin"
        with zipfile.ZipFile(file) as source:
            content = {name: source.read(name) for name in source.namelist()}
        with warnings.catch_warnings(), zipfile.ZipFile(file, "w") as target:
            warnings.simplefilter("ignore")  # names are there twice on purpose
            for name, data in change(content):
                target.writestr(name, data)

    return apply


def central_directory(offset: int, value: bytes) -> Change:
    """Overwrite bytes of each entry of the archive's directory."""

    def apply(path: Path) -> None:
        archive(create_tensors)(path)
        file = path / "pytorch_model.bin"
        data = bytearray(file.read_bytes())
        start = data.find(b"PK\x01\x02")
        while start >= 0:
            data[start + offset : start + offset + len(value)] = value
            start = data.find(b"PK\x01\x02", start + 4)
        file.write_bytes(data)

    return apply


def torch_index(path: Path) -> None:
    (path / "model.safetensors").unlink()
    weights = {"weight_map": {"a": "../../secret.bin"}}
    (path / "pytorch_model.bin.index.json").write_text(json.dumps(weights))


ARCHIVES: dict[str, tuple[Change, str]] = {
    "pickle runs": (archive({"a": Exploit()}), r"pytorch_model\.bin cannot be .*nothing of it was"),
    "pickle alone": (raw_archive(pickle.dumps(Exploit())), "not a zip archive"),
    "pickle replaced": (rewritten(pickled(Exploit())), "cannot be loaded as tensors only"),
    "old format": (
        archive(create_tensors, _use_new_zipfile_serialization=False),
        "not a zip archive of a current",
    ),
    "zip bomb": (
        rewritten(lambda n, d: d if "pkl" in n else b"\0" * (1 << 20), zipfile.ZIP_DEFLATED),
        "compressed, or its contents are larger",
    ),
    "storages short": (rewritten(lambda n, d: d if "pkl" in n else d[:8]), r"pytorch_model\.bin"),
    "a list": (archive([torch.ones(2)]), "holds a list"),
    "not tensors": (archive({"a": 3}), "'a' is a int"),
    "names not text": (archive({3: torch.ones(2)}), "instead of a tensor"),
    "sparse": (archive({"a": torch.ones(2, 2).to_sparse()}), "not a plain tensor"),
    "on meta": (archive({"a": torch.ones(2, device="meta")}), "not a plain tensor"),
    "expanded": (archive(expanded), r"lm_head\.weight .*should have shape"),
    "cut": (cut_archive, "not a zip archive"),
    "empty": (raw_archive(b""), "not a zip archive"),
    "shard above folder": (torch_index, "not the name of a file next"),
    "storage of 1 EB": (crafted(numbers=HUGE), r"pytorch_model\.bin|no tensor model"),
    "shape of 1 EB": (crafted(size=(HUGE,)), r"pytorch_model\.bin"),
    "offset of 1 EB": (crafted(offset=HUGE), r"pytorch_model\.bin"),
    "offset negative": (crafted(offset=-64), r"pytorch_model\.bin"),
    "stride negative": (crafted(stride=(-1,)), r"pytorch_model\.bin"),
    "storage elsewhere": (crafted(key="../../../../etc/passwd"), r"pytorch_model\.bin"),
    "pickle nested": (rewritten(pickled({"a": []})), "'a' is a list"),
    "pickle of a function": (rewritten(pickled({"a": os.system})), "cannot be loaded as tensors"),
    "pickle without end": (
        rewritten(lambda n, d: d[:-1] if n.endswith("data.pkl") else d),
        r"pytorch_model\.bin",
    ),
    "pickle of opcodes": (
        rewritten(lambda n, d: b"\x80\x02" + b"(" * (1 << 17) if n.endswith("data.pkl") else d),
        r"pytorch_model\.bin",
    ),
    "tensors twice": (
        members(lambda content: [*content.items(), *content.items()]),
        "two members with the same name",
    ),
    "member above folder": (
        members(lambda content: [("../../evil", b"x" * 99), *content.items()]),
        r"pytorch_model\.bin",
    ),
    "no pickle": (
        members(lambda content: [each for each in content.items() if "pkl" not in each[0]]),
        r"pytorch_model\.bin",
    ),
    "members of 4 GB": (central_directory(20, b"\xfe\xff\xff\xff" * 2), r"pytorch_model\.bin"),
    "members encrypted": (central_directory(8, b"\x01"), r"pytorch_model\.bin"),
    "members at 4 GB": (central_directory(42, b"\xfe\xff\xff\xff"), r"pytorch_model\.bin"),
}


# --- GGUF ----------------------------------------------------------------------------------------


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


@cache
def gguf_file() -> bytes:
    """A file of a model without layers, which is damaged only in that."""
    return create_gguf()


def create_gguf(architecture: str = "llama", **changes: Any) -> bytes:  # noqa: ANN401
    keys = GGUF_KEYS | {"attention.head_count": 4, "context_length": 64} | changes
    with TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        writer = gguf.GGUFWriter(file, architecture)
        for key, value in keys.items():
            writer.add_key_value(f"{architecture}.{key}", value, gguf.GGUFValueType.get_type(value))
        writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
        writer.add_tensor("token_embd.weight", np.zeros((40, 32), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return file.read_bytes()


def gguf_bytes(data: Callable[[], bytes]) -> Change:
    def apply(path: Path) -> None:
        for file in list(path.iterdir()):
            file.unlink()
        (path / "model.gguf").write_bytes(data())

    return apply


def gguf_header(tensors: int = 0, values: int = 0, rest: bytes = b"", version: int = 3) -> Change:
    return gguf_bytes(
        lambda: b"GGUF" + struct.pack("<IQQ", version, tensors, values) + rest + b"\0" * 64
    )


def gguf_tensor(*, shape: tuple[int, ...] = (8, 8), kind: int = 0, offset: int = 0) -> bytes:
    name = text("token_embd.weight") + struct.pack("<I", len(shape))
    return name + struct.pack(f"<{len(shape)}Q", *shape) + struct.pack("<IQ", kind, offset)


def gguf_array(kind: int, count: int) -> bytes:
    return text("a") + struct.pack("<IIQ", 9, kind, count)


def gguf_model(**changes: Any) -> Change:  # noqa: ANN401
    return gguf_bytes(partial(create_gguf, **changes))


def two_models(path: Path) -> None:
    gguf_model()(path)
    (path / "other.gguf").write_bytes(gguf_file())


def lonely_part(path: Path) -> None:
    gguf_model()(path)
    (path / "model.gguf").rename(path / "m-00001-of-00003.gguf")


def gguf_named(name: str) -> Change:
    def apply(path: Path) -> None:
        gguf_model()(path)
        (path / "model.gguf").rename(path / name)

    return apply


def gguf_value(key: str, kind: int, value: bytes) -> Change:
    return gguf_header(values=1, rest=text(key) + struct.pack("<I", kind) + value)


GGUF: dict[str, tuple[Change, str]] = {
    "part 1 of 99999": (gguf_named("m-00001-of-99999.gguf"), "lacks m-00002-of-99999"),
    "part 1 of 0": (gguf_named("m-00001-of-00000.gguf"), "no tensor model"),
    "part 7 of 3": (gguf_named("m-00007-of-00003.gguf"), "lacks m-00001-of-00003"),
    "alignment 0": (gguf_value("general.alignment", 4, b"\0" * 4), "alignment is 0"),
    "alignment a text": (gguf_value("general.alignment", 8, text("32")), "alignment is 32"),
    "alignment negative": (gguf_value("general.alignment", 5, b"\xff" * 4), "alignment is -1"),
    "key not UTF-8": (
        gguf_header(values=1, rest=struct.pack("<Q", 4) + b"\xff" * 8),
        "cannot read",
    ),
    "arrays in arrays of 1 EB": (
        gguf_header(values=1, rest=gguf_array(9, 2) + struct.pack("<IQ", 9, HUGE)),
        "cannot hold",
    ),
    "array of an unknown type": (gguf_header(values=1, rest=gguf_array(77, 1)), "unknown type"),
    "tensor name of 1 EB": (gguf_header(tensors=1, rest=struct.pack("<Q", HUGE)), "a name has"),
    "dimensions 5": (gguf_header(tensors=1, rest=gguf_tensor(shape=(1,) * 5)), "5 dimensions"),
    "size 0": (gguf_header(tensors=1, rest=gguf_tensor(shape=(0, 8))), "does not fit F32"),
    "architecture a number": (gguf_value("general.architecture", 4, b"\1" * 4), "is '16843009'"),
    "heads 0": (gguf_model(**{"attention.head_count": 0}), "head_count is '0'"),
    "experts huge": (gguf_model(expert_count=1 << 30, expert_used_count=1), "num_local_experts is"),
    "context a text": (gguf_model(context_length="long"), "max_position_embeddings is 'long'"),
    "empty": (gguf_bytes(lambda: b""), "cannot read"),
    "other magic": (gguf_bytes(lambda: b"GGML" + b"\0" * 64), "does not start with GGUF"),
    "old version": (gguf_header(version=1), "version 1"),
    "big endian": (gguf_header(version=3 << 24), "little-endian"),
    "tensors of 1 EB": (gguf_header(tensors=HUGE), "cannot hold"),
    "values of 1 EB": (gguf_header(values=HUGE), "cannot hold"),
    "key of 1 EB": (gguf_header(values=1, rest=struct.pack("<Q", HUGE)), "within its header"),
    "array of 1 EB": (gguf_header(values=1, rest=gguf_array(4, HUGE)), "cannot hold"),
    "texts of 1 EB": (gguf_header(values=1, rest=gguf_array(8, HUGE)), "cannot hold"),
    "arrays nested": (
        gguf_header(values=1, rest=gguf_array(9, 1) + struct.pack("<IQ", 9, 1) * 99),
        "nested",
    ),
    "type unknown": (gguf_header(values=1, rest=text("a") + struct.pack("<I", 99)), "unknown type"),
    "dimensions 0": (gguf_header(tensors=1, rest=gguf_tensor(shape=())), "0 dimensions"),
    "shape overflows": (
        gguf_header(tensors=1, rest=gguf_tensor(shape=(1 << 40, 1 << 40))),
        "ends at byte",
    ),
    "offset beyond": (gguf_header(tensors=1, rest=gguf_tensor(offset=HUGE)), "ends at byte"),
    "IQ2": (gguf_header(tensors=1, rest=gguf_tensor(kind=16)), "IQ2_XXS; use a file in .*Q4_K"),
    "type 77": (gguf_header(tensors=1, rest=gguf_tensor(kind=77)), "type 77"),
    "ragged": (gguf_header(tensors=1, rest=gguf_tensor(shape=(33, 8), kind=8)), "does not fit Q8"),
    "twice": (
        gguf_header(tensors=2, rest=gguf_tensor(shape=(2,)) + gguf_tensor(shape=(2,))),
        "two tensors",
    ),
    "no model": (gguf_header(), "general.architecture is 'None'"),
    "architecture unknown": (gguf_model(architecture="rwkv7"), "is 'rwkv7'; Argosy reads llama"),
    "layers absent": (gguf_model(), r"no tensor model\.norm|no tensor model\.layers"),
    "layers huge": (gguf_model(block_count=1 << 30), "num_hidden_layers is"),
    "heads a text": (gguf_model(**{"attention.head_count": "4"}), "head_count is '4'; it must be"),
    "cut": (gguf_bytes(lambda: gguf_file()[:-64]), "download is incomplete"),
    "two models": (two_models, "holds 2 GGUF models"),
    "part absent": (lonely_part, "lacks m-00002-of-00003"),
}

# --- tokenizers ----------------------------------------------------------------------------------


def tokenizer_file(name: str, content: bytes | str) -> Change:
    def apply(path: Path) -> None:
        (path / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return apply


def tokenizer_json(**values: object) -> Change:
    model = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
    definition: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "model": model,
        "decoder": None,
    }
    return tokenizer_file("tokenizer.json", json.dumps(definition | values))


def tekken(**config: object) -> Change:
    config = {"pattern": "a", "default_num_special_tokens": 3, "default_vocab_size": 259} | config
    vocabulary = [
        {"rank": rank, "token_bytes": b64encode(bytes([rank])).decode()} for rank in range(256)
    ]
    return tokenizer_file("tekken.json", json.dumps({"config": config, "vocab": vocabulary}))


def byte_ranks(*more: tuple[bytes, int]) -> str:
    ranks = [*((bytes([byte]), byte) for byte in range(256)), *more]
    return "\n".join(f"{b64encode(token).decode()} {rank}" for token, rank in ranks)


def added_token(token_id: object) -> Change:
    def apply(path: Path) -> None:
        tokenizer_file("tokenizer.model", byte_ranks())(path)
        (path / "added_tokens.json").write_text(json.dumps({"<x>": token_id}))

    return apply


TOKENIZERS: dict[str, tuple[Change, str]] = {
    "absent": (tokenizer_file("other", ""), "has no tokenizer"),
    "a device": (linked("tokenizer.json", "/dev/zero"), "has no tokenizer"),
    "a pipe": (pipe("tokenizer.model"), "has no tokenizer"),
    "empty": (tokenizer_file("tokenizer.json", ""), r"tokenizer\.json cannot be read"),
    "nested": (tokenizer_file("tokenizer.json", '{"a":' * 100_000), "cannot be read"),
    "id of 4 billion": (
        tokenizer_json(model={"type": "BPE", "vocab": {"a": (1 << 32) - 2}, "merges": []}),
        "has the id 4294967294",
    ),
    "id beyond 32 bits": (
        tokenizer_json(model={"type": "BPE", "vocab": {"a": HUGE}, "merges": []}),
        r"tokenizer\.json cannot be read",
    ),
    "pattern damaged": (
        tokenizer_json(
            pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated"}
        ),
        r"tokenizer\.json cannot be read",
    ),
    "pieces of 1 EB": (
        tokenizer_file("tokenizer.model", b"\x0a" + b"\xff" * 8 + b"\x7f"),
        "damaged",
    ),
    "pieces not UTF-8": (
        tokenizer_file("tokenizer.model", b"\x0a\x04\x0a\x02\xff\xff"),
        "cannot be",
    ),
    "ranks huge": (tokenizer_file("x.tiktoken", byte_ranks((b"ab", HUGE))), "cannot be read"),
    "ranks negative": (tokenizer_file("x.tiktoken", byte_ranks((b"ab", -1))), "cannot be read"),
    "token of 1 MB": (
        tokenizer_file("x.tiktoken", byte_ranks((b"a" * (1 << 20), 256))),
        "a token has 1048576 bytes",
    ),
    "specials huge": (tekken(default_num_special_tokens=HUGE), "default_num_special_tokens is"),
    "specials negative": (
        tekken(default_num_special_tokens=-5),
        "default_num_special_tokens is -5",
    ),
    "specials a list": (tekken(default_num_special_tokens=[1]), r"tekken\.json cannot be read"),
    "added id huge": (added_token(HUGE), "cannot be read"),
    "added id a text": (added_token("first"), "cannot be read"),
}


def load_tokenizer(path: Path) -> object:
    return Tokenizer.load(path)


# --- models of transformers ------------------------------------------------------------------------


def granite(**values: object) -> Change:
    """Write the configuration of a small Granite, which transformers computes, with changes."""
    sizes = {"model_type": "granite", "architectures": ["GraniteForCausalLM"]}
    return lambda path: (path / "config.json").write_text(json.dumps(CONFIG | sizes | values))


TRANSFORMERS: dict[str, tuple[Change, str]] = {
    "layers huge": (granite(num_hidden_layers=1 << 31), "num_hidden_layers is"),
    "layers negative": (granite(num_hidden_layers=-1), r"GraniteForCausalLM|config\.json"),
    "width of 1 EB": (granite(hidden_size=HUGE), r"config\.json|should have"),
    "vocabulary of 1 EB": (granite(vocab_size=HUGE), r"config\.json|should have"),
    "heads 0": (granite(num_attention_heads=0), r"config\.json"),
    "heads a text": (granite(num_attention_heads="4"), r"config\.json"),
    "rope a list": (granite(rope_parameters=[1]), r"config\.json"),
    "context a text": (granite(max_position_embeddings="long"), r"config\.json"),
    "no model class": (
        granite(architectures=["pipeline"], auto_map={"AutoModelForCausalLM": "code.Model"}),
        r"config\.json",
    ),
    "architecture a number": (granite(architectures=[7]), r"config\.json"),
    "code of another repository": (
        granite(model_type="x", auto_map={"AutoConfig": "evil/repository--code.Config"}),
        "--trust-remote-code",
    ),
    "code above the folder": (
        granite(model_type="x", auto_map={"AutoConfig": "../code.Config"}),
        "--trust-remote-code",
    ),
    "weights of another model": (granite(intermediate_size=96), "should have"),
}


def load_with_transformers(path: Path) -> object:
    model = build_transformers_model(path, torch.float32, max_model_len=64)
    return load_generic_decoder(model, create_cpu_device(1), torch.float32, lambda _: None)


LOADERS = {"tokenizer": load_tokenizer, "transformers": load_with_transformers}
CASES = {
    f"{kind}: {name}": (LOADERS.get(kind, load), *case)
    for kind, cases in (
        ("plain", PLAIN),
        ("special", SPECIAL),
        ("quantized", QUANTIZED),
        ("archive", ARCHIVES),
        ("gguf", GGUF),
        ("tokenizer", TOKENIZERS),
        ("transformers", TRANSFORMERS),
    )
    for name, case in cases.items()
}


@pytest.mark.parametrize("name", CASES)
def test_hostile_checkpoint_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    load_model, change, message = CASES[name]
    folder = tmp_path / "model"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(plain_file())
    change(folder)
    files = sorted(tmp_path.rglob("*"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=message) as caught:
        load_model(folder)
    assert len(str(caught.value)) < MAX_MESSAGE_CHARS
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert growth < MAX_GROWTH_BYTES
    after = [file for file in tmp_path.rglob("*") if not file.name.startswith("torchinductor")]
    assert sorted(after) == files


def test_code_in_a_checkpoint_is_never_imported(tmp_path: Path) -> None:
    """A known architecture loads, whatever `auto_map` and the Python files beside it say."""
    (tmp_path / "modeling_llama.py").write_text("raise SystemExit(9)")
    config(auto_map={"AutoModelForCausalLM": "modeling_llama.Llama"})(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(plain_file())
    load(tmp_path)


@pytest.mark.parametrize("sharded", [False, True])
def test_archives_of_torch_save_are_read(tmp_path: Path, sharded: bool) -> None:
    """The tensors are mapped, also views of one storage, as of tied or transposed matrices."""
    tensors = create_tensors()
    tensors["lm_head.weight"] = torch.full((32, 40), 0.01).T
    tensors["model.embed_tokens.weight"] = tensors["lm_head.weight"]
    config()(tmp_path)
    if sharded:
        names = sorted(tensors)
        shards = {"pytorch_model-1.bin": names[:9], "pytorch_model-2.bin": names[9:]}
        for file, own in shards.items():
            torch.save({name: tensors[name] for name in own}, tmp_path / file)
        weight_map = {name: file for file, own in shards.items() for name in own}
        (tmp_path / "pytorch_model.bin.index.json").write_text(
            json.dumps({"weight_map": weight_map})
        )
    else:
        torch.save(tensors, tmp_path / "pytorch_model.bin")
    load(tmp_path)
