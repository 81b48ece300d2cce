"""Reports of a native replica: its load and identity, its work for one request, and the blocks in its prefix cache."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from argosy.protocol.openai_responses import MAX_COUNT, PredictionUsage

ARITHMETIC_ID_CHARS = 32
"""Length of `ArithmeticIdentity.id` in hexadecimal digits."""
NonNegativeCount = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
LOAD_SCHEMA_VERSION = 1
"""Version of `LoadResponse`. Later versions only add fields."""
LoadPhase = Literal[
    "starting",
    "loading",
    "warming",
    "ready",
    "sleeping",
    "waking",
    "restarting",
    "draining",
    "failed",
    "stopped",
]
"""Lifecycle phase of a replica. `loading` and `warming` are parts of its start."""
SLEEP_STATES: frozenset[LoadPhase] = frozenset({"sleeping", "waking"})
"""Phases in which a replica is well, but frees its memory until a gateway wakes it up."""
REPORT_HEADER = b"x-argosy-report"
REPORT_CONTENT = b"content"
"""Value of the header that includes prompt and output in the report."""
MAX_REPORTED_CHARS = 64 * 1024
"""Characters of each prompt and output in a report. Longer ones are cut."""
MAX_REPORTED_ADAPTERS = 256
PUBLIC_MODEL_HEADER = b"x-argosy-public-model"
"""Request header with the name of an adapter for clients, percent-encoded, since the request has its digest."""
ADAPTER_HEADER = b"x-argosy-adapter"
"""Header with the digest of the LoRA adapter that answers, and in a resume, of the one that began the stream."""
Milliseconds = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
BLOCK_NAME_BYTES = 8
"""Bytes of a block name.

In 10 million blocks, two share a name with a probability of 1 in 300,000. A prompt then goes to a second-best replica.
"""


class ArithmeticIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of the arithmetic identity. Replicas with equal identities compute the same bytes for the same request.

    Threads, batch size, chunking, prefix hits and speculation are not part of it, since they do not change a byte.
    """

    weights: str
    """Digest of the checkpoint's files."""
    dtype: str
    """Data type of weights and activations, such as `bfloat16`."""
    quantization: str
    """Format to which the weights are rounded, or `none`."""
    kv_dtype: str
    """Data type of cached keys and values."""
    kernels: str
    """Digest of the engine's own computation code, the versions of torch and of the compiler, and the attention."""
    instruction_set: str
    """Instruction sets that the CPU kernels and torch use, or the compute capability of the GPU."""
    rope: str
    """Kind of the rotary embedding, and a digest of its frequencies."""
    tokenization: str = ""
    """Digest of the tokenizer and the chat template in use. Empty before they are loaded."""

    @property
    def id(self) -> str:
        """Short hash of all parts, by which identities are compared."""
        parts = msgspec.json.encode(msgspec.structs.astuple(self))
        return hashlib.sha256(parts).hexdigest()[:ARITHMETIC_ID_CHARS]


def differing_parts(identities: list[ArithmeticIdentity]) -> dict[str, list[str]]:
    """Return the parts in which the identities differ, each with its different values in sorted order."""
    values = {
        name: sorted({getattr(identity, name) for identity in identities})
        for name in ArithmeticIdentity.__struct_fields__
    }
    return {name: different for name, different in values.items() if len(different) > 1}


class ModelDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A loaded model as user interfaces show it."""

    family: str
    """Family of the architecture, such as `Qwen3`."""
    parameters: NonNegativeCount
    size_bytes: NonNegativeCount
    """Bytes of the files with its weights."""
    format: str
    """Format of these files, such as `safetensors` or `gguf`."""
    quantization: str
    """Format of the weights as they are computed with, such as `bfloat16` or `int8`."""


class StartupProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Current activity of a starting replica, and the completed fraction of it."""

    activity: str
    fraction: Annotated[float, Meta(ge=0, le=1)]


class ResourceUsage(msgspec.Struct, frozen=True, kw_only=True):
    """CPU and memory of an engine core and of its machine, each second.

    A replica reports it. It is shown to viewers of the gateway, and no gateway decides by it.
    """

    memory_bytes: NonNegativeCount = 0
    """Private memory of the core: mapped weights are no part of it. 0 if it is unknown."""
    cpus: NonNegativeFloat = 0.0
    """CPUs that the core used on average."""
    host_cpus: NonNegativeCount = 0
    """CPUs that the core may use. 0 if its system does not count their time."""
    host_free_cpus: NonNegativeFloat = 0.0
    """CPUs that were idle on average, within the limits of its container."""
    host_memory_bytes: NonNegativeCount = 0
    """Memory of the machine, within the limits of its container."""
    host_free_bytes: NonNegativeCount = 0
    """Memory that may still be allocated."""


class ResidentAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """LoRA adapter in the memory of a replica."""

    digest: Annotated[str, Meta(pattern=r"^[0-9a-f]{16}$(?!\n)")]
    """First 8 bytes of its digest, in hexadecimal (`adapter_digest_prefix`)."""
    size_bytes: NonNegativeCount
    """Memory that it takes."""
    idle_s: NonNegativeFloat
    """Seconds since the last request for it began. 0 while it is in use."""


def adapter_digest_prefix(digest: str) -> str:
    """Return the part of an adapter's digest that load reports have."""
    return digest.removeprefix("sha256:")[:16]


class LoadResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Response of `/load`, with the state that a router needs to select a replica."""

    server_load: NonNegativeCount
    """Running generation requests (vLLM's name)."""
    state: str
    models: list[str]
    running: NonNegativeCount
    waiting: NonNegativeCount
    queued_tokens: NonNegativeCount
    """Prompt tokens not computed yet, including those of running prefills."""
    max_seqs: NonNegativeCount
    max_model_len: NonNegativeCount
    block_size: NonNegativeCount
    kv_blocks_total: NonNegativeCount
    kv_blocks_used: NonNegativeCount
    kv_blocks_cached: NonNegativeCount
    step: NonNegativeCount
    step_s: NonNegativeFloat
    prefill_tokens_per_s: NonNegativeFloat = 0.0
    """Measured prefill rate; 0 before the first measurement."""
    decode_s: NonNegativeFloat = 0.0
    """Expected seconds between tokens if one more sequence runs, by the warm-up before a request is measured; 0 if
    neither is known."""
    usage: ResourceUsage | None = None
    """None before the core has reported it, and for replicas of earlier versions."""
    other_gateways: list[dict[int, NonNegativeCount]] = []
    """Running requests by tier of each gateway except the one that requests the report."""
    schema_version: NonNegativeCount = LOAD_SCHEMA_VERSION
    """`LOAD_SCHEMA_VERSION` of the replica."""
    phase: str = ""
    """`LoadPhase`, finer than `state` during a start."""
    startup: StartupProgress | None = None
    """Progress of a start; None while the replica serves."""
    build: str = ""
    """Program and version of the replica."""
    model_revision: str = ""
    """Commit of the model on the hub, or the requested revision; empty for a directory."""
    model_digest: Annotated[str, Meta(pattern=r"^(sha256:[0-9a-f]{64})?$(?!\n)")] = ""
    """SHA-256 digest of the model's files, which were verified when it was loaded. Empty before, or if not known."""
    arithmetic_id: str = ""
    """Id of `arithmetic`; empty before the model is loaded."""
    arithmetic: ArithmeticIdentity | None = None
    """Identity of everything that decides the bytes of outputs. None before the model is loaded."""
    accelerator: str = ""
    """Hardware in use; empty before the model is loaded."""
    zone: str = ""
    """Failure domain of the replica, as given at its start."""
    labels: dict[str, str] = {}
    """Labels of the replica, as given at its start."""
    kv_capacity_tokens: NonNegativeCount = 0
    """Number of tokens that fit into the KV cache if all sequences have `max_model_len`; 0 if unknown.

    With sliding windows, this is less than the blocks times their size, because a token has several blocks."""
    exact: bool = True
    """Whether results do not depend on other requests, bit for bit. Streams of other replicas are not resumed."""
    preemptions_total: NonNegativeCount = 0
    """Sequences preempted to free KV blocks since the engine core started."""
    model: ModelDescription | None = None
    """The loaded model; None before it is loaded."""
    sleep_level: NonNegativeCount = 0
    """How much memory of the model is freed: 0 none, 1 the KV cache and all but the weights, 2 the weights, too."""
    wake_s: NonNegativeFloat = 0.0
    """Seconds that the model took to wake up last. 0 if it has not slept."""
    awake_bytes: NonNegativeCount = 0
    """Memory that the engine core needs while it is awake at most, with the weights that it maps. 0 if unknown."""
    core_exits: NonNegativeCount = 0
    """Times that the engine core ended without being asked to, since the start of the replica."""
    no_drafts_reason: str = ""
    """Why outputs are not drafted. Empty if they may be."""
    last_core_exit: str = ""
    """Why it ended last; empty if it never did."""
    phase_s_total: dict[str, NonNegativeFloat] = {}
    """Seconds spent in steps since the engine core started, by phase: plan, launch, compute, sample, commit."""
    generation_tokens_total: NonNegativeCount = 0
    """Tokens generated since the engine core started."""
    draft_tokens_total: NonNegativeCount = 0
    """Drafts verified since the engine core started."""
    accepted_draft_tokens_total: NonNegativeCount = 0
    """Drafts accepted since the engine core started."""
    draft_saved_s_total: float = 0.0
    """Estimated seconds by which drafts made the tokens of all sequences arrive earlier. May be negative."""
    adapter_memory_bytes: NonNegativeCount = 0
    """Memory for LoRA adapters; 0 if the replica serves none."""
    adapters: Annotated[list[ResidentAdapter], Meta(max_length=MAX_REPORTED_ADAPTERS)] = []
    """Resident adapters, those that were used last first."""
    adapter_load_bytes_per_s: NonNegativeFloat = 0.0
    """Measured rate of loading adapters; 0 before the first measurement."""


class RequestReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Work of a replica for one request, with all of its choices. Fields that do not apply are left out.

    A gateway asks for it with the header `x-argosy-report: 1`, and with `x-argosy-report: content` if prompt and output
    may be kept. The replica sends it as one SSE comment, `: argosy report JSON`, before the metadata comment of the
    last output. A gateway that knows all finish reasons then has the report too, and can complete the usage.
    """

    queue_ms: Milliseconds = 0.0
    """Time in the engine's queue, of the choice that waited longest."""
    steps: Count = 0
    """Steps that generated tokens, of each choice on its own. Tokens that an earlier replica generated are left out."""
    accepted_drafts: Count = 0
    """Generated tokens that were drafts. Each step generated one token more."""
    draft_saved_s: Annotated[float, Meta(ge=-1e6, le=1e6)] = 0.0
    """Estimated seconds by which drafts made the tokens arrive earlier, summed over the choices. May be negative."""
    no_drafts_reason: str = ""
    """Why its output was not drafted. Empty if it could be."""
    grammar_compile_ms: Milliseconds | None = None
    """Time to compile the grammar; 0 if it was cached. None without a grammar."""
    masked_steps: Count = 0
    """Tokens that were sampled under a grammar's mask."""
    reasoning_tokens: Count | None = None
    """Output tokens inside reasoning blocks, including resumed ones. None if the output has no reasoning block."""
    prediction: PredictionUsage | None = None
    """Tokens of the predicted output. None if the request predicts none."""
    tool_calls: Count = 0
    malformed_calls: Count = 0
    """Tool calls that could not be parsed and became text."""
    parser_events: dict[str, Count] = {}
    """Number of events of the output parser by their kind, such as `reasoning` or `call_start`."""
    warnings: list[str] = []
    """Codes of the warnings in the response."""
    prompts: list[str] = []
    """Rendered prompts, if content is reported."""
    outputs: list[str] = []
    """Raw output of each choice with its special tokens, if content is reported."""

    @property
    def has_content(self) -> bool:
        """Whether the report has prompts or outputs."""
        return bool(self.prompts or self.outputs)

    def without_content(self) -> RequestReport:
        """Return the report without prompts and outputs."""
        return msgspec.structs.replace(self, prompts=[], outputs=[])


_decoder = msgspec.json.Decoder(RequestReport)


def parse_replica_report(text: bytes) -> RequestReport | None:
    """Parse the JSON of a report. Unknown fields are ignored. Returns None for anything else than a report."""
    try:
        return _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


class TokenizationKey(msgspec.Struct, frozen=True, kw_only=True):
    """Properties that determine which blocks a text becomes. Equal keys give the same text the same block names."""

    tokenizer: str
    """Identifier of the tokenizer and the chat template."""
    block_size: Annotated[int, Meta(ge=1)]
    """Tokens per block."""


class KvEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Change of a replica's prefix cache.

    A block's name is the first `BLOCK_NAME_BYTES` of its published hash. The hash covers the cache domain and all
    tokens up to the end of the block, so equal names stand for equal prefixes in one domain.
    """

    reset: TokenizationKey | None = None
    """Present if the reader has to forget all earlier events, because all blocks are published again."""
    stored: bytes = b""
    """Packed names of the stored blocks."""
    removed: bytes = b""
    """Packed names of the removed blocks."""


def pack_block_names(names: Iterable[int]) -> bytes:
    """Encode block names for a `KvEvent`."""
    return array("Q", names).tobytes()


def unpack_block_names(packed: bytes) -> array[int]:
    """Decode the block names of a `KvEvent`.

    Raises:
        ValueError: The length is not a multiple of `BLOCK_NAME_BYTES`.
    """
    names = array("Q")
    names.frombytes(packed)
    return names
