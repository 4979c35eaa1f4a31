"""Checks where git keeps a working tree's history: in the data directory, or in a repository that owns the tree.

Such a repository names the tree as its own. A tree that somebody else made could name the user's private repository
as its git directory, borrow its objects or link to its files. Then what was committed there would become training
text.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ALTERNATES = Path("info") / "alternates"


def refuse_outside(directory: Path, tree: Path, git_dir: Path, common_dir: Path) -> None:
    """Raises ValueError where the git directory of a working tree leads out of the data directory.

    A linked worktree and a submodule may have their git directory outside: the repository there names the worktree, so
    its owner made it.
    """
    top = directory.resolve()
    if not git_dir.resolve().is_relative_to(top):
        if _named_worktree(git_dir) != tree.resolve():
            raise ValueError(
                f"the working tree {tree} has its git directory outside of {directory} ({git_dir}): clone it into "
                f"{directory}, or remove "
                f"its .git"
            )
        return
    foreign = [
        path
        for path in (common_dir, *_borrowed(common_dir / "objects", set()))
        if not path.resolve().is_relative_to(top)
    ]
    foreign += [path for path in _links(git_dir) + _links(common_dir) if not path.resolve().is_relative_to(top)]
    if foreign:
        raise ValueError(
            f"the git directory of the working tree {tree} leads out of {directory} ({foreign[0]}): make it whole "
            f"with `git repack -a -d` "
            "and remove objects/info/alternates, clone it anew, or remove its .git"
        )


def _named_worktree(git_dir: Path) -> Path | None:
    """The tree that a git directory names: in a file for a linked worktree, in its settings for a submodule."""
    if (git_dir / "gitdir").is_file():
        return (git_dir / (git_dir / "gitdir").read_text(errors="surrogateescape").strip()).resolve().parent
    command = ["git", "config", "--file", str(git_dir / "config"), "--no-includes", "--get", "core.worktree"]
    named = (
        subprocess.run(command, capture_output=True, check=False)
        .stdout.decode("utf-8", "surrogateescape")
        .removesuffix("\n")
    )
    return (git_dir / named).resolve() if named else None


def _borrowed(objects: Path, seen: set[Path]) -> list[Path]:
    """Object directories that a repository borrows from, directly or through others; a quoted path counts as
    outside."""
    seen.add(objects.resolve())
    if not (objects / ALTERNATES).is_file():
        return []
    named = (objects / ALTERNATES).read_text(errors="surrogateescape").splitlines()
    borrowed = [
        Path(os.sep, line) if line.startswith('"') else objects / line
        for line in named
        if line and not line.startswith("#")
    ]
    return borrowed + [further for path in borrowed if path.resolve() not in seen for further in _borrowed(path, seen)]


def _links(directory: Path) -> list[Path]:
    return [
        Path(parent) / name
        for parent, directories, files in os.walk(directory)
        for name in (*directories, *files)
        if os.path.islink(os.path.join(parent, name))
    ]
