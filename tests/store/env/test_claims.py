"""Claims: a log has one writer at a time; a commit waits for a group, and a group, while it has claims, for nothing."""

from __future__ import annotations

import threading

import pytest

from duelog.store.env.claims import Claims, Conflict
from tests.store.group_commits import until

COMMIT, GROUP = object(), object()


def waiting(claims: Claims) -> int:
    """Threads that wait for a claim."""
    return claims._waiting


def test_a_group_meets_the_claim_of_a_commit() -> None:
    """It is told which log it was; once the commit has ended it has the log."""
    claims = Claims()
    claims.take("log", COMMIT)
    claims.take("log", COMMIT)  # it has it already
    with pytest.raises(Conflict) as caught:
        claims.try_take("log", GROUP)
    assert caught.value.owner == "log"
    claims.try_take("another", GROUP)
    claims.release(COMMIT, ["log"])
    claims.try_take("log", GROUP)
    claims.try_take("log", GROUP)


def test_a_claim_is_given_back_by_the_one_that_has_it() -> None:
    """A group that gave all back, and whose attempt gives them back again, takes none from a commit."""
    claims = Claims()
    claims.try_take("log", GROUP)
    claims.release(GROUP, ["log", "never taken"])
    claims.take("log", COMMIT)
    claims.release(GROUP, ["log"])
    with pytest.raises(Conflict):
        claims.try_take("log", GROUP)


@pytest.mark.parametrize("waits", ["commit", "group"])
def test_what_waits_for_a_claim_goes_on_when_it_is_given_back(waits: str) -> None:
    """The commit with the claim, the group without one."""
    claims = Claims()
    claims.take("log", COMMIT)
    other = object()

    def wait() -> None:
        if waits == "commit":
            claims.take("log", other)
        else:
            claims.wait("log")

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: waiting(claims) == 1)
    assert thread.is_alive()
    claims.release(COMMIT, ["log"])
    thread.join(20)
    assert not thread.is_alive()
    assert waiting(claims) == 0
    if waits == "commit":
        assert not claims.is_taken("log", GROUP)
    claims.release(other, ["log"])
    claims.wait("log")
    assert claims.is_taken("log", GROUP)
