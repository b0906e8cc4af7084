"""Every error of the library, for callers: `from duelog.errors import StoreLocked`."""

# ruff: noqa: F403, F405, PLC0414 - so that they are exported
from duelog.operations.wire import Disconnected as Disconnected
from duelog.operations.wire import NotAllowed as NotAllowed
from duelog.operations.wire import OnlyInProcess as OnlyInProcess
from duelog.store.errors import *

__all__ = [name for name, each in sorted(globals().items()) if isinstance(each, type) and issubclass(each, DuelogError)]
