"""Registered models in MLflow: one version per content digest, and aliases that people and later runs use.

The weights exist once. With a local store a version's files are hard links below the artifact directory of its run
(copies where the two are on different file systems) and its source is that run's `mlflow-artifacts:/...`. With an S3
store the source is the objects' own `s3://` prefix. Beside them are the files with which the version loads anywhere
(infra/registry/model_package.py). Every operation may be repeated.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from configs.files.atomic_files import replacing
from infra.home import Home
from infra.registry.experiment_tracking import KEY_TAG, connect
from infra.registry.model_package import package_files
from infra.servers.databases import check_database, mlflow_database
from infra.servers.recorded_servers import read_recorded
from infra.step import Artifact
from infra.storage.s3_store import S3Store
from infra.storage.store import Store

if TYPE_CHECKING:
    from mlflow import MlflowClient

DIGEST_TAG = "glm46.digest"
DECISION_TAG = "glm46.decision_key"
"""Step key of the phase's gate decision."""
PROMOTION_TAG = "glm46.promotion_key"
"""Step key of the decision against champion and anchors; on every release."""
PROMOTION_DECISION_TAG = "glm46.promotion_decision_key"
"""Step key of the decision on the promotion, which follows from that decision, quantization and smoke test."""
SUITE_TAG = "glm46.suite_decision_key"
"""Step key of the decision on the suite's benchmarks; on a release of a scale that has a suite."""
GGUF_TAG = "glm46.gguf_key"
"""Step key of the version's GGUF files."""
QUANTIZED_TAG = "glm46.quantized_key."
"""Prefix; with the name of a format it holds the step key of the version's checkpoint in that format."""
FIGURES_TAG = "glm46.figures_key."
"""Begins the tags that name what was measured of each format: of all GGUF files by `GGUF`, of a quantized checkpoint by
its format."""
CHAT_TAG = "glm46.chat"
"""`true` on a version that was trained on conversations, else `false`."""
EVIDENCE_TAG = "glm46.evidence"
"""URI of the report and cards of the run that judged the version last."""
CHAMPION = "champion"
"""Alias of the one version of a model that is served."""
PREVIOUS = "previous"
"""Alias of the champion before it, which `glm46 rollback` restores."""
CANDIDATE = "candidate"
"""Alias of the version that a release judges, or refused last."""
NO_LINK = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK)
"""Errors of a hard link that needs a copy instead: another file system, one without hard links, or too many links to
this file."""
ANCHOR_PREFIX = "anchor_"
"""Prefix of an alias; with the name of a figure it names the version that was best in it so far."""
SERVED = "mlflow-artifacts:/"
"""Scheme of artifacts that the tracking server keeps and serves."""
MODEL_DIR = "model"
"""Directory of the weights below a run's artifacts."""

DESCRIPTION = (
    "Every phase that a gate judged is a version; the alias of a phase names the last one accepted, `champion` the "
    "one that is served, `previous` the champion before it, `candidate` the version under judgement, "
    "`anchor_FIGURE` the best promoted one so far in a figure, to which no release may lose more than the "
    "margin.\n\n"
    '`mlflow.pyfunc.load_model("models:/NAME@champion").predict(["What is 12 + 7?"])` answers; `glm46.evidence` names '
    "the report."
)

Done = Literal["done", "unchanged"]


@dataclass(frozen=True)
class RegisteredVersion:
    """A version as it is in the registry."""

    version: str
    tags: Mapping[str, str]

    def tag(self, name: str) -> str:
        """Value of a tag that must be there. Raises ValueError: a version without it was not registered by glm46."""
        if name not in self.tags:
            raise ValueError(
                f"version {self.version} has no tag {name}: move the alias to a version that glm46 registered, or "
                f"delete it"
            )
        return self.tags[name]

    @property
    def digest(self) -> str:
        """Content digest of the registered artifact."""
        return self.tag(DIGEST_TAG)

    @property
    def key(self) -> str:
        """Step key under which the store holds the registered artifact."""
        return self.tag(KEY_TAG)

    @property
    def promotion_key(self) -> str:
        """Step key of the decision by which the version became champion."""
        return self.tag(PROMOTION_TAG)


