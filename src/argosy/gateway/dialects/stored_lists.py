"""Pages of stored items, as the Responses API lists them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl

import msgspec
from msgspec import Meta

from argosy.http_server import HttpExchange
from argosy.protocol import parse_query


class ItemPageQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Query parameters of a list."""

    after: str | None = None
    """Id of the item after which the page starts."""
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"

    def store_options(self) -> dict[str, Any]:
        """Return the arguments of the store's methods. One more item than the page shows whether there are more."""
        return {
            "after": self.after,
            "limit": self.limit + 1,
            "is_descending": self.order == "desc",
        }

    def build_page(self, items: Sequence[dict[str, Any]]) -> bytes:
        """Build the page of items that were read with `store_options`."""
        page = items[: self.limit]
        return msgspec.json.encode(
            {
                "object": "list",
                "data": page,
                "first_id": page[0]["id"] if page else None,
                "last_id": page[-1]["id"] if page else None,
                "has_more": len(items) > self.limit,
            }
        )


def parse_query_string(exchange: HttpExchange) -> dict[str, str]:
    """Return the query parameters, the last of each name. Clients repeat `include[]`, which has no effect."""
    return dict(parse_qsl(exchange.query.decode("latin-1"), keep_blank_values=True))


def parse_page_query(exchange: HttpExchange) -> ItemPageQuery:
    """Parse the query of a list.

    Raises:
        ApiError: 400 if a parameter is invalid.
    """
    return parse_query(ItemPageQuery, parse_query_string(exchange))
