"""Stands for llama.cpp's program `llama-server`: the pinned engine reads the command line by its own parser, serves.

    python -m tests.serving.llama_server --model FILE.gguf --port 8080 ...

xllamacpp has the engine and its parser, not the program. The parser is called by its C++ name, with the record inside
xllamacpp.CommonParams, which begins after the 16 bytes of a Python object.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from typing import Any

import xllamacpp

PARSE = "_Z19common_params_parseiPPcR13common_params13llama_examplePFviS0_E"
SERVER_ARGUMENTS = 12
"""LLAMA_EXAMPLE_SERVER: with another number the parser refuses arguments that only a server has, as --metrics."""


def parsed(command: list[str]) -> Any:
    """The settings that llama-server would have. Raises ValueError where the parser refuses the command."""
    parse = ctypes.CDLL(xllamacpp.xllamacpp.__file__)[PARSE]  # pyright: ignore[reportAttributeAccessIssue]
    parse.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    parse.restype = ctypes.c_bool
    settings = xllamacpp.CommonParams()  # pyright: ignore[reportAttributeAccessIssue]
    words = (ctypes.c_char_p * (len(command) + 1))(*[word.encode() for word in command], None)
    argv = ctypes.cast(words, ctypes.c_void_p)
    if not parse(len(command), argv, id(settings) + 16, SERVER_ARGUMENTS, None):
        raise ValueError(f"llama.cpp's parser refuses {command}")
    return settings


if __name__ == "__main__":
    server = xllamacpp.Server(parsed(["llama-server", *sys.argv[1:]]))  # pyright: ignore[reportAttributeAccessIssue]
    threading.Event().wait()
