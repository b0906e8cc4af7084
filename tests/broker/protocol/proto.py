"""The protocol once more, as a table of its own, and what protobuf makes of it.

By type number and name, fields: number, `!` required or `*` repeated, what it holds (u 64 bits without sign, i with
sign, e an enumeration, s text, b bytes, ? bool, d double, or a message), `=` its default.
"""

import re
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PARTS = """
KeyValue 1!s 2!s
MessageIdData 1!u 2!u 3i=-1 4i=-1 5*i 6i
Schema 1!s 3!b 4!i 5*KeyValue
HashRange 1!i 2!i
KeySharedMeta 1!e 3*HashRange 4?
FeatureFlags 1? 2? 3? 4? 5? 7?
AuthData 1s 2b
MessageMetadata 1!s 2!u 3!u 6s 11i 17? 18b 19i 24u 25?
"""

COMMANDS = """
2 Connect 1!s 3b 4u 5s 6s 7s 10FeatureFlags
3 Connected 1!s 2u 3u 4FeatureFlags
4 Subscribe 1!s 2!s 3!e 4!u 5!u 6s 7i 8?=true 9MessageIdData 10*KeyValue 11? 12Schema 13e 15?=true 16u 17KeySharedMeta \
    19u
5 Producer 1!s 2!u 3!u 4s 6*KeyValue 7Schema 8u 9?=true 10e 11u 13s
6 Send 1!u 2!u 3i=1 4u 5u 6u 7?
7 SendReceipt 1!u 2!u 3MessageIdData 4u
8 SendError 1!u 2!u 3!e 4!s
9 Message 1!u 2!MessageIdData 3u 4*i 5u
10 Ack 1!u 2!e 3*MessageIdData 4u 6u 7u 8u
11 Flow 1!u 2!u
12 Unsubscribe 1!u 2!u 3?
13 Success 1!u
14 Error 1!u 2!e 3!s
15 CloseProducer 1!u 2!u 3s 4s
16 CloseConsumer 1!u 2!u 3s 4s
17 ProducerSuccess 1!u 2!s 3i=-1 4b 5u 6?=true
18 Ping
19 Pong
20 Redeliver 1!u 2*MessageIdData 3u
21 PartitionedMetadata 1!s 2!u 6?=true
22 PartitionedMetadataResponse 1u 2!u 3e 4e 5s
23 Lookup 1!s 2!u 3? 7s
24 LookupResponse 1s 2s 3e 4!u 5? 6e 7s 8?
25 ConsumerStats 1!u 4!u
26 ConsumerStatsResponse 1!u 2e 3s 4d 5d 6d 7s 8u 9u 10? 11s 12s 13s 14d 15u 16d
28 Seek 1!u 2!u 3MessageIdData 4u
29 GetLastMessageId 1!u 2!u
30 GetLastMessageIdResponse 1!MessageIdData 2!u 3MessageIdData
31 ActiveConsumerChange 1!u 2?
32 GetTopics 1!u 2!s 3e 4s 5s
33 GetTopicsResponse 1!u 2*s 3? 4s 5?=true
34 GetSchema 1!u 2!s 3b
35 GetSchemaResponse 1!u 2e 3s 4Schema 5b
36 AuthChallenge 1s 2AuthData 3u
37 AuthResponse 1s 2AuthData 3u
38 AckResponse 1!u 2u 3u 4e 5s 6u
39 GetOrCreateSchema 1!u 2!s 3!Schema
40 GetOrCreateSchemaResponse 1!u 2e 3s 4b
50 NewTxn 1!u
51 NewTxnResponse 1!u 2u 3u 4e 5s
52 AddPartitionToTxn 1!u 2u 3u
53 AddPartitionToTxnResponse 1!u 2u 3u 4e 5s
54 AddSubscriptionToTxn 1!u 2u 3u
55 AddSubscriptionToTxnResponse 1!u 2u 3u 4e 5s
56 EndTxn 1!u 2u 3u
57 EndTxnResponse 1!u 2u 3u 4e 5s
62 TcClientConnect 1!u
63 TcClientConnectResponse 1!u 2e 3s
64 WatchTopicList 1!u 2!u 3!s 4!s 5s
65 WatchTopicListSuccess 1!u 2!u 3*s 4!s
66 WatchTopicUpdate 1!u 2*s 3*s 4!s
67 WatchTopicListClose 1!u 2!u
"""

_F = descriptor_pb2.FieldDescriptorProto
_KINDS = {
    "u": _F.TYPE_UINT64,
    "i": _F.TYPE_INT64,
    "e": _F.TYPE_UINT64,
    "s": _F.TYPE_STRING,
    "b": _F.TYPE_BYTES,
    "?": _F.TYPE_BOOL,
    "d": _F.TYPE_DOUBLE,
}
_LABELS = {"!": _F.LABEL_REQUIRED, "*": _F.LABEL_REPEATED, "": _F.LABEL_OPTIONAL}
_FIELD = re.compile(r"(\d+)([!*]?)([a-z?]|[A-Z]\w+)(?:=(\S+))?")


def _add(file: descriptor_pb2.FileDescriptorProto, name: str, fields: list[str]) -> None:
    message = file.message_type.add(name=name)
    for text in fields:
        found = _FIELD.fullmatch(text)
        assert found is not None, text
        number, label, holds, default = found.groups()
        field = message.field.add(name=f"f{number}", number=int(number), label=_LABELS[label])
        if holds in _KINDS:
            field.type = _KINDS[holds]
        else:
            field.type, field.type_name = _F.TYPE_MESSAGE, f".t.{holds}"
        if default is not None:
            field.default_value = default


def _build() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="t.proto", package="t", syntax="proto2")
    for line in PARTS.strip().splitlines():
        _add(file, line.split()[0], line.split()[1:])
    base = ["1!e"]
    for line in COMMANDS.strip().splitlines():
        number, name, *fields = line.split()
        _add(file, name, fields)
        base.append(f"{number}{name}")
    _add(file, "BaseCommand", base)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        each.name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"t.{each.name}"))
        for each in file.message_type
    }


MESSAGES = _build()
"""Protobuf's classes by name; a field's name is `f` and its number."""

NUMBERS = {line.split()[1]: int(line.split()[0]) for line in COMMANDS.strip().splitlines()}
"""Type numbers of commands by name."""
