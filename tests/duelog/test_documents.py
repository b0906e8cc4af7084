"""Documents: small durable records, changed by compare-and-set, in order of key, in every check and copy of a store."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from duelog import DelayedStore, Document, StoreConfig
from duelog.errors import CorruptRecord, DocumentChanged, InvalidArgument
from duelog.store.codec import format as fmt
from duelog.store.codec.format import Table
from duelog.store.log import catalog
from duelog.store.log.documents import MAX_KEY_BYTES, MAX_VALUE_BYTES
from duelog.tools.dump import open_environment, rows
from tests.conftest import OpenStore, applied, in_threads, present

FACES = True


def test_a_document_is_read_as_it_was_put_and_is_there_after_opening_again(
    open_store: OpenStore, store: DelayedStore
) -> None:
    """Value and version; what is deleted is gone."""
    documents = store.documents
    assert documents.get("a") is None
    version = documents.put("a", b"one")
    assert documents.get("a") == (b"one", version) == Document(b"one", version)
    assert documents.put("a", bytearray(b"two")) > version
    assert documents.put("b", b"") > version
    assert documents.delete("b")
    assert not documents.delete("b")
    store.close()
    assert present(open_store().documents.get("a")).value == b"two"


def test_a_change_whose_arguments_are_all_named_is_refused_as_any_other(store: DelayedStore) -> None:
    """By a connection `list index out of range` came in place of what is there."""
    version = store.documents.put(key="a", value=b"1")
    with pytest.raises(DocumentChanged) as caught:
        store.documents.put(key="a", value=b"2", expected=None)
    assert caught.value.found == version
    with pytest.raises(DocumentChanged):
        store.documents.delete(key="a", expected=version + 1)
    assert store.documents.delete(key="a", expected=version)


def test_only_who_knows_the_version_that_is_there_changes_it(open_store: OpenStore) -> None:
    """The error says what is there; nothing is stored."""
    documents = open_store().documents
    first = documents.put("a", b"1", expected=None)
    with pytest.raises(DocumentChanged, match=f"'a': version {first} is there, none was expected") as raised:
        documents.put("a", b"2", expected=None)
    assert (raised.value.key, raised.value.expected, raised.value.found) == ("a", None, first)
    second = documents.put("a", b"2", expected=first)
    with pytest.raises(DocumentChanged, match=f"version {second} is there, version {first} was expected"):
        documents.delete("a", expected=first)
    assert documents.delete("a", expected=second)
    with pytest.raises(DocumentChanged, match="no document is there"):
        documents.put("a", b"3", expected=second)
    assert documents.get("a") is None


def test_of_many_that_change_a_document_at_once_each_change_counts(open_store: OpenStore) -> None:
    """Eight threads count in one document, by compare-and-set alone."""
    documents = open_store(config=StoreConfig(durability="none")).documents
    documents.put("n", b"0")

    def add() -> None:
        for _ in range(20):
            while True:
                found = present(documents.get("n"))
                try:
                    documents.put("n", b"%d" % (int(found.value) + 1), expected=found.version)
                    break
                except DocumentChanged:
                    continue

    in_threads(add for _ in range(8))
    found = present(documents.get("n"))
    assert found.value == b"160"


def test_keys_and_values_at_their_bounds_are_taken_and_beyond_refused(open_store: OpenStore) -> None:
    """The refused field is named, and nothing is stored."""
    documents = open_store().documents
    longest = "é" * (MAX_KEY_BYTES // 2)
    documents.put(longest, bytes(MAX_VALUE_BYTES))
    assert len(present(documents.get(longest)).value) == MAX_VALUE_BYTES
    keys: tuple[Any, ...] = ("", longest + "x", 5, None, b"a", "\ud800")
    for key in keys:
        for call in (documents.get, documents.delete, lambda key: documents.put(key, b"")):
            with pytest.raises(InvalidArgument, match="key"):
                call(key)
    values: tuple[Any, ...] = (bytes(MAX_VALUE_BYTES + 1), "text", None, 5)
    for value in values:
        with pytest.raises(InvalidArgument, match="value"):
            documents.put("a", value)
    versions: tuple[Any, ...] = ("1", 1.0, True)
    for version in versions:
        with pytest.raises(InvalidArgument, match="expected"):
            documents.put("a", b"", expected=version)
    with pytest.raises(InvalidArgument, match="key"):
        documents.items(5)  # type: ignore[arg-type]
    assert [key for key, _ in documents.items()] == [longest]


def test_documents_come_in_order_of_key_and_only_those_of_a_prefix(open_store: OpenStore) -> None:
    """Also where they are more than is read at a time, and where a prefix is one's whole key."""
    documents = open_store(config=StoreConfig(durability="none")).documents
    keys = ["a", "a/", "a/é", "a/z", "b", *(f"many/{number:04}" for number in range(40))]
    for key in reversed(keys):
        documents.put(key, key.encode() + bytes(100_000 if key.startswith("many") else 0))
    assert [key for key, _ in documents.items()] == sorted(keys, key=str.encode)
    assert [key for key, _ in documents.items("a/")] == ["a/", "a/z", "a/é"]
    assert [key for key, _ in documents.items("many/")] == keys[5:]
    assert list(documents.items("c")) == []
    assert all(found.value.startswith(key.encode()) for key, found in documents.items())


@pytest.mark.inside
def test_a_backup_has_the_documents_and_dump_shows_them(
    open_store: OpenStore, store: DelayedStore, tmp_path: Path
) -> None:
    """With version and length."""
    version = store.documents.put("settings/a", b"value")
    store.backup(tmp_path / "copy")
    copy = open_store(tmp_path / "copy")
    assert copy.documents.get("settings/a") == (b"value", version)
    assert copy.documents.put("settings/a", b"other", expected=version) > version
    copy.close()
    with closing(open_environment(copy.path / "main", "main")) as main:
        (row,) = rows(main, table=Table.DOCUMENT)
    assert row.value == {"version": version + 1, "bytes": 5, "begins_with": b"other".hex()}


def _damaged(store: DelayedStore, key: bytes) -> None:
    """Have a record, not its copy, be unreadable."""
    store._engine.storage.main.commit(lambda transaction: transaction.raw.put(key, b"xx"))


def test_a_damaged_document_is_an_error_and_a_finding(store: DelayedStore) -> None:
    """Never a value that was not put."""
    store.documents.put("a", b"1")
    _damaged(store, fmt.document_key(b"a"))
    with pytest.raises(CorruptRecord):
        store.documents.get("a")
    with pytest.raises(CorruptRecord):
        list(store.documents.items())
    assert [finding.code for finding in store.check()] == ["corrupt-record"]
    assert store.documents.delete("a")
    assert list(applied(store).check()) == []


def test_a_counter_behind_the_versions_is_a_finding(store: DelayedStore) -> None:
    """A version would be given out twice."""
    store.documents.put("a", b"1")
    last = store.documents.put("a", b"1")
    key = fmt.counter_key(catalog.DOCUMENTS)
    store._engine.storage.main.write(lambda transaction: transaction.put(key, fmt.pack_u64(last)))
    assert [(finding.code, finding.address) for finding in store.check()] == [("counter", "next_document")]
    store._engine.storage.main.write(lambda transaction: transaction.put(key, fmt.pack_u64(last + 1)))


def test_a_version_is_never_given_out_again(open_store: OpenStore) -> None:
    """Who read a document that was deleted and put again does not take it for the one that it was."""
    documents = open_store().documents
    old = documents.put("a", b"1")
    documents.delete("a")
    documents.put("a", b"1")
    with pytest.raises(DocumentChanged):
        documents.put("a", b"2", expected=old)
