"""The messages of a Chakra execution trace, as bytes: the wire format of protocol buffers.

Numbers of fields are those of ``et_def.proto`` (https://github.com/mlcommons/chakra at 21585d8f), which no
package of the Python index brings. https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import NamedTuple

VERSION = "0.0.4"


class ChakraKind(IntEnum):
    """``NodeType``."""

    METADATA = 1
    MEM_LOAD = 2
    MEM_STORE = 3
    COMP = 4
    COMM_SEND = 5
    COMM_RECV = 6
    COMM_COLL = 7


COLLECTIVES = {
    **{"all_reduce": 0, "reduce": 1, "all_gather": 2, "gather": 3, "scatter": 4, "broadcast": 5},
    **{"all_to_all": 6, "reduce_scatter": 7, "barrier": 9},
}
"""``CollectiveCommType``, by what the kinds of collectives are called here."""


class Int64(NamedTuple):
    """A number that a reader expects as int64."""

    value: int


class Int32(NamedTuple):
    """A number that a reader expects as int32."""

    value: int


class UInt64(NamedTuple):
    """A number that a reader expects as uint64."""

    value: int


Attribute = bool | str | Int32 | Int64 | UInt64


def _varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    made = bytearray()
    while number > 127:
        made.append(number & 127 | 128)
        number >>= 7
    made.append(number)
    return bytes(made)


def _number(field: int, number: int) -> bytes:
    return _varint(field << 3) + _varint(number)


def _bytes(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _packed(field: int, numbers: Iterable[int]) -> bytes:
    content = b"".join(map(_varint, numbers))
    return _bytes(field, content) if content else b""


_FIELDS: dict[type, int] = {Int32: 7, Int64: 9, UInt64: 13}


def attribute(name: str, value: Attribute) -> bytes:
    """Return an ``AttributeProto``."""
    head = _bytes(1, name.encode())
    if isinstance(value, bool):
        return head + _number(27, value)
    if isinstance(value, str):
        return head + _bytes(29, value.encode())
    return head + _number(_FIELDS[type(value)], value.value)


class ChakraNode(NamedTuple):
    """A ``Node``: times in seconds, dependencies by number."""

    number: int
    name: str
    kind: ChakraKind
    before: Iterable[int]
    needs: Iterable[int]
    start: float
    duration: float
    attributes: Mapping[str, Attribute]

    def encoded(self) -> bytes:
        """Return the message."""
        parts = [
            _number(1, self.number),
            _bytes(2, self.name.encode()),
            _number(3, self.kind),
            _packed(4, self.before),
            _packed(5, self.needs),
            _number(6, round(self.start * 1e6)),
            _number(7, round(self.duration * 1e6)),
        ]
        parts += [_bytes(10, attribute(name, value)) for name, value in self.attributes.items()]
        return b"".join(parts)


def metadata() -> bytes:
    """Return the ``GlobalMetadata`` that begins a file."""
    return _bytes(1, VERSION.encode())


def delimited(message: bytes) -> bytes:
    """Return a message as it stands in a file of several: its length first."""
    return _varint(len(message)) + message
