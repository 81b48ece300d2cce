"""Stored responses and conversations through the OpenAI client: history, tenants, background, cancellation."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import openai
import pytest
from tests.integration.dialects.conftest import MODEL, DialectFleet
from tests.integration.test_parsed_output import CALL, THOUGHT, WEATHER
from tests.support.gateway_client import run_gateway_server
from tests.support.waiting import until

from argosy.store import ConversationStore, StoredConversation

pytestmark = pytest.mark.asyncio(loop_scope="module")

MAX_CONCURRENT_PER_TENANT = 8
PREFIX = "user: Hi"
"""First message in a rendered prompt."""


async def test_response_is_retrieved_continued_and_deleted(fleet: DialectFleet) -> None:
    client = fleet.openai()
    fleet.output = THOUGHT + "Hello!"
    first = await client.responses.create(
        model=MODEL, input="Hi", instructions="Be brief.", metadata={"a": "b"}
    )
    assert first.store is True  # type: ignore[attr-defined] # a field beyond the client's type
    assert (await client.responses.retrieve(first.id)).to_dict() == first.to_dict()
    items: list[Any] = [item async for item in client.responses.input_items.list(first.id)]
    assert [item.content[0].text for item in items] == ["Hi"]
    fleet.prompts()
    second = await client.responses.create(
        model=MODEL, input="And now?", previous_response_id=first.id
    )
    assert second.previous_response_id == first.id
    (prompt,) = fleet.prompts()
    assert prompt.startswith(f"{PREFIX}\nassistant: Hello!\nuser: And now?"), (
        "instructions are not inherited"
    )
    await client.responses.delete(first.id)
    for request in (
        client.responses.retrieve(first.id),
        client.responses.delete(first.id),
        client.responses.input_items.list(first.id),
    ):
        with pytest.raises(openai.NotFoundError):
            await request
    with pytest.raises(openai.BadRequestError) as lost:
        await client.responses.create(model=MODEL, input="x", previous_response_id=second.id)
    assert lost.value.code == "previous_response_not_found"
    assert (await client.responses.retrieve(second.id)).output_text == "Hello!"


async def test_response_that_is_not_stored_carries_its_reasoning_itself(
    fleet: DialectFleet,
) -> None:
    client = fleet.openai()
    fleet.output = THOUGHT + "Hello!"
    first = await client.responses.create(
        model=MODEL, input="Hi", store=False, include=["reasoning.encrypted_content"]
    )
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(first.id)
    reasoning: Any = first.output[0]
    assert "weather" not in reasoning.encrypted_content
    sealed = {
        "type": "reasoning",
        "id": reasoning.id,
        "summary": [],
        "encrypted_content": reasoning.encrypted_content,
    }
    history: Any = [{"role": "user", "content": "Hi"}, sealed, first.output[1].to_dict()]
    await client.responses.create(model=MODEL, input=[*history, {"role": "user", "content": "?"}])
    for key in ("", fleet.other_key):  # another tenant cannot have it decrypted
        fleet.prompts()
        await fleet.openai(key).responses.create(model=MODEL, input=[*history])
        (request,) = fleet.requests
        assert fleet.prompts()[0].startswith(PREFIX)
        assert request.prompt


async def test_stored_items_are_referred_to_by_id(fleet: DialectFleet) -> None:
    client = fleet.openai()
    first = await client.responses.create(model=MODEL, input="Hi")
    reference: Any = {"type": "item_reference", "id": first.output[0].id}
    question: Any = {"role": "user", "content": "And?"}
    fleet.prompts()
    await client.responses.create(model=MODEL, input=[reference, question])
    assert fleet.prompts()[0].startswith("assistant: Hello!\nuser: And?")
    with pytest.raises(openai.BadRequestError, match="not stored"):
        await fleet.openai(fleet.other_key).responses.create(
            model=MODEL, input=[reference, question]
        )


@pytest.mark.parametrize("stream", [True, False])
async def test_conversation_grows_with_its_responses(fleet: DialectFleet, *, stream: bool) -> None:
    client = fleet.openai()
    conversation = await client.conversations.create(
        items=[{"type": "message", "role": "user", "content": "I am Ann."}], metadata={"a": "b"}
    )
    for question in ("Hi", "And now?"):
        response: Any = await client.responses.create(
            model=MODEL, input=question, conversation=conversation.id, stream=stream
        )
        if stream:
            async for _ in response:
                pass
    assert fleet.prompts()[1].startswith(
        "user: I am Ann.\nuser: Hi\nassistant: Hello!\nuser: And now?"
    )
    items: list[Any] = [
        item
        async for item in client.conversations.items.list(conversation.id, order="asc", limit=2)
    ]
    assert [item.content[0].text for item in items] == [
        *("I am Ann.", "Hi", "Hello!", "And now?", "Hello!")
    ]
    changed = await client.conversations.update(conversation.id, metadata={"c": "d"})
    assert changed == await client.conversations.retrieve(conversation.id)
    added: Any = await client.conversations.items.create(
        conversation.id, items=[{"type": "message", "role": "user", "content": "x"}]
    )
    item_id = added.data[0].id
    found = await client.conversations.items.retrieve(item_id, conversation_id=conversation.id)
    assert found.id == item_id
    await client.conversations.items.delete(item_id, conversation_id=conversation.id)
    with pytest.raises(openai.NotFoundError):
        await client.conversations.items.retrieve(item_id, conversation_id=conversation.id)
    with pytest.raises(openai.NotFoundError):
        await fleet.openai(fleet.other_key).conversations.retrieve(conversation.id)
    assert (await client.conversations.delete(conversation.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model=MODEL, input="x", conversation=conversation.id)


async def test_other_tenants_have_no_access_to_responses(fleet: DialectFleet) -> None:
    mine, other = fleet.openai(), fleet.openai(fleet.other_key)
    fleet.output = "One. Two. Three."
    fleet.hold(2)
    response = await mine.responses.create(model=MODEL, input="Hi", background=True)
    await fleet.wait_held()
    for request in (
        other.responses.retrieve(response.id),
        other.responses.retrieve(response.id, stream=True),
        other.responses.cancel(response.id),
        other.responses.delete(response.id),
        other.responses.input_items.list(response.id),
    ):
        with pytest.raises(openai.NotFoundError):
            await request
    with pytest.raises(openai.BadRequestError):
        await other.responses.create(model=MODEL, input="x", previous_response_id=response.id)
    fleet.release()
    ended = await wait_for_end(mine, response.id)
    assert (ended.status, ended.output_text) == ("completed", "One. Two. Three.")


async def test_other_tenants_have_no_access_to_conversations(fleet: DialectFleet) -> None:
    mine, other = fleet.openai(), fleet.openai(fleet.other_key)
    message: Any = {"type": "message", "role": "user", "content": "I am Ann."}
    conversation = await mine.conversations.create(items=[message], metadata={"a": "b"})
    (item,) = (await mine.conversations.items.list(conversation.id)).data
    item_id = str(item.id)
    for request in (
        other.conversations.retrieve(conversation.id),
        other.conversations.update(conversation.id, metadata={"c": "d"}),
        other.conversations.delete(conversation.id),
        other.conversations.items.list(conversation.id),
        other.conversations.items.create(conversation.id, items=[message]),
        other.conversations.items.retrieve(item_id, conversation_id=conversation.id),
        other.conversations.items.delete(item_id, conversation_id=conversation.id),
        other.responses.create(model=MODEL, input="x", conversation=conversation.id),
    ):
        with pytest.raises(openai.NotFoundError):
            await request
    assert await mine.conversations.retrieve(conversation.id) == conversation
    assert (await mine.conversations.items.list(conversation.id)).data == [item]


async def wait_for_end(client: openai.AsyncOpenAI, response_id: str) -> Any:  # noqa: ANN401 - a response
    """Poll a background response until it has ended."""
    async with asyncio.timeout(30):
        while True:
            response = await client.responses.retrieve(response_id)
            if response.status not in {"queued", "in_progress"}:
                return response
            await asyncio.sleep(0.02)


async def test_background_response_is_polled_and_followed(fleet: DialectFleet) -> None:
    client = fleet.openai()
    fleet.output = THOUGHT + "One. Two. Three."
    fleet.hold(12)
    created = await client.responses.create(model=MODEL, input="Hi", background=True)
    assert created.status == "queued"
    await fleet.wait_held()
    running = await client.responses.retrieve(created.id)
    assert (running.status, running.output) == ("in_progress", [])
    followed = [await open_events(client, created.id, after) for after in (None, 3)]
    fleet.release()
    whole, rest = [[event async for event in events] for events in followed]
    assert [event.sequence_number for event in whole] == list(range(len(whole)))
    assert [event.sequence_number for event in rest] == list(range(4, len(whole)))
    final = await wait_for_end(client, created.id)
    assert final.output_text == "One. Two. Three."
    assert whole[-1].response == final
    assert final.usage.output_tokens > 0
    # The stream of a stored response has the same text in fewer events.
    stored = await read_events(client, created.id, None)
    texts = [event.delta for event in stored if event.type == "response.output_text.delta"]
    assert texts == [final.output_text]
    assert stored[-1].response == final
    (end,) = await read_events(client, created.id, 40)
    assert (end.sequence_number, end.response) == (41, final)
    row = await fleet.find_row(created.id)
    assert (row.status, row.output_tokens) == ("completed", final.usage.output_tokens)


async def test_repeated_background_request_gets_the_first_response(fleet: DialectFleet) -> None:
    client = fleet.openai()

    async def create(**changes: Any) -> Any:  # noqa: ANN401 - a response or its events
        body: Any = {"model": MODEL, "input": "Hi", "background": True} | changes
        return await client.responses.with_raw_response.create(
            **body, extra_headers={"Idempotency-Key": "once"}
        )

    answers: list[Any] = [*await asyncio.gather(create(), create(), return_exceptions=True)]
    for refused in (one for one in answers if isinstance(one, Exception)):
        assert isinstance(refused, openai.ConflictError), "the other one was still starting"
    created = next(one for one in answers if not isinstance(one, Exception)).parse()
    final = await wait_for_end(client, created.id)
    repeated = await create()
    assert repeated.headers["idempotent-replayed"] == "true"
    assert repeated.parse() == final
    with pytest.raises(openai.UnprocessableEntityError) as reused:
        await create(input="Something else")
    assert reused.value.code == "idempotency_key_reused"
    assert len(fleet.prompts()) == 1
    assert len(await fleet.take_rows(1)) == 1


async def open_events(
    client: openai.AsyncOpenAI, response_id: str, starting_after: int | None
) -> openai.AsyncStream[Any]:
    extra: dict[str, Any] = {} if starting_after is None else {"starting_after": starting_after}
    events: openai.AsyncStream[Any]
    events = await client.responses.retrieve(response_id, stream=True, **extra)
    return events


async def read_events(
    client: openai.AsyncOpenAI, response_id: str, starting_after: int | None
) -> list[Any]:
    return [event async for event in await open_events(client, response_id, starting_after)]


async def test_background_stream_goes_on_without_its_client(fleet: DialectFleet) -> None:
    client = fleet.openai()
    fleet.output = "One. Two. Three."
    fleet.hold(2)
    stream = await client.responses.create(model=MODEL, input="Hi", background=True, stream=True)
    event: Any = await anext(aiter(stream))
    await stream.close()
    fleet.release()
    final = await wait_for_end(client, event.response.id)
    assert (final.status, final.output_text) == ("completed", "One. Two. Three.")


async def test_cancelled_background_response_stops(fleet: DialectFleet) -> None:
    client = fleet.openai()
    fleet.output = "One. Two. Three."
    fleet.hold(2)
    created = await client.responses.create(model=MODEL, input="Hi", background=True)
    await fleet.wait_held()
    assert (await client.responses.cancel(created.id)).status == "cancelled"
    await until(lambda: not any(engine.live for engine in fleet.engines))
    assert (await client.responses.retrieve(created.id)).status == "cancelled"
    assert (await client.responses.cancel(created.id)).status == "cancelled"
    assert (await fleet.find_row(created.id)).status == "cancelled"
    direct = await client.responses.create(model=MODEL, input="Hi")
    with pytest.raises(openai.BadRequestError, match="background"):
        await client.responses.cancel(direct.id)


async def test_gateways_share_responses_and_one_that_stops_fails_its_own(
    fleet: DialectFleet,
) -> None:
    fleet.output = "One. Two. Three."
    fleet.hold(2)
    client, body = fleet.openai(), {"model": MODEL, "input": "Hi", "background": True}
    headers = {"authorization": f"Bearer {fleet.key}"}
    async with run_gateway_server(fleet.config) as (server, other):
        created = (await other.post("/v1/responses", json=body, headers=headers)).json()
        await fleet.wait_held()
        assert (await client.responses.retrieve(created["id"])).status == "in_progress"
        follower = asyncio.create_task(read_events(client, created["id"], None))
        server.stop()
        server.stop()
    failed = await client.responses.retrieve(created["id"])
    assert failed.status == "failed"
    assert failed.error is not None
    assert (await follower)[-1].type == "response.failed"


async def test_failed_background_response_says_so_and_its_stream_ends_with_it(
    fleet: DialectFleet,
) -> None:
    client = fleet.openai()
    stream = await client.responses.create(
        model="missing", input="Hi", background=True, stream=True
    )
    events: list[Any] = [event async for event in stream]
    assert [(event.sequence_number, event.type) for event in events] == [
        (0, "response.created"),
        (1, "response.in_progress"),
        (2, "response.failed"),
    ]
    failed: Any = await client.responses.retrieve(events[-1].response.id)
    assert failed == events[-1].response
    assert (failed.status, failed.error.code) == ("failed", "server_error")
    assert "model_not_found" in failed.error.message
    assert "'missing'" in failed.error.message, "the reason is that of the error"


async def test_full_project_is_told_what_to_delete(
    fleet: DialectFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    accounts = fleet.accounts
    project = accounts.project("small")
    key = accounts.key(project, role="admin", scope="gateway")
    await fleet.wait_for_key(key)
    client, admin = fleet.openai(key), {"authorization": f"Bearer {key}"}

    def stored() -> int:
        return accounts.store.stored_bytes.read_use([project])[project].stored_bytes

    kept = await client.responses.create(model=MODEL, input="Hi")
    size = stored()
    accounts.limit(project, "stored_bytes", 2 * size - 300)  # no room for a second output
    stream = await client.responses.create(model=MODEL, input="Hi", background=True, stream=True)
    events: list[Any] = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[-2].type, events[-1].type) == ("response.output_text.delta", "response.failed")
    failed = await client.responses.retrieve(events[-1].response.id)
    assert failed == events[-1].response
    assert (failed.status, failed.output_text) == ("failed", "")
    await client.responses.delete(failed.id)

    accounts.limit(project, "stored_bytes", size)
    shown = (await fleet.client.get(f"/admin/projects/{project}", headers=admin)).json()
    assert (shown["stored_bytes"], shown["max_stored_bytes"]) == (size, size)
    lost = await client.responses.create(
        model=MODEL, input="Hi"
    )  # what it needs is not known before
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(lost.id)
    fleet.prompts()
    unstored = await client.responses.with_raw_response.create(model=MODEL, input="Hi")
    assert unstored.headers["x-argosy-ignored-fields"] == "store"
    assert unstored.parse().store is False  # type: ignore[attr-defined] # a field beyond the client's type
    message: Any = {"type": "message", "role": "user", "content": "x"}
    for refused in (
        client.responses.create(model=MODEL, input="Hi", store=True),
        client.responses.create(model=MODEL, input="Hi", background=True),
        client.conversations.create(items=[message]),
    ):
        with pytest.raises(openai.APIStatusError, match=rf"stores {size:,} bytes") as full:
            await refused
        assert (full.value.status_code, full.value.code) == (413, "storage_quota_exceeded")
    assert len(fleet.prompts()) == 1, "what cannot be stored is not generated"
    monkeypatch.setattr("argosy.gateway.dialects.response_state.START_DELAY_S", 0.0)
    async with run_gateway_server(fleet.config) as (_, other):
        gauge = f'argosy_gateway_stored_bytes{{tenant="{project}"}} {float(size)}'
        metrics = ""
        while gauge not in metrics:
            await asyncio.sleep(0.02)
            metrics = (await other.get("/metrics", headers=admin)).text
    await client.responses.delete(kept.id)
    again = await client.responses.create(model=MODEL, input="Hi", store=True)
    assert (await client.responses.retrieve(again.id)).id == again.id


async def test_memory_of_background_responses_is_bounded_and_the_largest_tenant_makes_room(
    fleet: DialectFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("argosy.gateway.proxy.handlers.MAX_PENDING_BYTES", 2_500)
    monkeypatch.setattr("argosy.gateway.proxy.handlers.MAX_TENANT_PENDING_BYTES", 2_300)
    fleet.output = "One. Two. Three."
    fleet.hold(2)
    async with run_gateway_server(fleet.config) as (_, gateway):

        async def create(key: str, size: int) -> Any:  # noqa: ANN401 - JSON value
            body = {"model": MODEL, "input": "x" * size, "background": True}
            headers = {"authorization": f"Bearer {key}"}
            return (await gateway.post("/v1/responses", json=body, headers=headers)).json()

        large = await create(fleet.key, 1_800)
        refused = (await create(fleet.key, 600))["error"]
        assert (refused["code"], refused["type"]) == ("overloaded", "rate_limit_error")
        assert "too much memory" in refused["message"]
        small = [await create(fleet.other_key, 300) for _ in range(2)]
        client, other = fleet.openai(), fleet.openai(fleet.other_key)
        failed = await wait_for_end(client, large["id"])
        assert failed.status == "failed"
        assert "too much memory" in failed.error.message
        fleet.release()
        for created in small:
            assert (await wait_for_end(other, created["id"])).output_text == "One. Two. Three."
        again = await create(fleet.key, 1_800)
        assert (await wait_for_end(client, again["id"])).status == "completed"


async def test_tenant_waits_for_its_own_reads_of_the_store(
    fleet: DialectFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise one key would fill the memory with items of 30 MB that wait for slow clients."""
    get, may_return, running = ConversationStore.get, threading.Event(), 0

    def count_and_get(store: ConversationStore, *arguments: Any) -> StoredConversation:  # noqa: ANN401 - those of the method
        nonlocal running
        running += 1
        may_return.wait()
        return get(store, *arguments)

    monkeypatch.setattr(ConversationStore, "get", count_and_get)
    mine, other = fleet.openai(), fleet.openai(fleet.other_key)
    conversations = [await client.conversations.create() for client in (mine, other)]
    reads = [
        asyncio.create_task(mine.conversations.retrieve(conversations[0].id))
        for _ in range(2 * MAX_CONCURRENT_PER_TENANT)
    ]
    try:
        await until(lambda: running == MAX_CONCURRENT_PER_TENANT)
        reads.append(asyncio.create_task(other.conversations.retrieve(conversations[1].id)))
        await until(lambda: running > MAX_CONCURRENT_PER_TENANT)
        assert running == MAX_CONCURRENT_PER_TENANT + 1
    finally:
        may_return.set()
    assert len(await asyncio.gather(*reads)) == running


