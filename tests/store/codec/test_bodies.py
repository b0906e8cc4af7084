"""The bodies of a batch as columns, against a plain list of them."""

from __future__ import annotations

from itertools import accumulate
from zlib import crc32

from hypothesis import given
from hypothesis import strategies as st

from duelog.store.codec.bodies import Bodies


@st.composite
def columns(draw: st.DrawFn) -> tuple[Bodies, list[bytes]]:
    """Bodies with and without a shared beginning, of one size and of several; and what they stand for."""
    head = draw(st.sampled_from([b"", b"h", b"head"]))
    size = draw(st.none() | st.integers(0, 40))
    each = st.binary(max_size=40) if size is None else st.binary(min_size=size, max_size=size)
    rests = draw(st.lists(each, max_size=20))
    known = size is not None and draw(st.booleans())
    return Bodies(rests, head, len(head) + (size or 0) if known else None), [head + rest for rest in rests]


@given(columns(), st.data())
def test_columns_of_bodies_are_the_bodies(case: tuple[Bodies, list[bytes]], data: st.DataObject) -> None:
    """Whatever is asked of them whole, of a slice of them, or of some in another order."""
    bodies, plain = case
    bound = st.integers(0, len(plain))
    start, limit = data.draw(bound), data.draw(bound)
    rows = data.draw(st.permutations(range(len(plain))))[: data.draw(bound)]
    for found, expected in (
        (bodies, plain),
        (bodies[start:limit], plain[start:limit]),
        (bodies.pick(rows), [plain[row] for row in rows]),
        (Bodies.of(plain), plain),
    ):
        assert list(found) == expected
        assert [found[place] for place in range(len(found))] == expected
        assert found.sizes().tolist() == [len(body) for body in expected]
        assert found.total() == sum(map(len, expected))
        assert found.ends().tolist() == list(accumulate(map(len, expected)))
        assert found.checksums() == b"".join(crc32(body).to_bytes(4, "little") for body in expected)
        assert b"".join(found.parts()) == b"".join(expected)
