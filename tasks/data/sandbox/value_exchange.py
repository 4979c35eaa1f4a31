"""Values and calls between two processes over a pair of pipes: a solution and the judge of its tests.

The two do not trust each other. Plain data is sent by value, as JSON: numbers, texts, bytes, containers of exactly
Python's own types, some types of the standard library. Everything else stays in its process and is a `Remote` on the
other side, whose attributes, calls and operators are requests. A container that was passed is updated when the call
returns, so tests see changes of their arguments. Exceptions arrive as their own classes if those are Python's, else as
classes of the same name and bases. Runs inside the sandbox: imports only the standard library.
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

from tasks.data.sandbox.remote_objects import FORWARDING, OPERATORS, Remote
from tasks.data.sandbox.value_writer import CONTAINERS, STANDARD, Writer

PLAIN = (int, float, complex, str, bytes, bytearray, tuple, list, dict, set, frozenset)
MAX_MESSAGE_BYTES = 1 << 30
NEW = {name: kind for kind, name in CONTAINERS.items()}


class EndedError(BaseException):
    """The other process has ended or sent an unreadable message. Not an Exception, so that tests do not catch it."""


class Peer:
    """One end. While it waits for an answer, it serves the other side's requests."""

    def __init__(self, read_from: int, write_to: int) -> None:
        self.read_from, self.write_to = read_from, write_to
        self.printed: list[str] = []
        """Text printed here since the last message; the next message carries it."""
        self.has_ended = False
        self._mine: list[object] = []
        """Objects that the other side may name by their number; they are kept as long as this."""
        self._numbers: dict[int, int] = {}
        self._classes: dict[type, int] = {}
        """Numbers of the classes of such objects; separate, since the classes were not passed themselves."""
        self._theirs: dict[int, Any] = {}
        self._types: dict[int, type] = {}

    def request(self, verb: str, *arguments: object) -> Any:
        """The other side's answer to a request; raises the exception that it raised there."""
        if self.has_ended:
            raise EndedError("the other side is gone")
        writer = Writer(self)
        self._send([verb, *map(writer.atom, arguments)], writer.nodes())
        while (message := self._receive())["body"][0] not in ("return", "raise"):
            self.serve(message)
        kind, result = self._read(message, writer.containers)
        if kind == "raise":
            raise result from None
        return result

    def serve(self, message: dict[str, Any]) -> None:
        """Serve one request of the other side."""
        containers: list[Any] = []
        verb, *arguments = self._read(message, containers)
        before = Writer(self, containers).nodes()
        try:
            writer = Writer(self, containers)
            body = ["return", writer.atom(self.answer(verb, *arguments))]
            after = writer.nodes()
        except EndedError:
            raise
        except BaseException as error:
            writer = Writer(self, containers)
            body = ["raise", writer.atom(error)]
            after = writer.nodes()
        changed = [
            None if number < len(before) and before[number] == node else node for number, node in enumerate(after)
        ]
        self._send(body, changed)

    def serve_all(self) -> None:
        """Serve requests until the other side has ended."""
        while True:
            self.serve(self._receive())

    def operate(self, remote: Remote, name: str, *arguments: object) -> Any:
        """The result of an operator of a Remote."""
        return self.request("operate", remote, name, *arguments)

    def refuse(self, what: str) -> Any:
        raise TypeError(what)

    def answer(self, verb: str, target: Any, *arguments: Any) -> object:
        """The answer to a request about an object of this process."""
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
            size = int.from_bytes(self._take(8), "big")
            if size > MAX_MESSAGE_BYTES:
                raise ValueError(size)
            message = json.loads(self._take(size))
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
        """The values of a message. `containers`, which both sides know by number, is extended by the message's own."""
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
        """An object of the standard library that the other side names."""
        return value

    def names_library(self, value: object) -> bool:
        """Whether an object of the standard library is sent by its name, so that the other side uses its own."""
        return isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType, types.FunctionType))

    def _error(self, number: int, kind: type[BaseException], arguments: tuple[object, ...]) -> BaseException:
        """An exception of the other side: Python's own are created again, others refer to the other side's object."""
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

    def _remote(
        self, number: int, class_number: int, name: str = "", operators: Sequence[str] = (), is_plain: bool = False
    ) -> object:
        """An object of the other side; the first one of a class brings the class's name and operators."""
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
        """A class as the other side needs it for Remotes; only its number after the first time."""
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
    """The plain value of an object whose class derives from a plain type."""
    base = next(base for base in PLAIN if isinstance(value, base))
    return {int: int.__int__, float: float.__float__, str: str.__str__}.get(base, base)(value)
