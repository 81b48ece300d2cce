"""Memory of the latest prompts of each tenant, with which later ones are compared."""

from __future__ import annotations

from itertools import count, islice

from argosy.policy.prefix_diagnosis.diagnosis import ServedPrompt
from argosy.policy.tenant_memory import MemoryEntry, TenantMemory

MAX_MEMORY_BYTES = 16 << 20
"""Bytes of all outlines. Beyond it, the oldest ones of the largest tenant are dropped."""
MAX_COMPARED = 16
"""Latest prompts of the same scope with which a prompt is compared, that of its conversation first."""
MAX_SEPARATE = 8
"""Latest prompts of other scopes."""
MAX_SEARCHED = 256


class _StoredPrompt(MemoryEntry, gc=False, eq=False):
    prompt: ServedPrompt


class PromptMemory:
    """Outlines of the latest prompts, by tenant. They are found only for prompts of the same tenant."""

    def __init__(self, max_bytes: int = MAX_MEMORY_BYTES) -> None:
        self._memory = TenantMemory(max_bytes)
        self._prompts: dict[str, dict[str, _StoredPrompt]] = {}
        """Prompts by tenant and key, oldest first."""
        self._conversations: dict[tuple[str, bytes, bytes], str] = {}
        """Key of the latest prompt by tenant, scope and conversation."""
        self._numbers = count()

    def add(self, tenant: str, prompt: ServedPrompt) -> None:
        """Keep a prompt, in the place of the oldest ones of the largest tenant if there is no room."""
        key = f"{next(self._numbers)} {tenant}"
        stored = _StoredPrompt(tenant, key, prompt.outline.memory_bytes, self._drop, prompt)
        if not self._memory.add_cached(stored):
            return
        self._prompts.setdefault(tenant, {})[key] = stored
        if prompt.conversation:
            self._conversations[tenant, prompt.scope, prompt.conversation] = key

    def find(
        self, tenant: str, scope: bytes, conversation: bytes
    ) -> tuple[list[ServedPrompt], list[ServedPrompt]]:
        """Return earlier prompts of the scope and of other scopes, latest first."""
        prompts = self._prompts.get(tenant, {})
        key = self._conversations.get((tenant, scope, conversation), "")
        same = [prompts[key].prompt] if key else []
        separate = list[ServedPrompt]()
        for stored in islice(reversed(prompts.values()), MAX_SEARCHED):
            prompt = stored.prompt
            if prompt.scope != scope:
                if len(separate) < MAX_SEPARATE:
                    separate.append(prompt)
            elif len(same) < MAX_COMPARED and stored.key != key:
                same.append(prompt)
        return same, separate

    def _drop(self, key: str) -> None:
        tenant = key.partition(" ")[2]
        prompts = self._prompts[tenant]
        prompt = prompts.pop(key).prompt
        if not prompts:
            del self._prompts[tenant]
        conversation = tenant, prompt.scope, prompt.conversation
        if self._conversations.get(conversation) == key:
            del self._conversations[conversation]
