"""A file is replaced as a whole or not at all, and nothing else is left beside it."""

from __future__ import annotations

import pytest

from configs.files.atomic_files import replace_durably, replacing


def test_a_file_is_replaced_when_the_block_ends(tmp_path):
    path = tmp_path / "file"
    for content in ("first", "second"):
        before = path.read_text() if path.exists() else None
        with replacing(path) as temporary:
            temporary.write_text(content)
            assert (path.read_text() if path.exists() else None) == before
        assert path.read_text() == content and list(tmp_path.iterdir()) == [path]


def test_a_block_that_fails_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "file"
    replace_durably(path, b"first")
    with pytest.raises(OSError, match="full"), replacing(path) as temporary:
        temporary.write_text("half")
        raise OSError("full")
    assert path.read_bytes() == b"first" and list(tmp_path.iterdir()) == [path]
