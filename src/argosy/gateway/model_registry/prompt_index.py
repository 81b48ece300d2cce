"""Prompts by the name, and the label or number, under which a caller knows them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from argosy.deployment import PromptConfig
from argosy.gateway.model_registry.adapter_index import DECLARED
from argosy.gateway.model_registry.owner_scopes import OwnerScope, find_owners, list_scopes
from argosy.gateway.principal import Principal
from argosy.protocol import ApiError
from argosy.store import LATEST, AccountSnapshot, Prompt

_MAX_LISTED_VERSIONS = 20


class PromptIndex:
    """Finds the version of a prompt that a request means. Immutable.

    A name of the project hides one of its organisation, which hides one of the whole gateway. Prompts of others are not
    found, as if they did not exist.

    Attributes:
        declared: Those of the settings.
    """

    def __init__(self, stored: Sequence[Prompt] = (), declared: Sequence[Prompt] = ()) -> None:
        self.declared = declared
        self._prompts: dict[OwnerScope, dict[str, list[Prompt]]] = {}
        for prompt in sorted((*stored, *declared), key=lambda each: each.version):
            if prompt.deleted_at is None:
                scope = OwnerScope(prompt.organisation, prompt.project)
                self._prompts.setdefault(scope, {}).setdefault(prompt.name, []).append(prompt)

    def find(self, name: str, version: str, principal: Principal) -> Prompt:
        """Return the version with a number or a label of the prompt that a caller means by a name.

        Raises:
            ApiError: 404 if the caller knows no such prompt, or it has no such version.
        """
        found = (self._prompts.get(scope, {}).get(name) for scope in list_scopes(principal))
        versions = next((each for each in found if each), None)
        if versions is None:
            message = f"The prompt {name[:100]!r} does not exist. Correct its name, or add it."
            raise ApiError(404, "prompt_not_found", message, param="prompt_id")
        if version == LATEST:
            return versions[-1]
        for each in versions:
            if version in {*each.labels, str(each.version)}:
                return each
        known = [label for each in versions for label in each.labels]
        known += [str(each.version) for each in versions]
        listed = ", ".join(known[-_MAX_LISTED_VERSIONS:])
        message = f"The prompt {name!r} has no version {version[:100]!r}. Use one of {listed}."
        raise ApiError(404, "prompt_not_found", message, param="prompt_version")


def resolve_prompt_owners(
    declared: Sequence[PromptConfig], snapshot: AccountSnapshot
) -> tuple[list[Prompt], dict[str, str]]:
    """Return declared prompts with the ids of their owners, and the unknown owners by prompt."""
    owners = find_owners([each.owner for each in declared], snapshot)
    prompts = [
        Prompt(
            id=f"{DECLARED}/{config.name}/{config.version}",
            organisation=scope.organisation,
            project=scope.project,
            name=config.name,
            version=config.version,
            labels=config.labels,
            content=msgspec.json.encode(config.content).decode(),
            created_at=0.0,
            created_by=DECLARED,
        )
        for config in declared
        for scope in owners[config.owner]
    ]
    unknown = {each.name: each.owner for each in declared if each.owner and not owners[each.owner]}
    return prompts, unknown
