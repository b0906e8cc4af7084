"""Which status answers which error, and the text that clients show."""

from __future__ import annotations

from ...store import errors
from ..protocol.failures import Refused, ServerError
from .http_request import HttpError

_BY_NUMBER = {
    ServerError.METADATA: 412,
    ServerError.AUTHENTICATION: 401,
    ServerError.AUTHORIZATION: 403,
    ServerError.TOPIC_NOT_FOUND: 404,
    ServerError.SUBSCRIPTION_NOT_FOUND: 404,
    ServerError.CONSUMER_NOT_FOUND: 404,
    ServerError.INVALID_TOPIC_NAME: 412,
    ServerError.NOT_ALLOWED: 412,
    ServerError.CONSUMER_BUSY: 412,
    ServerError.INCOMPATIBLE_SCHEMA: 409,
    ServerError.TOO_MANY_REQUESTS: 429,
    ServerError.SERVICE_NOT_READY: 503,
}

_BY_CLASS: dict[type[BaseException], int] = {
    errors.UnknownTopic: 404,
    errors.UnknownSubscription: 404,
    errors.PoliciesChanged: 409,
    errors.DocumentChanged: 409,
    errors.ConsumerBusy: 412,
    errors.InvalidArgument: 412,
    errors.ClosedError: 503,
    errors.StoreFailed: 503,
    errors.StoreUnavailable: 503,
    errors.StoreBusy: 503,
    errors.StoreFull: 507,
}


def as_http_error(error: BaseException) -> HttpError | None:
    """The answer to an error; None: it is a fault of the broker's."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, Refused):
        return HttpError(_BY_NUMBER.get(error.error, 500), error.message)
    for cls in type(error).__mro__:
        if cls in _BY_CLASS:
            return HttpError(_BY_CLASS[cls], str(error))
    return None
