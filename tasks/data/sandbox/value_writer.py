"""Writes values as JSON: some by value, others only by name.

Runs inside the sandbox: imports only the standard library.
"""

from __future__ import annotations

import sys
import types
from typing import Any, Protocol

from tasks.data.sandbox.remote_objects import Remote, number_of

CONTAINERS = {list: "list", dict: "dict", set: "set", bytearray: "bytearray"}
STANDARD = {
    "collections.Counter": lambda value: [dict(value)],
    "collections.OrderedDict": lambda value: [list(value.items())],
    "collections.defaultdict": lambda value: [None, dict(value)],
    "collections.deque": lambda value: [list(value), value.maxlen],
    "decimal.Decimal": lambda value: [str(value)],
    "fractions.Fraction": lambda value: [value.numerator, value.denominator],
    "datetime.date": lambda value: [value.year, value.month, value.day],
    "datetime.time": lambda value: [value.hour, value.minute, value.second, value.microsecond],
    "datetime.datetime": lambda value: [*value.timetuple()[:6], value.microsecond],
    "datetime.timedelta": lambda value: [value.days, value.seconds, value.microseconds],
}
"""Types of the standard library that are sent by value, with the arguments that make an equal one; with a time zone
they are sent as objects."""


class Numbers(Protocol):
    """Gives numbers to the objects of this side (value_exchange.Peer)."""

    def number(self, value: object) -> int: ...

    def class_atom(self, kind: type) -> object: ...

    def names_library(self, value: Any) -> bool: ...


class Writer:
    """One message: atoms that refer to numbered containers, so that shared and cyclic containers are preserved."""

    def __init__(self, peer: Numbers, containers: list[Any] | None = None) -> None:
        self.peer = peer
        self.containers: list[Any] = list(containers or ())
        self.indices = {id(container): index for index, container in enumerate(self.containers)}

    def nodes(self) -> list[object]:
        """The content of all containers; containers inside them are added while they are written."""
        return [[CONTAINERS[type(container)], self._content(container)] for container in self.containers]

    def _content(self, container: Any) -> object:
        if type(container) is bytearray:
            return container.hex()
        if type(container) is dict:
            return [[self.atom(key), self.atom(value)] for key, value in container.items()]
        return [self.atom(item) for item in container]

    def atom(self, value: Any) -> object:
        kind = type(value)
        if value is None or kind in (bool, float, str):
            return value
        if kind is int:
            return value if -(1 << 63) < value < 1 << 63 else ["int", hex(value)]
        if kind in CONTAINERS:
            if id(value) not in self.indices:
                self.indices[id(value)] = len(self.containers)
                self.containers.append(value)
            return ["at", self.indices[id(value)]]
        if kind in (tuple, frozenset):
            return [kind.__name__, [self.atom(item) for item in value]]
        if kind is bytes:
            return ["bytes", value.hex()]
        if kind in (slice, range):
            return [kind.__name__, [self.atom(item) for item in (value.start, value.stop, value.step)]]
        if kind is complex:
            return ["complex", [value.real, value.imag]]
        return self._object(value, kind)

    def _object(self, value: Any, kind: type) -> object:
        if issubclass(kind, Remote):
            return ["yours", number_of(value)]
        if issubclass(kind, BaseException) and hasattr(kind, "_peer") and "_number" in vars(value):
            return ["yours", vars(value)["_number"]]
        if isinstance(value, type) and "_peer" in vars(value) and "_class" in vars(value):
            return ["yours", vars(value)["_class"]]
        library = self._library_name(value)
        if library is not None:
            return ["library", *library]
        standard = f"{kind.__module__}.{kind.__name__}"
        if standard in STANDARD and getattr(value, "tzinfo", None) is None:
            return ["standard", standard, self.atom(tuple(STANDARD[standard](value)))]
        if issubclass(kind, BaseException):
            is_python_s = self._library_name(kind) is not None
            return [
                "error",
                None if is_python_s else self.peer.number(value),
                self.atom(kind),
                self.atom(tuple(value.args)),
            ]
        if isinstance(value, type):
            bases = [self.atom(base) for base in value.__bases__ if issubclass(base, BaseException)]
            return ["class", self.peer.number(value), self.peer.class_atom(kind), value.__name__, bases]
        return ["object", self.peer.number(value), self.peer.class_atom(kind)]

    def _library_name(self, value: Any) -> tuple[str, str | None] | None:
        if value is NotImplemented or value is Ellipsis:
            return "builtins", repr(value)
        if not self.peer.names_library(value):
            return None
        if isinstance(value, types.ModuleType):
            return (
                (value.__name__, None)
                if sys.modules.get(value.__name__) is value and value.__name__ in sys.stdlib_module_names
                else None
            )
        module, name = value.__module__, value.__name__
        has_it = module in sys.stdlib_module_names and getattr(sys.modules.get(module), name, None) is value
        return (module, name) if has_it else None
