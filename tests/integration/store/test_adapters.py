"""Registry of adapters on both databases: owners, versions, and what the audit log keeps of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from tests.integration.store.conftest import ACTOR, RULES

from argosy.store import ConflictError, Organisation, Project, Store

FIRST, SECOND = (f"sha256:{digit * 64}" for digit in "12")


def test_versions_of_an_adapter_are_added_promoted_and_removed(
    store: Store, organisation: Organisation, project: Project
) -> None:
    adapters = store.adapters
    add = partial(adapters.add_version, "support", "chat", actor=ACTOR)
    own = partial(add, organisation=organisation.id)
    added = own(FIRST, pinned=True)
    assert (added.digest, added.candidate, added.pinned) == (FIRST, None, True)
    with pytest.raises(ConflictError, match="has no candidate"):
        adapters.promote(added.id, actor=ACTOR)
    with pytest.raises(ConflictError, match="has no candidate"):
        adapters.change_adapter(added.id, candidate_percent=5, actor=ACTOR)
    for share in (10, 20):
        newer = own(SECOND, candidate_percent=share)
    assert (newer.id, newer.digest, newer.candidate) == (added.id, FIRST, SECOND)
    assert (newer.candidate_percent, newer.pinned) == (20, True)
    promoted = adapters.promote(added.id, actor=ACTOR)
    assert (promoted.digest, promoted.candidate, promoted.candidate_percent) == (SECOND, None, 0)
    replaced = own(FIRST, replaces=True, min_replicas=2)
    assert (replaced.digest, replaced.min_replicas) == (FIRST, 2)
    same = add(FIRST, project=project.id)
    assert same.id != added.id
    assert same.organisation == organisation.id
    listed = adapters.list_adapters()
    assert {each.id: each for each in listed} == {added.id: replaced, same.id: same}
    assert [*store.load_snapshot().adapters] == listed
    adapters.remove(added.id, actor=ACTOR)
    assert store.load_snapshot().adapters == (same,)
    actions = [entry.action for entry in store.audit_log.list_entries(subject=added.id)]
    assert actions[0] == "adapter.delete"
    assert {"adapter.create", "adapter.add_version", "adapter.promote"} < {*actions}


def test_rollout_changes_what_was_judged_only(store: Store) -> None:
    """A share that a person set, or another gateway, is not overwritten. A bad version is not tried again."""
    adapters = store.adapters
    add = partial(adapters.add_version, "support", "chat", actor=ACTOR)
    follow = partial(adapters.follow_rollout, actor=ACTOR)
    added = add(FIRST)
    judged = add(SECOND)
    assert (judged.candidate_percent, judged.step_s) == (0, 120.0)
    raised = follow(judged, 5)
    assert raised is not None
    assert follow(judged, None) is follow(judged, 0, "worse") is None
    paused = adapters.change_adapter(added.id, candidate_percent=10, actor=ACTOR)
    assert paused.step_s is None
    assert follow(raised, 25) is None
    resumed = add(SECOND, step_s=7)
    assert (resumed.candidate_percent, resumed.rollout) == (10, judged.rollout)
    for after, replaced in ((0, True), (0, False), (1, True)):
        assert adapters.replace_evidence(added.id, b"%d" % after, after=after) is replaced
    assert adapters.read_evidence([added.id])[added.id].content == b"1"
    rejected = follow(resumed, 0, "worse")
    assert rejected is not None
    assert (rejected.candidate, rejected.rejected, rejected.rejection) == (None, SECOND, "worse")
    with pytest.raises(ConflictError, match="was rolled back: worse"):
        add(SECOND)
    by_hand = add(SECOND, candidate_percent=1)
    assert (by_hand.rejected, by_hand.rollout != judged.rollout) == (None, True)
    assert follow(by_hand, None) == adapters.get_adapter(added.id)
    assert adapters.get_adapter(added.id).digest == SECOND


@RULES
def test_view_of_an_organisation_refuses_what_is_invalid_or_foreign(
    store: Store, organisation: Organisation
) -> None:
    foreign = store.accounts.create_organisation("Foreign", actor=ACTOR).id
    foreign_project = store.accounts.create_project(foreign, "p", actor=ACTOR).id
    add = partial(store.adapters.add_version, actor=ACTOR)
    hidden = [add("f", "m", FIRST, organisation=foreign).id, add("g", "m", FIRST).id]
    view = store.adapters.for_organisation(organisation.id)
    own = view.add_version("own", "m", FIRST, actor=ACTOR)
    assert view.list_adapters() == [own]
    add = partial(view.add_version, actor=ACTOR)
    version = store.load_snapshot().version
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: add("x", "m", "sha256:0"), "digest"),
        (lambda: add("x\0", "m", FIRST), "printable"),
        (lambda: add("x" * 201, "m", FIRST), "name"),
        (lambda: add("own", "other", FIRST), "adapter of 'm'"),
        (lambda: add("x", "m", FIRST, organisation=foreign), "no organisation"),
        (lambda: add("x", "m", FIRST, project=foreign_project), "no project"),
        *((lambda each=each: view.promote(each, actor=ACTOR), "no adapter") for each in hidden),
        *((lambda each=each: view.remove(each, actor=ACTOR), "no adapter") for each in hidden),
    ]
    for change, error in refused:
        with pytest.raises(ValueError, match=error):
            change()
    assert store.load_snapshot().version == version
