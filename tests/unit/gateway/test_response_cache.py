"""Keys of the response cache: whatever decides an answer, or whose it is, makes another key."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw
from tests.support.limit_harness import make_context

from argosy.gateway.pool import Pool
from argosy.gateway.principal import Principal
from argosy.gateway.proxy.response_cache import compute_key, compute_partition
from argosy.gateway.request_context import COMPLETION, RequestContext

BASE: dict[str, Any] = {
    "organisation": "org",
    "project": "shop",
    "key": "k1",
    "model": "big",
    "version": "v1",
    "adapter": "",
    "upstream": "m",
    "digest": "d1",
    "path": False,
    "field": "1",
}


def build_context(values: dict[str, Any]) -> RequestContext:
    """Return a request with these values of what decides an answer."""
    names = ("organisation", "project", "key")
    context = make_context(Principal(**{name: values[name] for name in names}))
    pool = context.pool = Pool(values["model"], [], version=values["version"])
    replica: Any = SimpleNamespace(upstream_model=values["upstream"], model_digest=values["digest"])
    pool.replicas["a"] = replica
    adapter: Any = SimpleNamespace(digest=values["adapter"])
    context.adapter = adapter if values["adapter"] else None
    context.api = COMPLETION if values["path"] else context.api
    context.fields.raw["a_later_field"] = Raw(msgspec.json.encode(values["field"]))
    return context


def describe(values: dict[str, Any]) -> tuple[str, tuple[str, str]]:
    """Return the key of a request, and its partition in the semantic cache."""
    context = build_context(values)
    return compute_key(context), compute_partition(context, [], "digest")


@given(st.sampled_from(sorted(BASE)), st.text(min_size=1, max_size=8), st.booleans())
def test_each_thing_that_decides_an_answer_is_in_the_key(
    name: str, text: str, has_project: bool
) -> None:
    base = BASE if has_project else BASE | {"project": ""}
    other = base | {name: not base[name] if name == "path" else text}
    if name == "project" and not has_project:
        other |= {"key": base["key"]}
    is_same = other == base or (name == "key" and has_project)  # keys of a project share answers
    (key, partition), (other_key, other_partition) = describe(base), describe(other)
    assert (key == other_key) == is_same
    assert (partition == other_partition) == is_same
    assert key.startswith(f"{partition[0]}.")


def test_the_question_is_in_no_partition_and_all_else_is() -> None:
    context = build_context(BASE)
    before = compute_key(context), compute_partition(context, [], "d")
    context.fields.raw["messages"] = Raw(b'[{"role":"user","content":"other"}]')
    assert compute_key(context) != before[0]
    assert compute_partition(context, [], "d") == before[1]
    for messages, extra in (([{"role": "system", "content": "Be brief"}], "d"), ([], "e")):
        assert compute_partition(context, messages, extra) != before[1]
