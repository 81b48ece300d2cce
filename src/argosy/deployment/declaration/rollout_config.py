"""Declaration of a pool's rollouts with their pinned prompts, and the plan that follows from it."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from argosy.policy.rollout import (
    GateLimits,
    GateSettings,
    Metric,
    MetricRule,
    RolloutPlan,
    RolloutSettings,
    RolloutStep,
)
from argosy.settings import ByOperator

MAX_TEXT = 100_000
MetricName = Literal["errors", "refusals", "ttft", "tpot", "short_output", "long_output"]
Seconds = Annotated[float, Meta(gt=0, le=31_536_000)]
Ratio = Annotated[float, Meta(ge=1, le=1000)]
StepShare = (
    Annotated[float, Meta(ge=0, lt=1)]
    | Annotated[str, Meta(pattern=r"^[0-9]{1,2}(\.[0-9]{1,6})?%$(?!\n)", examples=["25%"])]
)
"""Share of the users or requests, such as `25%` or 0.25."""
DEFAULT_SHADOW_SHARE = 0.1
_DEFAULT_SHARES = {"canary": (0.05, 0.25, 0.5), "a_b": (0.5,)}
"""Shares of the users of strategies that have steps."""
OBJECTIVE_MISS_RATE = 0.05
"""Part of the requests that may miss objectives for 95 % of them."""


class ExpectedText(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Conditions for an answer, which must meet all that are given.

    Raises:
        ValueError: Nothing is expected, or the regular expression is invalid.
    """

    contains: ByOperator[Annotated[str, Meta(min_length=1, max_length=MAX_TEXT)] | None] = None
    """Text that the answer contains."""
    regex: ByOperator[Annotated[str, Meta(min_length=1, max_length=1000)] | None] = None
    """Regular expression in RE2's syntax that matches a part of the answer. It has no look-arounds and no references to
    groups, so that no expression can hold up the controller."""

    def __post_init__(self) -> None:
        if self.contains is None and self.regex is None:
            raise ValueError("expect needs `contains`, `regex` or both")
        self.matches("")

    def matches(self, text: str) -> bool:
        """Return whether a text matches the regular expression, or there is none. Takes time linear in the text."""
        import re2

        options = re2.Options()
        options.log_errors = False  # it would write to stderr
        text = text.encode(errors="replace").decode()  # JSON may contain half of a surrogate pair
        try:
            return re2.compile(self.regex or "", options=options).search(text) is not None
        except re2.error as error:
            reason = error.args[0]
            reason = reason.decode(errors="replace") if isinstance(reason, bytes) else reason
            raise ValueError(f"regex is invalid: {reason}") from None


class PinnedMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Message of a pinned chat."""

    role: ByOperator[Literal["system", "user", "assistant"]] = "user"
    content: ByOperator[Annotated[str, Meta(max_length=MAX_TEXT)]]


class PinnedPrompt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request at temperature 0 with a fixed seed, and the answer that is expected.

    Raises:
        ValueError: It has neither a prompt nor messages, or both.
    """

    prompt: ByOperator[Annotated[str, Meta(min_length=1, max_length=MAX_TEXT)] | None] = None
    """Text to complete. Use `messages` for a chat."""
    messages: ByOperator[Annotated[tuple[PinnedMessage, ...], Meta(max_length=100)]] = ()
    """Messages of a chat. The model needs a chat template."""
    max_tokens: ByOperator[Annotated[int, Meta(ge=1, le=4096)]] = 32
    """Longest answer."""
    expect: ByOperator[Literal["same"] | ExpectedText] = "same"
    """`same` for the bytes that the stable version answers, if both versions have the same weights and arithmetic. With
    other weights the answers differ rightly, and only their absence is a failure; use `{contains: TEXT}` or
    `{regex: PATTERN}` there."""

    def __post_init__(self) -> None:
        if (self.prompt is None) == (not self.messages):
            raise ValueError("a pinned prompt needs either `prompt` or `messages`")


