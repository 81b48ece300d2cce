"""Options of a pool whose engine is `argosy`: those of `argosy replica` that the fleet does not set itself."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from argosy.settings import Size

AtLeastOne = Annotated[int, Meta(ge=1)]


class ArgosyOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `argosy replica`. None leaves the default of the command."""

    dtype: Literal["auto", "bfloat16", "float32", "float16"] | None = None
    """Data type of weights and KV cache."""
    device: Literal["auto", "cpu", "cuda"] | None = None
    """Device that runs the model."""
    quantize: Literal["int8", "int4", "fp8", "none"] | None = None
    """Quantize weights while they are loaded."""
    task: Literal["auto", "generate", "embed", "score"] | None = None
    """Use of the model: text, embeddings or scores."""
    model_impl: Literal["auto", "argosy", "transformers"] | None = None
    """Implementation of the model."""
    trust_remote_code: bool = False
    """Run Python code in the model's directory."""
    chat_template: str | None = None
    """Jinja file to use instead of the model's template."""
    tool_format: str | None = None
    """Format of tool calls and reasoning."""
    generation_config: str | None = None
    """Source of sampling defaults: `auto`, `none`, or a folder."""
    override_generation_config: dict[str, float | None] | None = None
    """Sampling defaults that replace those of the generation config."""
    max_model_len: AtLeastOne | None = None
    """Maximum tokens of prompt and output."""
    max_seqs: AtLeastOne | None = None
    """Maximum number of running sequences."""
    kv_memory: Size | None = None
    """KV cache memory."""
    kv_dtype: Literal["auto", "fp8"] | None = None
    """Data type of the KV cache."""
    host_kv: Size | None = None
    """Host memory for evicted KV blocks."""
    pack_cache: Size | None = None
    """Disk space for packed weights."""
    threads: Annotated[int, Meta(ge=1, le=1024)] | None = None
    """CPU threads."""
    colocated_replicas: Annotated[int, Meta(ge=0)] | None = None
    """Number of other replicas on the same CPUs or GPU, with which each shares cores and memory."""
    max_step_tokens: AtLeastOne | None = None
    """Token budget of an engine step."""
    batching: Literal["continuous", "dynamic", "static"] | None = None
    """How requests share steps."""
    prefix_cache: bool = True
    """Reuse the KV blocks of prompts with a common prefix."""
    request_timeout: Annotated[float, Meta(ge=0.001)] | None = None
    """Timeout of one request in seconds."""
    unknown_fields: Literal["ignore", "refuse"] | None = None
    """Unknown request fields: ignored and named in a response header, or refused."""
    vllm_metrics: bool = False
    """Export metrics under vLLM's names too."""
    log_level: Literal["debug", "info", "warning", "error"] | None = None
    """Lowest level that is logged."""


FLEET_OPTIONS = {
    "model": "models[].source",
    "revision": "models[].revision",
    "digest": "models[].digest",
    "served_model_name": "models[].name",
    "drain_deadline": "drain_deadline_s of the pool",
    "zone": "zones of the pool",
    "label": "labels of the pool",
    "log_name": "",
    "host": "",
    "port": "",
    "uds": "",
    "tls_cert": "",
    "tls_key": "",
    "tls_client_ca": "",
}
"""Options of `argosy replica` that the fleet sets, with the setting to use instead. Empty where there is none."""
