"""Assigns roles to the files of a user's data directory: by `glm46-data.yaml`, or by text-like suffixes without one.

The YAML lists globs (`{a,b}`, `*`, `**`) with role, format, domain, language, text fields, kind and licence. The
first matching entry wins, and a file that none matches is ignored. `format: git` means the files of a git working
tree that git does not ignore.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from configs.strict_yaml import MAX_BYTES, read_yaml
from tasks.data.readers.git_trees import GIT_COMMITS, GIT_DIRECTORY
from tasks.data.readers.issue_threads import ISSUES
from tasks.data.readers.record_lines import TABLES
from tasks.data.readers.source_bytes import HUGGING_FACE, open_source, stem_of
from tasks.data.readers.table_records import CSV, JSON
from tasks.data.records.documents import CODE, COMMIT, ISSUE
from tasks.data.sources.benchmark_shapes import refuse_benchmarks
from tasks.data.sources.globs import Glob
from tasks.data.sources.held_out_splits import held_out_names, is_held_out
from tasks.data.sources.remote_sources import CARD
from tasks.data.sources.source_root import MANIFEST_NAME, SourceRoot

OTHER_MANIFEST_NAMES = ("glm46-data.yml", "glm46_data.yaml", "glm46_data.yml")
"""Objects of a bucket that are looked at concurrently, each with one request."""
ROLES = ("pretrain", "evaluation", "reference", "sft", "preference", "prompts", "classifier", "ignore")
TEXT_ROLES = ("pretrain", "evaluation", "reference")
"""Roles whose files are read record by record, in any format."""
GIT = "git"
FORMATS = (
    "text",
    "jsonl",
    JSON,
    CSV,
    "parquet",
    "html",
    "html_jsonl",
    "web_archive",
    "mediawiki",
    "zip_text",
    "repository_files",
    "commits",
    ISSUES,
    GIT,
)
DOMAINS = ("web", "multilingual", "code", "commit", "issue", "math", "medical", "financial", "synthetic")
PATCH_SUFFIXES = (".patch", ".diff")
ENTRY_KEYS = ("files", "role", "format", "domain", "lang", "text", "kind", "label", "licence", "commits")
TEXT_SUFFIXES = (".txt", ".md", ".rst")
CODE_SUFFIXES = (
    ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".java", ".js", ".jsx", ".ts", ".tsx", ".go", ".rs", ".rb",
    ".php", ".cs", ".swift", ".kt", ".scala", ".sh", ".sql", ".r", ".jl", ".lua", ".pl", ".hs", ".ml", ".ex", ".erl",
    ".clj",
)  # fmt: skip
PATTERN_FORMATS = (
    (r".*\.(?:jsonl|ndjson)", "jsonl"),
    (r".*\.parquet", "parquet"),
    (r".*\.html?", "html"),
    (r".*\.(?:warc|arc|wet|warc\.wet)", "web_archive"),
    (r".*pages-(?:articles|meta).*\.xml(?:-[\dp]+)?", "mediawiki"),
)
WIKI_INDEX = re.compile(r".*pages-articles-multistream-index.*")
"""The file beside a wiki's dump that says where each page is in it."""
"""Formats by the name without the ending of a compression."""


@dataclass(frozen=True)
class RoleEntry:
    """One entry of the manifest: the role of a group of files."""

    files: str
    role: str
    format: str = ""
    domain: str = "web"
    lang: str = ""
    text: tuple[str, ...] = ()
    """Fields that hold the document, joined in order; empty for `text` or `content`, whichever the record has."""
    kind: str = ""
    label: str = ""
    licence: str = ""
    commits: int = 0
    """With format git: how many of each working tree's newest commits become documents of domain commit."""


def assign_roles(root: SourceRoot, needed: str = "pretrain") -> list[tuple[str, RoleEntry]]:
    """(name below the root, entry) of every file with a role, sorted by name. Raises ValueError on a wrong manifest.

    Without a manifest every file is text to train on, apart from test and validation splits and cards of datasets;
    where `needed` is sft, every table is one of conversations.

    The commits of a working tree have an entry of their own: the file `.git` of the tree.
    """
    names = [name for name in root.names if name != MANIFEST_NAME]
    misnamed = next((name for name in OTHER_MANIFEST_NAMES if name in root.addresses), None)
    if misnamed is not None:
        raise ValueError(f"{root.where.rstrip('/')}/{misnamed}: roles are read from {MANIFEST_NAME}: rename it")
    if MANIFEST_NAME not in root.addresses:
        _refuse_bare(root, root.bare)
        return _roles_by_suffix(root, names, needed)
    manifest = f"{root.where.rstrip('/')}/{MANIFEST_NAME}"
    with open_source(root.addresses[MANIFEST_NAME]) as file:
        entries = _read_manifest(manifest, file.read(MAX_BYTES + 1))
    patterns = [(_glob_of(manifest, entry), entry) for entry in entries]
    winners = {name: next((entry for pattern, entry in patterns if pattern.fullmatch(name)), None) for name in names}
    _refuse_idle_entries(manifest, patterns, winners, root.note)
    heads = {name: winners.get(f"{name}/HEAD".lstrip("/")) for name in root.bare}
    _refuse_bare(
        root,
        [name for name, entry in heads.items() if entry is not None and entry.format == GIT and entry.role != "ignore"],
    )
    assigned = []
    for name, entry in winners.items():
        if entry is None or entry.role == "ignore":
            continue
        if entry.format == GIT:
            assigned.extend(_tree_file(root, name, entry))
        else:
            assigned.append((name, _with_format(entry, name, manifest)))
    assigned.extend(_tree_commits(root, assigned, manifest, [entry for entry in entries if entry.format == GIT]))
    return sorted(assigned, key=lambda item: item[0])


