"""The commands of glm46 that change, describe or check what was made: rollback, evidence, verify, speedrun, forget."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from flows.cli.command_errors import EXIT_FAILED, EXIT_REFUSED, failures, usage_errors
from flows.cli.options import ADDRESS, JSON, STORE


def rollback(
    reason: Annotated[str, typer.Option(help="why; kept on the version that goes, with time and user")],
    scale: Annotated[str, typer.Argument(metavar="SCALE|FILE.yaml", help="the scale of the model")] = "tiny",
    store: STORE = None,
) -> None:
    """Make the champion before this one champion again; a running `glm46 serve` follows."""
    with usage_errors():
        from configs.load import load_scale
        from flows.cli.serving.serve_model import find_version
        from infra.home import known_home
        from infra.registry.model_registry import CHAMPION, model_name, open_registry
        from infra.registry.promotion import refuse_wrong_reason, roll_back
        from infra.storage.open_store import open_known_store

        refuse_wrong_reason(reason)
        home, configuration = known_home(), load_scale(scale)
        find_version(home, configuration, CHAMPION)
        opened = open_known_store(store, home, writes=True)
    with failures(home):
        registry, model = open_registry(home), model_name(configuration.scale)
        done = roll_back(registry, opened, model, reason, lambda said: print(said, file=sys.stderr))
        print(done.describe())


def evidence(
    output: Annotated[Path, typer.Option(metavar="DIR", help="a new directory")],
    name: Annotated[str, typer.Argument(metavar="ALIAS|VERSION", help="champion, candidate, 3, ...")] = "champion",
    scale: Annotated[str, typer.Option(help="the scale of the model")] = "tiny",
    sign_key: Annotated[
        Path | None, typer.Option(metavar="KEY.pem", help="sign weights and provenance with this EC key")
    ] = None,
    store: STORE = None,
) -> None:
    """Write what others' tools read: model card, provenance (SLSA), SBOM, OpenLineage, Croissant. No server."""
    with usage_errors():
        from flows.cli.evidence.write_evidence import write_evidence

        for path in write_evidence(name, scale, store, output, sign_key):
            print(path)


def verify(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="what `glm46 evidence` wrote")],
    key: Annotated[
        Path | None, typer.Option(metavar="KEY.pub", help="the signer's public key: the statement must be signed")
    ] = None,
    rebuild: Annotated[
        str | None,
        typer.Option(metavar="SCALE|FILE.yaml", help="also run this scale in a fresh home and compare every digest"),
    ] = None,
    data: Annotated[str | None, typer.Option(metavar=ADDRESS, help="the documents of --rebuild, as for `run`")] = None,
    store: STORE = None,
    as_json: JSON = False,
) -> None:
    """Check a release against its evidence: signature, keys, digests, the sha256 of every file. Changes nothing."""
    with usage_errors():
        from infra.home import known_home
        from infra.signature_bundle import read_public_key
        from infra.storage.open_store import open_known_store
        from tasks.lineage.verify_release import verify_release

        if data is not None and rebuild is None:
            raise ValueError("--data is what --rebuild reads: give both, or neither")
        home = known_home()
        public = None if key is None else read_public_key(key)
        found = verify_release(directory, open_known_store(store, home), public)
        print(found.model_dump_json() if as_json else found.describe(), flush=True)
    differs = bool(found.problems)
    if rebuild is not None:
        with failures(home):
            from flows.cli.evidence.rebuild_release import rebuild_release

            for compared in rebuild_release(directory, rebuild, data):
                print(compared.model_dump_json() if as_json else compared.describe())
                differs |= bool(compared.difference)
    raise typer.Exit(EXIT_FAILED if differs else 0)


def speedrun(
    scale: Annotated[str, typer.Argument(metavar="SCALE|FILE.yaml", help="the scale that is run")] = "tiny",
    target: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="pass@1 on held-out problems, lower end of its 95 % interval")
    ] = 0.9,
    output: Annotated[Path, typer.Option(metavar="FILE.json", help="a new file")] = Path("speedrun.json"),
    record: Annotated[
        Path | None, typer.Option("--verify", metavar="FILE.json", help="run or look up a record's steps, and compare")
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar=ADDRESS, help="your documents instead of Python's, as for `run`")
    ] = None,
    as_json: JSON = False,
) -> None:
    """Measure the time from raw pages to a share of right answers, or repeat another's record. docs/speedrun.md has
    the rules and the table."""
    with usage_errors():
        from configs.files.atomic_files import replace_durably
        from configs.load import load_scale
        from infra.home import open_home

        phases, home = [phase.name for phase in load_scale(scale).phases], open_home()
        if record is None and (output.exists() or not output.absolute().parent.is_dir()):
            raise ValueError(f"--output {output} must be a new file in a directory that exists")
        from flows.cli.evidence import speedrun as measured

        recorded = None if record is None else measured.read_record(record)
        if recorded is None:
            measured.refuse_used_store(home)
        elif recorded.phase not in phases:
            raise ValueError(f"{scale} has no phase {recorded.phase}: name the scale of the record, {recorded.scale}")
    with failures(home, output.absolute().parent):
        if recorded is None:
            outcome = measured.run_to(phases[-1], home, scale, data)
            made, found = measured.record_target(outcome, home, scale, target), []
            replace_durably(output, made.model_dump_json(indent=1).encode() + b"\n")
        else:
            outcome = measured.run_to(recorded.phase, home, scale, data)
            made = measured.record_phase(outcome, home, scale, recorded.target, recorded.phase)
            found = measured.differences(recorded, made)
        print(made.model_dump_json() if as_json else made.describe())
        said = [f"DIFFERS: {difference}" for difference in found]
        if recorded is not None and not found:
            said = [f"all {len(made.steps)} digests are those of the record"]
        for line in said:
            print(line, file=sys.stderr if as_json else sys.stdout)
    raise typer.Exit(EXIT_FAILED if found else 0)


def forget(
    asked: Annotated[str, typer.Argument(metavar="DOCUMENT|URL", help="an id of 16 hex digits, or a URL")],
    scale: Annotated[str, typer.Option(metavar="SCALE|FILE.yaml", help="the scale whose block list is used")] = "tiny",
    apply: Annotated[bool, typer.Option("--apply", help="block the documents and tag the versions")] = False,
    run: Annotated[bool, typer.Option("--run", help="apply, then run the scale: a release without them")] = False,
    data: Annotated[
        str | None, typer.Option(metavar=ADDRESS, help="the documents of --run, as those of glm46 run")
    ] = None,
    store: STORE = None,
    as_json: JSON = False,
) -> None:
    """Plan a take-down: where a document is, which versions were trained on it, what a rebuild costs."""
    with usage_errors():
        from flows.cli.evidence import forget_document
        from infra.home import open_home

        if data is not None and not run:
            raise ValueError("--data names the documents of --run: add --run, or leave --data out")
        takedown = forget_document.plan(asked, store)
        done = forget_document.apply(takedown, scale, store) if apply or run else []
    print(takedown.model_dump_json() if as_json else takedown.describe())
    aside = sys.stderr if as_json else sys.stdout
    for line in done:
        print(line, file=aside)
    if not run:
        return
    with failures(open_home()):
        outcome = forget_document.rebuild(takedown, scale, data, store)
    named = f"{outcome.model} version {outcome.version}"
    for reason in outcome.reasons:
        print(f"refused: {reason}", file=sys.stderr)
    if not outcome.promoted:
        raise typer.Exit(EXIT_REFUSED)
    print(f"{named} was made without it and is champion", file=aside)
