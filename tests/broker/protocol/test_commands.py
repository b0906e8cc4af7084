"""Commands against protobuf's own reading and writing of them."""

import math
from enum import IntEnum
from random import Random
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duelog.broker.protocol import commands, entry, fields
from duelog.broker.protocol.failures import ServerError
from duelog.broker.protocol.fields import ProtocolError, tag, varint
from tests.broker.protocol.proto import MESSAGES, NUMBERS

T = TypeVar("T")
WORD = 1 << 64
LETTERS = "aZ0 -/\x00\u00e9\u20ac\U0001f600"


def one_value(field: fields.Field, random: Random) -> Any:
    """One value of a field, the ends of its range among them."""
    if issubclass(field.type, IntEnum):
        return random.choice(list(field.type))
    if field.type is bool:
        return random.random() < 0.5
    if field.type is int:
        lowest = -WORD // 2 if field.signed else 0
        highest = WORD // 2 - 1 if field.signed else WORD - 1
        small = random.randrange(-2 if field.signed else 0, 128)
        return random.choice((lowest, highest, small, random.getrandbits(random.randrange(1, 64))))
    if field.type is float:
        return random.choice((0.0, -1.5, math.inf, random.uniform(-1e300, 1e300)))
    size = random.choice((0, 3, 127, 128, 300))
    if field.type is str:
        return "".join(random.choices(LETTERS, k=size))
    return random.randbytes(size) if field.type is bytes else instance(field.type, random)


def instance(cls: type[T], random: Random) -> T:
    """Any instance of a class of the table; each field that need not be there may be left out."""
    arguments: dict[str, Any] = {}
    for field in fields.fields_of(cls):
        if field.repeated:
            found = [one_value(field, random) for _ in range(random.randrange(4))]
            arguments[field.name] = found or ()
        else:
            absent = not field.required and random.random() < 0.5
            arguments[field.name] = field.default if absent else one_value(field, random)
    return cls(**arguments)


def as_protobuf(value: Any) -> Any:
    """A part or command of ours as protobuf's message."""
    message = MESSAGES[type(value).__name__]()
    for field in fields.fields_of(type(value)):
        held, name = getattr(value, field.name), f"f{field.number}"
        if field.repeated:
            getattr(message, name).extend(
                [as_protobuf(each) if field.type in fields.DECODERS else each for each in held]
            )
        elif held is not None:
            if field.type in fields.DECODERS:
                getattr(message, name).CopyFrom(as_protobuf(held))
            else:
                setattr(message, name, int(held) if isinstance(held, IntEnum) else held)
    return message


def without_defaults(message: Any) -> Any:
    """The message with every field cleared that says what is so without it."""
    for descriptor, held in message.ListFields():
        if descriptor.is_repeated:
            for each in held if descriptor.message_type else ():
                without_defaults(each)
        elif descriptor.message_type:
            without_defaults(held)
        elif not descriptor.is_required and held == descriptor.default_value:
            message.ClearField(descriptor.name)
    return message


CLASSES = sorted(fields.CLASSES.values(), key=lambda cls: cls.type_number)


def test_the_table_has_every_command_under_its_number() -> None:
    """Names and numbers as in the other table."""
    assert {cls.__name__: cls.type_number for cls in CLASSES} == NUMBERS


def test_protobuf_reads_what_is_encoded_and_writes_what_is_decoded() -> None:
    """Both ways, every command and field at its number, with its presence and default."""
    for cls in CLASSES:
        random, number = Random(cls.type_number), f"f{cls.type_number}"
        for _ in range(60):
            command = instance(cls, random)
            read = MESSAGES["BaseCommand"]()
            assert read.ParseFromString(commands.encode(command)) > 0
            assert read.f1 == cls.type_number
            wanted = as_protobuf(command)
            assert without_defaults(getattr(read, number)) == without_defaults(as_protobuf(command))
            full = MESSAGES["BaseCommand"](f1=cls.type_number)
            getattr(full, number).CopyFrom(wanted)
            assert commands.decode(full.SerializeToString()) == command


