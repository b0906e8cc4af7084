"""The gate of an environment: readers inside, or one thread alone, whatever interrupts leave behind."""

import gc
import threading
from collections.abc import Callable

import pytest

from duelog.store.env import reader_gate
from duelog.store.env.reader_gate import ReaderGate

_LONG_S = 30.0


def ended(work: Callable[[], object]) -> bool:
    """Do a work in another thread; False: it does not end."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(_LONG_S)
    return not thread.is_alive()


def in_a_cycle(*kept: object) -> None:
    """Have garbage refer to something until it is collected, as the traceback of an interrupt may."""
    cycle: list[object] = [*kept]
    cycle.append(cycle)


def test_a_reader_that_is_collected_in_the_thread_that_who_is_alone_waits_for_ends() -> None:
    """A leader collected one of the gate of firing while firing waited for its group: the store stood still."""
    gate = ReaderGate()
    in_a_cycle(reading := gate.reading())
    with reading:
        pass
    del reading
    with gate.alone():
        assert ended(gc.collect)


def test_what_an_interrupt_left_alone_is_found_among_the_garbage_by_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else may make garbage meanwhile, so that none is collected by itself."""
    gate = ReaderGate()
    in_a_cycle(left := gate.alone())
    left.__enter__()  # an interrupt comes as the block ends, and nothing is called any more
    del left

    def read() -> None:
        with gate.reading():
            pass

    monkeypatch.setattr(reader_gate, "_LOOK_AGAIN_S", 0.001)
    gc.disable()
    try:
        assert ended(read)
    finally:
        gc.enable()
    assert not gate.wanted


def test_nobody_is_inside_while_another_is_alone() -> None:
    """Eight threads read, are alone, or try to be, and count who is there; each may do so within its own block."""
    gate = ReaderGate()
    readers, alone, wrong = list[int](), list[int](), list[str]()

    def work(number: int) -> None:
        for turn in range(200):
            if (number + turn) % 4:
                with gate.reading(), gate.reading():
                    readers.append(number)
                    wrong.extend("a reader beside one that is alone" for _ in alone)
                    readers.remove(number)
                continue
            with gate.alone_at_once() if turn % 3 else gate.alone() as is_alone:
                if is_alone is False:
                    continue
                alone.append(number)
                with gate.reading():
                    wrong.extend("two that are alone" for other in alone if other != number)
                    wrong.extend("one that is alone beside a reader" for _ in readers)
                alone.remove(number)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_LONG_S)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong
    assert not gate.inside
    assert not gate.wanted