def _refuse_bare(root: SourceRoot, names: Sequence[str]) -> None:
    if names:
        path = f"{root.where.rstrip('/')}/{names[0]}".rstrip("/")
        raise ValueError(
            f"{path} is a bare git repository, which has no checked-out files: `git clone {path} NEW` makes a working "
            f"tree of it; put that "
            f"here instead, or give its files the role ignore in {MANIFEST_NAME}"
        )


def _refuse_idle_entries(
    manifest: str, patterns: list[tuple[Glob, RoleEntry]], winners: Mapping[str, RoleEntry | None], note: str
) -> None:
    """Raises ValueError for entries that no file uses: a mistyped glob would silently train on a benchmark or leave out
    a part of the corpus."""
    used = {id(entry) for entry in winners.values()}
    for number, (pattern, entry) in enumerate(patterns, 1):
        if id(entry) in used or entry.role == "ignore":
            continue
        taken = next((name for name in winners if pattern.fullmatch(name)), None)
        winner = winners[taken] if taken is not None else None
        why = (
            f"no file matches it{note}: names are relative to the directory of this file, and `**/` matches any "
            f"depth; correct the glob"
        )
        if winner is not None:
            why = (
                f"every file that it matches (such as {taken}) belongs to the earlier entry {winner.files}: put "
                f"this one in front of it"
            )
        raise ValueError(f"{manifest}, entry {number} ({entry.files}, role {entry.role}): {why}, or remove the entry")


def _tree_file(root: SourceRoot, name: str, entry: RoleEntry) -> list[tuple[str, RoleEntry]]:
    """The file's entry if it is source code or text that git does not ignore, else nothing."""
    tree, form = root.tree_of(name), format_of(name)
    if tree is None or name not in tree.files or form not in ("text", "html"):
        return []
    domain = _domain_by_suffix(name) if entry.domain == RoleEntry.domain else entry.domain
    return [(name, replace(entry, format=form, domain=domain))]


def _tree_commits(
    root: SourceRoot, assigned: list[tuple[str, RoleEntry]], manifest: str, entries: list[RoleEntry]
) -> list[tuple[str, RoleEntry]]:
    commits = []
    for entry in entries:
        trees = {
            tree.root: tree
            for name, given in assigned
            if given.files == entry.files and (tree := root.tree_of(name)) is not None
        }
        if not trees:
            raise ValueError(
                f"{manifest}: the entry {entry.files} has format git, but no git working tree holds files that it "
                f"matches"
            )
        for tree in trees.values():
            if entry.commits and tree.head:
                commits.append(
                    (f"{tree.root}/{GIT_DIRECTORY}".lstrip("/"), replace(entry, format=GIT_COMMITS, domain=COMMIT))
                )
    return commits


def _read_manifest(path: str, data: bytes) -> list[RoleEntry]:
    content = read_yaml(path, data)
    if not isinstance(content, dict) or content.get("version") != 1 or not isinstance(content.get("entries"), list):
        raise ValueError(f"{path}: must hold `version: 1` and a list `entries`")
    unknown = sorted(set(content) - {"version", "entries"})
    if unknown:
        raise ValueError(f"{path}: unknown key {unknown[0]!r}; allowed are version and entries")
    return [_parse_entry(path, number, entry) for number, entry in enumerate(content["entries"], 1)]


