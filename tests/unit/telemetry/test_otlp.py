"""Encoding of spans, compared with what the official protobuf classes decode."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from argosy.telemetry import (
    AttributeValue,
    Span,
    SpanEvent,
    SpanKind,
    encode_request,
    encode_spans,
)

MAX_VALUE_CHARS = 4096
texts = st.one_of(
    st.text(max_size=20), st.just("\ud800 lone"), st.just("é" * (MAX_VALUE_CHARS + 9))
)
values: st.SearchStrategy[AttributeValue] = st.one_of(
    texts,
    st.booleans(),
    st.integers(-(2**63) + 1, 2**63 - 1),
    st.floats(allow_nan=False),
    st.lists(texts, max_size=3),
)
attributes = st.dictionaries(st.text(min_size=1, max_size=30), values, max_size=5)
times = st.integers(0, 2**63)
ids = st.binary(min_size=8, max_size=8)
spans = st.builds(
    Span,
    name=texts,
    kind=st.sampled_from(SpanKind),
    span_id=ids,
    parent_id=st.one_of(st.just(b""), ids),
    start_ns=times,
    end_ns=times,
    attributes=attributes,
    events=st.lists(
        st.builds(SpanEvent, name=texts, at_ns=times, attributes=attributes), max_size=2
    ),
    linked_id=st.one_of(st.just(b""), ids),
    error=st.one_of(st.none(), texts),
)


def expect_value(value: AttributeValue) -> object:
    """Return what a receiver decodes: text is cut, and lone surrogates become question marks."""
    if isinstance(value, str):
        return value[:MAX_VALUE_CHARS].encode(errors="replace").decode()
    return [expect_value(each) for each in value] if isinstance(value, list) else value


def read_attributes(encoded: object) -> dict[str, object]:
    found: dict[str, object] = {}
    for pair in encoded:  # type: ignore[attr-defined]
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        is_list = kind == "array_value"
        found[pair.key] = [each.string_value for each in value.values] if is_list else value
    return found


@given(
    st.lists(spans, max_size=3), st.binary(min_size=16, max_size=16), st.text("a=b,1", max_size=9)
)
def test_receivers_decode_the_same_values(
    expected: list[Span], trace_id: bytes, trace_state: str
) -> None:
    encoded = encode_spans(trace_id, trace_state, expected)
    body = encode_request({"service.name": "gate", "port": 1}, "1.2", "https://schema", [encoded])
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    assert read_attributes(resource.resource.attributes) == {"service.name": "gate", "port": 1}
    (scope,) = resource.scope_spans
    assert (scope.scope.name, scope.scope.version) == ("argosy", "1.2")
    assert scope.schema_url == "https://schema"
    assert len(scope.spans) == len(expected)
    for actual, span in zip(scope.spans, expected, strict=True):
        assert (actual.trace_id, actual.trace_state) == (trace_id, trace_state)
        assert (actual.span_id, actual.parent_span_id) == (span.span_id, span.parent_id)
        assert (actual.name, actual.kind) == (expect_value(span.name), span.kind)
        assert (actual.start_time_unix_nano, actual.end_time_unix_nano) == (
            span.start_ns,
            span.end_ns,
        )
        assert read_attributes(actual.attributes) == {
            name: expect_value(value) for name, value in span.attributes.items()
        }
        assert [
            (event.name, event.time_unix_nano, read_attributes(event.attributes))
            for event in actual.events
        ] == [
            (
                expect_value(event.name),
                event.at_ns,
                {name: expect_value(value) for name, value in event.attributes.items()},
            )
            for event in span.events
        ]
        assert [link.span_id for link in actual.links] == [span.linked_id] * bool(span.linked_id)
        is_error = span.error is not None
        assert actual.status.code == 2 * is_error
        assert actual.status.message == (expect_value(span.error or "") if is_error else "")
