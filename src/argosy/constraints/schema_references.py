"""Resolves `$ref` within one document: JSON pointers, anchors and identified subschemas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from argosy.constraints.schema_vocabulary import (
    DRAFT_4,
    DRAFT_7,
    child_pointer,
    find_draft,
    iterate_subschemas,
    resolve_pointer,
)

ROOT_URI = "urn:root"


@dataclass(frozen=True, slots=True)
class SchemaLocation:
    """Subschema with what its keywords depend on."""

    schema: Any
    pointer: str
    base_uri: str
    draft: int


class SchemaReferences:
    """Index of the resources and anchors of one document."""

    def __init__(self, document: Any) -> None:  # noqa: ANN401 - any JSON value
        self.root = SchemaLocation(document, "#", ROOT_URI, find_draft(document))
        self._locations: dict[int, SchemaLocation] = {}
        self._resources: dict[str, SchemaLocation] = {}
        self._anchors: dict[tuple[str, str], SchemaLocation] = {}
        self._resources[ROOT_URI] = self.root
        self._index_document()
        self.root = self._locations.get(id(document), self.root)

    def locate(self, schema: Any, pointer: str, parent: SchemaLocation) -> SchemaLocation:  # noqa: ANN401
        """Return the location of a subschema of `parent`."""
        known = self._locations.get(id(schema))
        if known is not None and isinstance(schema, dict):
            return known
        return SchemaLocation(schema, pointer, parent.base_uri, parent.draft)

    def resolve(self, reference: str, source: SchemaLocation) -> SchemaLocation:
        """Return the target of a reference.

        Raises:
            LookupError: The document does not contain the target.
        """
        uri, fragment = urldefrag(_join(source.base_uri, reference))
        resource = self._resources[uri]
        if not fragment:
            return resource
        if not fragment.startswith("/"):
            return self._anchors[uri, unquote(fragment)]
        target = resolve_pointer(resource.schema, fragment)
        return self.locate(target, _append_fragment(resource.pointer, fragment), resource)

    def _index_document(self) -> None:
        pending = [self.root]
        while pending:
            location = self._register(pending.pop())
            for schema, pointer in iterate_subschemas(location.schema, location.pointer):
                if isinstance(schema, dict):
                    pending.append(
                        SchemaLocation(schema, pointer, location.base_uri, location.draft)
                    )

    def _register(self, location: SchemaLocation) -> SchemaLocation:
        schema = location.schema
        if not isinstance(schema, dict):
            return SchemaLocation({}, location.pointer, location.base_uri, location.draft)
        draft = find_draft(schema) if "$schema" in schema else location.draft
        base_uri = location.base_uri
        identifier = schema.get("id" if draft == DRAFT_4 else "$id")
        has_ignored_siblings = draft <= DRAFT_7 and "$ref" in schema
        if isinstance(identifier, str) and not has_ignored_siblings:
            base_uri, anchor = urldefrag(_join(base_uri, identifier))
            location = SchemaLocation(schema, location.pointer, base_uri, draft)
            if anchor:
                self._anchors[base_uri, anchor] = location
            else:
                self._resources.setdefault(base_uri, location)
        location = SchemaLocation(schema, location.pointer, base_uri, draft)
        self._locations[id(schema)] = location
        for keyword in ("$anchor", "$dynamicAnchor"):
            name = schema.get(keyword)
            if isinstance(name, str):
                self._anchors[base_uri, name] = location
        return location


def _join(base_uri: str, reference: str) -> str:
    """Resolve a relative reference. The base of a document without `$id` is opaque: only fragments are relative."""
    if reference.startswith("#"):
        return base_uri + reference
    if base_uri.startswith("urn:"):
        return reference
    try:
        return urljoin(base_uri, reference)
    except ValueError:
        return reference


def _append_fragment(pointer: str, fragment: str) -> str:
    return child_pointer(pointer) + unquote(fragment)
