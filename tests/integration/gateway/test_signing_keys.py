"""Fetches of signing keys that come to nothing: they are failures like others, and there is another one."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from tests.integration.gateway.test_token_verifier import (
    DEADLINE_S,
    Clock,
    identify,
    refusal,
    trusting,
    until_refused,
)
from tests.support.account_fixtures import bearer
from tests.support.token_issuer import OTHER_RSA_KEY, RSA_KEY, Issuer, issuer, public_jwk

from argosy.gateway.auth import Authenticator, signing_keys
from argosy.protocol import ApiError

LATER_S = 3700.0


def test_keys_are_fetched_again_once_there_is_a_thread_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody would have fetched them ever again, so a withdrawn key was good until a restart."""
    with issuer() as issuing, capture_logs() as logs:
        clock = Clock()
        who = trusting(issuing, clock)
        stolen = issuing.token(project="chat", exp=time.time() + 2 * LATER_S)
        identify(who, bearer(stolen))
        issuing.keys = [public_jwk(OTHER_RSA_KEY, "new")]
        clock.ahead = LATER_S
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", _refuse)
            assert who.authenticate(bearer(stolen)).project == "proj_chat"
        clock.ahead += 6.0
        assert until_refused(who, stolen, time.monotonic() + DEADLINE_S) == 401
    assert [line["event"] for line in logs][:1] == ["signing_keys_unavailable"]


def test_new_keys_are_found_after_the_system_clock_was_set_back() -> None:
    """As it is by hours when a machine has started with a clock of another zone."""
    with issuer() as issuing:
        clock = Clock()
        clock.ahead = 2 * LATER_S
        who = trusting(issuing, clock)
        token = issuing.token(project="chat", exp=time.time() + 3 * LATER_S)
        identify(who, bearer(token))
        clock.ahead = 0.0
        identify(who, bearer(token))
        issuing.keys.append(public_jwk(OTHER_RSA_KEY, "new"))
        clock.ahead = signing_keys.MIN_REFETCH_INTERVAL_S + 1.0
        new = issuing.token(OTHER_RSA_KEY, "new", project="chat")
        assert identify(who, bearer(new)).project == "proj_chat"


def test_a_file_that_cannot_be_read_to_its_end_is_not_read_for_each_request(tmp_path: Path) -> None:
    with issuer() as issuing, capture_logs() as logs:
        file, clock = tmp_path / "jwks.json", Clock()
        file.write_text(json.dumps({"keys": issuing.keys}))
        who = trusting(issuing, clock, jwks=str(file))
        token = issuing.token(project="chat")
        file.write_text('{"more": ' + "[" * 100_000)
        clock.ahead = 6.0
        deadline = time.monotonic() + DEADLINE_S
        while not logs and time.monotonic() < deadline:
            identify(who, bearer(token))
        for _ in range(20):
            assert identify(who, bearer(token)).project == "proj_chat"
            time.sleep(0.01)
    assert [line["event"] for line in logs] == ["signing_keys_unavailable"]


def _calls_itself_another(issuing: Issuer) -> None:
    issuing.named = "https://another.test"


def _answers_with_an_error(issuing: Issuer) -> None:
    issuing.status = 500


def _has_more_than_anybody_needs(issuing: Issuer) -> None:
    issuing.keys.append({"kty": "oct", "k": "x" * signing_keys.MAX_DOCUMENT_BYTES})


@pytest.mark.parametrize(
    ("does", "said"),
    [
        (_calls_itself_another, "calls itself https://another.test"),
        (_answers_with_an_error, "answered with status 500"),
        (_has_more_than_anybody_needs, "answered with more than"),
    ],
)
def test_keys_are_taken_of_nobody_who_is_not_the_issuer_and_well(
    does: Callable[[Issuer], None], said: str
) -> None:
    with issuer() as issuing, capture_logs() as logs:
        does(issuing)
        who = trusting(issuing)
        token, deadline = issuing.token(project="chat"), time.monotonic() + DEADLINE_S
        while not logs and time.monotonic() < deadline:
            assert _status(who, token) == 503
        assert _status(who, token) == 503
    assert [line["event"] for line in logs] == ["signing_keys_unavailable"]
    assert said in logs[0]["reason"]


def test_where_keys_cannot_be_had_is_said() -> None:
    nowhere = "http://127.0.0.1:1/keys"
    with issuer() as issuing, capture_logs() as logs:
        who = trusting(issuing, jwks=nowhere)
        token, deadline = issuing.token(project="chat"), time.monotonic() + DEADLINE_S
        while not logs and time.monotonic() < deadline:
            assert _status(who, token) == 503
    assert logs[0]["reason"].startswith(f"{nowhere} cannot be reached (")


def test_a_key_is_good_for_the_algorithm_that_it_was_published_for() -> None:
    with issuer() as issuing:
        issuing.keys = [public_jwk(RSA_KEY, "rsa", alg="RS512")]
        who = trusting(issuing, algorithms=("RS256", "RS512"))
        identify(who, bearer(issuing.token(project="chat", algorithm="RS512")))
        status, message = refusal(who, issuing.token(project="chat", algorithm="RS256"))
        assert status == 401
        assert "its key is for another algorithm" in message


def _status(who: Authenticator, token: str) -> int:
    with pytest.raises(ApiError) as caught:
        who.authenticate(bearer(token))
    return caught.value.status


def _refuse(thread: threading.Thread) -> None:
    del thread
    raise RuntimeError("can't start new thread")
