"""Settings of an adapter (LoRA) that is declared with its base model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from argosy.model_store import ModelStoreError, open_model_store
from argosy.settings import ByOperator
from argosy.store import AdapterReplicas

_DIGEST = re.compile("sha256:[0-9a-f]{64}")


class AdapterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An adapter under a name that requests use. The admin API cannot change it."""

    name: ByOperator[Annotated[str, Meta(min_length=1, max_length=200)]]
    """Name that requests use."""
    source: ByOperator[
        Annotated[
            str,
            Meta(
                pattern=r"^(store:[A-Za-z0-9][A-Za-z0-9._/:-]*|sha256:[0-9a-f]{64})$(?!\n)",
                max_length=300,
                examples=["store:support", "sha256:" + "0" * 64],
            ),
        ]
    ]
    """Stored adapter: `store:NAME`, `store:NAME:STAGE` or `sha256:DIGEST`. A name becomes its digest when the file is
    read."""
    owner: ByOperator[Annotated[str, Meta(min_length=1, max_length=401)] | None] = None
    """Organisation whose requests may name it, or `ORGANISATION/PROJECT`, by names or ids. None for all callers."""
    base_digest: ByOperator[
        Annotated[
            str, Meta(pattern=r"^sha256:[0-9a-f]{64}$(?!\n)", examples=["sha256:" + "0" * 64])
        ]
        | None
    ] = None
    """Digest of the base model that it was made for. None serves it on any version of the base model."""
    min_replicas: ByOperator[AdapterReplicas] = 0
    """Number of replicas that keep it loaded without requests."""
    pinned: ByOperator[bool] = False
    """Whether all replicas keep it loaded."""


def resolve_adapters(adapters: Sequence[AdapterConfig], where: str) -> tuple[AdapterConfig, ...]:
    """Replace names of stored adapters by their digests.

    Args:
        adapters: The settings.
        where: Place of their model in error messages.

    Raises:
        ValueError: The model store has no such adapter.
    """
    resolved = []
    for index, adapter in enumerate(adapters):
        source = adapter.source
        if not _DIGEST.fullmatch(source):
            try:
                source = open_model_store().find(source).digest
            except ModelStoreError as error:
                raise ValueError(f"{where}.adapters[{index}].source: {error}") from error
        resolved.append(msgspec.structs.replace(adapter, source=source))
    return tuple(resolved)
