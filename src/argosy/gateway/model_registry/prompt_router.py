"""Decisions of routes that depend on more than conditions of the request: its prompt, load and budgets."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Collection
from typing import Any, Literal, NamedTuple

from argosy.deployment import ClassifierConfig, RouteConfig
from argosy.gateway.backends import CONSTRAINT_FIELDS
from argosy.gateway.model_routes import RequestRule
from argosy.gateway.pool import Pool
from argosy.gateway.request_fields import RequestFields
from argosy.policy.traffic import PromptSample, ShareController, TrafficSubject

MAX_CONVERSATIONS = 100_000
"""Conversations that are remembered as not simple. Beyond it the one that is idle for the longest time is forgotten."""


class RouteDecision(NamedTuple):
    """Decision of a route about one request."""

    route: str
    model: str
    """The model that answers by this decision."""
    reason: str
    is_dry_run: bool
    outcome: Literal["simple", "not_simple", "degraded"] = "not_simple"
    is_taken: bool = False
    """Whether the route answers the request: it is no dry run, and the outcome is another one than `not_simple`."""
    score: float | None = None
    threshold: float | None = None
    share: float | None = None
    """Part of a request that counts for the share that the threshold follows; None if it does not count."""
    conversation: bytes = b""
    """Key of the conversation, if the route is sticky."""

    @property
    def is_degraded(self) -> bool:
        """Whether the request is answered in another way because of load or a budget."""
        return self.outcome == "degraded" and self.is_taken

    def to_dict(self) -> dict[str, Any]:
        """Format the decision for explanations."""
        row: dict[str, Any] = {
            "route": self.route,
            "model": self.model,
            "decision": self.outcome,
            "reason": self.reason,
            "dry_run": self.is_dry_run,
        }
        if self.score is not None and self.threshold is not None:
            row |= {"score": round(self.score, 4), "threshold": round(self.threshold, 4)}
        return row


class PromptRouter:
    """Decides for routes that look at the prompt, and remembers conversations. Not thread-safe."""

    def __init__(self) -> None:
        self._conversations: OrderedDict[bytes, float] = OrderedDict()
        """Monotonic time of the last request of each conversation that was not simple."""
        self._controllers: dict[str, tuple[ClassifierConfig, ShareController]] = {}
        """Controllers of the classifiers with a share as their target, by name of the route."""

    def keep_routes(self, names: Collection[str]) -> None:
        """Forget what belongs to routes without one of these names."""
        for name in self._controllers.keys() - set(names):
            del self._controllers[name]

    def decide(
        self,
        rule: RequestRule,
        requested: Pool,
        target: Pool,
        subject: TrafficSubject,
        fields: RequestFields | None,
        *,
        tier: int,
        failed: Collection[str] = (),
        pressure: str = "",
    ) -> RouteDecision:
        """Decide whether the target of a route, whose conditions hold, answers a request. Changes nothing.

        Otherwise `requested` answers, the pool of the requested model. `failed` are models that could not answer.
        `pressure` says which load or budget the route is for.
        """
        config = rule.config
        assert isinstance(config, RouteConfig)  # noqa: S101 - checked by the caller
        unknown = "the fields of the request are unknown"
        decision = RouteDecision(rule.name, requested.model, unknown, is_dry_run=config.dry_run)
        if fields is None:
            return decision
        sample = fields.sample_prompt()
        obstacle = _find_unreadiness(target, tier, failed, config.min_wait_s)
        if config.reads_prompt and not obstacle:
            obstacle = _find_obstacle(config, target, fields, sample)
        if config.classifier is not None and not obstacle:
            obstacle = _find_other_version(config.classifier, requested, target)
        if obstacle:
            return decision._replace(reason=obstacle)
        taken = decision._replace(
            model=target.model,
            is_taken=not config.dry_run,
            outcome="degraded" if pressure else "simple",
            reason=pressure or "its conditions",
        )
        if sample is None or not config.reads_prompt:
            return taken
        reason, is_simple = taken.reason, True
        score = threshold = share = None
        if config.classifier is not None:
            trained = config.classifier.trained
            assert trained is not None  # noqa: S101 - read with the settings
            score = trained.score(sample)
            threshold = self._threshold(rule.name, config.classifier)
            is_simple = score < threshold
            reason = f"score {score:.2f} is {'' if is_simple else 'not '}below {threshold:.2f}"
        if config.sticky_s:
            conversation = _conversation_key(rule.name, subject, sample)
            taken, decision = (
                each._replace(conversation=conversation) for each in (taken, decision)
            )
            if self._is_kept(conversation, config.sticky_s):
                is_simple, reason = False, f"the conversation stays with {requested.model}"
        if config.classifier is not None:
            share = _counted_share(config.classifier, is_simple=is_simple)
        return (taken if is_simple else decision)._replace(
            reason=reason, score=score, threshold=threshold, share=share
        )

    def record(self, rule: RequestRule, decision: RouteDecision) -> None:
        """Record that a request was routed by a decision."""
        config = rule.config
        if isinstance(config, RouteConfig) and config.classifier and decision.share is not None:
            self._controller(rule.name, config.classifier).record(decision.share)
        if decision.outcome == "not_simple":
            self.keep_conversation(decision.conversation)

    def keep_conversation(self, conversation: bytes) -> None:
        """Remember that the requested model answers a conversation, if it has a key."""
        if not conversation:
            return
        self._conversations[conversation] = time.monotonic()
        self._conversations.move_to_end(conversation)
        if len(self._conversations) > MAX_CONVERSATIONS:
            self._conversations.popitem(last=False)

    def _is_kept(self, conversation: bytes, sticky_s: float) -> bool:
        """Return whether the requested model has answered a conversation in this time."""
        last_at = self._conversations.get(conversation)
        return last_at is not None and time.monotonic() - last_at <= sticky_s

    def _threshold(self, name: str, config: ClassifierConfig) -> float:
        assert config.trained is not None  # noqa: S101 - read with the settings
        if config.quality_share is not None:
            return config.trained.select_point(config).threshold
        return self._controller(name, config).threshold

    def _controller(self, name: str, config: ClassifierConfig) -> ShareController:
        known = self._controllers.get(name)
        if known is not None and known[0] is config:
            return known[1]
        trained = config.trained
        assert trained is not None  # noqa: S101 - read with the settings
        target = config.traffic_share if config.traffic_share is not None else config.cost_share
        assert target is not None  # noqa: S101 - the only other target
        controller = ShareController(
            trained.select_point(config).threshold,
            target,
            trained.curve[-1].threshold,
            trained.curve[0].threshold,
        )
        self._controllers[name] = config, controller
        return controller


def degrade(rule: RequestRule, config: RouteConfig, pool: Pool, pressure: str) -> RouteDecision:
    """Return the decision of a route without a model, for requests to this pool."""
    return RouteDecision(
        rule.name,
        pool.model,
        pressure or "its conditions",
        is_dry_run=config.dry_run,
        outcome="degraded",
        is_taken=not config.dry_run,
    )


def _find_unreadiness(
    target: Pool, tier: int, failed: Collection[str], max_wait_s: float | None
) -> str:
    """Return why a model cannot answer now; empty if it can."""
    if target.model in failed:
        return f"{target.model} could not answer"
    return describe_load(target, tier, max_wait_s)


def describe_load(pool: Pool, tier: int, max_wait_s: float | None) -> str:
    """Return why a model is overloaded: it has no ready replica, or a longer wait; empty if it is not."""
    wait_s = pool.expected_wait_s(tier, time.monotonic())
    if wait_s is None:
        return f"{pool.model} has no ready replica"
    if max_wait_s is not None and wait_s > max_wait_s:
        return f"{pool.model} has {wait_s:.1f} s of queue, more than {max_wait_s:g} s"
    return ""


def _find_obstacle(
    config: RouteConfig,
    target: Pool,
    fields: RequestFields,
    sample: PromptSample | None,
) -> str:
    """Return why a request is not for the smaller model, whatever its score; empty if the score decides."""
    if sample is None:
        return "the prompt is no text, or too long for the classifier"
    if config.cascade is not None and not (fields.generates and fields.choice_count == 1):
        return "the request is for several choices, or for none"
    if fields.has_tools and (config.tools is not True or config.cascade is not None):
        return "the request has tools"
    if fields.has_media and (config.media is not True or config.cascade is not None):
        return "the request has media"
    if not CONSTRAINT_FIELDS.isdisjoint(fields.raw):
        return "the answer must follow a schema or grammar"
    limit = target.max_model_len
    tokens = fields.estimated_prompt_tokens + (fields.max_output_tokens or 0)
    if limit is not None and tokens > limit:
        return f"the context of {target.model} may be too short"
    return ""


def _find_other_version(config: ClassifierConfig, requested: Pool, target: Pool) -> str:
    """Return that a classifier was made for another version of one of the models; empty if not."""
    trained = config.trained
    assert trained is not None  # noqa: S101 - read with the settings
    for pool, made_for in ((target, trained.small), (requested, trained.large)):
        if made_for.digest and pool.model_digest not in {None, made_for.digest}:
            return f"the classifier was made for another version of {pool.model}; train it again"
    return ""


def _counted_share(config: ClassifierConfig, *, is_simple: bool) -> float | None:
    """Return what a request counts of the traffic or cost of the large model."""
    if config.quality_share is not None:
        return None
    trained = config.trained
    assert trained is not None  # noqa: S101 - read with the settings
    if not is_simple:
        return 1.0
    if config.traffic_share is not None or not trained.large.cost:
        return 0.0
    return min(1.0, trained.small.cost / trained.large.cost)


def _conversation_key(route: str, subject: TrafficSubject, sample: PromptSample) -> bytes:
    """Return the key of a conversation: its session, or else its first message, which later turns repeat."""
    named = subject.session or f"\0{sample.opening}"
    hashed = hashlib.blake2b(digest_size=16)
    for part in (route, subject.tenant, subject.user, named):
        encoded = part.encode("utf-8", "surrogatepass")
        hashed.update(len(encoded).to_bytes(8, "big") + encoded)
    return hashed.digest()
