"""Checks of a rollout: its pinned prompts on real HTTP servers, and the error budget in a real ledger."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from tests.support.fake_upstream import FakeUpstream, UpstreamRequest
from tests.support.migrated_store import open_migrated_store
from tests.support.usage_rows import usage_row

from argosy.deployment import (
    ExpectedText,
    GoldenSetCheck,
    ObjectiveReader,
    ObjectivesConfig,
    PinnedMessage,
    PinnedPrompt,
    SloConfig,
)
from argosy.fleet.control.pinned_prompts import DEFAULT_PROMPTS, check_pinned_prompts
from argosy.fleet.control.quality_check import check_quality
from argosy.fleet.control.rollout_evidence import (
    BUDGET_INTERVAL_S,
    BUDGET_WINDOW_S,
    MIN_BUDGET_REQUESTS,
    ErrorBudgetReader,
)
from argosy.policy.objectives import HourCounts
from argosy.policy.rollout import CheckStatus
from argosy.store import ObjectiveHour

CHAT = PinnedPrompt(messages=(PinnedMessage(content="Hi"),), max_tokens=8)
PARIS = PinnedPrompt(prompt="Capital?", expect=ExpectedText(contains="Paris", regex="^The"))
FAILED, PASSED, PENDING = CheckStatus.FAILED, CheckStatus.PASSED, CheckStatus.PENDING
INCONCLUSIVE = CheckStatus.INCONCLUSIVE
NOW = 1_764_230_000.0


@contextlib.asynccontextmanager
async def serve_answers(*answers: str | int) -> AsyncIterator[list[FakeUpstream]]:
    """Run a server for each text or status that it answers to every prompt. Status 0 is a server that has stopped."""

    def build_server(answer: str | int) -> FakeUpstream:
        async def respond(request: UpstreamRequest) -> None:
            if isinstance(answer, int):
                request.send_json(answer, {"error": {"message": "no"}})
                return
            choice = {"message": {"content": answer}} if request.is_chat else {"text": answer}
            request.send_json(200, {"choices": [choice | {"finish_reason": "stop"}]})

        return FakeUpstream(script=respond)

    servers = [build_server(answer) for answer in answers]
    async with contextlib.AsyncExitStack() as stack:
        for server, answer in zip(servers, answers, strict=True):
            await server.listen("127.0.0.1", 0)
            if answer == 0:
                await server.close()
            else:
                stack.push_async_callback(server.close)
        yield servers


@pytest.mark.parametrize(
    ("answers", "prompts", "same_weights", "status", "reason"),
    [
        (("a", "a", "a"), None, True, PASSED, "3 answers are the same"),
        (("a", "a", "b"), None, True, FAILED, "expected 'a' (stop), as the stable version"),
        (("a", "b", "c"), None, False, PASSED, "other weights"),
        (("a", "a", 500), None, False, FAILED, "expected an answer, got status 500"),
        (("a", "a", 503), None, True, PENDING, "answers 503"),
        (("a", 0, "a"), None, True, PENDING, "cannot be reached"),
        ((0, "a", "a"), None, False, PASSED, "3 prompts are answered"),
        ((404, 404, 404), None, True, PASSED, "the same"),
        ((404, 404, 404), [CHAT], True, FAILED, "change the prompt"),
        (("a", "b", "b"), [CHAT], True, FAILED, "prompt 'Hi' at http"),
        (("", "The city is Paris.", "The Paris"), [PARIS], True, PASSED, "as declared"),
        (("", "The city is Rome.", "The Paris"), [PARIS], True, FAILED, "an answer with 'Paris'"),
        (("", "It is Paris.", "The Paris"), [PARIS], True, FAILED, "that matches '^The'"),
        (("", 503, 503), [], True, PASSED, "no pinned prompts"),
    ],
)
async def test_result_follows_the_answers(
    answers: tuple[str | int, ...],
    prompts: list[PinnedPrompt] | None,
    same_weights: bool,
    status: CheckStatus,
    reason: str,
) -> None:
    async with serve_answers(*answers) as (stable, *candidates):
        urls = [server.url for server in candidates]
        result = await check_pinned_prompts(
            stable.url, urls, "chat", prompts, same_weights=same_weights
        )
    assert result.status is status, result.reason
    assert reason in result.reason


@pytest.mark.parametrize(
    ("answers", "check", "status", "reason"),
    [
        (("Yes", "Yes", "Yes"), "numbers", PASSED, "golden set numbers@1: not worse by 5 points"),
        (("Yes", "No", "No"), "numbers@1", FAILED, "worse. Difference -100.0 points"),
        (("Yes", "Yes", "No"), "few", FAILED, "The loss exceeds max_loss, 10 points"),
        (("Yes", "Yes", "Yes"), "few", INCONCLUSIVE, "undecided"),
        (("Yes", "Yes", "Yes"), "missing", INCONCLUSIVE, "The store has no golden set"),
        (("Yes", "Yes", "Yes"), "judged", INCONCLUSIVE, "a judge does not gate a rollout"),
        (("Yes", 0, 0), "few", PENDING, "golden set few: "),
        (("Yes", 404, 404), "few", PENDING, "status 404"),
        (("Yes", "No", "No"), None, PASSED, ""),
    ],
)
async def test_golden_sets_compare_both_versions(
    answers: tuple[str | int, ...],
    check: str | None,
    status: CheckStatus,
    reason: str,
    tmp_path: Path,
) -> None:
    checks = [] if check is None else [GoldenSetCheck(set=check, max_loss=0.1)]
    with closing(open_migrated_store(f"sqlite:///{tmp_path}/store.db")) as store:
        for name, count in (("numbers", 130), ("few", 4), ("judged", 1)):
            assertion = {"type": "equals", "value": "Yes"}
            if name == "judged":
                assertion["type"] = "llm-rubric"
            items = [
                {
                    "id": str(number),
                    "messages": [{"role": "user", "content": str(number)}],
                    "assertions": [assertion],
                }
                for number in range(count)
            ]
            content = msgspec.json.encode({"items": items})
            store.quality.add_version(name, content, digest=name, items=count, actor="test")
        async with serve_answers(*answers) as (stable, *candidates):
            urls = [server.url for server in candidates]
            result = await check_quality(store.quality, checks, stable.url, urls, "chat")
            none = await check_quality(store.quality, checks, None, urls, "chat")
        tiers = {request.headers["x-argosy-tier"] for request in stable.requests}
    assert (result.status, tiers - {"2"}) == (status, set()), result.reason
    assert reason in result.reason
    assert none.status is (PENDING if checks else PASSED)


async def test_requests_are_reproducible() -> None:
    async with serve_answers("a") as (server,):
        result = await check_pinned_prompts(None, [server.url], "chat", None, same_weights=True)
        nothing = await check_pinned_prompts(server.url, [], "chat", None, same_weights=True)
    bodies = [request.body for request in server.requests]
    assert result.status is PASSED
    assert [body["prompt"] for body in bodies] == [prompt.prompt for prompt in DEFAULT_PROMPTS]
    assert all(
        (body["temperature"], body["seed"], body["model"]) == (0, 0, "chat") for body in bodies
    )
    assert nothing == (PENDING, "no replica of the candidate is ready")


async def test_budget_counts_recent_failures_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_migrated_store(f"sqlite:///{tmp_path}/store.db")) as store:

        def add(
            prefix: str, count: int, status: str, *, model: str = "chat", age_s: float = 9.0
        ) -> None:
            rows = [
                usage_row(f"{prefix}-{number}", ended_at=NOW - age_s, model=model, status=status)
                for number in range(count)
            ]
            store.ledger.add_records(rows)

        objectives = ObjectivesConfig()
        reader = ErrorBudgetReader(store.ledger, ObjectiveReader(store.objective_hours, ""))
        add("done", MIN_BUDGET_REQUESTS - 4, "completed")
        assert await reader.read("chat", objectives, 0.05, NOW) is None
        add("failed", 3, "failed")
        add("lost", 1, "interrupted")
        add("refused", 50, "refused")
        add("other", 70, "failed", model="other")
        add("old", 70, "failed", age_s=BUDGET_WINDOW_S + 1.0)
        assert await reader.read("chat", objectives, 0.05, NOW + 1.0) is None, "read again too soon"
        later = NOW + BUDGET_INTERVAL_S
        assert await reader.read("chat", objectives, 0.05, later) == pytest.approx(0.2)
        assert await reader.read("chat", objectives, None, later) is None
        monkeypatch.setattr("argosy.fleet.control.rollout_evidence.MAX_BUDGET_RECORDS", 60)
        assert await reader.read("chat", objectives, 0.05, later + BUDGET_INTERVAL_S) is None


async def test_budget_is_the_smallest_of_the_objectives_of_the_model(tmp_path: Path) -> None:
    slos = (
        SloConfig(name="answers", model="chat", availability="99%"),
        SloConfig(name="strict", model="chat", availability="99.9%", window="1d"),
        SloConfig(name="all", availability="99.99%"),
    )
    objectives = ObjectivesConfig(slos=slos)
    with closing(open_migrated_store(f"sqlite:///{tmp_path}/store.db")) as store:
        hours = store.objective_hours
        reader = ErrorBudgetReader(store.ledger, ObjectiveReader(hours, ""))
        assert await reader.read("chat", objectives, 0.05, NOW) is None, "no requests yet"
        for gateway, age_s in (("gone", 2 * 86_400), ("running", 3600)):
            hour = int(NOW - age_s) // 3600 * 3600
            counts = HourCounts([7], [1000], [4])
            rows = [
                ObjectiveHour(hour=hour, objective=each.id, gateway=gateway, counts=counts)
                for each in objectives.build_objectives()
            ]
            hours.write("", rows)
            hours.write("", rows)  # as after an error, which changes nothing
            hours.write("other-fleet", rows)
        reader = ErrorBudgetReader(store.ledger, ObjectiveReader(hours, ""))
        assert await reader.read("chat", objectives, 0.05, NOW) == pytest.approx(-3.0)
        only_first = ObjectivesConfig(slos=slos[:1])
        assert await reader.read("chat", only_first, 0.05, NOW) == pytest.approx(0.6)
        assert await reader.read("other", objectives, None, NOW) is None