def model_name(scale: str) -> str:
    """The registered model of a scale."""
    return f"glm46-{scale}"


def version_tags(scale: str, decision: Artifact[Any], store: Store) -> dict[str, str]:
    """Tags of a version besides its digest: the scale, the gate's verdict, and the address of the store that holds
    both."""
    return {
        "glm46.scale": scale,
        "glm46.accepted": str(decision.record.accepted).lower(),
        DECISION_TAG: decision.key,
        "glm46.store": store.uri,
    }


def find_registry(home: Home) -> MlflowClient | None:
    """A client that reads the home's registry: from its recorded server, or straight from the database where none runs.
    None where there is neither: before the first run. Raises ValueError where it does not answer."""
    recorded = read_recorded(home)
    if recorded is not None:
        return connect(recorded.mlflow)
    database = mlflow_database(home)
    if database.path is not None and not database.path.exists():
        return None
    if database.path is None:
        check_database(database)
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=database.uri, registry_uri=database.uri)


def open_registry(home: Home) -> MlflowClient:
    """The client of find_registry. Raises ValueError before the first run."""
    registry = find_registry(home)
    if registry is None:
        raise ValueError(
            f"{home.root} holds no model registry yet: run `glm46 run tiny` first, or set GLM46_HOME to where it was "
            f"run"
        )
    return registry


def ensure_registered(
    client: MlflowClient,
    model: str,
    artifact: Artifact[Any],
    directory: str,
    run_id: str,
    artifact_root: Path,
    tags: Mapping[str, str],
    description: str,
) -> tuple[str, Done]:
    """The version of the model with the artifact's digest, registered if there is none.

    directory: the artifact's directory that holds the weights (`hf`). run_id: the run the version belongs to.
    artifact_root: the server's artifact destination on this machine. tags: beside glm46.digest, glm46.key and
    glm46.chat, which are set here; on a version that exists, those that differ are set.
    """
    from mlflow.exceptions import MlflowException

    is_chat_trained: bool = artifact.record.is_chat_trained
    wanted = {**tags, DIGEST_TAG: artifact.digest, KEY_TAG: artifact.key, CHAT_TAG: str(is_chat_trained).lower()}
    try:
        client.create_registered_model(model, description=DESCRIPTION)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    existing, package = find_version(client, model, artifact.digest), package_files(is_chat_trained=is_chat_trained)
    if existing is not None:
        done = ensure_files(client, model, existing.version, artifact, directory, package, artifact_root)
        return existing.version, done_of(done, ensure_tags(client, model, existing, wanted))
    source = source_of_files(client, artifact, directory, package, run_id, artifact_root, MODEL_DIR)
    version = client.create_model_version(model, source, run_id, tags=wanted, description=description)
    return str(version.version), "done"


def ensure_tags(client: MlflowClient, model: str, version: RegisteredVersion, tags: Mapping[str, str]) -> Done:
    """Set those of the tags that differ on a version."""
    differing = {name: value for name, value in tags.items() if version.tags.get(name) != value}
    for name, value in differing.items():
        client.set_model_version_tag(model, version.version, name, value)
    return "done" if differing else "unchanged"


def ensure_evidence(client: MlflowClient, model: str, version: str, uri: str) -> Done:
    """Tag a version with the URI of its report and cards; the newest run that judged it wins."""
    item = client.get_model_version(model, version)
    return ensure_tags(client, model, RegisteredVersion(version, dict(item.tags)), {EVIDENCE_TAG: uri})


def find_version(client: MlflowClient, model: str, digest: str) -> RegisteredVersion | None:
    """The first version of a model with a content digest."""
    matches = client.search_model_versions(f"name = '{model}' and tag.`{DIGEST_TAG}` = '{digest}'")
    versions = sorted(
        (RegisteredVersion(str(item.version), dict(item.tags)) for item in matches), key=lambda item: int(item.version)
    )
    return versions[0] if versions else None


