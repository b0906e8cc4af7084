"""Readers inside, or one thread alone: which waits for which, and which does not."""

from __future__ import annotations

import threading

from duelog.store.env.reader_gate import ReaderGate


def test_alone_at_once_does_not_wait_for_readers() -> None:
    """With a reader inside it says no, and keeps no reader out; without, it is alone until it leaves."""
    gate = ReaderGate()
    with gate.reading():
        with gate.alone_at_once() as alone:
            assert not alone
        with gate.reading():
            pass
    entered = threading.Event()

    def read() -> None:
        with gate.reading():
            entered.set()

    reader = threading.Thread(target=read)
    with gate.alone_at_once() as alone:
        assert alone
        reader.start()
        assert not entered.wait(0.05)
    reader.join()
    assert entered.is_set()
