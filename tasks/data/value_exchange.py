"""Values and calls between two processes over a pair of pipes: a solution and the judge of its tests, which trust each other with nothing.

Plain data goes by value, as JSON: numbers, texts, bytes, containers of exactly Python's own types, some of the standard library. Everything
else stays where it is and is a `Remote` on the other side, whose attributes, calls and operators are requests. A container that is handed
over is brought up to date when the call returns, so tests see what was done to their arguments. Exceptions arrive as their own classes
where those are Python's, else as classes of the same name and descent. Runs inside the sandbox: imports the standard library only.
"""

from __future__ import annotations

import builtins
import importlib
import json
import os
import sys
import types
from collections.abc import Sequence
from typing import Any

UNARY = ("__abs__", "__neg__", "__pos__", "__invert__", "__round__", "__floor__", "__ceil__", "__trunc__", "__int__", "__float__",
         "__complex__", "__index__")  # fmt: skip
ARITHMETIC = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow", "lshift", "rshift", "and", "or", "xor")
BINARY = tuple(f"__{mark}{name}__" for mark in ("", "r", "i") for name in ARITHMETIC)
ORDER = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
OPERATORS = (
    *UNARY, *BINARY, *ORDER, "__hash__", "__bool__", "__len__", "__length_hint__", "__getitem__", "__setitem__", "__delitem__",
    "__contains__", "__iter__", "__next__", "__reversed__", "__enter__", "__exit__", "__format__", "__bytes__", "__call__",
)  # fmt: skip
"""What a Remote has where the class of its object defines it."""
PLAIN = (int, float, complex, str, bytes, bytearray, tuple, list, dict, set, frozenset)
CONTAINERS = {list: "list", dict: "dict", set: "set", bytearray: "bytearray"}
NEW = {name: kind for kind, name in CONTAINERS.items()}
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
"""Types of the standard library that go by value, with the arguments that make an equal one; with a time zone they stay objects."""
MAX_PRINTED = 1 << 20


class EndedError(BaseException):
    """The other process is gone or said what cannot be read. No Exception: tests must not take it for what they expect."""


