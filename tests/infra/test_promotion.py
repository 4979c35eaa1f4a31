"""Promotion and rollback against a real MLflow server: two at once, kills between two moves of aliases, lost files."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from unittest.mock import patch

import pytest
from mlflow import MlflowClient

from infra.home import Home
from infra.registry.experiment_tracking import connect, ensure_run
from infra.registry.model_registry import (
    CANDIDATE,
    CHAMPION,
    GGUF_TAG,
    ensure_alias,
    ensure_registered,
    find_version,
    model_name,
)
from infra.registry.promotion import (
    FORGOTTEN_TAG,
    MAX_REASON_CHARS,
    MAX_TAG_CHARS,
    MOVES_TAG,
    REIGNS_TAG,
    ROLLED_BACK_AT_TAG,
    ROLLED_BACK_BY_TAG,
    ROLLED_BACK_REASON_TAG,
    AliasMoves,
    look_up_rivals,
    promote,
    refusal_of,
    roll_back,
)
from infra.step import Output, Record, step
from infra.storage.open_store import open_store
from tests.support.evaluation_fakes import commit

FIGURES = ("bits_per_byte", "pass_at_1")
BOTH, NEITHER = FIGURES, ()
REASON = "it answers in the wrong language"
numbers = itertools.count()


class Weights(Record):
    number: int
    is_chat_trained: bool = True


@step(content=("hf/*",))
def train_phase(*, recipe: Weights, output: Output) -> Weights:
    output.path("hf/model.safetensors").write_text(f"weights {recipe.number}")
    return recipe


@step(content=("model-*.gguf",))
def convert_to_gguf(*, recipe: Weights, output: Output) -> Weights:
    output.path("model-F32.gguf").write_text(f"weights {recipe.number} once more")
    return recipe


class Registry:
    """A model of its own, whose versions are promoted and rolled back."""

    def __init__(self, server, tmp_path) -> None:
        self.client, self.home = connect(server.uri), server.home
        self.model = model_name(f"promoted{next(numbers)}")
        self.root = tmp_path
        self.store = open_store(str(tmp_path / "store"), Home(tmp_path / "home"))
        self.said: list[str] = []
        self.keys: dict[str, str] = {}

    def version(self) -> str:
        """A new version with GGUF files."""
        weights = Weights(number=next(numbers))
        checkpoint = commit(self.store, train_phase, recipe=weights)
        gguf = commit(self.store, convert_to_gguf, recipe=weights)
        run_id = ensure_run(self.client, "glm46-promotions", "phase", checkpoint.key, None, {})
        root, tags = self.home.mlflow_dir / "artifacts", {GGUF_TAG: gguf.key}
        version, _ = ensure_registered(self.client, self.model, checkpoint, "hf", run_id, root, tags, "")
        self.keys[version] = gguf.key
        return version

    def rivals(self):
        return look_up_rivals(self.client, self.store, self.model, FIGURES, self.said.append)

    def promote(self, version, anchored, rivals=None, store=None):
        rivals = rivals or self.rivals()
        store = store or self.store
        return promote(
            self.client, store, self.model, version, dict.fromkeys(anchored, version), rivals, self.said.append
        )

    def roll_back(self, reason=REASON):
        return roll_back(self.client, self.store, self.model, reason, self.said.append)

    @property
    def aliases(self) -> dict[str, str]:
        return {alias: str(number) for alias, number in self.client.get_registered_model(self.model).aliases.items()}


@pytest.fixture
def registry(mlflow_server, tmp_path):
    return Registry(mlflow_server, tmp_path)


def reigning(champion, previous=None, bits_per_byte="1", pass_at_1="1"):
    aliases = {"champion": champion, "anchor_bits_per_byte": bits_per_byte, "anchor_pass_at_1": pass_at_1}
    return aliases if previous is None else aliases | {"previous": previous}


def three_champions(registry) -> None:
    """Version 2 became the anchor of pass@1, version 3 that of bits per byte."""
    for anchored in (BOTH, ("pass_at_1",), ("bits_per_byte",)):
        assert registry.promote(registry.version(), anchored) == "done"


def test_a_promotion_names_the_champion_before_it_and_ends_the_judgement(registry):
    first, second = registry.version(), registry.version()
    assert registry.promote(first, BOTH) == "done" and registry.aliases == reigning("1")
    ensure_alias(registry.client, registry.model, CANDIDATE, second)
    assert registry.promote(second, ("pass_at_1",)) == "done"
    assert registry.aliases == reigning("2", "1", pass_at_1="2")
    assert registry.promote(second, BOTH) == "unchanged" and registry.aliases == reigning("2", "1", pass_at_1="2")


def test_of_two_releases_at_once_one_wins_and_the_other_is_told_to_compare_again(registry):
    """From two homes on one store."""
    registry.promote(registry.version(), BOTH)
    candidates, rivals = [registry.version(), registry.version()], registry.rivals()
    stores = [open_store(registry.store.uri, Home(registry.root / f"home-{version}")) for version in candidates]
    with ThreadPoolExecutor(2) as both:
        ended = list(
            both.map(lambda version, store: registry.promote(version, NEITHER, rivals, store), candidates, stores)
        )
    assert sorted(ended) == ["done", "overtaken"]
    winner, loser = (candidates[ended.index(end)] for end in ("done", "overtaken"))
    assert registry.aliases == reigning(winner, "1")
    assert registry.promote(loser, NEITHER) == "done" and registry.aliases == reigning(loser, winner)


def test_an_anchor_that_moved_after_the_comparison_counts_as_well(registry):
    registry.promote(registry.version(), BOTH)
    candidate, rivals = registry.version(), registry.rivals()
    ensure_alias(registry.client, registry.model, "anchor_pass_at_1", registry.version())
    assert registry.promote(candidate, NEITHER, rivals) == "overtaken"
    assert registry.aliases == reigning("1", pass_at_1="3")


def test_a_rollback_restores_champion_anchors_and_the_champion_before(registry):
    three_champions(registry)
    assert registry.aliases == reigning("3", "2", bits_per_byte="3", pass_at_1="2")
    back = registry.roll_back()
    assert registry.aliases == reigning("2", "1", pass_at_1="2")
    assert (back.withdrawn, back.restored, back.previous, back.anchors) == ("3", "2", "1", {"bits_per_byte": "1"})
    assert "champion is version 2 again, instead of version 3; previous: version 1" in back.describe()
    tags = registry.client.get_model_version(registry.model, "3").tags
    assert tags[ROLLED_BACK_REASON_TAG] == REASON and "@" in tags[ROLLED_BACK_BY_TAG]
    registry.roll_back()
    assert registry.aliases == reigning("1")
    with pytest.raises(ValueError, match="no version with the alias previous: there is nothing to roll back to"):
        registry.roll_back()
    assert registry.aliases == reigning("1")
    assert registry.promote(registry.version(), NEITHER) == "done" and registry.aliases == reigning("4", "1")


def test_a_rollback_by_a_user_without_a_name_records_the_number(registry, monkeypatch):
    three_champions(registry)
    for variable in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    withdrawn = registry.client.get_model_version(registry.model, registry.roll_back().withdrawn)
    assert withdrawn.tags[ROLLED_BACK_BY_TAG].startswith("54321@")


def test_a_rolled_back_version_is_no_candidate_until_its_mark_is_removed(registry):
    three_champions(registry)
    registry.roll_back()
    digest = registry.client.get_model_version(registry.model, "3").tags["glm46.digest"]
    assert refusal_of(find_version(registry.client, registry.model, digest)).startswith("version 3 was rolled back on ")
    assert f"({REASON})" in refusal_of(find_version(registry.client, registry.model, digest))
    registry.client.delete_model_version_tag(registry.model, "3", ROLLED_BACK_AT_TAG)
    assert refusal_of(find_version(registry.client, registry.model, digest)) == ""


def test_a_version_trained_on_what_was_taken_down_is_neither_restored_nor_a_candidate(registry):
    """Also not as the champion before the restored one."""
    three_champions(registry)
    registry.client.set_model_version_tag(registry.model, "2", FORGOTTEN_TAG, "https://one.example, today")
    with pytest.raises(
        ValueError, match=r"cannot go back: version 2 was trained on a text .*https://one.example, today"
    ):
        registry.roll_back()
    assert registry.aliases == reigning("3", "2", bits_per_byte="3", pass_at_1="2")
    digest = registry.client.get_model_version(registry.model, "2").tags["glm46.digest"]
    assert refusal_of(find_version(registry.client, registry.model, digest)).endswith(f"tag {FORGOTTEN_TAG} in MLflow")
    assert registry.promote(registry.version(), NEITHER) == "done"
    assert registry.roll_back().previous == "1", "version 2 is passed over"


def test_a_version_that_was_marked_after_its_release_was_judged_is_judged_again(registry):
    version, rivals = registry.version(), registry.rivals()
    registry.client.set_model_version_tag(registry.model, version, FORGOTTEN_TAG, "https://one.example, today")
    assert registry.promote(version, BOTH, rivals) == "overtaken" and not registry.aliases


def test_a_champion_that_reigned_twice_is_not_restored_after_it_was_rolled_back(registry):
    """1, 2, 1, 3: rolled back are 3, then 1; before 2 there is only 1."""
    first, second = registry.version(), registry.version()
    for version in (first, second, first, registry.version()):
        assert registry.promote(version, NEITHER) == "done"
    assert [registry.roll_back().restored for _ in range(2)] == [first, second]
    assert registry.aliases == {"champion": second}


def test_a_comparison_that_was_overtaken_by_a_rollback_does_not_hold(registry):
    three_champions(registry)
    candidate, rivals = registry.version(), registry.rivals()
    registry.roll_back()
    assert registry.promote(candidate, NEITHER, rivals) == "overtaken"
    assert registry.aliases == reigning("2", "1", pass_at_1="2")


class Killed(Exception):
    """What stands for the end of the process."""


@contextmanager
def killed_before(write: int) -> Iterator[None]:
    """The process ends before its n-th write to the registry."""
    left = itertools.count(write, -1)

    def guarded(method):
        def call(*arguments):
            if next(left) == 0:
                raise Killed
            return method(*arguments)

        return call

    writes = [f"{verb}_registered_model_{what}" for verb in ("set", "delete") for what in ("tag", "alias")]
    with patch.multiple(
        MlflowClient, **{name: guarded(getattr(MlflowClient, name)) for name in (*writes, "set_model_version_tag")}
    ):
        yield


@pytest.mark.parametrize("act", ["promotion", "rollback"])
def test_whatever_write_a_kill_comes_before_all_or_nothing_has_moved_for_the_next(act, registry):
    three_champions(registry)
    before = registry.aliases
    after = reigning("2", "1", pass_at_1="2") if act == "rollback" else reigning("4", "3", "4", pass_at_1="2")
    fourth = registry.version()
    ensure_alias(registry.client, registry.model, CANDIDATE, fourth)
    ended = set()
    for write in range(20):
        try:
            with killed_before(write):
                registry.roll_back() if act == "rollback" else registry.promote(fourth, ("bits_per_byte",))
        except Killed:
            registry.said.clear()
            registry.rivals()
            left = {alias: number for alias, number in registry.aliases.items() if alias != CANDIDATE}
            ended.add("nothing" if left == before else "all")
            assert left == (before if write == 0 else after), write
            assert (
                bool(registry.said) is (write > 0)
                and MOVES_TAG not in registry.client.get_registered_model(registry.model).tags
            )
            if write > 0:
                assert "completed the moves of aliases that a killed process had begun" in registry.said[-1]
                restore(registry, before, fourth)
        else:
            break
    assert ended == {"nothing", "all"} and write > 5
    assert {alias: number for alias, number in registry.aliases.items() if alias != CANDIDATE} == after


@pytest.mark.parametrize(
    ("act", "deleted", "write", "left"),
    [
        ("promotion", "4", 1, reigning("3", "2", bits_per_byte="3", pass_at_1="2")),
        ("promotion", "4", 4, reigning("3", "2", bits_per_byte="3", pass_at_1="2")),
        ("promotion", "3", 4, reigning("4", "2", bits_per_byte="4", pass_at_1="2")),
        ("rollback", "1", 1, reigning("2", bits_per_byte="2", pass_at_1="2")),
        ("rollback", "2", 1, {"champion": "3", "previous": "1", "anchor_bits_per_byte": "3"}),
        ("rollback", "2", 7, reigning("1")),
    ],
)
def test_begun_moves_to_a_version_that_was_deleted_since_are_left_out(act, deleted, write, left, registry):
    """A promotion of 4 after 1, 2, 3, or a rollback of 3, before whose n-th write a kill comes."""
    three_champions(registry)
    fourth = registry.version()
    with killed_before(write), pytest.raises(Killed):
        registry.roll_back() if act == "rollback" else registry.promote(fourth, ("bits_per_byte",))
    registry.client.delete_model_version(registry.model, deleted)
    registry.rivals()
    assert f"; deleted since: version {deleted})" in registry.said[-1]
    assert registry.aliases == left
    assert MOVES_TAG not in registry.client.get_registered_model(registry.model).tags
    if "previous" in left:
        assert registry.roll_back().restored == left["previous"], "the next act goes on"


def restore(registry, aliases, candidate) -> None:
    """As it was after three champions."""
    for alias, number in {**aliases, CANDIDATE: candidate}.items():
        ensure_alias(registry.client, registry.model, alias, number)
    registry.client.set_registered_model_tag(registry.model, "glm46.reigns", REIGNS_OF_THREE)
    for tag in (ROLLED_BACK_AT_TAG, ROLLED_BACK_BY_TAG, ROLLED_BACK_REASON_TAG):
        if tag in registry.client.get_model_version(registry.model, "3").tags:
            registry.client.delete_model_version_tag(registry.model, "3", tag)


REIGNS_OF_THREE = (
    '[{"champion": "1", "anchor_bits_per_byte": "1", "anchor_pass_at_1": "1"}, '
    '{"champion": "2", "anchor_bits_per_byte": "1", "anchor_pass_at_1": "2"}]'
)


@pytest.mark.parametrize("loss", ["manifest", "file"])
def test_a_version_without_its_files_is_not_restored(loss, registry):
    three_champions(registry)
    before, key = registry.aliases, registry.keys["2"]
    if loss == "manifest":
        (registry.root / "store" / "manifests" / f"{key}.json").unlink()
    else:
        shutil.rmtree(registry.root / "store" / "objects" / key)
    lost = "are not" if loss == "manifest" else r"\(model-F32.gguf\) are no longer whole"
    with pytest.raises(ValueError, match=rf"version 2, .* cannot be restored: its GGUF files {lost} in store"):
        registry.roll_back()
    assert registry.aliases == before
    assert ROLLED_BACK_AT_TAG not in registry.client.get_model_version(registry.model, "3").tags


def test_an_alias_that_was_moved_by_hand_and_a_missing_reason_are_refused(registry):
    three_champions(registry)
    before = registry.aliases
    for reason in (" ", "x" * (MAX_REASON_CHARS + 1)):
        with pytest.raises(ValueError, match="--reason has"):
            registry.roll_back(reason)
    ensure_alias(registry.client, registry.model, "previous", "1")
    with pytest.raises(ValueError, match="alias previous was moved by hand to version 1"):
        registry.roll_back()
    assert registry.aliases == {**before, "previous": "1"} and registry.aliases[CHAMPION] == "3"


def test_no_tag_of_many_reigns_is_longer_than_a_column(registry):
    """With more characters Postgres would refuse the last writes of this promotion, and of all that follow."""
    first, second = registry.version(), registry.version()
    registry.promote(first, BOTH)
    filled = [{"champion": first, "anchor_bits_per_byte": first}] * 106
    registry.client.set_registered_model_tag(registry.model, REIGNS_TAG, json.dumps(filled))
    assert registry.promote(second, NEITHER) == "done"
    held = registry.client.get_registered_model(registry.model).tags[REIGNS_TAG]
    assert len(json.loads(held)) == 107 and len(held) <= MAX_TAG_CHARS


def test_the_oldest_reigns_are_forgotten_where_a_tag_would_hold_no_more():
    """MLflow's column in Postgres has 5,000 characters; SQLite takes any number."""
    figures = ("bits_per_byte", "arithmetic_accuracy", "choice_accuracy", "safe_answer_share", "pass_at_1")
    reigns = [{"champion": str(number)} | {f"anchor_{name}": str(number) for name in figures} for number in range(90)]
    moves = AliasMoves(version_tags={"9": {"reason": "ß" * 1000}}, reigns=reigns, aliases={"champion": "91"})
    fitting, tag = moves.as_tag()
    assert 4800 < len(tag) <= 5000 and AliasMoves.model_validate_json(tag) == fitting
    assert fitting.reigns == reigns[-len(fitting.reigns) :] and len(json.dumps(fitting.reigns)) <= 5000
    few = moves.model_copy(update={"reigns": reigns[:3]})
    assert few.as_tag() == (few, few.model_dump_json())
