"""What was found in a source file is kept beside its bytecode, and found anew whenever it may differ."""

import sys
from importlib.util import cache_from_source
from pathlib import Path

import pytest

from infra import parsed_sources
from infra.parsed_sources import SUFFIX, found_once


@pytest.fixture(autouse=True)
def writes_bytecode(monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)


class Finder:
    def __init__(self):
        self.num_asked = 0

    def __call__(self):
        self.num_asked += 1
        return ["digest", [["configs.schema", "Scale"]], self.num_asked]


def kept_of(path: Path) -> Path:
    return Path(cache_from_source(str(path))).with_suffix(SUFFIX)


def test_what_was_found_in_a_file_is_not_looked_for_again(tmp_path):
    finder, path = Finder(), tmp_path / "module.py"
    first = found_once(path, [b"x = 1", b"header"], finder)
    assert found_once(path, [b"x = 1", b"header"], finder) == first
    assert finder.num_asked == 1


@pytest.mark.parametrize("contents", [[b"x = 2", b"header"], [b"x = 1", b"other header"], [b"x = 1"], [b"x = 1header"]])
def test_other_contents_are_read_anew(tmp_path, contents):
    finder, path = Finder(), tmp_path / "module.py"
    found_once(path, [b"x = 1", b"header"], finder)
    assert found_once(path, contents, finder)[-1] == 2
    assert found_once(path, contents, finder)[-1] == 2


def test_other_code_or_another_python_finds_anew(tmp_path, monkeypatch):
    finder, path = Finder(), tmp_path / "module.py"
    found_once(path, [b"x = 1"], finder)
    monkeypatch.setattr(parsed_sources, "FOUND_BY", b"another Python, or other finders")
    assert found_once(path, [b"x = 1"], finder)[-1] == 2


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"key": 1}', b"\xff"])
def test_a_damaged_file_is_replaced(tmp_path, damage):
    finder, path = Finder(), tmp_path / "module.py"
    found_once(path, [b"x = 1"], finder)
    kept_of(path).write_bytes(damage)
    assert found_once(path, [b"x = 1"], finder)[-1] == 2
    assert found_once(path, [b"x = 1"], finder)[-1] == 2


def test_nothing_is_kept_where_bytecode_is_not(tmp_path, monkeypatch):
    finder, path = Finder(), tmp_path / "module.py"
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert [found_once(path, [b"x = 1"], finder)[-1] for _ in range(2)] == [1, 2]
    assert not kept_of(path).exists()
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    (tmp_path / "__pycache__").write_text("where no directory can be made")
    assert found_once(path, [b"x = 1"], finder)[-1] == 3
