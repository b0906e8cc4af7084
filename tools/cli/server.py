"""A server's administration over HTTP, by the operations of the table: REST of `duelog serve --http`.

Each operation is a request or several, and takes and gives the JSON of the table; nothing is open between two. Where
REST has more to say than the table, as it knows partitioned topics, clients and their names, that is asked.
"""

import json
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.client import HTTPException
from math import ceil
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlencode, urljoin, urlsplit
from urllib.request import HTTPRedirectHandler, HTTPSHandler, Request, build_opener

from ...broker.lookup.topic_address import TopicAddress, partition_name
from ...operations.json_form import camel
from ...store.errors import DuelogError, InvalidArgument
from ...store.names import TopicName, validate_namespace_name
from ...store.position import MessageId
from ..asking import with_shown_names
from ..output import printable

_PAGE = 1_000
_PAYLOAD_BYTES = 4_096
_PLACES = {"latest": {"ledgerId": 2**63 - 1, "entryId": 2**63 - 1}, "earliest": {"ledgerId": -1, "entryId": -1}}

_TOLD = ("message_id", "key", "properties", "due_ms", "publish_ms")
"""Fields of a scheduled message that a server tells."""
_AS_THEY_ARE = ("effective", "figures", "partitions")
"""Operations of the table that a server is asked for as they are."""
_NOT_ASKED = {
    "cancel_keys": "a server is not asked by key; cancel by id, or in its directory",
    "peek": "a server is not asked for messages; peek in its directory",
}

_TIMEOUT_S = 60
_MOST_REDIRECTS = 5


class ServerRefused(DuelogError):
    """A server's answer that is an error, or why there was none (status 0)."""

    def __init__(self, server: str, status: int, reason: str) -> None:
        super().__init__(printable(f"{server}: {f'{status}: ' if status else ''}{reason}"))
        self.status = status
        self.reason = reason


class _NoRedirects(HTTPRedirectHandler):
    """They are followed here: the library follows none that changes something."""

    def redirect_request(self, *_: Any) -> None:
        return None


class RestClient:
    """One server, and the others that it sends requests on to."""

    def __init__(self, url: str, token: str | None = None, trust: Path | None = None) -> None:
        """trust: certificates in PEM; None: those of this machine. Raises InvalidArgument."""
        self.url = url.rstrip("/")
        self._headers = {"Accept": "application/json"} | ({} if token is None else {"Authorization": f"Bearer {token}"})
        if any(not value.isprintable() for value in self._headers.values()):
            raise InvalidArgument("--token", None, "has characters that no token has")
        try:
            context = ssl.create_default_context(cafile=trust)
        except (OSError, ssl.SSLError) as error:
            raise InvalidArgument("--tls-trust", str(trust), f"cannot be read: {error.strerror or error}") from error
        self._opener = build_opener(_NoRedirects, HTTPSHandler(context=context))

    def get(self, path: str, **query: object) -> Any:
        """None: 204."""
        return self.ask("GET", path, **query)

    def names(self, path: str) -> list[str]:
        """A list of names. Raises ServerRefused, also for an answer that is none."""
        found = self.get(path)
        if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
            raise self.strange(f"expected a list of names, not {str(found)[:100]}")
        return found

    def strange(self, reason: str) -> ServerRefused:
        """The error of an answer in JSON of another shape than duelog's."""
        return ServerRefused(self.url, 0, f"is no server of duelog, or one of another version: {reason}")

    def ask(self, method: str, path: str, body: object = ..., **query: object) -> Any:
        """The JSON of the answer; None: it has none. A query that is None is left out. Raises ServerRefused."""
        given = {name: value for name, value in query.items() if value is not None}
        url = f"{self.url}{path}{'?' if given else ''}{urlencode(given)}"
        data = None if body is ... else json.dumps(body).encode()
        headers = self._headers | ({} if data is None else {"Content-Type": "application/json"})
        for _ in range(_MOST_REDIRECTS):
            found = self._once(Request(url, data, headers, method=method))
            if isinstance(found, bytes):
                return self._json(url, found)
            onward = urljoin(url, found["Location"])
            if urlsplit(onward).scheme not in ("https", urlsplit(url).scheme):
                raise ServerRefused(self.url, 307, f"sends on to {onward}, which is not encrypted")
            url = onward
        raise ServerRefused(self.url, 307, "is sent on from server to server")

    def _json(self, url: str, answer: bytes) -> Any:
        try:
            return json.loads(answer) if answer else None
        except (ValueError, RecursionError) as error:
            raise ServerRefused(self.url, 0, f"is no server of duelog: what it answers to {url} is no JSON") from error

    def _once(self, request: Request) -> bytes | Mapping[str, str]:
        """The body of an answer, or the headers of one that sends on."""
        server = f"{request.type}://{request.host}"
        try:
            with self._opener.open(request, timeout=_TIMEOUT_S) as answer:
                return bytes(answer.read())
        except HTTPError as error:
            with error:
                if error.code == 307 and error.headers.get("Location"):
                    return dict(error.headers.items())
                raise ServerRefused(server, error.code, _reason(error)) from error
        except URLError as error:
            reason = error.reason
            text = getattr(reason, "strerror", None) or reason
            raise ServerRefused(server, 0, str(getattr(reason, "verify_message", "") or text)) from error
        except (OSError, HTTPException, ValueError) as error:
            raise ServerRefused(server, 0, str(error) or type(error).__name__) from error


