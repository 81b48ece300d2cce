"""Damaged, mislabelled and hostile checkpoints: refused by name with a remedy, nothing run, nothing left behind."""

from __future__ import annotations

import json
import math
import os
import pickle
import random
import resource
import struct
import tempfile
import warnings
import zipfile
from base64 import b64encode
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from argosy.engine.execution.checkpoint_formats.checkpoint import resolve_model_path
from argosy.engine.execution.decoders.generic_loader import load_generic_decoder
from argosy.engine.execution.kernels.cpu.device import create_cpu_device
from argosy.engine.execution.loading.model_selection import build_transformers_model
from argosy.engine.serving.text.tokenizer import Tokenizer
from tests.engine.decoder_driver import load_checkpoint
from tests.engine.stored_formats import (
    StoredFormat,
    awq,
    bitsandbytes_4bit,
    compressed_int,
    fp8,
    gptq,
    mxfp4_experts,
)
from tests.engine.test_checkpoint import CONFIG, create_tensors

Change = Callable[[Path], object]

HUGE = 1 << 60
MAX_GROWTH_BYTES = 300 << 20
MAX_MESSAGE_CHARS = 2000
MARKER = "argosy_hostile_checkpoint_ran"
NAME = "model.layers.0.mlp.down_proj"
KEY = "model.layers.1.self_attn.k_proj.weight"
GGUF_KEYS = {"block_count": 2, "embedding_length": 32, "feed_forward_length": 64}


def load(path: Path) -> object:
    """Load the model with Argosy's own decoder."""
    resolved = resolve_model_path(str(path), None)
    return load_checkpoint(resolved)


# --- safetensors ---------------------------------------------------------------------------------


@cache
def plain_file() -> bytes:
    return save(create_tensors())


def with_last(name: str, value: float) -> Tensor:
    """Return a tensor whose last element has another value."""
    tensor = create_tensors()[name]
    tensor.view(-1)[-1] = value
    return tensor


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


def index(weight_map: object) -> Change:
    def apply(path: Path) -> None:
        (path / "model.safetensors").rename(path / "one.safetensors")
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return apply


def index_text(text: str) -> Change:
    def apply(path: Path) -> None:
        index({})(path)
        (path / "model.safetensors.index.json").write_text(text)

    return apply


