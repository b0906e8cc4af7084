"""Settings that change while the broker runs: the limits of topic lists. Documents of the store keep what is set.

Owns names, which values they may have, and what is in force. All belongs to the event loop's thread.
"""

from collections.abc import Mapping

from ...store.errors import InvalidArgument
from ...store.log.documents import Documents
from ..lookup.resources import Records, values_of
from .memory_limits import DualMemoryLimiter, Limits

MAX_VALUE = (1 << 31) - 1

_KINDS = ("Heap", "Direct")
_MEMORY = "maxTopicListInFlight{}MemSizeMB"
_TIMEOUT = "maxTopicListInFlight{}MemSizePermitsAcquireTimeoutMillis"
_QUEUE = "maxTopicListInFlight{}MemSizePermitsAcquireQueueSize"

NAMES = tuple(sorted(form.format(kind) for kind in _KINDS for form in (_MEMORY, _TIMEOUT, _QUEUE)))


class DynamicSettings:
    """Six settings, all whole numbers."""

    def __init__(self, documents: Documents, defaults: Mapping[str, int], limiter: DualMemoryLimiter) -> None:
        """defaults: by name, what is in force where nothing is set. limiter: has what is in force. Call `load`, too."""
        self._records: Records[int] = values_of(documents, "setting", "value")
        self._defaults = defaults
        self._limiter = limiter

    async def load(self) -> None:
        await self._records.load()
        self._apply()

    def values(self) -> dict[str, str]:
        found = {name: self._records.get(name) for name in NAMES}
        return {name: str(each) for name, each in found.items() if each is not None}

    async def set(self, name: str, text: str) -> None:
        """Set a setting durably and at once. Raises InvalidArgument, and what the store raises."""
        value = _checked(_known(name), text)
        await self._records.change(name, lambda before: value)
        self._apply()

    async def delete(self, name: str) -> None:
        """Have a setting follow the configuration again. Raises InvalidArgument, and what the store raises."""
        await self._records.remove(_known(name))
        self._apply()

    def _apply(self) -> None:
        found = {name: self._records.get(name) for name in NAMES}
        self._limiter.set_limits(
            *limits_of({name: self._defaults[name] if each is None else each for name, each in found.items()})
        )


def limits_of(settings: Mapping[str, int]) -> tuple[Limits, Limits]:
    """The limits of lists being made and of frames being written, of settings by their names."""
    heap, direct = ([settings[form.format(kind)] for form in (_MEMORY, _QUEUE, _TIMEOUT)] for kind in _KINDS)
    return Limits(heap[0] << 20, *heap[1:]), Limits(direct[0] << 20, *direct[1:])


def _known(name: str) -> str:
    if name not in NAMES:
        raise InvalidArgument("name", name, f"no setting that can be changed; there are {', '.join(NAMES)}")
    return name


def _checked(name: str, text: str) -> int:
    least = 1 if name.endswith("Millis") else 0
    value = int(text) if text.isascii() and text.isdigit() and len(text) <= 10 else -1
    if not least <= value <= MAX_VALUE:
        raise InvalidArgument(name, text, f"expected a whole number, {least} to {MAX_VALUE}")
    return value
