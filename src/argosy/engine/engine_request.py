"""Request for one sequence, as the replica server sends it to the engine core and the scheduler runs it."""

from __future__ import annotations

import msgspec

from argosy.engine.pooling import PoolingParams
from argosy.protocol import SamplingParams


class AdapterSource(msgspec.Struct, frozen=True, array_like=True):
    """LoRA adapter of a request, by its content, and where its files are."""

    digest: str
    """Digest of the files (`model_store.Manifest`), which identifies the adapter everywhere."""
    folder: str
    size_bytes: int
    """Size of the weights in the files."""


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="request"):
    """Sequence to generate, or to pool to a vector.

    A request with `n` > 1 is sent as `n` messages. The first is the parent, and its siblings name it in `parent_id`.
    """

    id: str
    prompt: list[int]
    resumed_tokens: list[int] = []
    """Output tokens that another replica generated already (resume). Generation continues exactly after them."""
    params: SamplingParams
    parent_id: str | None = None
    """Id of the request that has the same prompt. This request forks from it once that prompt is prefilled."""
    group_id: str = ""
    """Id that the choices, prompts or inputs of one request share. Empty for a single one."""
    cache_domain: str = ""
    """Cache domain. KV blocks are never shared between domains."""
    tenant: str = ""
    tier: int = 1
    """Priority class. 0 is the most urgent."""
    weight: float = 1.0
    timeout_s: float | None = None
    """Seconds after arrival at which the request ends with the tokens it has (finish reason `timeout`)."""
    shares_outputs: bool = False
    """Whether its output may be drafts of later requests of its cache domain, and theirs drafts of its own."""
    speculation: bool = True
    """Whether steps may compute drafts of its output."""
    prediction: list[int] = []
    """Tokens that the output probably repeats in large parts."""
    adapter: AdapterSource | None = None
    """Adapter that computes the output. None is the model alone."""
    pooling: PoolingParams | None = None
    """Parameters of a sequence that is pooled to a vector. None generates tokens."""

    @property
    def max_tokens(self) -> int:
        """Largest number of output tokens, which the preprocessing has set."""
        return self.params.max_tokens or 0
