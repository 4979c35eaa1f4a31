"""Checks the evidence of a release against a store: what a stranger does who has both.

In: the directory that `glm46 evidence` wrote, a store, the signer's public key where one is known. Out: what differs,
one sentence each, down to the file. It reads every file that the release was made from and through, and changes
nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from infra.registry.experiment_tracking import KEY_TAG
from infra.registry.model_registry import DIGEST_TAG, GGUF_TAG, PROMOTION_DECISION_TAG, QUANTIZED_TAG, RegisteredVersion
from infra.registry.registered_versions import NamedVersion
from infra.step import Manifest
from infra.storage.manifest_graph import ManifestGraph
from infra.storage.manifest_store import CorruptManifestError, newest_manifests, step_key
from infra.storage.store import hash_file
from tasks.lineage.model_signature import model_payloads
from tasks.lineage.provenance import BUILD_TYPE, DECISION, provenance_statement, subjects
from tasks.lineage.trace_model import trace_model

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

    from infra.storage.store import Store

PROVENANCE_FILE, BUNDLE_FILE = "provenance.intoto.json", "provenance.sigstore.json"
OF_ONE_BUILD = ("attempt", "manifest")
"""Fields of a step in a statement that differ where its work was computed again, with the same digest."""


class Verification(BaseModel):
    """What was compared, and what differs."""

    model: str
    version: str
    signature: str
    """Whose signature holds, or why none was checked."""
    num_steps: int
    num_files: int
    num_bytes: int
    """Of the files in the store, each read and compared by sha256."""
    num_subjects: int
    """Files of the weights."""
    recomputed: tuple[str, ...]
    """Steps that this store computed another time than the statement's store did, with the same digest."""
    problems: tuple[str, ...]

    def describe(self) -> str:
        """Lines for a terminal."""
        lines = [
            f"{self.model} version {self.version}: {self.num_subjects} files of weights, {self.num_steps} steps, "
            f"{self.num_files:,} files, {self.num_bytes:,} bytes compared",
            f"signature: {self.signature}",
        ]
        lines += [f"computed again here, with the same digest: {', '.join(self.recomputed)}"] if self.recomputed else []
        lines += [f"DIFFERS: {problem}" for problem in self.problems]
        return "\n".join([*lines, *([] if self.problems else ["all of it is as the statement says"])])


class Statement:
    """A provenance statement that `glm46 evidence` wrote."""

    def __init__(self, values: dict[str, Any]) -> None:
        """Raises ValueError, KeyError or TypeError where it is none."""
        if values["predicate"]["buildDefinition"]["buildType"] != BUILD_TYPE:
            raise ValueError("buildType")
        definition = values["predicate"]["buildDefinition"]
        parameters, internal = definition["externalParameters"], definition["internalParameters"]
        self.values = values
        self.model, self.version = str(parameters["model"]), str(parameters["version"])
        self.formats: dict[str, str] = dict(internal["formats"])
        self.decision: str = internal["decision"]
        self.steps: list[dict[str, Any]] = list(internal["steps"])
        self.recipes = {entry["key"]: entry["recipe"] for entry in parameters["recipes"]}
        self.subjects = {each["name"]: each["digest"]["sha256"] for each in values["subject"]}
        byproducts = values["predicate"]["runDetails"]["byproducts"]
        self.documents = {each["name"]: each["digest"]["sha256"] for each in byproducts if each["name"] != DECISION}
        for made in self.steps:
            step_key(self.identity(made))

    def identity(self, made: dict[str, Any]) -> dict[str, Any]:
        """The parts of a step's key."""
        parts = {name: made[name] for name in ("step", "inputs", "code", "distributions")}
        return {**parts, "recipe": self.recipes.get(made["key"])}


def read_statement(directory: Path) -> Statement:
    """The statement of an evidence directory. Raises ValueError where there is none that can be read."""
    path = directory / PROVENANCE_FILE
    if not path.is_file():
        raise ValueError(f"{path} does not exist: name a directory that `glm46 evidence` wrote")
    try:
        return Statement(json.loads(path.read_bytes()))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is no statement that this version of glm46 can check ({type(error).__name__}: {error}): it was "
            f"changed, or another version wrote it"
        ) from None


def verify_release(directory: Path, store: Store, key: EllipticCurvePublicKey | None) -> Verification:
    """Compare the evidence with the store. Raises ValueError for a directory without a statement that can be read, and
    for a store that holds none of the steps: it is that of another machine or run."""
    statement = read_statement(directory)
    if not newest_manifests(store.manifest_names()).keys() & {made["key"] for made in statement.steps}:
        raise ValueError(
            f"store {store.uri} holds none of the {len(statement.steps)} steps that led to {statement.model} version "
            f"{statement.version}: name with --store the one in which it was made, or a copy of it"
        )
    signature, problems = _check_signatures(directory, key)
    problems += _check_documents(directory, statement)
    manifests: dict[str, Manifest] = {}
    recomputed: list[str] = []
    for made in statement.steps:
        problems += _check_step(statement, made, store, manifests, recomputed)
    problems += _check_subjects(statement, manifests)
    if not problems:
        problems += _compute_again(statement, ManifestGraph(store, {m.digest: (m,) for m in manifests.values()}))
    entries = [entry for m in manifests.values() for entry in (*m.content.values(), *m.evidence.values())]
    return Verification(
        model=statement.model,
        version=statement.version,
        signature=signature,
        num_steps=len(statement.steps),
        num_files=len(entries),
        num_bytes=sum(entry.size for entry in entries),
        num_subjects=len(statement.subjects),
        recomputed=tuple(recomputed),
        problems=tuple(problems),
    )


