"""Settings by which another model than the requested one answers: the `traffic` of a model, and the `routes`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from argosy.policy import TruncationPolicy
from argosy.policy.paraphrase import CacheEvaluation, GuardName, guard_version
from argosy.policy.traffic import (
    ClassifierTarget,
    DailyWindow,
    FlagCondition,
    Language,
    PromptClassifier,
    TrafficRoute,
    WeightedPool,
)
from argosy.settings import ByCommandLine, ByOperator
from argosy.store import Tier

ANY_HEADER_VALUE = "*"
"""Matches any value of a header."""

HeaderName = Annotated[
    str, Meta(pattern=r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+$(?!\n)", examples=["x-team"])
]
HeaderValue = Annotated[str, Meta(pattern=r"^([!-~]([ -~]*[!-~])?)?$(?!\n)", examples=["blue"])]
"""A header's value without surrounding spaces."""


class TrafficTarget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model that answers for a part of the users of another one."""

    model: ByOperator[str]
    """The model, by any of its names. It may be the one to which the setting belongs."""
    weight: ByOperator[Annotated[float, Meta(ge=0, le=1e9)]] = 1.0
    """Share of the users relative to the other models."""


def validate_traffic(
    model: str,
    traffic: Sequence[TrafficTarget],
    fallback_models: Sequence[str],
    max_wait_s: float | None,
    other_models: Mapping[str, bool],
) -> None:
    """Check the traffic settings of a model.

    `other_models` says whether a model divides its own traffic, by each name of the other models.

    Raises:
        ValueError: The settings are invalid. The message says what to change.
    """
    for setting, names in (
        ("traffic", [target.model for target in traffic]),
        ("fallback_models", fallback_models),
    ):
        for name in names:
            if name == model:
                continue
            if name not in other_models:
                known = ", ".join(sorted(other_models)) or "none"
                raise ValueError(
                    f"{setting}: no other model has the name {name!r}. Use one of: {known}."
                )
            if other_models[name]:
                raise ValueError(
                    f"{setting}: the model {name!r} divides its own traffic. Name the models that answer for it."
                )
    if max_wait_s is not None and not fallback_models:
        raise ValueError("max_wait_s: no other model takes over. Add `fallback_models`.")
    build_traffic_route(model, traffic, fallback_models, max_wait_s)


def build_traffic_route(
    model: str,
    traffic: Sequence[TrafficTarget],
    fallback_models: Collection[str],
    max_wait_s: float | None,
) -> TrafficRoute | None:
    """Build the traffic route of a model from its settings; None if the model itself always answers.

    Raises:
        ValueError: The weights are invalid.
    """
    if not (traffic or fallback_models):
        return None
    pools = [WeightedPool(pool=target.model, weight=target.weight) for target in traffic]
    return TrafficRoute(
        model=model,
        pools=tuple(pools) or (WeightedPool(pool=model),),
        fallback_pools=tuple(fallback_models),
        max_wait_s=max_wait_s,
    )


class RequestConditions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Conditions of a rule for requests, which must all hold."""

    name: ByOperator[Annotated[str, Meta(min_length=1, max_length=200)] | None] = None
    """Name in explanations and logs. Defaults to the position, for example `routes[0]`."""
    model: ByOperator[str | None] = None
    """Requested model, by any of its names. None matches every model."""
    headers: ByOperator[Annotated[dict[HeaderName, HeaderValue], Meta(min_length=1)] | None] = None
    """Headers that the request must have. The value `*` matches any value."""
    tenants: ByOperator[Annotated[tuple[str, ...], Meta(min_length=1)] | None] = None
    """Organisations, or projects as organisation/project, by name or id. The request must belong to one of them."""
    tiers: ByOperator[Annotated[tuple[Tier, ...], Meta(min_length=1)] | None] = None
    """Tiers. The tenant must be in one of them."""
    flags: ByOperator[Annotated[tuple[str, ...], Meta(min_length=1)] | None] = None
    """Flags of projects and keys. The project or the key must have one of them."""
    flag: ByOperator[FlagCondition | None] = None
    """Name of a feature flag whose variant for the request must be `true`, or name and variant as `NAME=VARIANT`."""
    windows: ByOperator[Annotated[tuple[DailyWindow, ...], Meta(min_length=1)] | None] = None
    """Times of the day or week. One of them must contain the request's arrival."""
    min_prompt_tokens: ByOperator[Annotated[int, Meta(ge=1)] | None] = None
    """Smallest prompt, in tokens as the gateway estimates them: a quarter of the bytes of its text and tools."""
    max_prompt_tokens: ByOperator[Annotated[int, Meta(ge=1)] | None] = None
    """Largest prompt, in the same tokens."""
    tools: ByOperator[bool | None] = None
    """Whether the request must have tools, or must have none."""
    media: ByOperator[bool | None] = None
    """Whether the request must have pictures, sounds, videos or files, or must have none."""
    languages: ByOperator[Annotated[tuple[Language, ...], Meta(min_length=1)] | None] = None
    """Languages. The last message of the user must be in one of them, by its script or by its function words. Short
    texts without function words are in none."""