@given(st.integers(0, 2**32))
def test_metadata_is_read_and_what_the_broker_does_not_know_of_it_is_skipped(seed: int) -> None:
    """Producers write fields that later versions brought."""
    random = Random(seed)
    wanted, other = instance(entry.MessageMetadata, random), random.randbytes(random.randrange(40))
    data = as_protobuf(wanted).SerializeToString()
    unknown = tag(4, 2) + varint(len(other)) + other + tag(12, 0) + varint(1 << 60) + tag(90, 1) + bytes(8)
    assert entry.decode_metadata(memoryview(unknown + data + unknown + tag(91, 5) + bytes(4))) == wanted


def test_whatever_form_protobuf_gives_a_command_is_read() -> None:
    """Unknown fields inside it and beside it, any order of fields, both forms of a repeated number."""
    send = commands.Send(1, 2)
    body = fields.ENCODERS[commands.Send](send) + tag(200, 2) + varint(3) + b"abc"
    data = tag(1, 0) + varint(6) + tag(99, 0) + varint(7) + tag(6, 2) + varint(len(body)) + body
    assert commands.decode(data) == send
    assert commands.decode(tag(11, 2) + b"\x04\x08\x01\x10\x02" + tag(1, 0) + b"\x0b") == commands.Flow(1, 2)
    packed = tag(1, 0) + b"\x01" + tag(2, 0) + b"\x02" + tag(5, 2) + b"\x0b\x05" + varint(-1)
    found = fields.DECODERS[commands.MessageIdData](packed, 0, len(packed))
    assert found == commands.MessageIdData(1, 2, ack_set=[5, -1])


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "type 0"),
        (b"\x08\x01", "type 1"),
        (b"\x08\x7f", "type 127"),
        (b"\x08", "malformed"),
        (b"\x08\x06", "no producer_id"),
        (b"\x08\x06\x32\x02\x08\x01", "no sequence_id"),
        (b"\x08\x06\x32\x04\x08\x01\x10", "cut off"),
        (b"\x5a\x03\x08\x01\x10\x08\x0b", "Flow is cut off"),
        (b"\x08\x06\x32\x03\x08\x01\x10", "malformed"),
        (b"\x08\x0b\x5a\x05\x08\x01\x10\x02\x0f", "wire type 7"),
        (b"\x08\x0b\x5a\x05\x08\x01\x10\x02\x02", "no field number"),
        (b"\x08\x0b\x5a\x0c\x08" + b"\xff" * 11, "ten bytes"),
        (b"\x08\x0a\x52\x04\x08\x01\x10\x02", "unknown value"),
        (b"\x08\x07\x3a\x07\x08\x01\x10\x02\x1a\x02\x08", "malformed"),
        (b"\x08\x15\xaa\x01\x05\x0a\x01\xff\x10\x01", "malformed"),
    ],
)
def test_a_malformed_command_is_a_protocol_error_that_says_what_it_is(data: bytes, says: str) -> None:
    """One example of each fault."""
    with pytest.raises(ProtocolError, match=says):
        commands.decode(data)


@settings(max_examples=500)
@given(st.integers(0, 2**32))
def test_damaged_commands_decode_or_are_protocol_errors(seed: int) -> None:
    """Bytes flipped, cut off and added anywhere."""
    random = Random(seed)
    damaged = bytearray(commands.encode(instance(random.choice(CLASSES), random)))
    for _ in range(random.randrange(1, 5)):
        at = random.randrange(len(damaged))
        damaged[at : at + random.randrange(3)] = random.randbytes(random.randrange(4))
        if not damaged:
            break
    try:
        found = commands.decode(bytes(damaged))
    except ProtocolError:
        return
    assert commands.decode(commands.encode(found)) == found


def test_text_that_is_no_unicode_is_still_sent() -> None:
    """Error messages may name files whose names are no text."""
    found = commands.decode(commands.encode(commands.Error(1, ServerError.UNKNOWN, "a\udcffb")))
    assert found == commands.Error(1, ServerError.UNKNOWN, "a?b")
