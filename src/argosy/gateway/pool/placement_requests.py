"""Placement requests: what placement needs to know of a generation request and of its prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial

from msgspec import Raw

from argosy.gateway.principal import Principal
from argosy.gateway.request_fields import TOOL_FIELDS, RequestFields
from argosy.policy import BLOCK_BYTES, compute_prefix_keys
from argosy.policy.placement import PlacementRequest
from argosy.store import Adapter

MAX_AFFINITY_BYTES = 64 * 1024
MAX_DIGESTED_BYTES = 64 * 1024
PREFIX_KEY_FIELDS = frozenset(
    {
        "add_generation_prompt",
        "add_special_tokens",
        "cache_salt",
        "chat_template_kwargs",
        "continue_final_message",
        "tools",
        "truncate_prompt_tokens",
        "truncation_side",
    }
)
"""Request fields beside the prompt that change its tokens or separate its cache entries."""


def build_placement_request(
    request_id: str,
    fields: RequestFields,
    principal: Principal,
    model: str,
    adapter: Adapter | None = None,
    *,
    tier: int,
    deadline: float,
    start_wait_s: float,
    unsuitable: set[str],
) -> PlacementRequest:
    """Build the placement request of a request to a model, or to an adapter of it.

    An adapter's digest stands for the model in the keys of the prompt's blocks, since it changes what is cached.
    """
    content = model if adapter is None else adapter.digest
    return PlacementRequest(
        request_id,
        fields.estimated_prompt_tokens,
        tenant=principal.tenant,
        tier=tier,
        weight=principal.weight,
        compute_block_keys=partial(compute_block_keys, fields, principal.cache_domain, content)
        if fields.generates and fields.prompt_bytes >= BLOCK_BYTES
        else list,
        compute_digest=partial(compute_prompt_digest, fields, principal.tenant),
        tool_tokens=fields.estimated_tool_tokens,
        prompt_bytes=fields.prompt_bytes,
        size_bytes=fields.body_bytes,
        choice_count=fields.choice_count,
        sequence_count=fields.sequence_count,
        max_output_tokens=fields.max_output_tokens,
        session_id=fields.session_id,
        adapter="" if adapter is None else adapter.digest,
        min_homes=0 if adapter is None else adapter.min_homes,
        deadline=deadline,
        is_stream=fields.stream,
        can_aggregate=fields.stream or fields.can_aggregate_stream,
        start_wait_s=start_wait_s,
        unsuitable=unsuitable,
    )


def compute_block_keys(fields: RequestFields, cache_domain: str, content: str) -> list[bytes]:
    """Return the keys of the prompt's blocks, by which replicas that have computed them are found."""
    salt = _prefix_salt(cache_domain, content, fields.raw)
    return compute_prefix_keys(salt, fields.raw_prompt[:MAX_AFFINITY_BYTES], BLOCK_BYTES)


def compute_prompt_digest(fields: RequestFields, tenant: str) -> bytes:
    """Return a digest of tenant and prompt. For a long prompt only its length and its end are hashed."""
    prompt = fields.raw_prompt
    prefix = f"{tenant}\0{fields.prompt_field} {len(prompt)}\0".encode()
    digest = hashlib.blake2b(prefix, digest_size=16)
    digest.update(prompt[-MAX_DIGESTED_BYTES:])
    return digest.digest()


def compute_cache_scope(fields: RequestFields, cache_domain: str, content: str) -> bytes:
    """Return a digest of what separates the cache entries of equal prompts with equal tools."""
    raw = {name: value for name, value in fields.raw.items() if name not in TOOL_FIELDS}
    return hashlib.blake2b(_prefix_salt(cache_domain, content, raw), digest_size=16).digest()


def _prefix_salt(cache_domain: str, content: str, raw: Mapping[str, Raw]) -> bytes:
    """Return a salt that differs if equal prompts have different tokens or must not share cache entries."""
    salt = f"{cache_domain}\0{content}".encode()
    for name in sorted(PREFIX_KEY_FIELDS.intersection(raw)):
        salt += b"\0%b\0%b" % (name.encode(), raw[name])
    return salt
