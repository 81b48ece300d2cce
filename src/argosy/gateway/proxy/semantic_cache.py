"""Semantic cache: answers a question with the kept answer to a similar one of the same tenant.

Only first turns with one text of a user are compared, without tools. All else in a request, the model and the content
rule have to be equal: they name a partition, and the embedding has the question alone. The answers themselves are in
the `ResponseCache`; the questions and their vectors are in the memory of this gateway.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from argosy.deployment import CacheRule, SemanticCacheConfig
from argosy.gateway.model_registry import ModelRouter
from argosy.gateway.principal import ANONYMOUS
from argosy.gateway.proxy.model_call import ModelCaller
from argosy.gateway.proxy.response_cache import (
    ResponseCache,
    compute_partition,
    select_keys,
)
from argosy.gateway.proxy.single_flight import CacheEntry
from argosy.gateway.request_context import CHAT, EMBEDDINGS, RequestContext
from argosy.gateway.request_fields import TOOL_FIELDS
from argosy.policy.paraphrase import MAX_QUESTION_CHARS, allows_answer
from argosy.protocol import ApiError

if TYPE_CHECKING:
    from argosy.policy.vectors import Vector, VectorIndex

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

MAX_CANDIDATES = 8
"""Most similar questions whose words are compared."""
RETRY_INTERVAL_S = 5.0
"""How long a model is not called after it was too slow or has failed."""
UNVERIFIED = "unverified"
"""Digest of an embedding model whose replicas report none."""
MAX_COMPARISONS = 4
"""Comparisons of dry runs at a time. Further ones are left out."""


class _Embedding(msgspec.Struct, frozen=True):
    index: int
    embedding: list[float]


class _EmbeddingList(msgspec.Struct, frozen=True):
    data: list[_Embedding]


_find_problem = lru_cache(maxsize=64)(SemanticCacheConfig.find_problem)
_decode_embeddings = msgspec.json.Decoder(_EmbeddingList).decode


class SemanticLookup(msgspec.Struct):
    """A question, and the kept answer to a similar one."""

    tenant: str
    partition: str
    question: str
    vector: Vector
    entry: CacheEntry | None = None
    """The answer; None if no similar question has one."""
    similarity: float = 0.0


class SemanticCache:
    """Vectors of the questions whose answers a gateway has seen. Use it from one event loop."""

    def __init__(
        self,
        models: ModelRouter,
        caller: ModelCaller,
        answers: ResponseCache,
        max_bytes: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Create an empty cache.

        Args:
            models: The models, of which one embeds.
            caller: Sends questions to it.
            answers: Keeps the answers.
            max_bytes: Size of all questions and vectors.
            clock: Seconds since the epoch.
        """
        self._models = models
        self._caller = caller
        self._answers = answers
        self._max_bytes = max_bytes
        self._clock = clock
        self._index: VectorIndex | None = None
        self._retry_at: dict[str, float] = {}
        """When a model that has failed is called again, and when a rule that is disabled is checked again."""
        self._comparisons: set[asyncio.Task[None]] = set()

    async def find(
        self, context: RequestContext, rule: CacheRule, rule_name: str
    ) -> SemanticLookup | None:
        """Find the answer to a similar question. Returns None if the request has none, or it cannot be embedded."""
        config, found = rule.semantic, _find_question(context)
        if config is None or found is None:
            return None
        question, other_messages = found
        digest = self._check_model(config, rule_name)
        vectors = None
        if digest is not None:
            vectors = await self._embed(context, config, [question])
        if digest is None or vectors is None:
            self._count(rule_name, "unavailable")
            return None
        content = None if context.content is None else context.content.rule.config
        extra = (digest, None if content is None else msgspec.to_builtins(content))
        tenant, partition = compute_partition(context, other_messages, extra)
        lookup = SemanticLookup(tenant, partition, question, vectors[0])
        is_similar = await self._search(lookup, rule, config)
        if lookup.entry is not None:
            self._count(rule_name, "would_serve" if config.dry_run else "served")
        else:
            self._count(rule_name, "rejected" if is_similar else "none")
        return lookup

    def add(self, lookup: SemanticLookup, config: SemanticCacheConfig, answer_key: str) -> None:
        """Add a question whose answer was kept."""
        self._open_index().add(
            lookup.tenant,
            lookup.partition,
            lookup.question,
            lookup.vector,
            answer_key=answer_key,
            max_entries=config.max_entries,
            now=self._clock(),
        )

    def purge(self, tenant: tuple[str, str] | None, model: str | None) -> None:
        """Remove the questions of a tenant (organisation and project) and a model. None means all."""
        if self._index is not None:
            self._index.remove_matching(select_keys(tenant, model))

    def compare(
        self,
        context: RequestContext,
        rule_name: str,
        config: SemanticCacheConfig,
        lookup: SemanticLookup,
        computed: CacheEntry,
    ) -> None:
        """Compare the answer that a dry run would have sent with the computed one, for a share of the requests."""
        kept = lookup.entry
        draw = zlib.crc32(context.response_id.encode()) / 2**32
        is_dropped = len(self._comparisons) >= MAX_COMPARISONS
        if kept is None or draw >= config.compared_share or is_dropped:
            return
        texts = [_read_text(kept), _read_text(computed)]
        task = asyncio.create_task(self._compare(context, rule_name, config, texts))
        self._comparisons.add(task)
        task.add_done_callback(self._comparisons.discard)

    async def _compare(
        self, context: RequestContext, rule_name: str, config: SemanticCacheConfig, texts: list[str]
    ) -> None:
        kept, computed = (" ".join(each.split()) for each in texts)
        is_same = kept == computed
        if not is_same:
            shortened = [each[:MAX_QUESTION_CHARS] for each in (kept, computed)]
            vectors = await self._embed(context, config, shortened)
            if vectors is None:
                return
            is_same = float(vectors[0] @ vectors[1]) >= config.threshold
        self._count(rule_name, "agreed" if is_same else "differed")

    async def _search(
        self, lookup: SemanticLookup, rule: CacheRule, config: SemanticCacheConfig
    ) -> bool:
        """Set the answer of a lookup to that of the most similar question that the guard allows.

        Returns whether there are similar questions.
        """
        index = self._open_index()
        matches = index.find(
            lookup.partition,
            lookup.vector,
            config.threshold,
            MAX_CANDIDATES,
            self._clock() - rule.max_age_s,
        )
        for match in matches:
            if allows_answer(config.guard, lookup.question, match.question.text):
                key = match.question.answer_key
                entry = await self._answers.read(key, rule.max_age_s)
                if entry is not None:
                    index.use(lookup.tenant, key)
                    lookup.entry, lookup.similarity = entry, match.similarity
                    break
                index.remove(lookup.tenant, key)
        return bool(matches)

    def _check_model(self, config: SemanticCacheConfig, rule_name: str) -> str | None:
        """Return the digest of the embedding model; None if it is not the evaluated one, or has failed just now."""
        name = config.embedding_model
        names = name, f"rule {rule_name}"
        if self._clock() < max(self._retry_at.get(each, 0.0) for each in names):
            return None
        try:
            pool = self._models.find_target(name, ANONYMOUS, {}).pool
        except ApiError:
            return None
        digest = pool.model_digest or UNVERIFIED
        problem = _find_problem(config)
        evaluation = config.evaluation
        if not config.dry_run and evaluation is not None and evaluation.embedding_digest != digest:
            problem = (
                f"{name!r} serves {digest}, and semantic.evaluation is of {evaluation.embedding_digest}. "
                "Run `argosy cache evaluate` again, or serve the evaluated model."
            )
        if problem:
            log.warning("semantic_cache_disabled", rule=rule_name, reason=problem)
            self._pause(f"rule {rule_name}")
            return None
        return digest

    async def _embed(
        self, context: RequestContext, config: SemanticCacheConfig, texts: list[str]
    ) -> list[Vector] | None:
        """Return the vectors of texts with length 1; None if the model cannot embed them in time."""
        import numpy as np  # here, so that gateways without such rules start faster

        name = config.embedding_model
        body = msgspec.json.encode({"model": name, "input": texts})
        try:
            response = await self._caller.call(context, EMBEDDINGS, body, config.timeout_s)
            data = sorted(_decode_embeddings(response).data, key=lambda each: each.index)
            vectors = np.array([each.embedding for each in data], np.float32)
            lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
            if len(vectors) != len(texts) or not np.all((lengths > 0) & np.isfinite(lengths)):
                raise ValueError("the response has no vector for each text")  # noqa: TRY301 - same end
        except (TimeoutError, ApiError, msgspec.DecodeError, ValueError) as error:
            if not isinstance(error, ApiError) or error.status >= 500:
                reason = str(error) or f"no response within {config.timeout_s:g} s"
                log.warning("semantic_embedding_failed", model=name, reason=reason)
                self._pause(name)
            return None
        return list(vectors / lengths)

    def _pause(self, name: str) -> None:
        self._retry_at[name] = self._clock() + RETRY_INTERVAL_S

    def _count(self, rule_name: str, result: str) -> None:
        self._answers.metrics.semantic_lookups.add((rule_name, result))

    def _open_index(self) -> VectorIndex:
        if self._index is None:
            from argosy.policy.vectors import VectorIndex  # it imports NumPy

            self._index = VectorIndex(self._max_bytes)
        return self._index


