"""A server of SeaweedFS for copies of stores, where it is installed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def copy_server(directory: Path) -> Iterator[bool]:
    """Have `s3://backups/...` be on a server in a directory, in child processes too; False: it is not installed."""
    from tests.duelog.replica.seaweed import KEYS, seaweed, weed  # noqa: PLC0415 - where the tests' needs are installed

    if weed() is None:
        yield False
        return
    with seaweed(directory) as address:
        os.environ.update({**KEYS, "AWS_ENDPOINT_URL": address})
        yield True