class ClassifierConfig(ClassifierTarget, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A trained classifier of prompts, and what it is to reach."""

    file: ByCommandLine[str | None] = None
    """File that `argosy routing train` has written. A relative path is relative to the folder of this file. Its content
    takes the place of the path when this file is read."""
    trained: ByOperator[PromptClassifier | None] = None
    """Content of such a file, in place of its path."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.file is None) == (self.trained is None):
            raise ValueError("give the file of the classifier, or its content as trained")


Logprob = Annotated[float, Meta(ge=-100, le=0)]


class JudgeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model of this gateway that grades a smaller model's answer before the client gets it."""

    model: ByOperator[str]
    """The judge, by any of its names. Its tokens are billed to the project that asks: at most 8 of output, and those
    of 4,096 characters of the question and 16,000 of the answer."""
    min_grade: ByOperator[Annotated[float, Meta(ge=0, le=1)]] = 0.7
    """Smallest grade, from 0 to 1, of an answer that the client gets."""
    sure_mean_logprob: ByOperator[Logprob | None] = None
    """Mean log-probability from which an answer is not graded, which saves the judge's tokens."""
    on_failure: ByOperator[Literal["keep", "escalate"]] = "keep"
    """Effect of a grade that does not come in time, or for which the limits leave no room: `keep` sends the answer."""
    timeout_s: ByOperator[Annotated[float, Meta(gt=0, le=60)]] = 5.0
    """Time for the grade."""


class CascadeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When the requested model answers after all, by the log-probabilities of the smaller model's answer or a judge."""

    min_mean_logprob: ByOperator[Logprob | None] = None
    """Smallest mean log-probability of its tokens."""
    min_token_logprob: ByOperator[Logprob | None] = None
    """Smallest log-probability of each of its tokens."""
    after_tokens: ByOperator[Annotated[int, Meta(ge=1, le=4096)] | None] = None
    """Number of tokens that decide. A shorter answer decides at its end. None holds back the whole answer."""
    judge: ByOperator[JudgeConfig | None] = None
    """A model that grades whole answers with sufficient log-probabilities."""

    def __post_init__(self) -> None:
        if self.judge is None and not self.has_least:
            raise ValueError("give min_mean_logprob, min_token_logprob or judge")
        if self.judge is not None and self.after_tokens is not None:
            raise ValueError("judge: it grades whole answers. Remove `after_tokens` or `judge`.")

    @property
    def has_least(self) -> bool:
        """Whether log-probabilities alone can be too low."""
        return self.min_mean_logprob is not None or self.min_token_logprob is not None

    @property
    def needs_logprobs(self) -> bool:
        """Whether log-probabilities decide anything."""
        judge = self.judge
        return self.has_least or (judge is not None and judge.sure_mean_logprob is not None)


class RouteConfig(RequestConditions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one route: its conditions, and what happens if they hold. By default another model answers."""

    target_model: ByOperator[str | None] = None
    """The model that answers. Its own routes are not applied, but its `traffic` and `fallback_models` are."""
    max_cached_age_s: ByOperator[Annotated[float, Meta(gt=0, le=86_400)] | None] = None
    """In place of a model: a cached answer up to this age, if a cache rule has kept one. Without one, later routes or
    the requested model answer. `response_cache.retention_s` bounds the age, too."""
    refuse: ByOperator[Annotated[str, Meta(min_length=1, max_length=1000)] | None] = None
    """In place of a model: the request is refused with this message, unless the cache has an answer."""
    min_wait_s: ByOperator[Annotated[float, Meta(ge=0, le=3600)] | None] = None
    """Condition: a new request would wait for the requested model for longer than this, or it has no ready replica. The
    route is skipped if its own model cannot answer in time either."""
    min_budget_used: ByOperator[Annotated[float, Meta(ge=0, le=1)] | None] = None
    """Condition: this part of a budget in dollars is used up or reserved, of the sender's key, user, project or
    organisation."""
    classifier: ByOperator[ClassifierConfig | None] = None
    """Only prompts that a classifier takes for simple are answered by `target_model`. Requests with tools or media need
    the condition `tools: true` or `media: true`, and requests for JSON or another grammar are never simple."""
    cascade: ByOperator[CascadeConfig | None] = None
    """`target_model` answers first. Its answer is held back, and replaced by the requested model's if it is unlikely or
    graded too low. All are billed. Requests for several choices, tools, media or a grammar go to the requested one."""
    sticky_s: ByOperator[Annotated[float, Meta(ge=0, le=86_400)]] = 0.0
    """How long a conversation stays with the requested model once that has answered, because it has the prompt cached.
    0 decides on each request anew."""
    dry_run: ByOperator[bool] = False
    """Decide and report, but let later routes and the requested model answer."""

    @property
    def has_pressure(self) -> bool:
        """Whether load or a budget is a condition."""
        return self.min_wait_s is not None or self.min_budget_used is not None

    @property
    def reads_prompt(self) -> bool:
        """Whether the prompt or its answer decides."""
        return self.classifier is not None or self.cascade is not None

    @property
    def decides_by_prompt(self) -> bool:
        """Whether more than conditions decides."""
        return self.reads_prompt or self.dry_run


class SemanticCacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings for answers to similar questions. They need the evaluation that `argosy cache evaluate` prints."""

    embedding_model: ByOperator[str]
    """Model that embeds questions, by any of its names. Its tokens are billed to the project that asks."""
    threshold: ByOperator[Annotated[float, Meta(ge=0.85, le=1)]] = 0.85
    """Smallest cosine similarity of two questions with the same answer."""
    guard: ByOperator[GuardName] = "no_substitution"
    """How words are compared: `no_residual` wants the same words or synonyms in the same order, and with
    `no_substitution` one question may have more."""
    dry_run: ByOperator[bool] = False
    """Only count which answers would have been sent, and compare some of them with the computed ones."""
    compared_share: ByOperator[Annotated[float, Meta(ge=0, le=1)]] = 0.1
    """Share of these answers that a dry run compares, which embeds both."""
    max_entries: ByOperator[Annotated[int, Meta(ge=1, le=20_000)]] = 5000
    """Most questions that a gateway keeps for a project. Those that were used least recently are dropped first."""
    timeout_s: ByOperator[Annotated[float, Meta(gt=0, le=10)]] = 0.5
    """How long a request waits for the embedding. Then its answer is computed."""
    max_wrong_answers: ByOperator[Annotated[float, Meta(gt=0, le=0.2)]] = 0.05
    """Declared bound of the share of wrong answers to similar questions with another answer. The upper 95 % bound of
    the evaluation has to be below it."""
    evaluation: ByOperator[CacheEvaluation | None] = None
    """Result of `argosy cache evaluate`. Only a dry run does without."""

    def find_problem(self) -> str:
        """Return why the cache may not answer, and what to change; empty if it may."""
        evaluation, command = self.evaluation, "argosy cache evaluate"
        if self.dry_run:
            return ""
        if evaluation is None:
            return f"semantic.evaluation is missing. Add what `{command}` prints, or set dry_run: true."
        if evaluation.guard != self.guard or evaluation.guard_version != guard_version():
            return (
                f"semantic.evaluation is of the guard {evaluation.guard} {evaluation.guard_version}, and not of "
                f"{self.guard} {guard_version()}. Run `{command}` again."
            )
        if evaluation.threshold > self.threshold:
            return f"semantic.evaluation is of the threshold {evaluation.threshold:g}. Use no lower one than that."
        if evaluation.wrong_bound > self.max_wrong_answers:
            return (
                f"semantic.evaluation: up to {evaluation.wrong_bound:.2%} wrong answers ({evaluation.wrong_answers} of "
                f"{evaluation.unequal_pairs} pairs, upper 95 % bound) are more than max_wrong_answers "
                f"{self.max_wrong_answers:.2%}. Use a higher threshold, another guard or more pairs."
            )
        return ""


class CacheRule(RequestConditions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one cache rule: its conditions, and which answers are kept and replayed if they hold."""

    max_age_s: ByOperator[Annotated[float, Meta(gt=0, le=86_400)]] = 3600.0
    """Age from which an answer is computed again. `response_cache.retention_s` bounds it, too."""
    sampled: ByOperator[bool] = False
    """Keep sampled answers as well. By default only answers at temperature 0 or to a seed of the client are kept."""
    with_tools: ByOperator[bool] = False
    """Keep answers to requests with tools as well."""
    charge: ByOperator[Annotated[float, Meta(ge=0, le=1)]] = 0.0
    """Part of the model's price that a replayed answer costs."""
    semantic: ByOperator[SemanticCacheConfig | None] = None
    """Answer similar questions, too. Off by default."""


class SummaryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model of this gateway that summarises what is dropped from a conversation."""

    model: ByOperator[str]
    """The model, by any of its names. Its tokens are billed to the project that asks."""
    max_tokens: ByOperator[Annotated[int, Meta(ge=16, le=2048)]] = 256
    """Longest summary."""
    max_chars: ByOperator[Annotated[int, Meta(ge=1000, le=200_000)]] = 32_000
    """Characters of the dropped messages that the model reads, the latest ones."""
    timeout_s: ByOperator[Annotated[float, Meta(gt=0, le=120)]] = 20.0
    """Time for a summary. Without one the messages are dropped as without this setting."""


class TruncationRule(RequestConditions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one truncation rule: its conditions, and how chats that are too long become shorter if they hold."""

    policy: ByOperator[TruncationPolicy] = "oldest_turns"
    """`refuse`, `oldest_turns`, or `middle`, which keeps the first turn too. A request with `truncation: disabled` is
    refused if it is too long."""
    keep: ByOperator[Annotated[float, Meta(ge=0.1, le=0.95)]] = 0.75
    """Share of the context's room for prompts that is kept of a longer one. The next cut follows when it is full."""
    answer_tokens: ByOperator[Annotated[int, Meta(ge=1)] | None] = None
    """Tokens that are kept for answers of requests without a limit. By default an eighth of the context."""
    summary: ByOperator[SummaryConfig | None] = None
    """Put a summary of the dropped messages in their place."""


def validate_conditions(
    config: RequestConditions, model_names: Collection[str], *, has_accounts: bool
) -> None:
    """Check a rule for conditions that can never hold, and a route for its model.

    `model_names` are all names and aliases of models.

    Raises:
        ValueError: The rule is invalid. The message says what to change.
    """
    named = [("model", config.model)]
    if isinstance(config, RouteConfig):
        judge = None if config.cascade is None else config.cascade.judge
        named += [("target_model", config.target_model)]
        named += [("cascade.judge.model", None if judge is None else judge.model)]
    if isinstance(config, TruncationRule) and config.summary is not None:
        named += [("summary.model", config.summary.model)]
    for key, model in named:
        if model is not None and model not in model_names:
            known = ", ".join(sorted(model_names))
            raise ValueError(f"{key}: no model has the name {model!r}. Use one of {known}.")
    if isinstance(config, CacheRule) and config.semantic is not None:
        _validate_semantic_cache(config.semantic, model_names)
    if not has_accounts and (config.tenants or config.tiers or config.flags):
        raise ValueError(
            "tenants, tiers and flags belong to accounts, which need a store. Add `store`, or remove them."
        )
    if isinstance(config, RouteConfig):
        _validate_effect(config, has_accounts=has_accounts)
    least, most = config.min_prompt_tokens, config.max_prompt_tokens
    if least is not None and most is not None and least > most:
        raise ValueError("no prompt has min_prompt_tokens above max_prompt_tokens. Exchange them.")
    if isinstance(config, RouteConfig) and config.sticky_s and not config.reads_prompt:
        raise ValueError(
            "sticky_s: conditions alone decide. Add `classifier` or `cascade`, or remove it."
        )
    names = [name.lower() for name in config.headers or ()]
    duplicates = {name for name in names if names.count(name) > 1}
    if duplicates:
        raise ValueError(
            f"headers: {min(duplicates)!r} is defined twice (names are case-insensitive). Keep one."
        )


def _validate_effect(config: RouteConfig, *, has_accounts: bool) -> None:
    """Check that a route has one effect. Raises ValueError."""
    effects = (config.target_model, config.max_cached_age_s, config.refuse)
    if sum(effect is not None for effect in effects) != 1:
        raise ValueError("give one of target_model, max_cached_age_s and refuse")
    if config.target_model is None and config.reads_prompt:
        raise ValueError(
            "classifier and cascade select a model. Add `target_model`, or remove them."
        )
    if config.min_budget_used is not None and not has_accounts:
        raise ValueError("min_budget_used: budgets need a store. Add `store`, or remove it.")


MAX_CLASSIFIER_BYTES = 1 << 20
"""Bytes that are read of the file of a classifier. A larger file is none."""


def read_classifiers(routes: Sequence[RouteConfig], files: Sequence[Path]) -> list[RouteConfig]:
    """Replace the files of classifiers by their content.

    Args:
        routes: The settings.
        files: The settings file of each route.

    Raises:
        ValueError: A file cannot be read, or is no classifier of this version. The message says what to change.
    """
    return [
        route
        if route.classifier is None or route.classifier.file is None
        else msgspec.structs.replace(
            route,
            classifier=msgspec.structs.replace(
                route.classifier,
                file=None,
                trained=read_classifier(
                    file.parent / Path(route.classifier.file).expanduser(),
                    f"{file}: routes[{index}].classifier.file",
                ),
            ),
        )
        for index, (route, file) in enumerate(zip(routes, files, strict=True))
    ]


def read_classifier(path: Path, where: str) -> PromptClassifier:
    """Read a classifier that `argosy routing train` has written. `where` begins error messages.

    Raises:
        ValueError: As `read_classifiers`.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_CLASSIFIER_BYTES)
        return msgspec.json.decode(content, type=PromptClassifier)
    except OSError as error:
        raise ValueError(
            f"{where}: cannot read {path} ({error.strerror}). Check the path."
        ) from error
    except ValueError as error:
        raise ValueError(
            f"{where}: {path} is no classifier ({error}). Write it with `argosy routing train`."
        ) from error


def _validate_semantic_cache(config: SemanticCacheConfig, model_names: Collection[str]) -> None:
    """Check that a semantic cache may be on. Raises ValueError, whose message says what to change."""
    if config.embedding_model not in model_names:
        known = ", ".join(sorted(model_names))
        raise ValueError(
            f"semantic.embedding_model: no model has the name {config.embedding_model!r}. Use one of {known}."
        )
    if problem := config.find_problem():
        raise ValueError(problem)


def rule_name(config: RequestConditions, setting: str, index: int) -> str:
    """Return the configured name of a rule, or its position in a setting such as `routes[0]`."""
    return f"{setting}[{index}]" if config.name is None else config.name