def weights(changes: dict[str, Tensor | None], *then: Change) -> Change:
    """Add and replace tensors, and remove those that are None. Then apply other changes."""

    def apply(path: Path) -> None:
        tensors = {
            name: each for name, each in (create_tensors() | changes).items() if each is not None
        }
        (path / "model.safetensors").write_bytes(save(tensors))
        for change in then:
            change(path)

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
    "header a list": (header(lambda entries: [entries]), "not an object"),
    "header nested": (
        raw_file(lambda _: struct.pack("<Q", 200_000) + b'{"a":' * 40_000),
        "cannot read",
    ),
    "file empty": (raw_file(lambda _: b""), r"cannot read .*model\.safetensors.*fetch it again"),
    "file cut": (raw_file(lambda data: data[:-1]), r"cannot read .*model\.safetensors.*fetch it"),
    "tensor absent": (weights({KEY: None}), r"has no tensor .*model\.layers\.1\.self_attn\.k_proj"),
    "tensor absent in its shard": (
        weights({KEY: None}, index(dict.fromkeys(create_tensors(), "one.safetensors"))),
        rf"{KEY} from .*one\.safetensors",
    ),
    **{
        f"tensor of shape {shape}": (
            weights({KEY: torch.zeros(shape)}),
            r"self_attn\.k_proj\.weight \[.*model\.safetensors",
        )
        for shape in ((16, 31), (17, 32), (16, 32, 1), (16,), ())
    },
    **{
        f"{name} unread": (
            weights({name: torch.ones(32)}),
            rf"{name} .*model\.safetensors.*config\.json",
        )
        for name in (
            "model.layers.0.self_attn.q_proj.bias",
            "model.layers.1.mlp.down_proj.bias",
            "model.layers.2.input_layernorm.weight",
            "model.layers.0.self_attn.sinks",
            "model.layers.0.self_attn.q_norm.weight",
            "lm_head.bias",
        )
    },
    "many unread": (
        weights({f"model.layers.{layer}.sinks": torch.ones(4) for layer in range(30)}),
        r"layers\.0\.sinks.* and 22 others",
    ),
    **{
        f"{value} in {name}": (
            weights({f"{name}.weight": with_last(f"{name}.weight", value)}),
            rf"model\.safetensors: {name}.*not finite",
        )
        for name, value in (
            ("model.embed_tokens", math.inf),
            ("model.layers.1.mlp.up_proj", math.nan),
            ("model.layers.0.input_layernorm", -math.inf),
        )
    },
    "integers": (
        weights({"model.norm.weight": torch.zeros(32, dtype=torch.int8)}),
        r"model\.norm\.weight is stored as torch\.int8",
    ),
    "index no JSON": (index_text(""), r"model\.safetensors\.index\.json"),
    "config a list": (config_text("[1]"), r"config\.json"),
    "shard above folder": (index({"a": "../one.safetensors"}), "not the name of a file next"),
    "shard a number": (index({"a": 7}), "not the name of a file next"),
    "map a list": (index([["a", "one.safetensors"]]), "has no weight_map"),
    "shards absent": (index({f"t{i}": f"{i}.safetensors" for i in range(999)}), "lacks 0.safe"),
    "config nested": (config_text('{"a":' * 100_000), r"config\.json"),
    "sizes huge": (config(hidden_size=1 << 30), r"hidden_size is 1073741824; it must be"),
    "heads wide": (config(hidden_size=1 << 24), "num_attention_heads is 4; it must be at least"),
    "rotations huge": (config(hidden_size=1 << 18, max_position_embeddings=1 << 20), "the context"),
    "experts huge": (
        config(architectures=["MixtralForCausalLM"], num_local_experts=8192, num_hidden_layers=999),
        "num_hidden_layers.* experts",
    ),
    "remote code": (remote_code, r"architectures is \['EvilForCausalLM'\]"),
    "adapter": (
        lambda path: (path / "config.json").rename(path / "adapter_config.json"),
        r"holds an adapter .*--lora-modules",
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


SPECIAL: dict[str, tuple[Change, str]] = {
    "weights are a device": (linked("model.safetensors", "/dev/zero"), "fetch the model's weights"),
    "config is a device": (linked("config.json", "/dev/zero"), r"no config\.json"),
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
        encoded, _ = stored_format.encode(NAME, weight)
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
        blocks, scales, _ = mxfp4_experts((2, 4, 64), 1)
        tensors = create_tensors() | {"x_blocks": change(blocks).contiguous(), "x_scales": scales}
        (path / "model.safetensors").write_bytes(save(tensors))
        config(quantization_config={"quant_method": "mxfp4"})(path)

    return apply


def keep(_: object) -> None:
    """Change nothing."""


QUANTIZED: dict[str, tuple[Change, str]] = {
    "wrong method": (quantized(gptq(), keep, quant_method="bitsandbytes"), "no stored tensor is"),
    "values empty": (quantized(gptq(), put("qweight", lambda t: t[:0])), "should be a matrix"),
    "method a list": (quantized(gptq(), keep, quant_method=["gptq"]), "quant_method is"),
    "group size 0": (quantized(gptq(), keep, group_size=0), "group_size is 0"),
    "values cut": (quantized(gptq(), put("qweight", lambda t: t[:3])), "down_proj"),
    "values float": (quantized(gptq(), put("qweight", torch.Tensor.float)), "int32"),
    "scales absent": (quantized(gptq(), drop("scales")), r"no tensor .*scales"),
    "scales wide": (quantized(gptq(), put("scales", lambda t: t.repeat(1, 2))), "should have"),
    "scales infinite": (quantized(gptq(), put("scales", lambda t: t * 1e9)), "not finite"),
    "group beyond": (quantized(gptq(), put("g_idx", lambda t: t + 99)), r"g_idx has groups"),
    "GPTQ as AWQ": (quantized(gptq(), keep, **awq().config), "down_proj"),
    "shape huge": (
        quantized(compressed_int(4, 32), put("weight_shape", lambda t: t * (1 << 40))),
        "weight_shape",
    ),
    "FP8 block 0": (quantized(fp8("block"), keep, weight_block_size=[0, 128]), "above 0"),
    "FP8 not FP8": (quantized(fp8("tensor"), put("weight", torch.Tensor.float)), "float8_e4m3fn"),
    "NF4 state noise": (quantized(bitsandbytes_4bit(), state("\1\2{")), "not a description"),
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


def members(
    change: Callable[[dict[str, bytes]], list[tuple[str, bytes]]], compression: int = 0
) -> Change:
    """Change the list of an archive's members."""

    def apply(path: Path) -> None:
        archive(create_tensors)(path)
        file = path / "pytorch_model.bin"
        with zipfile.ZipFile(file) as source:
            content = {name: source.read(name) for name in source.namelist()}
        with warnings.catch_warnings(), zipfile.ZipFile(file, "w", compression) as target:
            warnings.simplefilter("ignore")  # some names are there twice on purpose
            for name, data in change(content):
                target.writestr(name, data)

    return apply


def rewritten(change: Callable[[str, bytes], bytes], compression: int = 0) -> Change:
    """Change each member of an archive."""
    return members(
        lambda content: [(name, change(name, data)) for name, data in content.items()], compression
    )


def raw_archive(data: bytes) -> Change:
    def apply(path: Path) -> None:
        (path / "model.safetensors").unlink()
        (path / "pytorch_model.bin").write_bytes(data)

    return apply


def expanded() -> dict[str, Tensor]:
    """Tensors that claim terabytes with one stored number."""
    return create_tensors() | {"lm_head.weight": torch.zeros(1).expand(1 << 20, 1 << 20)}


ARCHIVES: dict[str, tuple[Change, str]] = {
    "a list": (archive([torch.ones(2)]), "holds a list"),
    "sparse": (archive({"a": torch.ones(2, 2).to_sparse()}), "not a plain tensor"),
    "pickle runs": (archive({"a": Exploit()}), r"pytorch_model\.bin cannot be .*nothing of it was"),
    "pickle alone": (raw_archive(pickle.dumps(Exploit())), "not a zip archive"),
    "zip bomb": (
        rewritten(lambda n, d: d if "pkl" in n else b"\0" * (1 << 20), zipfile.ZIP_DEFLATED),
        "compressed, or its contents are larger",
    ),
    "names not text": (archive({3: torch.ones(2)}), "instead of a tensor"),
    "expanded": (archive(expanded), r"lm_head\.weight .*should have shape"),
    "tensors twice": (
        members(lambda content: [*content.items(), *content.items()]),
        "two members with the same name",
    ),
}


# --- GGUF ----------------------------------------------------------------------------------------


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


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
    (path / "other.gguf").write_bytes((path / "model.gguf").read_bytes())


def lonely_part(path: Path) -> None:
    gguf_model()(path)
    (path / "model.gguf").rename(path / "m-00001-of-00003.gguf")


def gguf_value(key: str, kind: int, value: bytes) -> Change:
    return gguf_header(values=1, rest=text(key) + struct.pack("<I", kind) + value)


GGUF: dict[str, tuple[Change, str]] = {
    "part absent": (lonely_part, "lacks m-00002-of-00003"),
    "two models": (two_models, "holds 2 GGUF models"),
    "old version": (gguf_header(version=1), "version 1"),
    "key not UTF-8": (
        gguf_header(values=1, rest=struct.pack("<Q", 4) + b"\xff" * 8),
        "cannot read",
    ),
    "values of 1 EB": (gguf_header(values=HUGE), "cannot hold"),
    "array of an unknown type": (gguf_header(values=1, rest=gguf_array(77, 1)), "unknown type"),
    "shape overflows": (
        gguf_header(tensors=1, rest=gguf_tensor(shape=(1 << 40, 1 << 40))),
        "ends at byte",
    ),
    "alignment 0": (gguf_value("general.alignment", 4, b"\0" * 4), "alignment is 0"),
    "tensor name of 1 EB": (gguf_header(tensors=1, rest=struct.pack("<Q", HUGE)), "a name has"),
    "heads 0": (gguf_model(**{"attention.head_count": 0}), "head_count is '0'"),
    "other magic": (gguf_bytes(lambda: b"GGML" + b"\0" * 64), "does not start with GGUF"),
    "key of 1 EB": (gguf_header(values=1, rest=struct.pack("<Q", HUGE)), "within its header"),
    "arrays nested": (
        gguf_header(values=1, rest=gguf_array(9, 1) + struct.pack("<IQ", 9, 1) * 99),
        "nested",
    ),
    "type unknown": (gguf_header(values=1, rest=text("a") + struct.pack("<I", 99)), "unknown type"),
    "dimensions 0": (gguf_header(tensors=1, rest=gguf_tensor(shape=())), "0 dimensions"),
    "IQ2": (gguf_header(tensors=1, rest=gguf_tensor(kind=16)), "IQ2_XXS; use a file in .*Q4_K"),
    "ragged": (gguf_header(tensors=1, rest=gguf_tensor(shape=(33, 8), kind=8)), "does not fit Q8"),
    "twice": (
        gguf_header(tensors=2, rest=gguf_tensor(shape=(2,)) + gguf_tensor(shape=(2,))),
        "two tensors",
    ),
    "architecture unknown": (gguf_model(architecture="rwkv7"), "is 'rwkv7'; Argosy reads llama"),
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


TOKENIZERS: dict[str, tuple[Change, str]] = {
    "absent": (tokenizer_file("other", ""), "has no tokenizer"),
    "id of 4 billion": (
        tokenizer_json(model={"type": "BPE", "vocab": {"a": (1 << 32) - 2}, "merges": []}),
        "has the id 4294967294",
    ),
    "pieces of 1 EB": (
        tokenizer_file("tokenizer.model", b"\x0a" + b"\xff" * 8 + b"\x7f"),
        "damaged",
    ),
    "token of 1 MB": (
        tokenizer_file("x.tiktoken", byte_ranks((b"a" * (1 << 20), 256))),
        "a token has 1048576 bytes",
    ),
    "specials huge": (tekken(default_num_special_tokens=HUGE), "default_num_special_tokens is"),
}


def load_tokenizer(path: Path) -> object:
    return Tokenizer.load(path)


# --- models of transformers ------------------------------------------------------------------------


def granite(**values: object) -> Change:
    """Write the configuration of a small Granite, which transformers computes, with changes."""
    sizes = {"model_type": "granite", "architectures": ["GraniteForCausalLM"]}
    return lambda path: (path / "config.json").write_text(json.dumps(CONFIG | sizes | values))


TRANSFORMERS: dict[str, tuple[Change, str]] = {
    "layers huge": (granite(num_hidden_layers=1 << 31), "num_hidden_layers is .*at most 1024"),
    "no model class": (
        granite(architectures=["pipeline"], auto_map={"AutoModelForCausalLM": "code.Model"}),
        r"config\.json",
    ),
    "architecture a number": (granite(architectures=[7]), r"config\.json"),
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


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder of a sound checkpoint. Its loads may neither need much memory nor leave a file behind."""
    folder = tmp_path / "model"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(plain_file())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield folder
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert growth < MAX_GROWTH_BYTES
    left = {file for file in tmp_path.iterdir() if not file.name.startswith("torchinductor")}
    assert left == {folder}


@pytest.mark.parametrize("name", CASES)
def test_hostile_checkpoint_is_refused(folder: Path, name: str) -> None:
    load_model, change, message = CASES[name]
    change(folder)
    files = sorted(folder.iterdir())
    with pytest.raises(ValueError, match=message) as caught:
        load_model(folder)
    assert len(str(caught.value)) < MAX_MESSAGE_CHARS
    assert sorted(folder.iterdir()) == files


FUZZED: dict[str, tuple[str, Change]] = {
    "config": ("config.json", keep),
    "safetensors": ("model.safetensors", keep),
    "quantized": ("model.safetensors", quantized(gptq(), keep)),
    "archive": ("pytorch_model.bin", archive(create_tensors)),
    "gguf": ("model.gguf", gguf_model()),
    "tokenizer": ("tokenizer.json", tokenizer_json()),
}
"""File that is damaged, and the checkpoint that has it."""
NUM_DAMAGES = 200


def damage(data: bytes, rng: random.Random) -> bytes:
    """Cut the data, or overwrite, insert and remove bytes in the header, where lengths and offsets are, or anywhere."""
    if rng.random() < 0.2:
        return data[: rng.randrange(len(data))]
    damaged = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        start = rng.randrange(min(rng.choice((64, 1024, len(data))), len(damaged)))
        damaged[start : start + rng.randint(0, 8)] = rng.choice(
            (rng.randbytes(rng.randint(0, 8)), b"\xff" * 8, b"\0" * 8, b"9" * 8)
        )
    return bytes(damaged)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", FUZZED)
def test_damaged_checkpoint_is_refused_in_time_by_name(folder: Path, name: str) -> None:
    """Damage that no check can see, as of a weight's value, may load."""
    file, write = FUZZED[name]
    write(folder)
    sound = (folder / file).read_bytes()
    load_model = LOADERS.get(name, load)
    messages = {}
    for seed in range(NUM_DAMAGES):
        (folder / file).write_bytes(damage(sound, random.Random(seed)))
        try:
            load_model(folder)
        except ValueError as error:
            messages[seed] = str(error)
    assert len(messages) > NUM_DAMAGES // 4
    for seed, message in messages.items():
        assert str(folder) in message, f"seed {seed}"
        assert len(message) < MAX_MESSAGE_CHARS


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