async def test_compacted_conversation_goes_on(fleet: DialectFleet) -> None:
    client = fleet.openai()
    first = await client.responses.create(model=MODEL, input="Hi")
    fleet.output = "Ann said hi."
    compacted = await client.responses.compact(model=MODEL, previous_response_id=first.id)
    assert fleet.prompts()[-1].startswith(f"{PREFIX}\nassistant: Hello!\nuser: Summarise")
    assert compacted.usage.output_tokens > 0
    items: Any = [item.to_dict() for item in compacted.output]
    await client.responses.create(
        model=MODEL, input=[*items, {"role": "user", "content": "And now?"}]
    )
    assert fleet.prompts()[0].startswith(
        "user: Summary of the conversation so far:\nAnn said hi.\nuser: And now?"
    )


async def test_unknown_paths_and_methods(fleet: DialectFleet) -> None:
    headers = {"authorization": f"Bearer {fleet.key}"}
    for method, path, status in (
        ("POST", "/v1/responses/resp_x", 405),
        ("GET", "/v1/responses/resp_x/other", 404),
        ("GET", "/v1/responses/resp_x/cancel", 405),
        ("PUT", "/v1/conversations/conv_x", 405),
        ("GET", "/v1/conversations/conv_x/items/a/b", 404),
        ("GET", "/v1/responses", 405),
    ):
        response = await fleet.client.request(method, path, headers=headers)
        assert response.status_code == status, path