def segment(text: str) -> str:
    """A part of a path."""
    return quote(text, safe="")


def _reason(error: HTTPError) -> str:
    try:
        return " ".join(str(json.loads(error.read())["reason"]).split())
    except (ValueError, KeyError, TypeError, OSError):
        return str(error.reason)


class Server:
    """A server that does operations, each by requests of its own."""

    def __init__(self, url: str, token: str | None, trust: Path | None) -> None:
        self._rest = RestClient(url, token, trust)

    @contextmanager
    def understood(self) -> Iterator[None]:
        """Raise ServerRefused where the block, which reads answers, meets one of another shape."""
        try:
            yield
        except DuelogError:
            raise
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise self._rest.strange(f"an answer is not as expected ({type(error).__name__}: {error})") from error

    def ask(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Do an operation, with arguments and result in JSON; None in place of what REST does not tell."""
        if name in _AS_THEY_ARE:
            return self._of_table(name, **arguments)
        if not hasattr(type(self), name):
            reason = _NOT_ASKED.get(name, f"a server is not asked to {name}; ask in its directory")
            raise InvalidArgument("--server", self._rest.url, reason)
        return getattr(self, name)(**arguments)

    # -- topics ----------------------------------------------------------------------------------------

    def topics(self, namespace: str | None = None) -> Iterator[str]:
        for each in self._namespaces() if namespace is None else [validate_namespace_name(namespace)]:
            yield from self._rest.names(f"/admin/v2/persistent/{each}")

    def _namespaces(self) -> Iterator[str]:
        for tenant in self._rest.names("/admin/v2/tenants"):
            yield from self._rest.names(f"/admin/v2/namespaces/{segment(tenant)}")

    def create_topic(self, topic: str) -> bool:
        return self._create(_admin(topic), {})

    def delete_topic(self, topic: str, force: bool = False) -> None:
        self._rest.ask("DELETE", _admin(topic), force=str(force).lower())

    def _create(self, path: str, body: object) -> bool:
        try:
            self._rest.ask("PUT", path, body)
        except ServerRefused as refused:
            if refused.status != 409:
                raise
            return False
        return True

    def topic_figures(self, topic: str) -> Any:
        return with_shown_names(self._of_table("topic_figures", topic=topic))

    def _of_table(self, name: str, **arguments: object) -> Any:
        """Have an operation of the table done as it is."""
        return self._rest.ask("POST", f"/duelog/v1/operations/{name}", arguments)

    # -- messages --------------------------------------------------------------------------------------

    def scheduled(
        self,
        topic: str,
        start_ms: int | None = None,
        end_ms: int | None = None,
        limit: int = _PAGE,
        newest_first: bool = False,
    ) -> Iterator[dict[str, Any]]:
        if newest_first:
            raise InvalidArgument("--newest-first", newest_first, "a server lists the one first that is due first")
        after, path = None, f"{_duelog(topic)}/scheduled"
        name = str(TopicName.parse(topic))
        while limit > 0:
            given = {"start": start_ms, "end": end_ms, "limit": min(limit, _PAGE), "after": after}
            page = self._rest.get(path, **given, payloadBytes=_PAYLOAD_BYTES)
            for each in page["messages"]:
                told = {field: each[camel(field)] for field in _TOLD}
                yield {**told, "payload": each.get("payload", ""), "topic": name}
            limit, after = limit - len(page["messages"]), page["next"]
            if after is None:
                return

    def cancel(self, topic: str, ids: list[str]) -> list[str]:
        return [each["outcome"] for each in self._together(topic, "cancel", ids, {})]

    def reschedule(
        self, topic: str, ids: list[str], deliver_at: int | None = None, deliver_after: float | None = None
    ) -> list[str | None]:
        given = {"deliverAt": deliver_at, "deliverAfter": deliver_after}
        body = {name: value for name, value in given.items() if value is not None}
        return [each["newMessageId"] for each in self._together(topic, "reschedule", ids, body)]

    def _together(self, topic: str, verb: str, ids: list[str], body: Mapping[str, Any]) -> list[Any]:
        """Send one request, which is one transaction, for each 1,000."""
        done: list[Any] = []
        for at in range(0, len(ids), _PAGE):
            given = {**body, "messageIds": ids[at : at + _PAGE]}
            done += self._rest.ask("POST", f"{_duelog(topic)}/{verb}", given)["messages"]
        if len(done) != len(ids):
            raise self._rest.strange(f"{len(ids)} messages were named, and {len(done)} answered")
        return done

    # -- subscriptions ---------------------------------------------------------------------------------

    def subscriptions(self, topic: str) -> list[str]:
        return self._rest.names(f"{_admin(topic)}/subscriptions")

    def create_subscription(self, topic: str, subscription: str, position: str) -> bool:
        return self._create(_subscription(topic, subscription), _PLACES[position])

    def delete_subscription(self, topic: str, subscription: str) -> None:
        self._rest.ask("DELETE", _subscription(topic, subscription))

    def seek(self, topic: str, subscription: str, to: str | Mapping[str, int]) -> None:
        path = f"{_subscription(topic, subscription)}/resetcursor"
        if not isinstance(to, str):
            if "due_ms" in to:
                raise InvalidArgument("--due", to["due_ms"], "a server goes by --published")
            self._rest.ask("POST", f"{path}/{to['published_ms']}")
        elif to in _PLACES:
            self._rest.ask("POST", path, _PLACES[to])
        else:
            position = MessageId.parse(to)
            self._rest.ask("POST", path, {"ledgerId": position.ledger_id, "entryId": position.entry_id})

    def skip(self, topic: str, subscription: str, count: int) -> None:
        self._rest.ask("POST", f"{_subscription(topic, subscription)}/skip/{count}")

    def expire(self, topic: str, subscription: str, older_than: float) -> None:
        self._rest.ask("POST", f"{_subscription(topic, subscription)}/expireMessages/{max(ceil(older_than), 1)}")

    # -- policies --------------------------------------------------------------------------------------

    def policies(self, **scope: str | None) -> Any:
        if any(scope.values()):
            return self._of_table("policies", **self._scopes(**scope)[0])
        found = {f"namespace {name}": self.policies(namespace=name) for name in self._namespaces()}
        return {name: each for name, each in found.items() if each is not None}

    def update_policies(self, values: Mapping[str, Any], **scope: str | None) -> Any:
        done, *_ = [self._of_table("update_policies", values=values, **each) for each in self._scopes(**scope)]
        return done

    def remove_policies(self, **scope: str | None) -> Any:
        done, *_ = [self._of_table("remove_policies", **each) for each in self._scopes(**scope)]
        return done

    def _scopes(self, namespace: str | None = None, topic: str | None = None, **subscription: str | None) -> list[Any]:
        """The scope, which exists; of a partitioned topic, or a partition, its and those of all its partitions."""
        if topic is not None:
            address = TopicAddress.parse(topic)
            name, count = address.name, self._partitions(address.name)
            if address.partition >= 0:
                with suppress(ServerRefused):  # a plain topic may have such a name
                    count = self._partitions(address.base)
                    name = address.base if count else name
            topics = [name, *(partition_name(name, number) for number in range(count))]
            return [{"namespace": namespace, "topic": str(each), **subscription} for each in topics]
        if namespace is None:
            raise InvalidArgument("--namespace", None, "a server has policies of namespaces and topics: name one")
        self._rest.get(f"/admin/v2/namespaces/{validate_namespace_name(namespace)}")
        return [{"namespace": namespace, **subscription}]

    def _partitions(self, topic: TopicName) -> int:
        return int(self._rest.get(f"{_admin(str(topic))}/partitions")["partitions"])


def _admin(topic: str) -> str:
    name = TopicName.parse(topic)
    return f"/admin/v2/persistent/{name.namespace_name}/{segment(name.local_name)}"


def _duelog(topic: str) -> str:
    return _admin(topic).replace("/admin/v2", "/duelog/v1", 1)


def _subscription(topic: str, subscription: str) -> str:
    return f"{_admin(topic)}/subscription/{segment(subscription)}"
