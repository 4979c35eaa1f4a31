"""`glm46 forget`: plans a take-down; with `--apply` writes the block list and tags the affected versions, and with
`--run` makes a version without the text."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from configs.files.atomic_files import replace_durably
from configs.load import load_scale
from flows.cli.evidence.trace_lineage import registered_versions
from flows.cli.evidence.whole_run import whole_run
from flows.show.outcome import RunOutcome
from infra.file_lock import locked
from infra.home import Home, known_home, open_home
from infra.registry.model_registry import open_registry
from infra.registry.promotion import FORGOTTEN_TAG
from infra.storage.manifest_graph import read_manifest_graph
from infra.storage.open_store import open_known_store
from infra.user_name import user_name
from tasks.data.filtering.blocked_documents import NOTHING_BLOCKED, block_list_path, read_block_list
from tasks.lineage.plan_takedown import TakeDown, plan_takedown

MAX_TAG_CHARS = 5000
"""What MLflow keeps of a tag."""


def plan(asked: str, store: str | None) -> TakeDown:
    """What a take-down would do. Raises ValueError for a document that the store does not know."""
    home = known_home()
    return plan_takedown(read_manifest_graph(open_known_store(store, home)), registered_versions(home), asked)


def apply(takedown: TakeDown, scale: str, store: str | None) -> list[str]:
    """Block the documents for every later run of the scale, and tag the versions that were trained on them, also those
    that a run registered meanwhile; what was done, for a terminal. Raises ValueError for a block list that cannot be
    read."""
    home, name = open_home(), load_scale(scale).data.recipe.filter.block_list
    path, asked = block_list_path(home.root, name), [takedown.asked] if "://" in takedown.asked else []
    path.parent.mkdir(parents=True, exist_ok=True)
    # Of two take-downs at a time, the second would write the list that it had read before the first.
    lock, tell = path.with_name(f".{path.name}.lock"), partial(print, file=sys.stderr)
    with locked(lock, tell, f"another take-down writes {path}; waiting for it"):
        known = read_block_list(home.root, name)
        entries = (known or NOTHING_BLOCKED).missing((*asked, *takedown.entries))
        if entries:
            _append(path, takedown.asked, entries)
        said = [f"{len(entries)} entries added to {path}: the next run of a scale with this block list leaves them out"]
        return [*said, *_tag(home, plan(takedown.asked, store))]


def rebuild(takedown: TakeDown, scale: str, data: str | None, store: str | None) -> RunOutcome:
    """The outcome of a run of the scale, which leaves an applied take-down out. Raises RuntimeError where the run
    fails, and where the champion was trained on the text nevertheless, as one that reads another block list."""
    options = {"--data": data, "--store": store}
    given = [part for option, value in options.items() if value is not None for part in (option, value)]
    outcome = whole_run(open_home().root, scale, *given)
    if outcome.promoted:
        trained = [model for model in plan(takedown.asked, store).models if model.version == outcome.version]
        if any(model.model == outcome.model for model in trained):
            raise RuntimeError(
                f"{outcome.model} version {outcome.version}, which the run promoted, was trained on {takedown.asked}: "
                f"compare --data and data.recipe.filter.block_list of {scale} with those of the first run"
            )
    return outcome


def _append(path: Path, asked: str, entries: list[str]) -> None:
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    head = f"# {_now()}, {user_name()}: {asked}"
    replace_durably(path, "".join(f"{line}\n" for line in (*before.splitlines(), head, *entries)).encode())


def _tag(home: Home, takedown: TakeDown) -> list[str]:
    said, registry, now = [], open_registry(home), _now()
    for model in (model for model in takedown.models if model.model):
        before = registry.get_model_version(model.model, model.version).tags.get(FORGOTTEN_TAG)
        asked = "; ".join([f"{takedown.asked}, {now}", *([before] if before else [])])
        registry.set_model_version_tag(model.model, model.version, FORGOTTEN_TAG, asked[:MAX_TAG_CHARS])
        aliases = f"still has the aliases {', '.join(model.aliases)}" if model.aliases else "has no alias"
        said.append(f"{model.model} version {model.version} is tagged {FORGOTTEN_TAG}; it {aliases}")
    return said


def _now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
