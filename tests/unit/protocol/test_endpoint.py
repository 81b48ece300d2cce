"""Server addresses: accepted forms, display names and errors."""

from __future__ import annotations

import pytest

from argosy.protocol import parse_endpoint


@pytest.mark.parametrize("url", ["", "host", "ftp://x", "http://", "http://x:y", "unix:relative"])
def test_invalid_address_is_rejected_with_remedy(url: str) -> None:
    with pytest.raises(ValueError, match="write http://HOST:PORT"):
        parse_endpoint(url)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://a", "a"),
        ("http://a:8000/v1/", "a:8000"),
        ("https://a:443/x/v1", "a"),
        ("http://[::1]:8000", "[::1]:8000"),
        ("unix:/a b.sock", "unix:/a b.sock"),
        ("unix:///a.sock", "unix:/a.sock"),
        ("http+unix://%2Fa.sock/v1", "unix:/a.sock"),
    ],
)
def test_address_is_normalised(url: str, name: str) -> None:
    endpoint = parse_endpoint(url)
    assert endpoint.display_name == name
    assert endpoint.path_prefix == ("/x" if "/x" in url else "")
    assert endpoint.tls == url.startswith("https")
