"""Stored responses and conversations: tenants, history, background runs, retention and deletion, on both databases."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.integration.store.conftest import ACTOR, RULES, START
from tests.support.fake_clock import FakeClock

from argosy.store import (
    HistoryTooLongError,
    Item,
    ItemOwner,
    NotFoundError,
    StorageQuotaError,
    Store,
    StoredResponse,
    item_table,
)
from argosy.store.response_store import HEARTBEAT_TIMEOUT_S
from argosy.store.stored_bytes import ROW_OVERHEAD_BYTES

OWNER = ItemOwner("org_a", "proj_a")
OTHERS = (ItemOwner("org_a", "proj_b"), ItemOwner("org_b", "proj_a"), ItemOwner("", ""))
RETENTION_S = 1000.0


def message(item_id: str, text: str = "Hi\x00") -> Item:
    return {"type": "message", "id": item_id, "content": text}


def response(number: int, previous: int | None = None, **fields: Any) -> StoredResponse:  # noqa: ANN401 - a response's
    return StoredResponse(
        id=f"resp_{number}",
        previous=None if previous is None else f"resp_{previous}",
        body={"id": f"resp_{number}", "error": None},
        **{
            "status": "completed",
            "input": [message(f"in_{number}")],
            "output": [message(f"out_{number}")],
            **fields,
        },
    )


def create(store: Store, *responses: StoredResponse) -> None:
    for one in responses:
        store.responses.create(OWNER, one, RETENTION_S)


def history_ids(store: Store, number: int) -> list[str]:
    items = store.responses.load_history(OWNER, f"resp_{number}", RETENTION_S)
    return [item["id"] for item in items]


def test_response_is_stored_with_its_history(store: Store) -> None:
    create(store, response(1), response(2, 1), response(3, 2), response(4, 1))
    assert store.responses.get(OWNER, "resp_3").render() == {
        "id": "resp_3",
        "error": None,
        "status": "completed",
        "output": [message("out_3")],
    }
    assert store.responses.list_input(OWNER, "resp_3") == ([message("in_3")], False)
    assert history_ids(store, 3) == ["in_1", "out_1", "in_2", "out_2", "in_3", "out_3"]
    assert history_ids(store, 4) == ["in_1", "out_1", "in_4", "out_4"]
    assert store.responses.find_items(OWNER, ["out_1", "in_4", "x"]) == {
        "out_1": message("out_1"),
        "in_4": message("in_4"),
    }


def assert_not_found(
    store: Store, owner: ItemOwner, response_id: str, conversation: str, item: str
) -> None:
    """Check that no operation finds a response, a conversation or an item of it."""
    responses, conversations = store.responses, store.conversations
    attempts: list[Callable[[], object]] = [
        *(partial(call, owner, response_id) for call in (responses.get, responses.list_input)),
        *(partial(call, owner, response_id) for call in (responses.cancel, responses.delete)),
        partial(responses.load_history, owner, response_id, RETENTION_S),
        *(partial(call, owner, conversation) for call in (conversations.get, conversations.delete)),
        partial(conversations.set_metadata, owner, conversation, {"a": "b"}),
        partial(conversations.append_items, owner, conversation, [message("n")], RETENTION_S),
        partial(conversations.list_items, owner, conversation),
        partial(conversations.get_item, owner, conversation, item),
        partial(conversations.delete_item, owner, conversation, item),
    ]
    for attempt in attempts:
        with pytest.raises(NotFoundError):
            attempt()


@RULES
@pytest.mark.parametrize("other", OTHERS)
def test_other_tenants_have_no_access(store: Store, other: ItemOwner) -> None:
    create(store, response(1, status="in_progress", is_background=True))
    responses, conversations = store.responses, store.conversations
    conversation = conversations.create(OWNER, {}, [message("m")], RETENTION_S).id
    assert_not_found(store, other, "resp_1", conversation, "m")
    assert responses.find_items(other, ["in_1", "m"]) == {}
    assert not responses.finish(other, "resp_1", "completed", {}, [])
    # A chain does not lead into another tenant's responses.
    responses.create(other, response(2, 1), RETENTION_S)
    with pytest.raises(NotFoundError, match="resp_1"):
        responses.load_history(other, "resp_2", RETENTION_S)
    assert responses.get(OWNER, "resp_1").status == "in_progress"
    assert conversations.list_items(OWNER, conversation) == ([message("m")], False)


def test_unprintable_ids_are_not_found(store: Store) -> None:
    create(store, response(1))
    conversation = store.conversations.create(OWNER, {}, [message("m")], RETENTION_S).id
    assert_not_found(store, OWNER, "resp_1\0", "\0", "m")
    for call in (store.conversations.get_item, store.conversations.delete_item):
        with pytest.raises(NotFoundError):
            call(OWNER, conversation, "m\0")
    assert store.responses.list_input(OWNER, "resp_1", after="in_1\0") == ([], False)
    assert store.responses.find_items(OWNER, ["in_1\0", "in_1"]) == {"in_1": message("in_1")}


@RULES
def test_deleted_response_is_gone_with_its_items(store: Store) -> None:
    create(store, response(1), response(2, 1))
    store.responses.delete(OWNER, "resp_1")
    with pytest.raises(NotFoundError):
        store.responses.get(OWNER, "resp_1")
    with pytest.raises(NotFoundError, match="resp_1"):
        history_ids(store, 2)
    assert store.responses.find_items(OWNER, ["in_1", "out_1"]) == {}
    assert store.responses.get(OWNER, "resp_2").output == [message("out_2")]


@RULES
def test_responses_and_conversations_expire_after_their_last_use(
    store: Store, clock: FakeClock
) -> None:
    create(store, response(1), response(2, 1), response(3))
    used, unused = (
        store.conversations.create(OWNER, {}, [message("m")], RETENTION_S).id for _ in range(2)
    )
    clock.now += RETENTION_S / 2
    history_ids(store, 2)
    store.conversations.append_items(OWNER, used, [message("n")], RETENTION_S)
    clock.now += RETENTION_S / 2
    with pytest.raises(NotFoundError):
        store.responses.get(OWNER, "resp_3")
    with pytest.raises(NotFoundError):
        store.conversations.get(OWNER, unused)
    assert len(history_ids(store, 2)) == 4
    deleted = store.responses.delete_expired(), store.conversations.delete_expired()
    assert deleted == (1, 1)
    assert (store.responses.delete_expired(), store.conversations.delete_expired()) == (0, 0)
    clock.now = START  # a clock that is behind does not bring anything back
    assert store.responses.find_items(OWNER, ["out_3"]) == {}
    assert [item["id"] for item in store.conversations.list_items(OWNER, used)[0]] == ["m", "n"]


def test_background_response_is_completed_cancelled_or_interrupted(
    store: Store, clock: FakeClock
) -> None:
    running: dict[str, Any] = {"status": "in_progress", "is_background": True, "output": ()}
    create(store, *(response(number, **running) for number in range(1, 5)))
    responses, ids = store.responses, [f"resp_{number}" for number in range(1, 5)]
    assert responses.record_heartbeats(ids) == set(ids)
    assert responses.finish(OWNER, "resp_1", "completed", {"id": "x"}, [message("out_1")])
    assert responses.get(OWNER, "resp_1").render() == {
        "id": "x",
        "status": "completed",
        "output": [message("out_1")],
    }
    assert responses.cancel(OWNER, "resp_1").status == "completed", "it has ended before"
    assert responses.cancel(OWNER, "resp_2").status == "cancelled"
    assert responses.record_heartbeats(ids) == {"resp_3", "resp_4"}
    assert not responses.finish(OWNER, "resp_2", "completed", {}, [message("out_2")])
    clock.now += HEARTBEAT_TIMEOUT_S - 1
    responses.record_heartbeats(["resp_3"])
    clock.now += 2
    assert responses.fail_interrupted() == 1
    assert responses.fail_interrupted() == 0
    interrupted = responses.get(OWNER, "resp_4")
    assert interrupted.status == "failed"
    assert interrupted.body["error"]["code"] == "server_error"
    assert responses.get(OWNER, "resp_3").status == "in_progress"


def test_conversation_items_are_paged_in_order(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversations = store.conversations
    conversation = conversations.create(OWNER, {"a": "b"}, [message("m0")], RETENTION_S)
    assert conversations.get(OWNER, conversation.id) == conversation
    with ThreadPoolExecutor(4) as threads:
        for number in range(1, 5):
            threads.submit(
                conversations.append_items, OWNER, conversation.id, [message(f"m{number}")], 9.0
            ).add_done_callback(lambda done: done.result())

    def page(**options: Any) -> tuple[list[str], bool]:  # noqa: ANN401 - those of a page
        items, has_more = conversations.list_items(OWNER, conversation.id, **options)
        return [item["id"] for item in items], has_more

    listed, _ = page()
    assert sorted(listed) == [f"m{number}" for number in range(5)]
    assert page(after=listed[1], limit=2) == (listed[2:4], True)
    assert page(after=listed[3], limit=2, is_descending=True) == ([listed[2], listed[1]], True)
    assert page(after=listed[1], limit=1, is_descending=True) == ([listed[0]], False)
    with monkeypatch.context() as patch:  # items that are long end a page
        patch.setattr(item_table, "MAX_PAGE_BYTES", len(msgspec.json.encode(message("m0"))) * 2)
        assert page() == (listed[:2], True)
        patch.setattr(item_table, "MAX_PAGE_BYTES", 1)
        assert page(is_descending=True) == ([listed[-1]], True)
    assert conversations.get_item(OWNER, conversation.id, "m3") == message("m3")
    conversations.delete_item(OWNER, conversation.id, "m3")
    with pytest.raises(NotFoundError):
        conversations.get_item(OWNER, conversation.id, "m3")
    changed = conversations.set_metadata(OWNER, conversation.id, {"c": "d"})
    assert conversations.get(OWNER, conversation.id) == changed
    conversations.delete(OWNER, conversation.id)
    with pytest.raises(NotFoundError):
        conversations.list_items(OWNER, conversation.id)


@RULES
def test_history_is_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    create(store, response(1), response(2, 1))
    items = [message("a"), message("b"), message("c")]
    conversation = store.conversations.create(OWNER, {}, items, RETENTION_S).id
    assert len(store.conversations.load_history(OWNER, conversation)) == 3
    for limit, value in (("MAX_HISTORY_ITEMS", 2), ("MAX_HISTORY_BYTES", 20)):
        with monkeypatch.context() as patch:
            patch.setattr(item_table, limit, value)
            with pytest.raises(HistoryTooLongError, match="Compact"):
                history_ids(store, 2)
            with pytest.raises(HistoryTooLongError):
                store.conversations.load_history(OWNER, conversation)


def test_stored_bytes_are_counted_and_bounded(store: Store, clock: FakeClock) -> None:
    """Each way to store adds what deletion gives back, and no transaction passes the bound, but for failures."""
    conversations, responses = store.conversations, store.responses
    project = store.accounts.create_project(
        store.accounts.create_organisation("acme", actor=ACTOR).id, "web", actor=ACTOR
    )
    owner = ItemOwner(project.organisation, project.id)

    def stored() -> int:
        return store.stored_bytes.read_use([project.id])[project.id].stored_bytes

    assert store.stored_bytes.read_use([project.id])[project.id].max_stored_bytes == 2**30
    conversation = conversations.create(owner, {}, [message("a"), message("b")], RETENTION_S).id
    item_bytes = len(msgspec.json.encode(message("a"))) + ROW_OVERHEAD_BYTES
    assert stored() == 2 + ROW_OVERHEAD_BYTES + 2 * item_bytes
    running = response(1, status="in_progress", is_background=True, output=(), input=[message("i")])
    responses.create(owner, running, RETENTION_S)
    before = stored()
    conversations.append_items(owner, conversation, [message("c")], RETENTION_S)
    assert stored() == before + item_bytes
    conversations.delete_item(owner, conversation, "c")
    conversations.set_metadata(owner, conversation, {"a": "b"})
    assert stored() == before + len('"a":"b"')
    terms = store.limits_and_prices
    terms.set_limit("project", project.id, "stored_bytes", stored(), actor=ACTOR)
    for attempt in (
        partial(conversations.create, owner, {}, [], RETENTION_S),
        partial(conversations.append_items, owner, conversation, [message("d")], RETENTION_S),
        partial(conversations.set_metadata, owner, conversation, {"a": "bc"}),
        partial(responses.create, owner, response(2), RETENTION_S),
        partial(responses.finish, owner, "resp_1", "completed", running.body, [message("o")]),
        partial(store.stored_bytes.check_room, owner, 1),
    ):
        before = stored()
        with pytest.raises(StorageQuotaError, match=f"stores {before:,} bytes .* store {before:,}"):
            attempt()
        assert stored() == before
    store.stored_bytes.check_room(owner, 0)
    assert responses.get(owner, "resp_1").status == "in_progress"
    assert responses.finish(owner, "resp_1", "failed", {"error": "x" * 100}, [])
    conversations.set_metadata(
        owner, conversation, {"a": ""}
    )  # beyond the bound, but less than before
    responses.delete(owner, "resp_1")
    assert stored() == 2 + len('"a":""') + ROW_OVERHEAD_BYTES + 2 * item_bytes
    responses.create(OWNER, running, RETENTION_S)  # the bound is that of one project
    clock.now += HEARTBEAT_TIMEOUT_S + 1
    assert responses.fail_interrupted() == 1
    clock.now += RETENTION_S
    assert (conversations.delete_expired(), responses.delete_expired()) == (1, 1)
    assert store.stored_bytes.read_totals() == {owner: 0, OWNER: 0}
    for options in ({"window": "day"}, {"model": "m"}, {"owner_kind": "organisation"}):
        wrong: Any = {"owner_kind": "project", "owner": project.id, "actor": ACTOR, **options}
        with pytest.raises(ValueError, match="stored_bytes"):
            terms.set_limit(unit="stored_bytes", amount=1, **wrong)


@pytest.mark.parametrize("database_kind", ["sqlite"])
def test_space_of_what_is_deleted_is_used_again_and_given_back(store: Store, url: str) -> None:
    path = Path(url.removeprefix("sqlite:///"))

    def file_size() -> int:
        with sqlite3.connect(path) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return path.stat().st_size

    empty, sizes = file_size(), []
    for _ in range(3):
        items = [message(str(number), "x" * 20_000) for number in range(20)]
        conversation = store.conversations.create(OWNER, {}, items, RETENTION_S).id
        sizes.append(file_size())
        store.conversations.delete(OWNER, conversation)
    assert sizes[0] - empty <= 1.1 * 20 * 20_000
    assert sizes[1:] == sizes[:1] * 2
    while store.give_back_space():
        pass
    assert file_size() <= empty + 16 * 1024


def test_gateways_share_secrets(store: Store) -> None:
    with ThreadPoolExecutor(4) as threads:
        keys = set(threads.map(lambda _: store.secrets.get_or_create("a", 32), range(8)))
    assert [len(key) for key in keys] == [32]
    assert store.secrets.get_or_create("b", 16) not in keys
