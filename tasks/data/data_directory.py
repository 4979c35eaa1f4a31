"""Roles of the files in a user's data directory: its `glm46-data.yaml`, or text-like suffixes where there is none.

The YAML lists globs (`{a,b}`, `*`, `**`) with role, format, domain, language, text fields, kind and licence; the first matching entry
wins and what none matches is ignored.
"""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from tasks.data.documents import CODE, COMMIT

MANIFEST_NAME = "glm46-data.yaml"
ROLES = ("pretrain", "evaluation", "sft", "preference", "prompts", "classifier", "ignore")
FORMATS = ("text", "jsonl", "mediawiki", "zip_text", "repository_files", "commits")
DOMAINS = ("web", "multilingual", "code", "commit", "math", "medical", "financial", "synthetic")
PATCH_SUFFIXES = (".patch", ".diff")
ENTRY_KEYS = ("files", "role", "format", "domain", "lang", "text", "kind", "label", "licence")
TEXT_SUFFIXES = (".txt", ".md", ".rst")
CODE_SUFFIXES = (
    ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".java", ".js", ".jsx", ".ts", ".tsx", ".go", ".rs", ".rb", ".php", ".cs",
    ".swift", ".kt", ".scala", ".sh", ".sql", ".r", ".jl", ".lua", ".pl", ".hs", ".ml", ".ex", ".erl", ".clj",
)  # fmt: skip
BENCHMARK_SHAPES = ({"question", "choices", "answer"}, {"question", "answer"}, {"prompt", "canonical_solution", "test"})


@dataclass(frozen=True)
class RoleEntry:
    """What the directory says about a group of files."""

    files: str
    role: str
    format: str = ""
    domain: str = "web"
    lang: str = ""
    text: tuple[str, ...] = ()
    """Fields that hold the document, joined in order; none stands for `text` or `content`, whichever is there."""
    kind: str = ""
    label: str = ""
    licence: str = ""


def assign_roles(directory: Path) -> list[tuple[str, RoleEntry]]:
    """(name relative to the directory, entry) of every file with a role, sorted by name. Raises ValueError on a wrong manifest."""
    names = _file_names(directory)
    manifest = directory / MANIFEST_NAME
    if not manifest.exists():
        return _roles_by_suffix(directory, names)
    entries = _read_manifest(manifest)
    patterns = [(_glob_pattern(entry.files), entry) for entry in entries]
    found = []
    for name in names:
        entry = next((entry for pattern, entry in patterns if pattern.fullmatch(name)), None)
        if entry is not None and entry.role != "ignore":
            found.append((name, _with_format(entry, name, manifest)))
    return found


def _file_names(directory: Path) -> list[str]:
    names = []
    for parent, directories, files in os.walk(directory):
        directories[:] = [name for name in directories if not name.startswith(".")]
        names.extend((Path(parent) / name).relative_to(directory).as_posix() for name in files if not name.startswith("."))
    return sorted(name for name in names if name != MANIFEST_NAME)


def _read_manifest(path: Path) -> list[RoleEntry]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a YAML file: {error}") from error
    if not isinstance(content, dict) or content.get("version") != 1 or not isinstance(content.get("entries"), list):
        raise ValueError(f"{path}: must hold `version: 1` and a list `entries`")
    unknown = sorted(set(content) - {"version", "entries"})
    if unknown:
        raise ValueError(f"{path}: unknown key {unknown[0]!r}; allowed are version and entries")
    return [_parse_entry(path, number, entry) for number, entry in enumerate(content["entries"], 1)]


