"""Answers of a server in a file beside a command's output, so that the same command asks only what is left after it was
ended."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from infra.serving.model_client import ServerFailedError
from infra.step import digest_of

SUFFIX = ".answers.jsonl"


@contextmanager
def kept_until_done(output: Path | None) -> Iterator[Path | None]:
    """The path of the answers of a command that writes `output`; None for one that writes none. The file is removed
    where the block ends, and stays where it fails."""
    if output is None:
        yield None
        return
    path = output.with_name(output.name.removesuffix(".json") + SUFFIX)
    try:
        yield path
    except ServerFailedError as error:
        if path.exists():
            raise ServerFailedError(f"{error}; the answers so far are in {path}, and are not asked again") from error
        raise
    path.unlink(missing_ok=True)


class KeptAnswers:
    """One JSON line per answer: who gave it, the digest of its request, the answer. Only answers of an earlier command
    are read: equal requests of one command are asked each."""

    def __init__(self, path: Path | None, answered_by: str) -> None:
        """None keeps nothing; `answered_by` distinguishes the models that share a file. Raises ValueError for a file of
        something else."""
        self._path, self._answered_by, self._lock = path, answered_by, threading.Lock()
        self._earlier: dict[str, Any] = {}
        if path is None or not path.exists():
            return
        with open(path, "rb+") as file:
            data = file.read()
            end = data.rfind(b"\n") + 1
            file.truncate(end)  # a line that the end of the command cut
        try:
            lines = [json.loads(line) for line in data[:end].splitlines()]
            self._earlier = {key: answer for by, key, answer in lines if by == answered_by}
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} holds other lines than answers ({error}): remove it, to ask for all") from error

    @property
    def num_earlier(self) -> int:
        return len(self._earlier)

    def recall(self, name: str, ask: Callable[..., Any], *arguments: Any) -> Any:
        """The earlier answer to the same request, else the one of `ask(*arguments)`, which is kept. Tuples are lists in
        an earlier answer."""
        key = digest_of([name, arguments])
        if key in self._earlier:
            return self._earlier[key]
        answer = ask(*arguments)
        if self._path is not None:
            line = json.dumps([self._answered_by, key, answer]).encode() + b"\n"
            with self._lock, open(self._path, "ab") as file:
                file.write(line)
        return answer
