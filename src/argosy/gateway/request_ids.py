"""Ids of requests and responses, which name the gateway that made them.

An id made by a gateway ends with 32 hexadecimal digits, of which the first 8 are the gateway's id. The id of a request
without one of the client's own and the id of its response have the same digits.
"""

from __future__ import annotations

import re
import secrets

GATEWAY_ID_DIGITS = 8
RESPONSE_ID_PREFIXES = ("chatcmpl", "cmpl")
_DIALECT_ID = re.compile(r"(?:resp_|msg_)([0-9a-f]{32})")
_OWN_ID = re.compile(r"(?:req_|chatcmpl-|cmpl-)([0-9a-f]{32})")


def new_gateway_id() -> str:
    """Return a random id for a gateway process."""
    return secrets.token_hex(GATEWAY_ID_DIGITS // 2)


def canonical_id(identifier: str) -> str:
    """Return the id of a chat for the id of a response in another dialect, and other ids unchanged."""
    parsed = _DIALECT_ID.fullmatch(identifier)
    return identifier if parsed is None else f"{RESPONSE_ID_PREFIXES[0]}-{parsed[1]}"


def named_gateway(identifier: str) -> str | None:
    """Return the id of the gateway that made a request or response id, or None if a client chose the id."""
    parsed = _OWN_ID.fullmatch(identifier)
    return None if parsed is None else parsed[1][:GATEWAY_ID_DIGITS]


def possible_response_ids(identifier: str) -> list[str]:
    """Return the response ids that a request or response id may stand for, by which the ledger knows requests."""
    parsed = _OWN_ID.fullmatch(identifier)
    if parsed is None:
        return []
    if not identifier.startswith("req_"):
        return [identifier]
    return [f"{prefix}-{parsed[1]}" for prefix in RESPONSE_ID_PREFIXES]
