"""Reading sealed partitions and main tables as columns, a key range at a time; for audits, exports and Spark."""

from ...store.errors import DuelogError

INSTALL = "pip install 'duelog[arrow]'"


class NeedsArrow(DuelogError):
    """Something needs pyarrow, or another package for data frames, and it is not installed."""

    def __init__(self, what: str, error: ImportError, install: str = INSTALL) -> None:
        super().__init__(f"{what} needs a package that is not installed ({error.name}); {install}")
