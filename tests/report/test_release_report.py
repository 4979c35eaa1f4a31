"""The report on a toy run: every number it shows is one of the artifacts', and it asks nobody for anything."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest

from configs.load import load_prices
from infra.home import Home
from infra.step import Artifact
from infra.storage.open_store import open_store
from tasks.data.filtering.blocked_documents import BlockedDocuments
from tasks.evaluation.evaluate_pairs import PairEvaluation
from tasks.evaluation.intervals import best_of_k
from tasks.evaluation.items import CHAT_PROBLEM, CHOICE, accuracy, read_items
from tasks.evaluation.sample_solutions import DomainSolutions, SampledSolutions
from tasks.release.decide_promotion import Approval
from tasks.report.dropped_examples import dropped_examples
from tasks.report.report_charts import Line, Span, bars, curves, intervals, strips
from tasks.report.report_cost import energy_note
from tasks.report.report_evaluation import DRAWN, evaluation_section
from tasks.report.report_inputs import ReportedPhases, ReportedRewardModel
from tasks.report.report_lineage import named_stages, time_section
from tasks.report.report_page import Section, page, table
from tasks.report.report_progress import experts_table
from tasks.report.report_quality import _scores
from tasks.report.report_solutions import solutions_section
from tasks.report.report_training import _loads, _reward_parts, training_section
from tasks.report.trend_page import trend_run
from tasks.report.write_report import _facts, publish_report
from tasks.training.watch.effective_time import TIME_FILE, Stretch
from tests.support.evaluation_fakes import commit
from tests.support.report_fakes import (
    GATE,
    STEPS,
    TOKENS_PER_STEP,
    reported_phase,
    reported_phases,
    write_toy_report,
    write_unreleased_report,
)
from tests.support.reported_data import REASONS, WORDS, reported_data, toy


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return open_store(None, Home(tmp_path_factory.mktemp("report")))


@pytest.fixture(scope="module")
def data(store):
    return reported_data(store)


@pytest.fixture(scope="module")
def phases(store):
    return reported_phases(store, tuple(STEPS))


@pytest.fixture(scope="module")
def report(store, data, phases):
    return write_toy_report(store, data, phases)


class Cells(HTMLParser):
    """Rows of all tables, the tags seen, the addresses named."""

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


def test_numbers_of_the_data_are_those_of_the_artifacts(report, data):
    rows = Cells(report.path("report.html").read_text()).rows
    assert ["ingest", "records unreadable: not_utf8 <&>", "7"] in rows
    assert [row[2] for row in rows if row[1] == "documents" and len(row) == 3] == [
        "1,000",
        "1,000",
        "901",
        "901",
        "853",
        "971",
    ]
    assert ["synthesize", "documents added", "120"] in rows
    assert ["web", "70", "2,100", "8"] in rows and ["code", "9", "400", "0"] in rows
    assert ["conversations, synthetic", "250"] in rows and ["of these what an assistant writes", "333"] in rows
    for contract in data.contract_results:
        assert [contract.record.contract, "1,000", "11", "met", contract.digest[:12]] in rows
    assert any(row[:6] == ["python", "pretrain", "code", "PSF-2.0", "3", "6,000"] for row in rows)


def test_first_screen_says_what_was_made_and_shows_answers_nobody_chose(report, data, phases):
    text = report.path("report.html").read_text()
    lead = re.sub("<[^>]*>", " ", text[: text.index('<div class="facts">')])
    last = phases.last
    assert f"{last.checkpoint.record.num_parameters:,} parameters" in lead and "from random weights" in lead
    assert f"{phases.path.num_tokens:,} tokens, in {len(phases.path.phases)} phases" in lead
    documents = data.documents.shards.record.num_documents
    assert f"drawn from {documents:,} documents" in lead, "more were cleaned, and some of them are held out"
    assert f"left of {data.ingested.record.num_documents:,} records" in lead
    assert f"{last.evaluation.record.pass_at_1:.1%} right" in lead
    rows = Cells(text).rows
    asked = sorted(
        (item for item in read_items(last.evaluation.path("items.parquet")) if item.kind == CHAT_PROBLEM),
        key=lambda item: item.item_id,
    )[:3]
    header = next(number for number, row in enumerate(rows) if row[:1] == ["question"])
    for item, row in zip(asked, rows[header + 1 :], strict=False):
        assert row[-1].endswith(f"{item.num_right} of {item.num_samples} right")
        assert len(row) == len(rows[header])


def test_what_was_watched_while_training_is_shown(report, phases):
    text = report.path("report.html").read_text()
    rows = Cells(text).rows
    sft = next(phase for phase in phases if phase.name == "sft")
    trained = [row for row in rows if row[:2] == ["sft", "sft"]]
    assert trained and "0.4" in trained[0] and f"{sft.checkpoint.record.lm_loss:.4f}" in trained[0]
    assert "Quoted: what S0 expects" in text and "Held-out text while training" in text
    assert ["sft", "1", "2"] in rows, "rollbacks and the steps left out"
    packed = next(row for row in rows if row[:2] == ["sft", "stream"])
    assert packed[-5:] == [
        "web 9,000 (1.50), code 6,360 (2.00)",
        "web 12,000 (2.25), code 6,360 (2.00)",
        "commit",
        "12",
        "13",
    ]
    layers = [row for row in rows if row[0] == "sft" and len(row) == 5 and row[1].isdigit()]
    record = sft.evaluation.record
    assert [(row[2], row[3], row[4]) for row in layers] == [
        (f"{load:.2f}", f"{cv:.3f}", str(dead))
        for load, cv, dead in zip(record.expert_load, record.expert_cv, record.num_dead_experts, strict=True)
    ]
    assert layers and ["repository", "550", "0", "50"] in rows


def test_every_figure_of_every_phase_is_in_the_benchmark_table(report, phases):
    rows = {row[0]: row[1:] for row in Cells(report.path("report.html").read_text()).rows if len(row) == 1 + len(STEPS)}
    assert rows["figure"] == list(STEPS)
    for number, phase in enumerate(phases):
        record = phase.evaluation.record
        lower, upper = record.intervals["bits_per_byte"]
        assert rows["bits per byte"][number] == f"{record.bits_per_byte:.4f}[{lower:.4f}, {upper:.4f}]"
        assert rows["pass@1 in conversation"][number].startswith(f"{record.pass_at_1:.4f}[")
        assert rows["pass@2 in conversation"][number].startswith(f"{record.pass_at_k:.4f}[")
        assert rows["different answers / right ones, at most 1"][number] == f"{record.distinct_answer_share:.4f}"
        assert rows["multiple choice, per character"][number] == f"{record.choice_accuracy_normalised:.4f}"
        choices = accuracy(read_items(phase.evaluation.path("items.parquet")), CHOICE)
        assert rows["multiple choice, toy_bench"][number] == f"{choices:.4f} of 4"
        for domain, value in record.bits_per_byte_by_domain.items():
            assert rows[f"bits per byte, {domain}"][number] == f"{value:.4f}"


def test_solved_tasks_are_drawn_with_their_intervals_where_they_were_played(phases):
    title = DRAWN["agentic_success"]
    assert title not in evaluation_section(phases)
    played = []
    for share, phase in enumerate(phases):
        own = {"agentic_success": share / 10, "intervals": {"agentic_success": (share / 10, share / 10 + 0.05)}}
        record = phase.evaluation.record.model_copy(update=own)
        played.append(replace(phase, evaluation=replace(phase.evaluation, record=record)))
    section = evaluation_section(ReportedPhases(tuple(played)))
    assert title in section
    rows = {row[0]: row[1:] for row in Cells(section).rows}
    solved = rows["held-out tasks solved in their environments"]
    assert solved == [
        "0.0000[0.0000, 0.0500]",
        "0.1000[0.1000, 0.1500]",
        "0.2000[0.2000, 0.2500]",
        "0.3000[0.3000, 0.3500]",
    ]


def test_every_bound_of_every_gate_is_shown(report, phases):
    text = report.path("report.html").read_text()
    rows = Cells(text).rows
    for phase in phases:
        for bound in phase.decision.record.bounds:
            sign, signed = {"held": "✓", "broken": "✗", "undecided": "?"}[bound.outcome], "+" if bound.against else ""
            interval = "" if bound.interval is None else "[{:+.4f}, {:+.4f}]".format(*bound.interval)
            floor = f"{bound.noise_floor:.4f}" if bound.noise_floor else ""
            shown = [
                f"{bound.value:{signed}.4f}",
                interval,
                floor,
                f"{bound.limit:{signed}.4g}",
                str(bound.num_items or ""),
            ]
            assert [
                sign,
                bound.figure,
                bound.against,
                *shown,
                "" if bound.outcome == "held" else bound.sentence,
            ] in rows
        assert phase.evaluation.digest[:12] in text and phase.checkpoint.digest[:12] in text
    assert report.record.accepted is False
    assert report.record.bits_per_byte == phases.last.evaluation.record.bits_per_byte


def test_what_each_phase_is_trained_for_is_shown_before_and_after(report, phases):
    rows = {
        row[0]: row
        for row in Cells(report.path("report.html").read_text()).rows
        if len(row) == 6 and row[1] == "pass_at_1"
    }
    judged = {phase.name: (phase, bound) for phase in phases for bound in phase.decision.record.bounds if bound.is_own}
    assert rows.keys() == judged.keys() == {*STEPS} - {"pretrain_general"}
    for name, (phase, bound) in judged.items():
        after = phase.evaluation.record.pass_at_1
        assert rows[name][2:4] == [f"{after - bound.value:.4f}", f"{after:.4f}"]
        assert rows[name][4].startswith(f"{bound.value:+.4f}[") and rows[name][5] in ("better", "no better", "worse")


def test_curves_are_on_one_token_axis(report):
    """The first point of the second phase is two steps after the last of the first one: a spike left one out."""
    text = report.path("report.html").read_text()
    lines = re.findall(r'points="([^"]*)"><title>next token</title>', text)
    assert len(lines) == 3, "the surrogate loss of a policy objective is no loss"
    ends = [(line.split()[0], line.split()[-1]) for line in lines]
    x_of = lambda point: float(point.split(",")[0])  # noqa: E731
    step = (980 - 64 - 16) / sum(STEPS.values())
    assert x_of(ends[1][0]) - x_of(ends[0][1]) == pytest.approx(2 * step, abs=0.2)
    assert x_of(ends[0][1]) == pytest.approx(64 + STEPS["pretrain_general"] * step, abs=0.2)
    assert f"{sum(STEPS.values()) * TOKENS_PER_STEP:,} tokens" in text
    assert len(re.findall(r"<title>mean of 10 steps</title>", text)) == 1


def test_scores_languages_buckets_masking_and_fertility_are_in_tables(report):
    rows = Cells(report.path("report.html").read_text()).rows
    assert ["quality", "0.25", "0.625", "10"] in rows
    assert ["en", "990"] in rows and ["none found", "10"] in rows
    assert ["no quality score", "3"] in rows and ["1", "450"] in rows
    assert ["email", "3", "2"] in rows and ["counter speech", "42%"] in rows
    assert ["seed problems", "77"] in rows and ["solutions that do not verify: wrong_answer", "7"] in rows
    assert ["ours", "web", "all", "5,000", "1.500", "3.250", "90.0%"] in rows and [
        "compared",
        "all",
        "all",
        "5,000",
        "1.500",
        "3.250",
        "90.0%",
    ] in rows


def test_sampled_answers_of_the_first_and_last_step_are_shown_escaped(report):
    text = report.path("report.html").read_text()
    assert "right 0.250, in form 0.500, punished for length -0.125, answers per step without a verdict 1.000" in text
    assert "prompts of files: math" in text
    assert "Sampled answers of step 1;" in text and "Sampled answers of step 20;" in text
    assert '<span class="chip good">7&lt;|user|&gt;</span>' in text and '<span class="chip bad">(empty)</span>' in text


def test_dropped_examples_are_the_texts_that_the_step_read(data):
    walk = data.documents
    for dropped, given in ((walk.deduplicated, data.ingested), (walk.filtered, walk.split)):
        examples = dropped_examples(dropped, (given,), None, walk.extracted)
        assert set(examples) == set(REASONS[dropped.manifest.step]) - {"blocked"}
        for group in examples.values():
            assert 0 < len(group) <= 3
            for example in group:
                assert (
                    example.text.startswith(f"{int(example.document_id, 16)}: {WORDS[:40]}") and len(example.text) < 230
                )


def test_no_text_that_was_taken_down_is_in_the_report(store, data, phases, report):
    """A blocked text is hidden by its id, its address or its digest; so are one that was dropped in its favour and a
    cluster of its near-duplicates."""
    shown = report.path("report.html").read_text()
    exact, near = f"{901:016x}", f"{961:016x}"
    assert all(f"document {identity}" in shown for identity in (exact, near)), "without a block list they are quoted"
    assert "filter · too_few_words" in shown and "filter · blocked" not in shown
    for lists in ({"ids": (exact, "0" * 16)}, {"digests": (f"{901:064x}", "0" * 64)}):
        text = (
            write_toy_report(store, data, phases, blocked=BlockedDocuments(**{"ids": (), "urls": (), **lists}))
            .path("report.html")
            .read_text()
        )
        assert f"document {exact}" not in text and f"document {near}" in text and "A cup" not in text
    listed = BlockedDocuments(ids=(), urls=("https://toy.example/7",))
    text = write_toy_report(store, data, phases, blocked=listed).path("report.html").read_text()
    assert f"document {exact}" in text and near not in text and "deduplicate · near" not in text


def test_the_largest_clusters_of_near_duplicates_are_shown_escaped(report):
    text = report.path("report.html").read_text()
    assert "30 of 400 documents of shop went as near-duplicates" in text and "A cup &lt;b&gt;1&lt;/b&gt;" in text


def test_report_asks_nobody_for_anything(report):
    text = report.path("report.html").read_text()
    parsed = Cells(text)
    anchors = {f"#{anchor}" for anchor in re.findall(r'<section id="([^"]*)"', text)}
    assert set(parsed.urls) == anchors and len(anchors) == 11
    assert not parsed.tags & {"script", "link", "img", "iframe", "b>", "i"}
    assert not re.search(r"https?://|url\(|@import", text)


def test_parts_that_a_run_does_not_have_leave_no_trace(store, data):
    """No policy phase, no contract, no broken record."""
    short = reported_phases(store, ("pretrain_general",))
    text = write_toy_report(store, replace(data, contracts={}), short).path("report.html").read_text()
    assert "Reward of" not in text and 'id="contracts"' not in text and "Sampled answers of step" not in text
    assert "What nothing trains on" not in text
    assert "nan" not in text.lower().split() and 'points=""' not in text


def test_a_refused_run_says_first_why_and_what_it_did_not_come_to(store, data):
    phases = reported_phases(store, ("pretrain_general", "mid_reasoning"), not_reached=("sft", "rl_reasoning"))
    phases = replace(phases, unread=("no phase of scale toy reads <b>domain medical</b>",))
    report = write_unreleased_report(store, data, phases)
    text = report.path("report.html").read_text()
    opening, rest = text.split('<div class="facts">')
    (broken,) = phases.last.decision.record.refusals
    assert "Gate of mid_reasoning: refused" in opening and broken in opening
    assert "Nothing was promoted. Not reached: sft, rl_reasoning, the release." in opening
    rows = Cells(rest).rows
    assert all(
        [title, "not reached", ""] in rows for title in ("Gate of sft", "Gate of rl_reasoning", "Quantized files")
    )
    assert "no phase of scale toy reads &lt;b&gt;domain medical" in rest
    assert ["deduplicate", "dropped: exact", "60"] in rows and len(re.findall(r"<title>next token</title>", rest)) == 2
    assert 'id="files-for-llama.cpp"' not in rest and not report.record.accepted
    assert "**Gate of mid_reasoning: refused.**" in report.path("model_card.md").read_text()


@pytest.mark.parametrize("answer", ["approved", "refused"])
def test_a_persons_answer_is_in_the_verdicts_and_a_refusal_comes_first(store, data, answer):
    first = ReportedPhases(reported_phases(store, ("pretrain_general", "mid_reasoning")).phases[:1])
    said = Approval(answer=answer, reason="it was read", name="Ada", at="2026-01-01 00:00:00 UTC")
    report = write_toy_report(store, data, first, said)
    opening, rest = report.path("report.html").read_text().split('<div class="facts">')
    sentence = f"Ada {answer} the release on 2026-01-01 00:00:00 UTC: it was read"
    verdict = "accepted" if answer == "approved" else "refused"
    assert ["Promotion", verdict, sentence] in Cells(rest).rows
    assert ("Promotion: refused" in opening and sentence in opening) is (answer == "refused")
    assert report.record.accepted is (answer == "approved")


def test_a_run_that_left_before_the_release_is_not_called_refused(store, data):
    first = reported_phases(store, ("pretrain_general", "mid_reasoning")).phases[0]
    opening = (
        write_unreleased_report(store, data, ReportedPhases((first,)))
        .path("report.html")
        .read_text()
        .split('<div class="facts">')[0]
    )
    assert (
        "The run ended after pretrain_general, before the release: nothing was promoted." in opening
        and "refused" not in opening
    )


def test_a_branch_is_reported_and_is_no_part_of_the_model_that_another_branch_led_to(store, data):
    general, middle = reported_phases(store, ("pretrain_general", "mid_reasoning")).phases
    tuned = reported_phase(store, "sft", "trained", general, GATE)
    phases = ReportedPhases((general, middle, tuned))
    assert [phase.name for phase in phases.path] == ["pretrain_general", "sft"]
    report = write_toy_report(store, data, phases)
    page, card = report.path("report.html").read_text(), report.path("model_card.md").read_text()
    digest = f"<code>{middle.checkpoint.digest[:12]}</code>"
    assert f'branch mid_reasoning {digest} <span class="soft">from pretrain_general' in page
    assert "checkpoint of sft" in page and "checkpoint of mid_reasoning" not in page
    assert "| mid_reasoning |" not in card and f"{90 * TOKENS_PER_STEP:,} tokens in all" in card


def test_rejection_sampling_shows_best_of_k_what_was_kept_and_answers(store, data):
    general, tuned = reported_phases(store, ("pretrain_general", "sft")).phases
    record = SampledSolutions(
        num_prompts=4,
        num_too_long=0,
        num_answers=32,
        num_right=9,
        num_without_verdict=0,
        num_solved_prompts=3,
        num_kept=5,
        num_kept_tokens=77,
        left_out={"other_form": 1, "repeated": 3},
        pass_at=best_of_k([0, 1, 3, 5], 8),
        domains=tuple(
            DomainSolutions(
                phase=phase,
                domain=domain,
                num_prompts=2,
                num_answers=16,
                num_right=sum(right),
                num_kept=kept,
                pass_at=best_of_k(right, 8),
            )
            for phase, domain, right, kept in (("pretrain_general", "math", [0, 1], 1), ("expert", "code", [3, 5], 4))
        ),
    )
    line = {"phase": "expert", "question": "What is <b>?", "samples": ["\n12", "\n13"], "rewards": [1.0, 0.0]}
    write = lambda output: output.path("rollouts.jsonl").write_text(json.dumps(line) + "\n")  # noqa: E731
    solutions = commit(store, toy("sample_solutions", record, write, evidence=("*.jsonl",)), "solutions")
    phases = ReportedPhases((general, replace(tuned, solutions=solutions)))
    text = write_unreleased_report(store, data, phases).path("report.html").read_text()
    rows = Cells(text).rows
    for point in record.pass_at:
        assert any(row[:2] == [str(point.k), f"{point.share:.4f}"] for row in rows), point
    assert "9 of 32 answers to 4 prompts are right, and 3 prompts have a right one" in text
    assert "trained on 5 (77 tokens); right ones left out: other form 1; repeated 3." in text
    assert ["pretrain_general", "math", "2", "16", "1", "1", "0.0625", "0.0625", "0.5000"] in rows
    assert ["expert", "code", "2", "16", "8", "4", "0.2500", "0.5000", "1.0000"] in rows
    assert "5 of the weights of pretrain_general and expert" in text
    assert ["expert", "What is <b>?", "13", "wrong"] in [[cell.strip() for cell in row] for row in rows]
    assert f"right answers <code>{solutions.digest[:12]}</code>" in text
    assert (
        "Best of k"
        not in write_unreleased_report(store, data, ReportedPhases((general, tuned))).path("report.html").read_text()
    )


def test_measured_prompts_are_counted_with_the_band_that_was_asked(store):
    general, tuned = reported_phases(store, ("pretrain_general", "rl_reasoning")).phases
    record = SampledSolutions(
        num_prompts=4,
        num_too_long=0,
        num_answers=32,
        num_right=9,
        num_without_verdict=0,
        num_solved_prompts=3,
        num_kept=0,
        num_kept_tokens=0,
        left_out={},
        pass_at=best_of_k([0, 1, 3, 5], 8),
        domains=(),
    )
    line = {"phase": "pretrain_general", "question": "What is 1 + 1?", "samples": ["\n2"], "rewards": [1.0]}
    write = lambda output: output.path("rollouts.jsonl").write_text(json.dumps(line) + "\n")  # noqa: E731
    measured = commit(store, toy("sample_solutions", record, write, evidence=("*.jsonl",)), "measured")
    band = {"min_pass_rate": 0.125, "max_pass_rate": 0.5, "order": "easy_first"}
    manifest = tuned.checkpoint.manifest
    identity = manifest.identity | {"recipe": {"objective": {"difficulty": band}}}
    counted = manifest.record | {"num_easy_prompts": 1, "num_hard_prompts": 1}
    chosen = replace(
        tuned.checkpoint,
        manifest=manifest.model_copy(update={"identity": identity, "record": counted}),
        record=tuned.checkpoint.record.model_copy(update={"num_easy_prompts": 1, "num_hard_prompts": 1}),
    )
    text = solutions_section(ReportedPhases((general, replace(tuned, checkpoint=chosen, solutions=measured))))
    assert "9 of 32 answers to 4 prompts are right, and 3 prompts have a right one. The phase asks the 2 " in text
    assert (
        "prompts of a pass rate of 0.125 to 0.5, easy first. Left out: 1 too easy, 1 too hard. solved.parquet" in text
    )
    timed = [{"step": 1, "reward_mean": 0.5, "pass_rate": 0.5, "reward_format": 1.0, "reward_length": 0.0}]
    timed = [line | {"unverified": 0.0} for line in timed * 3]
    timed[0] |= {"tool_timeouts_python": 2.0}
    timed[1] |= {"tool_timeouts_python": 1.0, "tool_timeouts_search": 0.0}
    assert "Tool calls out of time in all: python 3, search 0." in _reward_parts(timed)
    assert "out of time" not in _reward_parts(timed[2:])
    played = [timed[0] | {"episode_turns": 3.0}, timed[1], timed[2] | {"episode_turns": 5.0}]
    assert "turns of an episode 4.000" in _reward_parts(played), "a step may play no episode"


def test_expert_load_is_drawn_where_only_a_later_phase_has_logged_some(store):
    phases = reported_phases(store, ("pretrain_general", "sft")).phases
    spans = [Span(phase.name, 100.0 * number, 100.0 * (number + 1)) for number, phase in enumerate(phases)]
    logs = [[{"step": 1, "tokens": 50}], [{"step": 1, "tokens": 50, "expert_load_0": 1.5, "expert_load_1": 2.5}]]
    logs[1][0] |= {"expert_load_2": 2.0}
    drawn = _loads(list(zip(phases, spans, logs, strict=True)), spans)
    assert drawn is not None
    assert "Last: layer 1 1.50, layer 2 2.50, MTP layer 2.00. The MTP layer routes" in drawn[1], "3 layers, 1 dense"


def test_a_corpus_without_personal_data_has_a_sentence_in_place_of_a_table(data):
    text = _scores(data, data.documents)
    assert ">email</td>" in text and "None was found." not in text
    masked, chats = (
        replace(artifact, record=artifact.record.model_copy(update={"masked": {"email": 0}}))
        for artifact in (data.documents.masked, data.chats)
    )
    clean = replace(data.documents, masked=masked)
    assert "None was found." in _scores(replace(data, documents=clean, chats=chats), clean)


def test_a_phase_that_a_server_evaluated_has_no_row_of_experts(store):
    reported = reported_phases(store, ("pretrain_general", "sft"))
    uncounted = {"expert_load": (), "expert_cv": (), "num_dead_experts": (), "draft_acceptance": None}
    general, tuned = (
        replace(
            phase, evaluation=replace(phase.evaluation, record=phase.evaluation.record.model_copy(update=uncounted))
        )
        for phase in reported.phases
    )
    counted, mixed = reported.phases[1], replace(reported, phases=(general, reported.phases[1]))
    assert {row[0] for row in Cells(experts_table(mixed)).rows[1:]} == {counted.name}
    served = replace(reported, phases=(general, tuned))
    assert experts_table(served) == "" and "Experts on validation text" not in training_section(served)


def test_the_loss_of_a_pair_is_called_no_cross_entropy_and_a_reward_model_is_counted(store, data):
    general, tuned = reported_phases(store, ("pretrain_general", "sft")).phases
    paired = tuned.checkpoint.record.model_copy(update={"objective": "dpo", "lm_loss": 0.6931})
    aligned = replace(tuned, name="rl_alignment", checkpoint=replace(tuned.checkpoint, record=paired))
    scored = replace(general.checkpoint, record=paired.model_copy(update={"objective": "reward", "lm_loss": 0.25}))
    fakes = PairEvaluation.model_construct(
        is_scored=True, num_pairs=1, pair_accuracy=1.0, interval=(0.5, 1.0), calibration_error=0.0, bins=(),
        accuracy_by_collection=(),
    )  # fmt: skip
    pairs = Artifact(general.decision.manifest, fakes, general.decision.reader)
    model = ReportedRewardModel("reward_model", scored, general.decision, pairs)
    phases = ReportedPhases((general, aligned), reward_models=(model,))
    drawn = training_section(phases)
    of_text, of_pairs = drawn.split("<h3>Loss of preference pairs</h3>")
    rows = {row[0]: row for row in reversed(Cells(drawn).rows)}  # the first table is that of the phases
    losses = [rows["phase"].index(name) for name in ("last loss", "last loss of a pair")]
    shown = {
        name: [rows[name][index] for index in losses] for name in ("pretrain_general", "rl_alignment", "reward_model")
    }
    assert shown == {"pretrain_general": ["2.2500", ""], "rl_alignment": ["", "0.6931"], "reward_model": ["", "0.2500"]}
    assert of_text.count("<title>next token</title>") == 1 and "<title>rl_alignment</title>" in of_pairs
    assert {"train_phase reward_model", "evaluate_checkpoint rl_alignment"} <= {
        name for name, _ in named_stages(data, phases, ())
    }
    assert trend_run("", phases, 60.0, is_cached=False).figures["last loss"] == 2.25
    assert ("phases", "3 of 4") in _facts(data, replace(phases, not_reached=("rl_agentic",)), accepted=False)


def test_cards_hold_the_numbers(report, phases):
    model, cards = report.path("model_card.md").read_text(), report.path("data_card.md").read_text()
    assert "123,456 parameters" in model and "answers in the GLM chat template" in model
    assert f"| pretrain_general | pretrain | 60 | {60 * TOKENS_PER_STEP:,} |" in model
    assert f"{phases.last.evaluation.record.bits_per_byte:.4f} [" in model
    assert "**Gate of sft: accepted.**" in model and "**Against champion and anchors: refused.**" in model
    assert "906 documents (2,500 tokens in shards) and 285 conversations, from 9 files." in cards
    assert "tokens in all, drawn from 906 documents (2,500 tokens in shards) and 285 conversations: train" in model
    assert "| deduplicate | dropped: exact | 60 |" in cards and "MIT \\| Apache-2.0" in cards
    for text in (model, cards):
        columns = {line.count("|") - line.count("\\|") for line in text.splitlines() if line.startswith("|")}
        assert min(columns) >= 3 and "<code>" not in text


def test_publishing_again_changes_nothing(report, tmp_path):
    path = tmp_path / "reports" / "tiny.html"
    assert publish_report(report, path) == path
    before = path.stat()
    publish_report(report, path)
    assert (
        path.stat().st_mtime_ns == before.st_mtime_ns and path.read_bytes() == report.path("report.html").read_bytes()
    )
    assert sorted(entry.name for entry in path.parent.iterdir()) == [
        "tiny-data-card.md",
        "tiny-model-card.md",
        "tiny.html",
    ]


def test_curve_starts_top_left_and_ends_where_the_last_point_is():
    drawn = curves("tokens", "loss", [Line("a", [(0.0, 3.0), (50.0, 2.0), (100.0, 1.0)])])
    points = [tuple(map(float, pair.split(","))) for pair in re.findall(r'points="([^"]*)"', drawn)[0].split()]
    assert points == [(64.0, 26.0), (514.0, 138.0), (964.0, 250.0)]
    with pytest.raises(ValueError, match="curve a has no finite point"):
        curves("tokens", "loss", [Line("a", [(0.0, float("nan"))])])


def test_strip_cells_are_means_and_darker_where_higher():
    drawn = strips(
        "tokens",
        "load",
        [("layer 1", [(float(x), 1.0 if x < 500 else 2.0) for x in range(1, 1001)])],
        1.0,
        2.0,
        [Span("p", 0, 1000)],
    )
    shades = [float(value) for value in re.findall(r'fill-opacity="([0-9.]+)"', drawn)]
    assert len(shades) <= 160 and shades[0] == 0.0 and shades[-1] == 1.0 and sorted(shades) == shades


def test_intervals_and_bars_are_to_scale():
    drawn = intervals("pass@1", [("sft", 0.4, (0.3, 0.5)), ("rl", 0.5, (0.4, 0.7))])
    lows = [float(value) for value in re.findall(r'x1="([0-9.]+)"', drawn)]
    highs = [float(value) for value in re.findall(r'x2="([0-9.]+)"', drawn)]
    dots = [float(value) for value in re.findall(r'cx="([0-9.]+)"', drawn)]
    assert (
        dots[0] == lows[1]
        and dots[1] == highs[0]
        and (highs[1] - lows[0]) == pytest.approx(2 * (highs[0] - lows[0]), abs=0.2)
    )
    widths = [
        float(value)
        for value in re.findall(r' width="([0-9.]+)"', bars("time", [("a", 4.0, "4 s"), ("b", 1.0, "1 s")]))
    ]
    assert widths[0] == pytest.approx(4 * widths[1], abs=0.5)


def test_the_picture_of_times_is_to_scale_and_leaves_out_gaps_between_runs(data):
    def at(ended, seconds):
        made = data.ingested.manifest.model_copy(update={"seconds": seconds})
        return replace(data.ingested, manifest=made, reader=SimpleNamespace(committed_at=lambda manifest: ended))

    drawn = time_section([("b", at(1_000_040.0, 30.0)), ("a", at(1_000_010.0, 10.0)), ("c", at(2_000_060.0, 20.0))])
    begun = [float(value) for value in re.findall(r'<rect x="([0-9.]+)"', drawn)]
    widths = [float(value) for value in re.findall(r' width="([0-9.]+)"', drawn)]
    assert re.findall(r">([abc])</text>", drawn) == ["a", "b", "c"], "in the order in which they began"
    assert begun[1] - begun[0] == pytest.approx(widths[0], abs=0.2)
    assert begun[2] - begun[1] == pytest.approx(widths[1], abs=0.2)
    assert widths[1] == pytest.approx(3 * widths[0], abs=0.3)
    assert "60 s in all" in drawn and "1,000,000 s in which none was computed are left out" in drawn


def test_energy_and_cost_follow_from_rank_hours_and_the_device_of_each_phase(tmp_path, phases):
    def ran(device: str, *logs: str):
        folder = tmp_path / device
        folder.mkdir()
        stretch = Stretch(first_step=0, opened_at=9000.0, last_step=5, seen_at=10800.0)
        values = {"submitted_at": 0.0, "stretches": [asdict(stretch)], "device": device}
        (folder / TIME_FILE).write_text(json.dumps(values))
        manifest = SimpleNamespace(evidence=dict.fromkeys((TIME_FILE, *logs)))
        return SimpleNamespace(manifest=manifest, path=folder.joinpath)

    imported = SimpleNamespace(manifest=SimpleNamespace(evidence={}))
    prices = load_prices("guide").model_copy(
        update={"rank_watts": {"cpu": 100.0, "h100": 1000.0}, "rank_hour": {"cpu": 2.0, "h100": 3.0}}
    )

    def note(*checkpoints):
        reported = tuple(replace(phases.phases[0], checkpoint=each) for each in checkpoints)
        return energy_note(ReportedPhases(reported), prices)

    on_cpu = ran("cpu", "logs/rank-0.log", "logs/rank-1.log")
    said = note(imported, on_cpu)
    assert "1.00 rank-hours on cpu" in said and "0.100 kWh" in said and "2.00 USD" in said
    said = note(on_cpu, ran("NVIDIA H100 80GB HBM3", "logs/rank-0.log"))
    assert "1.00 rank-hours on cpu" in said and "0.50 rank-hours on NVIDIA H100 80GB HBM3" in said
    assert "0.500 kWh" in said and "1.50 USD" in said and "assumptions for h100" in said
    unpriced = note(ran("NVIDIA A10", "logs/rank-0.log"))
    assert "0.50 rank-hours on NVIDIA A10" in unpriced and "not known" in unpriced and "USD" not in unpriced
    assert note(imported) == ""


def test_an_accepted_run_says_first_what_became_champion_instead_of_what(store, data):
    first = ReportedPhases(reported_phases(store, ("pretrain_general", "mid_reasoning")).phases[:1])

    def opening(replaced: str) -> str:
        text = write_toy_report(store, data, first, replaced=replaced).path("report.html").read_text()
        return text.split('<div class="facts">')[0]

    assert "Promoted: version 7 of glm46-toy became champion, replacing version 3." in opening("3")
    assert "became champion, replacing nothing: it is the first." in opening("")


def test_texts_are_escaped_and_empty_sections_left_out():
    assert "<b>" not in table(("<b>",), [("<b>",)])
    body = page("t", "s", "", [], [Section("empty", ""), Section("full", "x")]).split("</style>")[1]
    assert "empty" not in body and 'id="full"' in body