def _find_question(context: RequestContext) -> tuple[str, list[Any]] | None:
    """Return the only text of a user in a first turn, and the messages before it. None if there is more than that."""
    fields = context.fields
    if context.api is not CHAT or fields.has_media or not fields.raw.keys().isdisjoint(TOOL_FIELDS):
        return None
    if fields.prompt_bytes > 64 * MAX_QUESTION_CHARS:
        return None
    messages = msgspec.json.decode(fields.raw["messages"])
    *others, last = messages
    if any(each.get("role") not in {"system", "developer"} for each in others):
        return None
    if last.keys() != {"role", "content"} or last["role"] != "user":
        return None
    content = last["content"]
    if isinstance(content, list):
        if (
            len(content) != 1
            or content[0].keys() != {"type", "text"}
            or content[0]["type"] != "text"
        ):
            return None
        content = content[0]["text"]
    if not isinstance(content, str) or not 0 < len(content) <= MAX_QUESTION_CHARS:
        return None
    return content, others


def _read_text(entry: CacheEntry) -> str:
    """Return the text of the first choice of an answer."""
    choices = (choice for chunk in entry.chunks for choice in msgspec.json.decode(chunk)["choices"])
    return "".join(
        choice.get("delta", {}).get("content") or "" for choice in choices if not choice["index"]
    )
