"""Reading sealed partitions and main tables as columns, a key range at a time; for audits, exports and Spark."""

from collections.abc import Iterator
from contextlib import contextmanager

from ...store.errors import DuelogError

INSTALL = "pip install 'duelog[arrow]'"


class NeedsArrow(DuelogError):
    """Something needs pyarrow, or another package for data frames, and it is not installed."""

    def __init__(self, what: str, error: ImportError, install: str = INSTALL) -> None:
        super().__init__(f"{what} needs a package that is not installed ({error.name}); {install}")


@contextmanager
def needs_arrow(what: str, install: str = INSTALL) -> Iterator[None]:
    """Import what something needs inside the block. Raises NeedsArrow."""
    try:
        yield
    except ImportError as error:
        raise NeedsArrow(what, error, install) from None
