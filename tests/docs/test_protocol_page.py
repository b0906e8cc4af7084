"""docs/protocol.md: the exchange, the frame and the figures that it shows are those of the code."""

import json
import re
import socket
from contextlib import closing
from pathlib import Path

from duelog import DelayedStore
from duelog.operations import wire_calls, wire_peer, wire_server, wire_values
from duelog.operations.face_table import FACE
from duelog.operations.wire import HEAD, address_in, framed
from tests.duelog.operations.test_wire import answer_of
from tests.packaging.tree import ROOT

PAGE = (ROOT / "docs" / "protocol.md").read_text()


def test_the_exchange_is_what_is_said_there(tmp_path: Path) -> None:
    """Body for body; the greeting's facts are those that the table lists."""
    lines = re.findall(r"^    (<-|->) (\[.*\])$", PAGE, re.MULTILINE)
    assert len(lines) == 5
    with DelayedStore.open(tmp_path / "store") as store, closing(socket.socket(socket.AF_UNIX)) as client:
        client.settimeout(20)
        with address_in(store.path) as address:
            client.connect(address)
        greeting = answer_of(client)
        assert [name for name in greeting[2] if f"`{name}`" not in PAGE] == []
        assert set(greeting[2]["capabilities"]) == set(FACE)
        for direction, body in lines[1:]:
            value = json.loads(body)
            if direction == "->":
                client.sendall(framed(wire_values.pack(value)))
            else:
                assert answer_of(client, raw=True) == value


def test_the_frame_is_that_of_the_request() -> None:
    """Byte for byte."""
    shown = bytes.fromhex(re.findall(r"`(00 00 00 [0-9a-f \n]*)`", PAGE)[0])
    assert HEAD.unpack_from(shown)[0] == len(shown) - 4
    assert shown == framed(wire_values.pack([1, "Topic.exists", ["reminders"], [], {}]))


def test_the_bounds_are_those_of_the_code() -> None:
    """The table's figures."""
    table = dict(re.findall(r"^\| ([a-z][^|]*) \| (.*) \|$", PAGE.partition("## Bounds")[2], re.MULTILINE))
    assert table["connections at a time"].startswith(f"{wire_server.MOST_CLIENTS:,};")
    assert table["requests under way in a connection"] == f"{wire_peer.MOST_REQUESTS:,}"
    assert table["answers that a peer has not read"].startswith(f"{wire_peer.MOST_UNREAD_BYTES >> 20} MiB;")
    stalled, last = wire_peer.STALLED_S, wire_server.LAST_ANSWER_S
    assert table["a frame without its end, or answers not read"].startswith(f"{stalled:.0f} s; {last:.0f} s")
    assert table["consumers, credits of one"] == f"{wire_calls.MOST_CONSUMERS:,}"


def test_every_extension_type_stands_on_the_page() -> None:
    """By its code."""
    rows = re.findall(r"^\| ([0-9, ]+) \| ", PAGE.partition("## Values")[2].partition("## Operations")[0], re.MULTILINE)
    assert sorted(int(code) for row in rows for code in row.split(",")) == sorted(wire_values._READERS)