def _parse_entry(path: Path, number: int, entry: object) -> RoleEntry:
    where = f"{path}, entry {number}"
    if not isinstance(entry, dict) or not {"files", "role"} <= set(entry):
        raise ValueError(f"{where}: must be a mapping with at least `files` and `role`, is {entry!r}")
    values: Mapping[str, object] = entry
    unknown = sorted(set(values) - set(ENTRY_KEYS))
    if unknown:
        raise ValueError(f"{where} ({values['files']}): unknown key {unknown[0]!r}; allowed are {', '.join(ENTRY_KEYS)}")
    for key, allowed in (("role", ROLES), ("format", FORMATS), ("domain", DOMAINS)):
        if key in values and values[key] not in allowed:
            raise ValueError(f"{where} ({values['files']}): unknown {key} {values[key]!r}; allowed are {', '.join(allowed)}")
    text = values.get("text")
    named = () if text is None else tuple(map(str, text)) if isinstance(text, list) else (str(text),)
    return replace(RoleEntry(**{key: str(value) for key, value in values.items() if key != "text"}), text=named)  # pyright: ignore


def _with_format(entry: RoleEntry, name: str, manifest: Path) -> RoleEntry:
    found = entry.format or _format_of(name)
    if not found and entry.role in ("pretrain", "evaluation"):
        raise ValueError(f"{manifest}: {name} has role {entry.role}, but its ending names no format: add `format: {' | '.join(FORMATS)}`")
    return replace(entry, format=found, domain=_domain_of(entry, name, found))


def _domain_of(entry: RoleEntry, name: str, form: str) -> str:
    """Changes are a domain of their own, also where a directory counts them among its code."""
    is_change = form == "commits" or name.endswith(PATCH_SUFFIXES)
    return COMMIT if is_change and entry.domain in (RoleEntry.domain, CODE) else entry.domain


def _format_of(name: str) -> str:
    stem = name.removesuffix(".gz")
    if stem.endswith(".jsonl"):
        return "jsonl"
    return "text" if stem.endswith(TEXT_SUFFIXES) or (stem == name and stem.lower().endswith((*CODE_SUFFIXES, *PATCH_SUFFIXES))) else ""


def _roles_by_suffix(directory: Path, names: list[str]) -> list[tuple[str, RoleEntry]]:
    found = []
    for name in names:
        form = _format_of(name)
        if form == "jsonl":
            _refuse_benchmark(directory, name)
        if form and name.lower().endswith((*TEXT_SUFFIXES, *CODE_SUFFIXES, *PATCH_SUFFIXES, ".jsonl", ".jsonl.gz", ".txt.gz")):
            suffixes = {CODE: CODE_SUFFIXES, COMMIT: PATCH_SUFFIXES}
            domain = next((domain for domain, endings in suffixes.items() if name.lower().endswith(endings)), "web")
            found.append((name, RoleEntry(files=name.split("/")[0] if "/" in name else "*", role="pretrain", format=form, domain=domain)))
    return found


def _refuse_benchmark(directory: Path, name: str) -> None:
    """A benchmark in the training text spoils every later measurement; only the user can say what the file is."""
    path = directory / name
    try:
        with gzip.open(path, "rb") if name.endswith(".gz") else open(path, "rb") as file:
            record = json.loads(file.readline(2**24))
    except (OSError, EOFError, ValueError):
        return
    shape = next((shape for shape in BENCHMARK_SHAPES if isinstance(record, dict) and shape <= set(record)), None)
    if shape is not None:
        raise ValueError(
            f"{path}: has the fields of a benchmark ({', '.join(sorted(shape))}) and the directory has no {MANIFEST_NAME}: "
            f"write one that gives this file a role, for example `{{files: {name!r}, role: evaluation}}`"
        )


def _glob_pattern(glob: str) -> re.Pattern[str]:
    """`**` any depth, `*` and `?` within one name, `{a,b}` alternatives."""
    pattern, depth = "", 0
    for token in re.findall(r"\*\*/?|.", glob, re.DOTALL):
        if token == "{":
            depth += 1
            pattern += "(?:"
        elif token == "}" and depth:
            depth -= 1
            pattern += ")"
        elif token == "," and depth:
            pattern += "|"
        else:
            pattern += {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}.get(token, re.escape(token))
    if depth:
        raise ValueError(f"{MANIFEST_NAME}: glob {glob!r} has an open brace")
    return re.compile(pattern)
