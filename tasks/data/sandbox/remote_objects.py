"""An object of the other process: attributes, calls and operators are requests to its `peer` (value_exchange).

Runs inside the sandbox: imports only the standard library.
"""

from __future__ import annotations

from typing import Any, Protocol

UNARY = (
    "__abs__",
    "__neg__",
    "__pos__",
    "__invert__",
    "__round__",
    "__floor__",
    "__ceil__",
    "__trunc__",
    "__int__",
    "__float__",
    "__complex__",
    "__index__",
)
ARITHMETIC = (
    "add",
    "sub",
    "mul",
    "matmul",
    "truediv",
    "floordiv",
    "mod",
    "divmod",
    "pow",
    "lshift",
    "rshift",
    "and",
    "or",
    "xor",
)
BINARY = tuple(f"__{mark}{name}__" for mark in ("", "r", "i") for name in ARITHMETIC)
ORDER = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
OPERATORS = (
    *UNARY,
    *BINARY,
    *ORDER,
    "__hash__",
    "__bool__",
    "__len__",
    "__length_hint__",
    "__getitem__",
    "__setitem__",
    "__delitem__",
    "__contains__",
    "__iter__",
    "__next__",
    "__reversed__",
    "__enter__",
    "__exit__",
    "__format__",
    "__bytes__",
    "__call__",
)
"""Operators that a Remote has if the class of its object defines them."""


class Peer(Protocol):
    """The end of the pipes on this side (value_exchange.Peer)."""

    def request(self, verb: str, *arguments: object) -> Any: ...

    def refuse(self, what: str) -> Any: ...


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
    """Whether the object is a result of arithmetic with plain data of this side."""
    return object.__getattribute__(remote, "_Remote__is_mixed")


def mark_mixed(remote: Remote) -> None:
    object.__setattr__(remote, "_Remote__is_mixed", True)


def is_remote(value: object) -> bool:
    """Whether a value is a Remote. Not by isinstance, since the other side controls what a Remote says of itself."""
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