class GoldenSetCheck(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Golden set of the store on which the new version must not be worse than the stable one."""

    set: ByOperator[Annotated[str, Meta(min_length=1, max_length=200, examples=["support@3"])]]
    """`NAME` of a set of the whole gateway (its latest version), `NAME@NUMBER`, or the id of any version."""
    margin: ByOperator[Annotated[float, Meta(ge=0.001, lt=1)]] = 0.05
    """Loss of mean score that counts as none. The rollout goes on with evidence that the loss is smaller."""
    max_loss: ByOperator[Annotated[float, Meta(gt=0, le=1)] | None] = None
    """Measured loss of mean score above which the version is rolled back even without enough evidence."""


class MetricConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one metric, as ratios of the rates of bad events of the new and the stable version."""

    tolerance: ByOperator[Ratio | None] = None
    """Largest ratio that is no regression."""
    margin: ByOperator[Ratio | None] = None
    """The next step needs evidence that the ratio is below it."""
    tight_margin: ByOperator[Ratio | None] = None
    """The same from a share of 25 %."""


class GateConfig(GateLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Comparison of the new with the stable version."""

    metrics: ByOperator[dict[MetricName, MetricConfig]] = msgspec.field(default_factory=dict)
    """Other limits than the defaults, by metric."""
    ignored_metrics: ByOperator[tuple[MetricName, ...]] = ()
    """Metrics that may change, such as `long_output` for a version that answers at greater length."""

    def settings(self, *, has_objectives: bool) -> GateSettings:
        """Return the settings of the gate.

        Raises:
            ValueError: They contradict each other.
        """
        rules: dict[Metric, MetricRule] = {}
        for metric, rule in GateSettings().rules.items():
            if metric.value in self.ignored_metrics:
                continue
            config = self.metrics.get(metric.value, MetricConfig())
            declared = {
                name: value
                for name, value in msgspec.structs.asdict(config).items()
                if value is not None
            }
            rules[metric] = MetricRule(**(msgspec.structs.asdict(rule) | declared))
        limits = {name: getattr(self, name) for name in GateLimits.__struct_fields__}
        if limits["max_miss_rate"] is None and has_objectives:
            limits["max_miss_rate"] = OBJECTIVE_MISS_RATE
        return GateSettings(**limits, rules=rules)


class RolloutConfig(RolloutSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the users of a pool get to a new version of its replicas.

    A running rollout keeps the settings with which it started.
    """

    steps: ByOperator[
        Annotated[tuple[StepShare, ...], Meta(min_length=1, max_length=20)] | None
    ] = None
    """Shares of the users, such as `[5%, 25%, 50%]`, which is the default of `canary`. That of `a_b` is `[50%]`. All
    users follow by themselves."""
    shadow: ByOperator[StepShare | None] = None
    """Share of the requests that are copied to the new version before it serves any user. The copies are compared and
    not billed. 10 % for `canary`, and none for the others. 0 for none."""
    gate: ByOperator[GateConfig] = GateConfig()
    """Comparison of both versions."""
    prompts: ByOperator[tuple[PinnedPrompt, ...] | None] = None
    """Requests that the new version must answer before it gets traffic. None for three built-in ones, `[]` for no
    check."""
    quality: ByOperator[Annotated[tuple[GoldenSetCheck, ...], Meta(max_length=10)]] = ()
    """Golden sets that replicas of both versions answer after the pinned prompts. Evidence of a loss rolls the new
    version back. Without enough evidence the rollout is inconclusive. See also `check_timeout_s`."""

    def build_plan(self, *, has_objectives: bool) -> RolloutPlan:
        """Return the plan.

        Args:
            has_objectives: Whether the fleet declares objectives for 95 % of the requests.

        Raises:
            ValueError: The settings contradict each other.
        """
        shared = {name: getattr(self, name) for name in RolloutSettings.__struct_fields__}
        gate = self.gate.settings(has_objectives=has_objectives)
        return RolloutPlan(**shared, steps=self._build_steps(), gate=gate)

    def _build_steps(self) -> tuple[RolloutStep, ...]:
        shadow = self.shadow
        if shadow is None:
            shadow = DEFAULT_SHADOW_SHARE if self.strategy == "canary" else 0.0
        shares = _DEFAULT_SHARES.get(self.strategy, ()) if self.steps is None else self.steps
        copies = [RolloutStep(share=_share(shadow), is_shadow=True)] if _share(shadow) else []
        return (*copies, *(RolloutStep(share=_share(each)) for each in shares))


def _share(share: float | str) -> float:
    return float(share.removesuffix("%")) / 100.0 if isinstance(share, str) else share
