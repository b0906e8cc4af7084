"""CRC-32 of every record: that of zlib, computed by the fastest code that is installed.

`isal` (the extra `duelog[speed]`) gives the same numbers with the processor's carry-less multiplication: 0.1 us a KiB
instead of 0.4 to 0.6. It is never required, and stores do not differ by it.
"""

from collections.abc import Callable

try:
    from isal.isal_zlib import crc32 as _crc32  # type: ignore[import-not-found,unused-ignore]
except ImportError:
    from zlib import crc32 as _crc32

crc32: Callable[..., int] = _crc32
"""`crc32(data, value=0)`: the checksum of `data`, going on from `value`."""
