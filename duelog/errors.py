"""Every error of the library, for callers: `from duelog.errors import StoreLocked`."""

# ruff: noqa: PLC0414 - so that they are exported
from duelog.operations.wire import Disconnected as Disconnected
from duelog.operations.wire import NotAllowed as NotAllowed
from duelog.operations.wire import OnlyInProcess as OnlyInProcess
from duelog.store.errors import AlreadyOpen as AlreadyOpen
from duelog.store.errors import BrokenInvariant as BrokenInvariant
from duelog.store.errors import ClockJumped as ClockJumped
from duelog.store.errors import ClosedError as ClosedError
from duelog.store.errors import ConsumerBusy as ConsumerBusy
from duelog.store.errors import CorruptEntry as CorruptEntry
from duelog.store.errors import CorruptRecord as CorruptRecord
from duelog.store.errors import DamagedStore as DamagedStore
from duelog.store.errors import DayAway as DayAway
from duelog.store.errors import DelayTooLong as DelayTooLong
from duelog.store.errors import Deposed as Deposed
from duelog.store.errors import DocumentChanged as DocumentChanged
from duelog.store.errors import DuelogError as DuelogError
from duelog.store.errors import ForkFound as ForkFound
from duelog.store.errors import FormatMismatch as FormatMismatch
from duelog.store.errors import HandlersHang as HandlersHang
from duelog.store.errors import InvalidArgument as InvalidArgument
from duelog.store.errors import InvalidMessage as InvalidMessage
from duelog.store.errors import NoPermission as NoPermission
from duelog.store.errors import NotLeader as NotLeader
from duelog.store.errors import NotReplicated as NotReplicated
from duelog.store.errors import PoliciesChanged as PoliciesChanged
from duelog.store.errors import QuotaExceeded as QuotaExceeded
from duelog.store.errors import ReadOnly as ReadOnly
from duelog.store.errors import ReplicaDamaged as ReplicaDamaged
from duelog.store.errors import ReplicaRefused as ReplicaRefused
from duelog.store.errors import ReplicaUnreachable as ReplicaUnreachable
from duelog.store.errors import ResourceShortage as ResourceShortage
from duelog.store.errors import StoreBusy as StoreBusy
from duelog.store.errors import StoreFailed as StoreFailed
from duelog.store.errors import StoreFull as StoreFull
from duelog.store.errors import StoreLocked as StoreLocked
from duelog.store.errors import StoreUnavailable as StoreUnavailable
from duelog.store.errors import TransactionConflict as TransactionConflict
from duelog.store.errors import UnknownSubscription as UnknownSubscription
from duelog.store.errors import UnknownTopic as UnknownTopic

__all__ = [name for name in sorted(globals()) if name[0].isupper()]