def source_of_files(
    client: MlflowClient,
    artifact: Artifact[Any],
    directory: str,
    package: Mapping[str, bytes],
    run_id: str,
    artifact_root: Path,
    place: str,
) -> str:
    """The URI of an artifact's directory with the package beside its files: in S3 the objects' own prefix; of a local
    store hard links below the run's artifacts, in the directory `place`, under which MLflow serves them."""
    if isinstance(artifact.reader, S3Store):
        prefix = f"objects/{artifact.manifest.object_key}/{artifact.manifest.attempt}/{directory}"
        for name, content in package.items():
            artifact.reader.write_beside(f"{prefix}/{name}", content)
        return f"{artifact.reader.uri}/{prefix}"
    artifact_uri = client.get_run(run_id).info.artifact_uri
    if artifact_uri is None or not artifact_uri.startswith(SERVED):
        raise ValueError(
            f"run {run_id} keeps its artifacts at {artifact_uri}: start the MLflow server with --serve-artifacts"
        )
    source = f"{artifact_uri}/{place}"
    _place_files(artifact, directory, package, _served_dir(artifact_root, source))
    return source


def ensure_files(
    client: MlflowClient,
    model: str,
    version: str,
    artifact: Artifact[Any],
    directory: str,
    package: Mapping[str, bytes],
    artifact_root: Path,
) -> Done:
    """Link the files of a version again where some are gone: `mlflow gc` removes them with a deleted run. In S3 they
    are the store's own."""
    source = client.get_model_version(model, version).source or ""
    if isinstance(artifact.reader, S3Store) or not source.startswith(SERVED):
        return "unchanged"
    target = _served_dir(artifact_root, source)
    names = {*_names_below(artifact, directory), *({"MLmodel"} & package.keys())}
    if all((target / name).is_file() for name in names):
        return "unchanged"
    _place_files(artifact, directory, package, target)
    return "done"


def done_of(*parts: Done) -> Done:
    """What became of something by what became of its parts."""
    return "done" if "done" in parts else "unchanged"


def _served_dir(artifact_root: Path, source: str) -> Path:
    return artifact_root / source.removeprefix(SERVED).lstrip("/")


def _names_below(artifact: Artifact[Any], directory: str) -> list[str]:
    files = {**artifact.manifest.content, **artifact.manifest.evidence}
    names = sorted(name.removeprefix(f"{directory}/") for name in files if name.startswith(f"{directory}/"))
    assert names, f"step {artifact.manifest.step} left no directory {directory}"
    return names


def _place_files(artifact: Artifact[Any], directory: str, package: Mapping[str, bytes], target: Path) -> None:
    for name in _names_below(artifact, directory):
        _link(artifact.path(f"{directory}/{name}"), target / name)
    for name, content in package.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(content)


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as temporary:
        try:
            os.link(source, temporary)
        except OSError as error:
            if error.errno not in NO_LINK:
                raise
            shutil.copyfile(source, temporary)


def ensure_alias(client: MlflowClient, model: str, alias: str, version: str) -> Done:
    """Point an alias of a model at a version; one move is atomic on the server."""
    current = resolve_alias(client, model, alias)
    if current is not None and current.version == version:
        return "unchanged"
    client.set_registered_model_alias(model, alias, version)
    return "done"


def resolve_alias(client: MlflowClient, model: str, alias: str) -> RegisteredVersion | None:
    """The version an alias names; None where the model or the alias does not exist."""
    from mlflow.exceptions import MlflowException

    try:
        item = client.get_model_version_by_alias(model, alias)
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise
    return RegisteredVersion(str(item.version), dict(item.tags))


def describe_aliases(client: MlflowClient, model: str) -> str:
    """The aliases of a model, in words for a message that refuses another one."""
    from mlflow.exceptions import MlflowException

    try:
        aliases = client.get_registered_model(model).aliases
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return "no version of it is registered"
    return f"its aliases are {', '.join(sorted(aliases))}" if aliases else "it has no aliases"
