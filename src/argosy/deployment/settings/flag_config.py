"""Settings of feature flags, and which rules read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from argosy.deployment.settings.routing_config import RequestConditions
from argosy.policy.traffic import FeatureFlag, FlagError, FlagRules
from argosy.settings import SettingError, SettingPath


class DeclaredFlag(NamedTuple):
    """Feature flag in the settings."""

    name: str
    flag: FeatureFlag


def parse_flag_condition(condition: str) -> tuple[str, str | None]:
    """Return the name of the flag and the variant that a condition needs; None for any whose value is `true`."""
    name, separator, variant = condition.partition("=")
    return name, variant if separator else None


def find_flag_problems(
    flags: Mapping[str, FeatureFlag], rules: Sequence[tuple[SettingPath, RequestConditions]]
) -> Iterator[SettingError]:
    """Yield an error for each problem of flags, and of rules that read them."""
    checked: dict[str, FlagRules] = {}
    for name, flag in flags.items():
        try:
            checked[name] = FlagRules(name, flag)
        except FlagError as error:
            yield SettingError(f"feature flag {name!r}: {error}", ("feature_flags", name))
    for path, rule in rules:
        if rule.flag is None:
            continue
        name, variant = parse_flag_condition(rule.flag)
        here = (*path, "flag")
        if name not in flags:
            yield SettingError.at(
                here, f"no feature flag has the name {name!r}. Add it to `feature_flags`."
            )
        elif variant is not None and variant not in flags[name].variants:
            known = ", ".join(flags[name].variants)
            yield SettingError.at(
                here, f"the flag {name!r} has no variant {variant!r}. Use one of {known}."
            )
        elif variant is None and name in checked and not checked[name].is_boolean:
            yield SettingError.at(
                here, f"the variants of {name!r} are not true and false. Write {name}=VARIANT."
            )


def find_unread_flags(
    flags: Mapping[str, FeatureFlag], rules: Sequence[RequestConditions]
) -> list[str]:
    """Return the names of the flags that no rule reads."""
    read = {parse_flag_condition(rule.flag)[0] for rule in rules if rule.flag is not None}
    return [name for name in flags if name not in read]


def describe_unread_flag(name: str) -> str:
    """Return the warning about a flag that no rule reads."""
    return f"The feature flag {name} changes nothing: no rule reads it. Add `flag: {name}` to one."
