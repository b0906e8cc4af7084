"""A logger that a loop does not flood."""

import logging

import pytest

from duelog.store.limited_log import LimitedLog


class Seconds:
    """A clock that a test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Seconds:
    """It stands at 0."""
    return Seconds()


@pytest.fixture
def limited(clock: Seconds) -> LimitedLog:
    """Three of each text in a minute."""
    return LimitedLog(logging.getLogger("duelog.test"), most=3, clock=clock)


def test_a_loop_logs_so_many_and_then_how_many_were_left_out(
    limited: LimitedLog, clock: Seconds, caplog: pytest.LogCaptureFixture
) -> None:
    """A minute later it is said again, with the number of those that were not."""
    for number in range(1_000):
        limited.log(logging.ERROR, "failed: %d", number)
    assert caplog.messages == ["failed: 0", "failed: 1", "failed: 2"]
    clock.now = 59.9
    limited.log(logging.ERROR, "failed: %d", 1_000)
    clock.now = 60.0
    limited.log(logging.ERROR, "failed: %d", 1_001)
    limited.log(logging.ERROR, "failed: %d", 1_002)
    assert caplog.messages[3:] == ["failed: 1001 (998 like it were not logged)", "failed: 1002"]


def test_one_text_does_not_silence_another(limited: LimitedLog, caplog: pytest.LogCaptureFixture) -> None:
    """Each has its own number, and its level and traceback."""
    for _ in range(9):
        limited.log(logging.WARNING, "one")
    limited.log(logging.ERROR, "other", error=ValueError("x"))
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3 + ["ERROR"]
    assert caplog.records[-1].exc_info is not None


def test_what_no_handler_wants_is_not_counted(limited: LimitedLog, caplog: pytest.LogCaptureFixture) -> None:
    """Once the level is lowered, all of it is logged."""
    for _ in range(9):
        limited.log(logging.DEBUG, "detail")
    with caplog.at_level(logging.DEBUG, "duelog.test"):
        limited.log(logging.DEBUG, "detail")
    assert caplog.messages == ["detail"]