def signed_payloads(statement: bytes) -> dict[str, bytes]:
    """What a signer signs, by the file of its bundle: the statement on a release, and the weights that it names in each
    format as OpenSSF's model-signing does."""
    read = Statement(json.loads(statement))
    return {BUNDLE_FILE: statement, **model_payloads(read.model, read.subjects)}


def _check_signatures(directory: Path, key: EllipticCurvePublicKey | None) -> tuple[str, list[str]]:
    from infra.signature_bundle import key_id, signature_problem

    payloads = signed_payloads((directory / PROVENANCE_FILE).read_bytes())
    if key is None:
        is_there = any((directory / name).exists() for name in payloads)
        return f"not checked: {'there is one, give the public key with --key' if is_there else 'there is none'}", []
    problems = []
    for name, payload in payloads.items():
        path = directory / name
        if not path.exists():
            problems.append(f"{name} does not exist: {_signed(name)} is not signed")
        elif problem := signature_problem(path.read_bytes(), payload, key):
            problems.append(f"{name} {problem}")
    if problems:
        return "wrong or missing", problems
    return f"key {key_id(key)[:12]} signed the statement and {len(payloads) - 1} formats of the weights", []


def _signed(name: str) -> str:
    return "the statement" if name == BUNDLE_FILE else "a format of the weights"


def _check_documents(directory: Path, statement: Statement) -> Iterator[str]:
    for name, sha256 in statement.documents.items():
        path = directory / name
        if not path.is_file():
            yield f"{name} does not exist"
        elif hash_file(path) != sha256:
            yield f"{name} was changed after the statement was written"


def _check_step(
    statement: Statement, made: dict[str, Any], store: Store, manifests: dict[str, Manifest], recomputed: list[str]
) -> Iterator[str]:
    """What differs in one step; its manifest is added to `manifests` by its key."""
    key, named = made["key"], f"{made['step']} ({made['key'][:12]})"
    if step_key(statement.identity(made)) != key:
        yield f"{named}: recipe, inputs, code and packages in the statement do not make this key"
    try:
        manifest = store.read_manifest(key)
    except CorruptManifestError as error:
        yield f"{named}: {str(error).partition(': remove it')[0]}"
        return
    if manifest is None:
        yield f"{named}: store {store.uri} holds no manifest of it"
        return
    manifests[key] = manifest
    if manifest.digest != made["digest"]:
        yield f"{named}: the store has digest {manifest.digest[:12]}, the statement {made['digest'][:12]}"
    if manifest.attempt != made["attempt"]:
        recomputed.append(made["step"])
    elif store.manifest_sha256(manifest) != made["manifest"]:
        yield f"{named}: its manifest was changed beside the digest"
    for name in store.broken_files(manifest, deep=True):
        yield f"{named}: {name} is missing or has another sha256"


def _check_subjects(statement: Statement, manifests: dict[str, Manifest]) -> Iterator[str]:
    known = {name: manifests[key] for name, key in statement.formats.items() if key in manifests}
    for name in statement.formats.keys() - known.keys():
        yield f"the {name} files have no manifest, so their subjects cannot be compared"
    stored = dict(subjects(known))
    for name in sorted(stored.keys() | statement.subjects.keys()):
        if name not in statement.subjects:
            yield f"subject {name} is not in the statement"
        elif statement.subjects[name] != stored.get(name) and name.partition("/")[0] in known:
            yield f"subject {name} has another sha256 in the store, or is not in it"


def _compute_again(statement: Statement, graph: ManifestGraph) -> Iterator[str]:
    """What the store would state today, where every part of it is intact."""
    checkpoint = graph.store.read_manifest(statement.formats["hf"])
    assert checkpoint is not None, statement.formats
    tags = {DIGEST_TAG: checkpoint.digest, KEY_TAG: checkpoint.key, PROMOTION_DECISION_TAG: statement.decision}
    for name, key in statement.formats.items():
        tags |= {GGUF_TAG: key} if name == "gguf" else {f"{QUANTIZED_TAG}{name}": key} if name != "hf" else {}
    version = NamedVersion(statement.model, (), RegisteredVersion(statement.version, tags))
    again = provenance_statement(graph, version, trace_model(graph, version, None), statement.documents)
    if difference := _first_difference(_comparable(statement.values), _comparable(json.loads(json.dumps(again))), ""):
        yield f"the statement says something else than the store at {difference}"


def _comparable(values: dict[str, Any]) -> dict[str, Any]:
    """A statement without what only says when its steps were computed."""
    copied = json.loads(json.dumps(values))
    for made in copied["predicate"]["buildDefinition"]["internalParameters"]["steps"]:
        for name in OF_ONE_BUILD:
            del made[name]
    return copied


def _first_difference(one: Any, other: Any, where: str) -> str:
    """The path of the first value that differs; empty where none does."""
    if isinstance(one, dict) and isinstance(other, dict):
        pairs = [(f"{where}.{name}", one.get(name), other.get(name)) for name in {**one, **other}]
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = [(f"{where}[{number}]", *pair) for number, pair in enumerate(zip(one, other, strict=True))]
    else:
        return "" if one == other else where.removeprefix(".") or "its beginning"
    return next((found for path, a, b in pairs if (found := _first_difference(a, b, path))), "")