@pytest.mark.parametrize("stream", [True, False])
async def test_chat_is_stored_listed_described_and_deleted(
    fleet: DialectFleet, *, stream: bool
) -> None:
    chats = fleet.openai().chat.completions
    fleet.output = f"{THOUGHT}I look.\n{CALL}"
    messages: Any = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    fields: Any = {"model": MODEL, "messages": messages, "tools": [WEATHER], "store": True}
    colour = "green" if stream else "blue"
    if stream:
        events = await chats.create(**fields, metadata={"colour": colour}, stream=True)
        ids = {event.id async for event in events}
    else:
        created = await chats.create(**fields, metadata={"colour": colour})
        ids = {created.id}
    await chats.create(model=MODEL, messages=messages, metadata={"colour": colour})
    (chat_id,) = ids
    stored = await chats.retrieve(chat_id)
    message = stored.choices[0].message
    assert (message.content, stored.choices[0].finish_reason) == ("I look.", "tool_calls")
    assert message.tool_calls
    assert stream or message == created.choices[0].message
    assert stored.to_dict()["metadata"] == {"colour": colour}

    fleet.output = "Hello!"
    second = await chats.create(
        model=MODEL, messages=messages, store=True, metadata={"colour": colour}
    )
    listed = chats.list(metadata={"colour": colour}, limit=1)
    assert [each.id async for each in listed] == [chat_id, second.id]
    listed = chats.list(order="desc", model=stored.model, limit=20)
    assert [each.id async for each in listed][:2] == [second.id, chat_id]
    assert [each.id async for each in chats.list(model="another")] == []
    history = [each async for each in chats.messages.list(chat_id, limit=1)]
    assert [(each.id, each.content) for each in history] == [
        (f"{chat_id}-0", "Be kind."),
        (f"{chat_id}-1", "Hi"),
    ]

    updated = await chats.update(chat_id, metadata={"colour": "red"})
    assert updated.to_dict()["metadata"] == {"colour": "red"}
    assert [each.id async for each in chats.list(metadata={"colour": colour})] == [second.id]
    others = fleet.openai(fleet.other_key)
    assert [each.id async for each in others.chat.completions.list()] == []
    for refused in (
        others.chat.completions.retrieve(chat_id),
        others.chat.completions.update(chat_id, metadata={}),
        others.chat.completions.delete(chat_id),
        fleet.openai().responses.retrieve(chat_id),
        chats.retrieve("resp_x"),
    ):
        with pytest.raises(openai.NotFoundError):
            await refused
    for each in (chat_id, second.id):
        assert (await chats.delete(each)).deleted
    with pytest.raises(openai.NotFoundError):
        await chats.messages.list(chat_id)


async def test_metadata_that_cannot_be_stored_is_refused(fleet: DialectFleet) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await fleet.openai().chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Hi"}],
            store=True,
            metadata={"key": "v" * 600},
        )
    assert (refused.value.param or "").startswith("metadata")
