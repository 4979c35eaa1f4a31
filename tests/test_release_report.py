"""The report on toy artifacts: every number it shows is one of theirs, and it asks nobody for anything."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest
from pydantic import Field

from configs.schema import EvaluationResources, GateRecipe, ReleaseRecipe, ServingResources
from infra.home import Home
from infra.step import Output, Record, step
from infra.store import open_store
from tasks.evaluation.decide_gate import decide_gate
from tasks.evaluation.evaluate_checkpoint import evaluate_checkpoint
from tasks.evaluation.select_evaluation_items import select_evaluation_items
from tasks.release.convert_to_gguf import convert_to_gguf
from tasks.release.decide_release import decide_release
from tasks.release.evaluate_gguf import evaluate_gguf
from tasks.release.report_page import curves, table
from tasks.release.write_report import publish_report, write_report
from tests.evaluation_fakes import commit, split_documents, synthesize_problems, toy_checkpoint_step, train_tokenizer
from tests.test_evaluation import RECIPE as EVALUATION

RELEASE = ReleaseRecipe(
    gguf_types=("F32", "Q8_0"), smoke_prompts=("The",), smoke_new_tokens=4, smoke_min_margin=0.01, max_quantization_bits_per_byte=0.05,
    num_quantization_documents=2, max_quantization_document_tokens=8,
)  # fmt: skip
SERVING = ServingResources(host="127.0.0.1", port=0, context_length=256, num_threads=1, startup_timeout_seconds=30)
GATE = GateRecipe(max_bits_per_byte=0.5, min_arithmetic_accuracy=0.0, noninferiority_bits_per_byte=0.05)


class ToyStage(Record):
    num_documents: int
    num_unsampled_documents: int = 0
    train_bytes_by_domain: dict[str, int] = Field(default_factory=dict)
    validation_bytes_by_domain: dict[str, int] = Field(default_factory=dict)
    dropped: dict[str, int] = Field(default_factory=dict)
    rejected: dict[str, int] = Field(default_factory=dict)


class TrainedToy(Record):
    phase: str = "pretrain_general"
    objective: str = "pretrain"
    num_steps: int = 3
    num_tokens: int = 3072
    lm_loss: float = 4.25
    mtp_loss: float = 4.5
    balance_loss: float = 1.01
    num_parameters: int = 123_456
    export_digest: str = "f" * 64


def toy_stage(name, record):
    @step(content=("none",))
    def stage(*, output: Output) -> ToyStage:
        return record

    return name, stage


@step(content=("hf/*",), evidence=("metrics.jsonl",))
def train_phase(*, output: Output) -> TrainedToy:
    toy_checkpoint_step("trained")(output=output)
    rows = [{"step": n, "tokens": n * 1024, "lm": 5.0 - n / 4, "mtp": 5.25 - n / 4} for n in (1, 2, 3)]
    output.path("metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return TrainedToy()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    store = open_store(None, Home(tmp_path_factory.mktemp("report")))
    funnel = {
        "ingested": ToyStage(num_documents=1000, num_unsampled_documents=5, rejected={"not UTF-8 <&>": 7}),
        "deduplicated": ToyStage(num_documents=901, dropped={"exact": 60, "near": 39}),
        "filtered": ToyStage(num_documents=853, dropped={"too_short": 48}),
        "decontaminated": ToyStage(
            num_documents=971, dropped={"overlap": 2}, train_bytes_by_domain={"web": 70, "code": 9}, validation_bytes_by_domain={"web": 8}
        ),
        "shards": ToyStage(num_documents=971),
    }
    given = {name: commit(store, toy_stage(name, record)[1], name) for name, record in funnel.items()}
    tokenizer = commit(store, train_tokenizer)
    checkpoint = commit(store, train_phase)
    made = {"documents": commit(store, split_documents), "problems": commit(store, synthesize_problems), "tokenizer": tokenizer}
    suite = commit(store, select_evaluation_items, recipe=EVALUATION, **made)
    evaluation = commit(
        store, evaluate_checkpoint, checkpoint=checkpoint, suite=suite, recipe=EVALUATION, resources=EvaluationResources(batch_sequences=8)
    )
    decision = commit(store, decide_gate, evaluation=evaluation, champion_evaluation=None, recipe=GATE)
    gguf = commit(store, convert_to_gguf, checkpoint=checkpoint, recipe=RELEASE)
    scored = commit(store, evaluate_gguf, gguf=gguf, checkpoint=checkpoint, suite=suite, recipe=RELEASE, resources=SERVING)
    released = commit(store, decide_release, gguf_evaluation=scored, recipe=RELEASE)
    return commit(
        store, write_report, **given, tokenizer=tokenizer, checkpoint=checkpoint, evaluation=evaluation, phase_decision=decision,
        gguf_evaluation=scored, release_decision=released, decision=decision,
    ), evaluation  # fmt: skip


class Cells(HTMLParser):
    """Rows of all tables, and the tags seen."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.tags, self.urls, self.is_inside = [], set(), [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.urls += [value for name, value in attrs if name in ("src", "href", "action", "data")]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.is_inside = True

    def handle_endtag(self, tag):
        self.is_inside &= tag not in ("td", "th")

    def handle_data(self, data):
        if self.is_inside:
            self.rows[-1][-1] += data


def test_numbers_are_those_of_the_artifacts(report):
    artifact, evaluation = report
    text = artifact.path("report.html").read_text()
    rows = Cells(text).rows
    assert ["ingest", "records unreadable: not UTF-8 <&>", "7"] in rows
    assert [row[2] for row in rows if row[1] == "documents" and len(row) == 3] == ["1,000", "901", "853", "971"]
    assert ["synthesize", "documents added", "120"] in rows, "971 + 2 dropped - 853"
    assert ["web", "70", "8"] in rows and ["code", "9", "0"] in rows
    assert next(row for row in rows if row[0] == "all")[3] == f"{evaluation.record.bits_per_byte:.4f}"
    for domain, value in evaluation.record.bits_per_byte_by_domain.items():
        assert next(row for row in rows if row[0] == domain and len(row) == 4)[3] == f"{value:.4f}"
    assert evaluation.digest[:12] in text
    assert artifact.record.accepted is False and "refused: bits_per_byte" in text


def test_report_asks_nobody_for_anything(report):
    text = report[0].path("report.html").read_text()
    parsed = Cells(text)
    assert not parsed.urls and not parsed.tags & {"script", "link", "img", "iframe"}
    assert not re.search(r"https?://|url\(|@import", text)


def test_publishing_again_changes_nothing(report, tmp_path):
    path = tmp_path / "reports" / "tiny.html"
    assert publish_report(report[0], path) == path
    before = path.stat()
    publish_report(report[0], path)
    assert path.stat().st_mtime_ns == before.st_mtime_ns and path.read_bytes() == report[0].path("report.html").read_bytes()


def test_curve_starts_top_left_and_ends_where_the_last_point_is():
    drawn = curves("tokens", "loss", {"a": [(0.0, 3.0), (50.0, 2.0), (100.0, 1.0)]})
    points = [tuple(map(float, pair.split(","))) for pair in re.findall(r'points="([^"]*)"', drawn)[0].split()]
    assert points == [(56.0, 14.0), (452.0, 120.0), (848.0, 226.0)]
    with pytest.raises(ValueError, match="curve a has no finite point"):
        curves("tokens", "loss", {"a": [(0.0, float("nan"))]})


def test_texts_are_escaped():
    assert "<b>" not in table(("<b>",), [("<b>",)])
