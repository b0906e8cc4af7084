"""Decoding bodies by column against decoding them one by one."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pyarrow")

from duelog.store.codec.body import decode_body
from duelog.store.codec.format import run_key
from duelog.store.codec.run import Run, pack_messages
from duelog.tools.columns.scan_arrow import read_bodies
from duelog.tools.columns.scan_plan import LogRange
from duelog.tools.columns.scan_rows import Batch, Piece
from tests.proof import length

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
MAPS = st.dictionaries(TEXTS, TEXTS, max_size=3)
PAYLOADS = st.one_of(st.binary(max_size=20), st.sampled_from([255, 256, 65_535, 65_536]).map(bytes))
TIMES = st.one_of(st.just(1_790_000_000_000), st.integers(0, 2**64 - 1))
FIELDS = st.tuples(TIMES, PAYLOADS, st.none() | TEXTS, st.none() | MAPS, st.none() | st.just({"retries": 2}))


def usual(fields: tuple[Any, ...]) -> bytes:
    """A body as it is written: trailing nils left out."""
    values = list(fields)
    while values[-1] is None:
        values.pop()
    return msgpack.packb(values)


BODIES = st.one_of(
    FIELDS.map(usual),
    FIELDS.map(usual).map(lambda body: body[:-1]),
    FIELDS.map(usual).map(lambda body: body + b"\xc0"),
    FIELDS.map(lambda fields: msgpack.packb(list(fields))),
    st.binary(max_size=30),
)


def pieces(bodies: list[bytes], cuts: list[int], damaged: set[int]) -> list[Piece]:
    """Runs of some of the bodies each, with a bit flipped in the damaged ones."""
    found = []
    for start, limit in zip([0, *cuts], [*cuts, len(bodies)], strict=True):
        if start == limit:
            found.append(Piece(0, None, 1, start, 0, 1, "no run"))
            continue
        key = run_key(1, start)
        part = bodies[start:limit]
        value = bytearray(pack_messages(key, 0, np.arange(start, limit), part))
        at = len(value) - sum(map(len, part))
        for number, body in enumerate(part):
            if start + number in damaged and body:
                value[at + len(body) // 2] ^= 4
            at += len(body)
        found.append(Piece(0, Run("e", key, bytes(value)), 1, start, 0, limit - start, None))
    return found


def one_by_one(piece: Piece) -> list[tuple[Any, ...]]:
    """(publish_ms, payload, key, properties, extra, whether there is a reason) of each body of a run."""
    if piece.run is None:
        return [(None, None, None, None, None, True)]
    found: list[tuple[Any, ...]] = []
    for _, body in piece.run.bodies():
        if body is None:
            found.append((None, None, None, None, None, False))
        elif not isinstance(body, bytes):
            found.append((None, None, None, None, None, True))
        else:
            try:
                publish_ms, payload, key, properties, extra = decode_body(body)
                if publish_ms > 2**63 - 1:
                    raise ValueError
            except ValueError:
                found.append((None, None, None, None, None, True))
                continue
            packed = None if extra is None else msgpack.packb(extra)
            found.append((publish_ms, payload, key, properties or {}, packed, False))
    return found


@pytest.mark.series
@settings(max_examples=length("DUELOG_BODIES", 100, 300), deadline=None)
@given(st.data())
def test_bodies_by_column_are_those_one_by_one(data: st.DataObject) -> None:
    """Usual and unusual forms, dropped and damaged ones, runs that cannot be read among them."""
    bodies = data.draw(st.lists(BODIES, min_size=1, max_size=12))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(bodies)), max_size=3)))
    damaged = data.draw(st.sets(st.integers(0, len(bodies) - 1), max_size=2))
    found = pieces(bodies, cuts, damaged)
    columns = read_bodies(Batch(found, (LogRange(1, "t", 1, 0, len(bodies)),)))
    columns.payload.validate(full=True)
    columns.properties.validate(full=True)
    rows = zip(*(column.to_pylist() for column in columns), strict=True)
    got = [
        (publish, payload, key, None if properties is None else dict(properties), extra, reason is not None)
        for publish, payload, key, properties, extra, reason in rows
    ]
    assert got == [row for piece in found for row in one_by_one(piece)]