class Remote:
    """An object of the other process."""

    __slots__ = ("__is_mixed", "__number", "__peer", "__weakref__")

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_Remote__peer", peer)
        object.__setattr__(self, "_Remote__number", number)
        object.__setattr__(self, "_Remote__is_mixed", False)

    def __getattr__(self, name: str) -> Any:
        return self.__peer.request("get", self, name)

    def __setattr__(self, name: str, value: object) -> None:
        self.__peer.request("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        self.__peer.request("delete", self, name)

    def __repr__(self) -> str:
        return self.__peer.request("text", self, "__repr__")

    def __str__(self) -> str:
        return self.__peer.request("text", self, "__str__")

    def __dir__(self) -> list[str]:
        return self.__peer.request("names", self)

    def __instancecheck__(self, value: object) -> bool:
        return is_remote(value) and self.__peer.request("isinstance", self, value)

    def __subclasscheck__(self, value: object) -> bool:
        return is_remote(value) and self.__peer.request("issubclass", self, value)

    def __mro_entries__(self, bases: object) -> Any:
        return self.__peer.refuse("a class derived from one of the other side")

    def __reduce_ex__(self, protocol: object) -> Any:
        return self.__peer.refuse("a copy of an object of the other side")


def number_of(remote: Remote) -> int:
    return object.__getattribute__(remote, "_Remote__number")


def is_mixed(remote: Remote) -> bool:
    """Whether it came from arithmetic with plain data of this side."""
    return object.__getattribute__(remote, "_Remote__is_mixed")


def mark_mixed(remote: Remote) -> None:
    object.__setattr__(remote, "_Remote__is_mixed", True)


def is_remote(value: object) -> bool:
    """Not isinstance: what a Remote says of itself is the other side's word."""
    return issubclass(type(value), Remote) or (issubclass(type(value), BaseException) and hasattr(type(value), "_peer"))


def _forwarding(name: str) -> Any:
    def operator(self: Remote, *arguments: object, **named: object) -> Any:
        peer = object.__getattribute__(self, "_Remote__peer")
        if name == "__call__":
            return peer.request("call", self, arguments, tuple(named.items()))
        if name == "__exit__":
            arguments = (*arguments[:2], None)
        return peer.operate(self, name, *arguments)

    return operator


FORWARDING = {name: _forwarding(name) for name in OPERATORS}


class Peer:
    """One end. Whoever waits for an answer serves the other side's requests meanwhile."""

    def __init__(self, read_from: int, write_to: int) -> None:
        self.read_from, self.write_to = read_from, write_to
        self.printed: list[str] = []
        """What was printed here since the last message; it goes with the next one."""
        self.has_ended = False
        self._mine: list[object] = []
        """Objects that the other side may name by their number, so they live as long as this."""
        self._numbers: dict[int, int] = {}
        self._classes: dict[type, int] = {}
        """Classes of such objects; numbers of their own, since nobody handed them over."""
        self._theirs: dict[int, Any] = {}
        self._types: dict[int, type] = {}

    def request(self, verb: str, *arguments: object) -> Any:
        """What the other side answers; raises what it raises there."""
        if self.has_ended:
            raise EndedError("the other side is gone")
        writer = _Writer(self)
        self._send([verb, *map(writer.atom, arguments)], writer.nodes())
        while (message := self._receive())["body"][0] not in ("return", "raise"):
            self.serve(message)
        kind, result = self._read(message, writer.containers)
        if kind == "raise":
            raise result from None
        return result

    def serve(self, message: dict[str, Any]) -> None:
        """Do what is asked and answer."""
        containers: list[Any] = []
        verb, *arguments = self._read(message, containers)
        before = _Writer(self, containers).nodes()
        try:
            writer = _Writer(self, containers)
            body = ["return", writer.atom(self.answer(verb, *arguments))]
            after = writer.nodes()
        except EndedError:
            raise
        except BaseException as error:
            writer = _Writer(self, containers)
            body = ["raise", writer.atom(error)]
            after = writer.nodes()
        changed = [None if number < len(before) and before[number] == node else node for number, node in enumerate(after)]
        self._send(body, changed)

    def serve_all(self) -> None:
        """Until the other side is gone."""
        while True:
            self.serve(self._receive())

    def operate(self, remote: Remote, name: str, *arguments: object) -> Any:
        """What an operator of a Remote gives."""
        return self.request("operate", remote, name, *arguments)

    def refuse(self, what: str) -> Any:
        raise TypeError(what)

    def answer(self, verb: str, target: Any, *arguments: Any) -> object:
        """What the other side asked of an object that lives here."""
        name = arguments[0] if arguments else ""
        if verb == "get":
            return getattr(target, name)
        if verb == "set":
            return setattr(target, name, arguments[1])
        if verb == "delete":
            return delattr(target, name)
        if verb == "call":
            return target(*arguments[0], **dict(arguments[1]))
        if verb in ("operate", "text"):
            return getattr(type(target), name)(target, *arguments[1:])
        if verb == "names":
            return dir(target)
        if verb == "plain":
            return _plain_value(target)
        if verb in ("isinstance", "issubclass"):
            return getattr(builtins, verb)(arguments[0], target)
        raise EndedError(verb)

    def _send(self, body: list[object], nodes: list[object]) -> None:
        printed, self.printed = "".join(self.printed), []
        data = json.dumps({"body": body, "nodes": nodes, "printed": printed}).encode()
        data = len(data).to_bytes(8, "big") + data
        try:
            while data:
                data = data[os.write(self.write_to, data) :]
        except OSError as error:
            raise self._ended(error) from None

    def _ended(self, error: object) -> EndedError:
        self.has_ended = True
        return EndedError(f"{type(error).__name__}: {error}")

    def _receive(self) -> dict[str, Any]:
        try:
            message = json.loads(self._take(int.from_bytes(self._take(8), "big")))
            (verb, *_), printed = message["body"], message["printed"]
            if (type(verb), type(message["nodes"]), type(printed)) != (str, list, str):
                raise ValueError(verb)
        except (OSError, EOFError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise self._ended(error) from None
        if printed and sys.stdout is not None:
            sys.stdout.write(printed)
        return message

    def _take(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            block = os.read(self.read_from, min(size - len(data), 1 << 20))
            if not block:
                raise EOFError
            data += block
        return bytes(data)

    def _read(self, message: dict[str, Any], containers: list[Any]) -> list[Any]:
        """The values of a message; `containers` are those that both sides know by number, and get the message's own added."""
        try:
            nodes = message["nodes"]
            containers += [NEW[kind]() for kind, _ in nodes[len(containers) :]]
            for container, node in zip(containers, nodes, strict=True):
                if node is not None:
                    self._fill(container, node[1], containers)
            return [message["body"][0], *(self._value(atom, containers) for atom in message["body"][1:])]
        except EndedError:
            raise
        except Exception as error:
            raise self._ended(error) from None

    def _fill(self, container: Any, content: Any, containers: list[Any]) -> None:
        if type(container) is bytearray:
            container[:] = bytes.fromhex(content)
            return
        if type(container) is dict:
            filled = [(self._value(key, containers), self._value(value, containers)) for key, value in content]
        else:
            filled = [self._value(atom, containers) for atom in content]
        if type(container) is list:
            container[:] = filled
        else:
            container.clear()
            container.update(filled)

    def _value(self, atom: Any, containers: list[Any]) -> Any:
        if atom is None or type(atom) in (bool, int, float, str):
            return atom
        tag, *rest = atom
        if tag == "at":
            return containers[rest[0]]
        if tag in ("tuple", "frozenset", "slice", "range", "complex"):
            values = [self._value(item, containers) for item in rest[0]]
            return getattr(builtins, tag)(*([values] if tag in ("tuple", "frozenset") else values))
        if tag == "int":
            return int(rest[0], 16)
        if tag == "bytes":
            return bytes.fromhex(rest[0])
        if tag == "yours":
            return self._mine[rest[0]]
        if tag == "library":
            assert rest[0] in sys.stdlib_module_names
            module = importlib.import_module(rest[0])
            return self.accept_library(module if rest[1] is None else getattr(module, rest[1]))
        if tag == "standard":
            module, _, name = rest[0].rpartition(".")
            assert rest[0] in STANDARD
            return getattr(importlib.import_module(module), name)(*self._value(rest[1], containers))
        if tag == "error":
            return self._error(rest[0], self._value(rest[1], containers), self._value(rest[2], containers))
        if tag == "class" and rest[3]:
            return self._error_class(rest[0], rest[2], tuple(self._value(base, containers) for base in rest[3]))
        assert tag in ("object", "class")
        return self._remote(rest[0], *rest[1])

    def accept_library(self, value: object) -> object:
        """Something of the standard library that the other side names."""
        return value

    def names_library(self, value: object) -> bool:
        """Whether the other side takes its own, where the standard library has this."""
        return isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType, types.FunctionType))

    def _error(self, number: int, kind: type[BaseException], arguments: tuple[object, ...]) -> BaseException:
        """An exception of the other side: Python's own are made anew, others know whose they are."""
        assert issubclass(kind, BaseException)
        if not hasattr(kind, "_peer"):
            return kind(*arguments)
        if number not in self._theirs:
            error = self._theirs[number] = kind.__new__(kind)
            error.args = arguments
            error.__dict__["_number"] = number
        return self._theirs[number]

    def _error_class(self, number: int, name: str, bases: tuple[type, ...]) -> type:
        assert all(issubclass(base, BaseException) for base in bases)
        if number not in self._theirs:
            members = {"_peer": self, "_class": number, "__str__": _text, "__getattr__": _attribute}
            self._theirs[number] = type(name, bases, members)
        return self._theirs[number]

    def _remote(self, number: int, class_number: int, name: str = "", operators: Sequence[str] = (), is_plain: bool = False) -> object:
        """An object of the other side; name and operators of its class come with the first one."""
        if class_number not in self._types:
            members: dict[str, Any] = {operator: FORWARDING[operator] for operator in operators}
            if "__eq__" in members and "__hash__" not in members:
                members["__hash__"] = None
            self._types[class_number] = type(name, (Remote,), {"__slots__": (), "_is_plain": is_plain, **members})
        if number not in self._theirs:
            self._theirs[number] = self._types[class_number](self, number)
        return self._theirs[number]

    def number(self, value: object) -> int:
        """The number by which the other side asks for an object of this one."""
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._mine)
            self._mine.append(value)
        return self._numbers[id(value)]

    def class_atom(self, kind: type) -> list[object]:
        """A class as the other side needs it for Remotes; only its number where it knows it."""
        if kind in self._classes:
            return [self._classes[kind]]
        self._classes[kind] = len(self._classes)
        defined = {name: value for base in reversed(kind.__mro__[:-1]) for name, value in vars(base).items()}
        operators = [name for name in OPERATORS if defined.get(name) is not None]
        return [self._classes[kind], kind.__name__, operators, issubclass(kind, PLAIN)]


