"""Numbers of errors that clients know, and which of duelog's errors is which of them."""

from enum import IntEnum

from ...store import errors


class ServerError(IntEnum):
    """The `error` of an answer."""

    UNKNOWN = 0
    METADATA = 1
    PERSISTENCE = 2
    AUTHENTICATION = 3
    AUTHORIZATION = 4
    CONSUMER_BUSY = 5
    SERVICE_NOT_READY = 6
    PRODUCER_BLOCKED_QUOTA_EXCEEDED_ERROR = 7
    PRODUCER_BLOCKED_QUOTA_EXCEEDED_EXCEPTION = 8
    CHECKSUM = 9
    UNSUPPORTED_VERSION = 10
    TOPIC_NOT_FOUND = 11
    SUBSCRIPTION_NOT_FOUND = 12
    CONSUMER_NOT_FOUND = 13
    TOO_MANY_REQUESTS = 14
    TOPIC_TERMINATED = 15
    PRODUCER_BUSY = 16
    INVALID_TOPIC_NAME = 17
    INCOMPATIBLE_SCHEMA = 18
    CONSUMER_ASSIGN = 19
    TRANSACTION_COORDINATOR_NOT_FOUND = 20
    INVALID_TXN_STATUS = 21
    NOT_ALLOWED = 22
    TRANSACTION_CONFLICT = 23
    TRANSACTION_NOT_FOUND = 24
    PRODUCER_FENCED = 25


class Refused(Exception):
    """A request that is answered with an error; the connection goes on."""

    def __init__(self, error: ServerError, message: str) -> None:
        super().__init__(message)
        self.error = error
        self.message = message


_BY_CLASS: dict[type[BaseException], ServerError] = {
    errors.UnknownTopic: ServerError.TOPIC_NOT_FOUND,
    errors.UnknownSubscription: ServerError.SUBSCRIPTION_NOT_FOUND,
    errors.ConsumerBusy: ServerError.CONSUMER_BUSY,
    errors.QuotaExceeded: ServerError.PRODUCER_BLOCKED_QUOTA_EXCEEDED_EXCEPTION,
    errors.InvalidMessage: ServerError.NOT_ALLOWED,
    errors.InvalidArgument: ServerError.NOT_ALLOWED,
    errors.StoreFull: ServerError.PERSISTENCE,
    errors.StoreFailed: ServerError.SERVICE_NOT_READY,
    errors.ClosedError: ServerError.SERVICE_NOT_READY,
    errors.NotLeader: ServerError.SERVICE_NOT_READY,
    errors.Deposed: ServerError.SERVICE_NOT_READY,
    errors.NotReplicated: ServerError.PERSISTENCE,
    errors.CorruptEntry: ServerError.PERSISTENCE,
    errors.CorruptRecord: ServerError.METADATA,
    errors.StoreUnavailable: ServerError.PERSISTENCE,
}


def server_error(error: BaseException) -> ServerError:
    """The number for an error, by the nearest class of the table."""
    if isinstance(error, Refused):
        return error.error
    for cls in type(error).__mro__:
        if cls in _BY_CLASS:
            return _BY_CLASS[cls]
    return ServerError.UNKNOWN
