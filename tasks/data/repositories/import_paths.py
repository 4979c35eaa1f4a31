"""Resolves the imports of a file to files of its repository, by patterns. Runs in executors: imports no Spark.

The languages are Python, JavaScript and TypeScript, C and C++, Go, Rust, Java, Kotlin and Scala. Patterns are used,
not parsers: half a file, or one that does not parse, has imports as well. A name is looked up among the paths that
exist: beside the file, in the folders above it and their src and lib. Where a language names files from a root that
is not stated, the end of a path is matched.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Iterator

PYTHON_IMPORT = re.compile(
    r"^[ \t]*+(?:from[ \t]++([\w.]*+)[ \t]++import[ \t]++(\([^)]{0,3000}\)|(?:[^\n#\\]|\\\n)*+)"
    r"|import[ \t]++([\w., \t]+))",
    re.M,
)
SCRIPT_IMPORT = re.compile(
    r"""(?:^[ \t]*(?:import[ \t]*|(?:import|export)\b[^'"`;()={\n]*(?:\{[^}'"`;()=]{0,2000}\}[^'"`;()={\n]*)?\bfrom\s*)"""  # noqa: E501
    r"""|\b(?:require|import)\s*\(\s*)"""
    r"""(?P<quote>['"`])(\.{1,2}(?:/[^'"`\n]*)?)(?P=quote)""",
    re.M,
)
C_INCLUDE = re.compile(r'^[ \t]*#[ \t]*(?:include|import)[ \t]*(?:"([^"\n]+)"|<([^>\n]+/[^>\n]+)>)', re.M)
GO_IMPORT = re.compile(r"^import[ \t]*(?:\(([^)]{0,3000})\)|(?:[\w.]+[ \t]+)?(\"[^\"\n]+\"))", re.M)
RUST_IMPORT = re.compile(
    r"^[ \t]*(?:pub(?:\([^)\n]{0,200}\))?[ \t]+)?"
    r"(?:mod[ \t]+(\w+)[ \t]*;|use[ \t]+((?:crate|self|super)\b[^;]{0,2000});)",
    re.M,
)
JAVA_IMPORT = re.compile(r"^[ \t]*import[ \t]+(?:static[ \t]+)?(\w+(?:\.\w+)*(?:\.(?:\*|\{[^}\n]*\}))?)", re.M)

PYTHON_SUFFIXES = (".py", ".pyi")
SCRIPT_SUFFIXES = (".js", ".jsx", ".ts", ".tsx", ".mjs", ".cjs")
C_SUFFIXES = (".c", ".h", ".cc", ".cpp", ".hpp")
JAVA_SUFFIXES = (".java", ".kt", ".scala")
SOURCE_FOLDERS = ("", "src", "lib")
CODE_HOSTS = ("github.com", "gitlab.com", "bitbucket.org")


class KnownPaths:
    """The paths of a repository, also by name and by folder."""

    def __init__(self, paths: Collection[str]) -> None:
        self.paths = frozenset(paths)
        self._by_name: dict[str, list[str]] = {}
        self._by_folder: dict[str, list[str]] = {}
        self._folders: dict[str, list[str]] = {}
        self._nearest: dict[str, dict[str, str]] = {}
        """By end of a path: of every folder the first path with that end in it or below."""
        for path in sorted(paths):
            folder, _, name = path.rpartition("/")
            self._by_name.setdefault(name, []).append(path)
            self._by_folder.setdefault(folder, []).append(path)
        for folder in self._by_folder:
            self._folders.setdefault(folder.rpartition("/")[2], []).append(folder)

    def first(self, candidates: Iterator[str]) -> set[str]:
        """The first candidate that exists, as a set; empty for none."""
        return next(({path} for path in candidates if path in self.paths), set())

    def ending(self, tail: str, path: str) -> set[str]:
        """The path that ends with `tail` and shares most folders with `path`; of several the first by name."""
        if f"/{path}".endswith(f"/{tail}"):
            return {path}
        if tail not in self._nearest:
            nearest = self._nearest[tail] = {}
            for other in self._by_name.get(tail.rpartition("/")[2], ()):
                for folder in _folders_above(other) if f"/{other}".endswith(f"/{tail}") else ():
                    nearest.setdefault(folder, other)
        return next(
            ({self._nearest[tail][folder]} for folder in _folders_above(path) if folder in self._nearest[tail]), set()
        )

    def within(self, tail: str, suffixes: tuple[str, ...]) -> set[str]:
        """The files of every folder whose path ends with `tail`."""
        named = self._folders.get(tail.rpartition("/")[2], ())
        folders = [folder for folder in named if folder == tail or folder.endswith(f"/{tail}")]
        return {path for folder in folders for path in self._by_folder[folder] if path.endswith(suffixes)}


def imported_paths(path: str, text: str, known: KnownPaths) -> set[str]:
    """The known paths that a file imports or includes."""
    imported: set[str] = set()
    for suffixes, find in FINDERS:
        if path.endswith(suffixes):
            for paths in find(path, text, known):
                imported |= paths
    return imported - {path}


def _python_imports(path: str, text: str, known: KnownPaths) -> Iterator[set[str]]:
    """Modules as files or packages; each name of a `from` can be a module of its own."""
    for origin, names, plain in PYTHON_IMPORT.findall(text):
        if plain:
            for name in plain.split(","):
                yield from (_python_module(path, stem.replace(".", "/"), known) for stem in name.split()[:1])
            continue
        dots = len(origin) - len(origin.lstrip("."))
        base = origin.lstrip(".").replace(".", "/")
        if dots:
            folder = path
            for _ in range(dots):
                folder = posixpath.dirname(folder)
            base = "/" + posixpath.join(folder, base).rstrip("/")
        if base.strip("/"):
            yield _python_module(path, base, known)
        for name in re.findall(r"\w+", re.sub(r"\bas\s+\w+", "", names)):
            yield _python_module(path, f"{base.rstrip('/')}/{name}", known)


def _python_module(path: str, stem: str, known: KnownPaths) -> set[str]:
    """A stem that begins with `/` is relative to the root; another is looked up in the folders above the file that are
    no packages, the nearest first."""
    endings = (*PYTHON_SUFFIXES, "/__init__.py", "/__init__.pyi")
    if stem.startswith("/"):
        return {stem[1:] + ending for ending in endings} & known.paths
    roots = (folder for folder in _folders_above(path) if posixpath.join(folder, "__init__.py") not in known.paths)
    stems = (posixpath.join(folder, source, stem) for folder in roots for source in SOURCE_FOLDERS)
    modules = (({candidate + ending for ending in endings} & known.paths) - {path} for candidate in stems)
    return next((module for module in modules if module), set())


def _folders_above(path: str) -> Iterator[str]:
    while path:
        path = posixpath.dirname(path)
        yield path


def _script_imports(path: str, text: str, known: KnownPaths) -> Iterator[set[str]]:
    """Relative imports; a name that ends with .js can mean the TypeScript from which it is compiled."""
    for _, name in SCRIPT_IMPORT.findall(text):
        stem = posixpath.normpath(posixpath.join(posixpath.dirname(path), name))
        bare = re.sub(r"\.[mc]?jsx?$", "", stem)
        bases = (stem, bare, posixpath.normpath(posixpath.join(stem, "index")))
        yield known.first(iter([stem, *(base + ending for base in bases for ending in SCRIPT_SUFFIXES)]))


def _c_includes(path: str, text: str, known: KnownPaths) -> Iterator[set[str]]:
    """Files beside the including file, else any path that ends with the name; in angle brackets only names with a
    folder, since others are the system's."""
    for quoted, bracketed in C_INCLUDE.findall(text):
        name = quoted or bracketed
        beside = (
            known.first(iter([posixpath.normpath(posixpath.join(posixpath.dirname(path), name))])) if quoted else set()
        )
        yield beside or known.ending(posixpath.normpath(name), path)


def _go_imports(path: str, text: str, known: KnownPaths) -> Iterator[set[str]]:
    """A package is a folder: the longest end of the import path, after host, owner and name, that is a folder here. The
    standard library's paths have no dot in their first part."""
    for block, single in GO_IMPORT.findall(text):
        for name in re.findall(r'"([^"\n]+)"', block or single):
            parts = name.split("/")
            if "." in parts[0]:
                ends = ("/".join(parts[start:]) for start in range(3 if parts[0] in CODE_HOSTS else 1, len(parts)))
                files = next((paths for end in ends if (paths := known.within(end, (".go",)))), set())
                yield {other for other in files if not other.endswith("_test.go")}


def _rust_imports(path: str, text: str, known: KnownPaths) -> Iterator[set[str]]:
    folder, name = posixpath.split(path)
    own = folder if name in ("mod.rs", "lib.rs", "main.rs") else posixpath.join(folder, name.removesuffix(".rs"))
    roots = (
        above
        for above in _folders_above(path)
        if {posixpath.join(above, root) for root in ("lib.rs", "main.rs")} & known.paths
    )
    source = next(roots, folder)
    for module, used in RUST_IMPORT.findall(text):
        if module:
            yield _rust_module(posixpath.join(own, module), own, known)
            continue
        for tree in _rust_trees(re.sub(r"\s+", "", re.sub(r"\s+as\s+\w+", "", used))):
            first, *rest = tree.split("::")
            base = {"crate": source, "self": own, "super": posixpath.dirname(own)}[first]
            while rest[:1] == ["super"]:
                base, rest = posixpath.dirname(base), rest[1:]
            modules = (_rust_module(posixpath.join(base, *rest[:end]), own, known) for end in range(len(rest), 0, -1))
            yield next((paths for paths in modules if paths), set())


def _rust_module(stem: str, own: str, known: KnownPaths) -> set[str]:
    return known.first(iter([f"{stem}.rs", f"{stem}/mod.rs"])) if stem != own else set()


def _rust_trees(used: str) -> Iterator[str]:
    """`a::{b,c::{d,e}}` as a::b, a::c::d, a::c::e."""
    opened = used.find("{")
    if opened < 0 or not used.endswith("}"):
        yield used.removesuffix("::*")
        return
    depth, start = 0, opened + 1
    for index in range(opened, len(used)):
        depth += {"{": 1, "}": -1}.get(used[index], 0)
        if (used[index] == "," and depth == 1) or not depth:
            part = used[start:index]
            start = index + 1
            if part and part != "self":
                yield from _rust_trees(used[:opened] + part)
            elif part:
                yield used[:opened].removesuffix("::")


def _java_imports(path: str, text: str, known: KnownPaths) -> Iterator[set[str]]:
    """A class by the end of its file's path, also if one of its members is imported; `*` and `_` mean all files of a
    package."""
    for name in JAVA_IMPORT.findall(text):
        package, _, last = name.rpartition(".")
        stem = package.replace(".", "/")
        if last in ("*", "_"):
            yield known.within(stem, JAVA_SUFFIXES) or _java_class(stem, path, known)
        else:
            for member in re.findall(r"\w+", last):
                yield _java_class(f"{stem}/{member}".lstrip("/"), path, known) or _java_class(stem, path, known)


def _java_class(stem: str, path: str, known: KnownPaths) -> set[str]:
    return (
        next((paths for ending in JAVA_SUFFIXES if (paths := known.ending(stem + ending, path))), set())
        if "/" in stem
        else set()
    )


FINDERS = (
    (PYTHON_SUFFIXES, _python_imports),
    (SCRIPT_SUFFIXES, _script_imports),
    (C_SUFFIXES, _c_includes),
    ((".go",), _go_imports),
    ((".rs",), _rust_imports),
    (JAVA_SUFFIXES, _java_imports),
)