def _parse_entry(path: str, number: int, entry: object) -> RoleEntry:
    where = f"{path}, entry {number}"
    if not isinstance(entry, dict) or not {"files", "role"} <= set(entry):
        raise ValueError(f"{where}: must be a mapping with at least `files` and `role`, is {entry!r}")
    values: Mapping[str, object] = entry
    unknown = sorted(set(values) - set(ENTRY_KEYS))
    if unknown:
        raise ValueError(
            f"{where} ({values['files']}): unknown key {unknown[0]!r}; allowed are {', '.join(ENTRY_KEYS)}"
        )
    for key, allowed in (("role", ROLES), ("format", FORMATS), ("domain", DOMAINS)):
        if key in values and values[key] not in allowed:
            raise ValueError(
                f"{where} ({values['files']}): unknown {key} {values[key]!r}; allowed are {', '.join(allowed)}"
            )
    for key in ("files", "lang", "kind", "label", "licence"):
        if key in values and (
            not isinstance(values[key], str | int) or isinstance(values[key], bool) or values[key] == ""
        ):
            fix = (
                "give each glob an entry"
                if key == "files"
                else f"write it in quotes where YAML reads something else into it ({key}: 'no')"
            )
            raise ValueError(f"{where} ({values['files']}): {key} is {values[key]!r}; allowed is one string: {fix}")
    commits = values.get("commits", 0)
    if (
        not isinstance(commits, int)
        or isinstance(commits, bool)
        or commits < 0
        or (commits and values.get("format") != GIT)
    ):
        raise ValueError(
            f"{where} ({values['files']}): commits is {commits!r}; allowed is a number, where the entry says `format: "
            f"git`"
        )
    text = values.get("text")
    if text is not None and not (
        isinstance(text, str) or (isinstance(text, list) and text and all(isinstance(name, str) for name in text))
    ):
        raise ValueError(
            f"{where} ({values['files']}): text is {text!r}; allowed is the name of a field or a list of names"
        )
    named = () if text is None else tuple(map(str, text)) if isinstance(text, list) else (str(text),)
    strings = {key: str(value) for key, value in values.items() if key not in ("text", "commits")}
    return replace(RoleEntry(**strings), text=named, commits=commits)  # pyright: ignore[reportArgumentType]


def _with_format(entry: RoleEntry, name: str, manifest: str) -> RoleEntry:
    form = (
        entry.format or format_of(name) or ("" if entry.role in ("pretrain", "reference") else record_format_of(name))
    )
    if not form and entry.role in TEXT_ROLES:
        raise ValueError(
            f"{manifest}: {name} has role {entry.role}, but its ending names no format: add `format: "
            f"{' | '.join(FORMATS)}`"
        )
    return replace(entry, format=form, domain=_domain_of(entry, name, form))


def _domain_of(entry: RoleEntry, name: str, form: str) -> str:
    """Commits and issue threads have domains of their own, even where the manifest gives their entry the domain
    code."""
    is_change = form == "commits" or name.endswith(PATCH_SUFFIXES)
    own = ISSUE if form == ISSUES else COMMIT if is_change else ""
    return own if own and entry.domain in (RoleEntry.domain, CODE) else entry.domain


def format_of(name: str) -> str:
    stem = stem_of(name)
    if WIKI_INDEX.fullmatch(stem):
        return ""
    if stem.endswith(".json") and stem != name.lower():
        return "jsonl"  # as C4 and Dolma name theirs; uncompressed, .json is settings more often than documents
    known = next((form for pattern, form in PATTERN_FORMATS if re.fullmatch(pattern, stem)), "")
    if known or stem.endswith(TEXT_SUFFIXES):
        return known or "text"
    return "text" if stem == name.lower() and stem.endswith((*CODE_SUFFIXES, *PATCH_SUFFIXES)) else ""


def record_format_of(name: str) -> str:
    """The format of an ending that in a corpus means settings or numbers more often than documents: read where the
    role is one of records, or where a file is named by itself."""
    stem = stem_of(name)
    if stem.endswith((".csv", ".tsv")):
        return CSV
    return JSON if name.lower().endswith(".json") else ""


def _domain_by_suffix(name: str) -> str:
    suffixes = {CODE: CODE_SUFFIXES, COMMIT: PATCH_SUFFIXES}
    return next((domain for domain, endings in suffixes.items() if name.lower().endswith(endings)), "web")


def held_out_files(root: SourceRoot) -> set[str]:
    """Names of the test and validation splits, which are left out of training where there is no manifest."""
    if root.where.startswith(HUGGING_FACE):
        return set(filter(is_held_out, root.names))
    return held_out_names({name: format_of(name) for name in root.names})


def _roles_by_suffix(root: SourceRoot, names: list[str], needed: str) -> list[tuple[str, RoleEntry]]:
    role, assigned = "sft" if needed == "sft" else "pretrain", []
    formats = {name: format_of(name) or (record_format_of(name) if len(names) == 1 else "") for name in names}
    held_out = held_out_files(root)
    for name, form in formats.items():
        tree = root.tree_of(name)
        if name in held_out or (role == "sft" and form not in TABLES) or _is_card(root, name, formats):
            continue
        if form and (tree is None or name in tree.files or (form != "text" and name not in tree.left_out)):
            group = name.split("/")[0] if "/" in name else "*"
            assigned.append((name, RoleEntry(files=group, role=role, format=form, domain=_domain_by_suffix(name))))
    refuse_benchmarks(root, {name: form for name, form in formats.items() if name not in held_out})
    return assigned


def _is_card(root: SourceRoot, name: str, formats: Mapping[str, str]) -> bool:
    """Whether a file is the card of a downloaded dataset: a README that begins with YAML, above a table."""
    folder = name.removesuffix(name.rpartition("/")[2])
    if name[len(folder) :].lower() != CARD or not any(
        form in TABLES and other.startswith(folder) for other, form in formats.items()
    ):
        return False
    with open_source(root.addresses[name]) as file:
        return file.read(4).startswith(b"---")


def _glob_of(manifest: str, entry: RoleEntry) -> Glob:
    try:
        return Glob(entry.files)
    except ValueError as error:
        raise ValueError(f"{manifest}: {error}") from error
