"""Many wrong tokens from one address: who sends them has to wait, and nobody else there; and one that is too long."""

from __future__ import annotations

import time

from tests.integration.gateway.test_token_verifier import identify, refusal, trusting
from tests.support.account_fixtures import bearer
from tests.support.token_issuer import issuer


def test_many_wrong_tokens_have_to_wait_and_right_ones_never() -> None:
    """One client that goes on with a token that has expired kept all behind its proxy from signing in."""
    with issuer() as issuing:
        who = trusting(issuing)
        identify(who, bearer(issuing.token(project="chat")))
        old = issuing.token(project="chat", exp=time.time() - 100)
        answers = [refusal(who, old)[0] for _ in range(30)]
        assert answers == [401] * 20 + [429] * 10
        assert identify(who, bearer(issuing.token(project="chat", sub="new"))).user == "new"
        assert refusal(who, issuing.token(project="chat", aud="other"))[0] == 429


def test_a_token_may_not_be_of_any_length() -> None:
    with issuer() as issuing:
        who = trusting(issuing)
        identify(who, bearer(issuing.token(project="chat", more="x" * 4096)))
        assert refusal(who, issuing.token(project="chat", more="x" * 16_384))[0] == 401
