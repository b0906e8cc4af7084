"""A Ctrl-C that does not wake the main thread, as one does not that comes as it falls asleep."""

import signal
import sys
import threading
from collections.abc import Callable

import pytest

from tests.store.commits import until


def interrupt_of_sleeping(receive: Callable[[], object], wake: Callable[[], object]) -> None:
    """Have a thread take a SIGINT while the main one waits in `receive`, which must hear it before `wake` is called."""
    main = threading.main_thread().ident
    assert main == threading.get_ident()
    receiving = False

    def interrupt() -> None:
        until(lambda: receiving and sys._current_frames()[main].f_code.co_name in ("wait", "attend", "_read"))
        signal.raise_signal(signal.SIGINT)

    interrupting, waking = threading.Thread(target=interrupt), threading.Timer(30, wake)
    waking.start()
    interrupting.start()
    try:
        receiving = True
        with pytest.raises(KeyboardInterrupt):
            receive()
        assert waking.is_alive(), "heard only when the wait was over"
    finally:
        waking.cancel()
        interrupting.join()
