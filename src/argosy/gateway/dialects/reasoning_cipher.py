"""Encryption of reasoning that clients keep for the gateway (`reasoning.encrypted_content`).

AES-SIV (RFC 5297) is deterministic, so a repeated response has the same bytes. The tenant is authenticated with the
text, so no tenant can have another one's reasoning decrypted.
"""

from __future__ import annotations

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESSIV

from argosy.protocol.dialects import ReasoningCipher

KEY_BYTES = 64
_PREFIX = "argosy1."
"""Start of every encrypted text, with the version of its format."""


def build_reasoning_cipher(key: bytes, tenant: str) -> ReasoningCipher:
    """Build the cipher of one tenant.

    Args:
        key: Random key of `KEY_BYTES` bytes.
        tenant: Organisation and owner of the responses.
    """
    cipher, associated = AESSIV(key), [tenant.encode()]

    def encrypt(text: str) -> str:
        sealed = cipher.encrypt(text.encode("utf-8", "surrogatepass"), associated) if text else b""
        return _PREFIX + urlsafe_b64encode(sealed).decode()

    def decrypt(text: str) -> str | None:
        if not text.startswith(_PREFIX):
            return None
        try:
            sealed = urlsafe_b64decode(text.removeprefix(_PREFIX))
            if not sealed:
                return ""
            return cipher.decrypt(sealed, associated).decode("utf-8", "surrogatepass")
        except (InvalidTag, ValueError, binascii.Error):
            return None

    return ReasoningCipher(encrypt, decrypt)
