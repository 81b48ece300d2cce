"""Settings of prompts: declared versions of templates, and rules by which they are put before messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from msgspec import Meta

from argosy.deployment.settings.routing_config import RequestConditions
from argosy.policy.prompts import CompiledPrompt, PromptContent
from argosy.settings import ByOperator, SettingError
from argosy.store import PRODUCTION, PromptLabel, PromptName, PromptVersionNumber


class PromptConfig(PromptContent, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Version of a prompt. The admin API cannot change it."""

    name: ByOperator[PromptName]
    """Name that requests use (`prompt_id`)."""
    version: ByOperator[PromptVersionNumber] = 1
    """Number of the version. Give changed templates a new one, since what has run stays readable by its number."""
    labels: ByOperator[Annotated[tuple[PromptLabel, ...], Meta(max_length=20)]] = (PRODUCTION,)
    """Names that requests may use in place of the number. Requests without either get `production`."""
    owner: ByOperator[Annotated[str, Meta(min_length=1, max_length=401)] | None] = None
    """Organisation whose requests may use it, or `ORGANISATION/PROJECT`, by names or ids. None for all callers."""

    @property
    def content(self) -> PromptContent:
        """The version without its name."""
        return PromptContent(
            **{name: getattr(self, name) for name in PromptContent.__struct_fields__}
        )


class PromptRule(RequestConditions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one prompt rule: its conditions, and the prompt that is put before the messages if they hold."""

    prompt: ByOperator[PromptName]
    """Name of the prompt, as a request of the same caller would name it."""
    label: ByOperator[PromptLabel] = PRODUCTION
    """Label or number of its version."""
    only_named: ByOperator[bool] = False
    """Only requests that name this prompt and no version of it, whose version the rule then selects. Otherwise the
    rule also puts the prompt before the messages of requests that name none."""


def find_prompt_problems(
    prompts: Sequence[PromptConfig], rules: Sequence[PromptRule], *, has_accounts: bool
) -> Iterator[SettingError]:
    """Yield an error for each problem of the declared prompts. The messages say what to change."""
    known = set[Any]()
    for index, prompt in enumerate(prompts):
        path = ("prompts", index)
        where = f"prompt {prompt.name!r} version {prompt.version}"
        if prompt.owner is not None and not has_accounts:
            yield SettingError.at(
                (*path, "owner"), "owners are organisations, which need a store. Add `store`."
            )
        for key in (prompt.version, *prompt.labels):
            if (prompt.owner, prompt.name, key) in known:
                kind = "version" if isinstance(key, int) else "label"
                yield SettingError(f"{where}: the {kind} {key!r} is defined twice. Keep one.", path)
            known.add((prompt.owner, prompt.name, key))
        try:
            CompiledPrompt(prompt.content)
        except ValueError as error:
            yield SettingError(f"{where}: {error}", path)
    if not has_accounts:  # otherwise tenants may have them
        names = {prompt.name for prompt in prompts}
        for index, rule in enumerate(rules):
            if rule.prompt not in names:
                yield SettingError.at(
                    ("prompt_rules", index, "prompt"),
                    f"no prompt has the name {rule.prompt!r}. Add it to `prompts`.",
                )