def _text(error: Any) -> str:
    return error._peer.request("text", error, "__str__") if "_number" in vars(error) else BaseException.__str__(error)


def _attribute(error: Any, name: str) -> Any:
    if name.startswith("__") or "_number" not in vars(error):
        raise AttributeError(name)
    return error._peer.request("get", error, name)


def _plain_value(value: Any) -> object:
    """Of an object whose class derives from a plain type, what it is as that."""
    base = next(base for base in PLAIN if isinstance(value, base))
    return {int: int.__int__, float: float.__float__, str: str.__str__}.get(base, base)(value)


class _Writer:
    """Values as JSON: atoms that refer to numbered containers, so that shared and cyclic ones stay what they are."""

    def __init__(self, peer: Peer, containers: list[Any] | None = None) -> None:
        self.peer = peer
        self.containers: list[Any] = list(containers or ())
        self.places = {id(container): place for place, container in enumerate(self.containers)}

    def nodes(self) -> list[object]:
        """Of all containers the content; what they refer to is added on the way."""
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
            if id(value) not in self.places:
                self.places[id(value)] = len(self.containers)
                self.containers.append(value)
            return ["at", self.places[id(value)]]
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
            return ["error", None if is_python_s else self.peer.number(value), self.atom(kind), self.atom(tuple(value.args))]
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
                (value.__name__, None) if sys.modules.get(value.__name__) is value and value.__name__ in sys.stdlib_module_names else None
            )
        module, name = value.__module__, value.__name__
        has_it = module in sys.stdlib_module_names and getattr(sys.modules.get(module), name, None) is value
        return (module, name) if has_it else None
