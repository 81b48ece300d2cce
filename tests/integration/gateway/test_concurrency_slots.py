"""Order in which waiting requests get the free slots of replicas, and requests that fail while they wait."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable

import httpx2
from tests.support.fake_upstream import (
    FakeUpstream,
    UpstreamRequest,
    fake_upstream,
    respond_with_tokens,
)
from tests.support.gateway_harness import GatewayHarness, RecordingFilter, run_gateway
from tests.support.waiting import until

from argosy.deployment import QueueConfig, ReplicaConfig, Timeouts
from argosy.policy import RetryBudget
from argosy.protocol import ApiError

LONG_TIMEOUTS = Timeouts(
    first_token_timeout_s=20.0, stream_idle_timeout_s=20.0, failover_timeout_s=20.0
)


class GatedScript:
    """Script that responds to a prompt once the gate of that prompt is open.

    The prompt "full" is rejected with 429. With `cuts`, the connection of the prompt "cut" closes.
    """

    def __init__(self, *, cuts: bool = False) -> None:
        self._cuts = cuts
        self.prompts: list[str] = []
        self.gates: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    async def __call__(self, request: UpstreamRequest) -> None:
        prompt = str(request.body["prompt"])
        self.prompts.append(prompt)
        if prompt == "full":
            request.send_json(429, {"error": {"message": "full"}})
            return
        await self.gates[prompt].wait()
        if prompt == "cut" and self._cuts:
            request.start_stream()
            request.writer.close()
            return
        await respond_with_tokens(request)


def replica_config(server: FakeUpstream, name: str, max_requests: int) -> ReplicaConfig:
    return ReplicaConfig(url=server.url, name=name, kind="openai", max_requests=max_requests)


def post(gateway: GatewayHarness, prompt: str) -> asyncio.Task[httpx2.Response]:
    body = {"model": "big", "prompt": prompt, "max_tokens": 3, "stream": True}
    return asyncio.create_task(gateway.client.post("/v1/completions", json=body))


def has_received(script: GatedScript, count: int) -> Callable[[], bool]:
    return lambda: len(script.prompts) == count


async def test_failed_over_request_precedes_waiting_requests() -> None:
    left, right = GatedScript(cuts=True), GatedScript()
    async with (
        fake_upstream(left) as left_server,
        fake_upstream(right) as right_server,
        run_gateway(
            [],
            replica_config(left_server, "left", 1),
            replica_config(right_server, "right", 1),
            timeouts=LONG_TIMEOUTS,
        ) as gateway,
    ):
        cut = post(gateway, "cut")
        await until(has_received(left, 1))
        other = post(gateway, "other")
        await until(has_received(right, 1))
        waiting = []
        for number in range(4):
            waiting.append(post(gateway, f"waiting {number}"))
            await gateway.wait_for_queued(number + 1)
        left.gates["cut"].set()  # the slot of the cut connection goes to a waiting request
        await until(has_received(left, 2))
        right.gates["cut"].set()
        right.gates["other"].set()
        assert (await cut).status_code == 200
        for script in (left, right):
            for number in range(4):
                script.gates[f"waiting {number}"].set()
        responses = await asyncio.gather(other, *waiting)
        assert {response.status_code for response in responses} == {200}
        assert right.prompts[:2] == ["other", "cut"]


async def test_replica_gets_requests_again_after_429_while_others_still_run() -> None:
    script = GatedScript()
    timeouts = Timeouts(
        first_token_timeout_s=20.0, stream_idle_timeout_s=20.0, failover_timeout_s=0.01
    )
    async with (
        fake_upstream(script) as server,
        run_gateway([], replica_config(server, "a", 2), timeouts=timeouts) as gateway,
    ):
        long = post(gateway, "long")
        await until(has_received(script, 1))
        assert (await post(gateway, "full")).status_code == 429
        script.gates["quick"].set()
        quick = post(gateway, "quick")
        await gateway.wait_for_queued(1)
        async with asyncio.timeout(10.0):
            assert (await quick).status_code == 200
        assert not long.done()
        script.gates["long"].set()
        assert (await long).status_code == 200


async def test_waiting_request_fails_with_no_replica_after_all_replicas_leave() -> None:
    script, queue = GatedScript(), QueueConfig(timeout_s=0.3)
    async with (
        fake_upstream(script) as server,
        run_gateway(
            [], replica_config(server, "a", 1), queue=queue, timeouts=LONG_TIMEOUTS
        ) as gateway,
    ):
        long = post(gateway, "long")
        await until(has_received(script, 1))
        assert (await post(gateway, "waiting")).json()["error"]["code"] == "overloaded"
        waiting = post(gateway, "waiting")
        await gateway.wait_for_queued(1)
        (replica,) = gateway.replicas
        replica.health.on_report_required()
        response = await waiting
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_replica")
        script.gates["long"].set()
        assert (await long).status_code == 200


async def test_rejected_requests_do_not_increase_retry_budget() -> None:
    rejecting = RecordingFilter(rejection=ApiError(429, "rate_limit_exceeded", "Too many."))
    async with (
        fake_upstream() as server,
        run_gateway([rejecting], replica_config(server, "a", 2)) as gateway,
    ):
        for _ in range(100):
            assert (await post(gateway, "quick")).status_code == 429
        (pool,) = gateway.models.pools
        now = asyncio.get_running_loop().time()

        def count_retries(budget: RetryBudget) -> int:
            count = 0
            while budget.try_acquire(now):
                count += 1
            return count

        assert count_retries(pool.retry_budget) == count_retries(RetryBudget())
