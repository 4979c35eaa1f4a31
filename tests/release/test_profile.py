"""A profile of a real server: its table agrees with its JSON, quoted figures stay apart, and drafts change no token."""

from __future__ import annotations

import math
from types import SimpleNamespace

import psutil
import pytest

from configs.schema import ServingResources
from flows.cli.serving.compare_formats import FormatComparison, FormatFigures, with_speeds
from flows.cli.serving.format_speeds import measure_speeds
from flows.cli.serving.profile_target import memory_behind, parse_levels, profile_target
from infra.serving.model_client import ServerFailedError
from infra.serving.model_server import Access, running_model_server
from model.formats.gguf_checkpoint import write_gguf
from tasks.evaluation.comparisons import FigureChange
from tasks.release.convert_checkpoint import convert_checkpoint
from tasks.release.server_profile import LLAMA_SERVER, ServerProfile, compare_drafts, measure_own_drafts, served_answers
from tasks.report.published_figures import published_figures
from tests.release.test_conversion import SHAPES, open_source, saved

RESOURCES = ServingResources(host="127.0.0.1", port=0, num_threads=1, context_length=256, startup_timeout_seconds=60.0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("profile") / "hf", SHAPES["355B"])


def test_a_server_is_measured_at_each_concurrency(checkpoint, tmp_path, home):
    convert_checkpoint(open_source(checkpoint), tmp_path / "m.gguf", "gguf")
    with running_model_server(tmp_path / "m.gguf", RESOURCES, tmp_path / "log") as server:
        done = profile_target(server.url, home, "tiny", None, (1, 3), 8, "", "", tmp_path / "out")
        memory = psutil.Process(server.process.pid).memory_info().rss
    assert done.memory_bytes == pytest.approx(memory, rel=0.2), "of the process that listens at the port"
    assert done.not_measured.startswith("drafts: a running server cannot be told to draft or not")
    assert done == ServerProfile.model_validate_json((tmp_path / "out" / "profile.json").read_text())
    assert [(each.concurrency, each.num_requests, each.num_tokens) for each in done.levels] == [(1, 4, 32), (3, 4, 32)]
    assert all(0 < each.seconds_to_first_token[0] <= each.seconds_to_first_token[1] for each in done.levels)
    assert done.levels[1].seconds_to_first_token[1] > done.levels[0].seconds_to_first_token[0], "one slot: others wait"
    html = (tmp_path / "out" / "profile.html").read_text()
    measured, _, quoted = html.partition("Quoted, not measured</h2>")
    assert all(each.source in quoted and each.source not in measured for each in published_figures())
    with pytest.raises(ServerFailedError, match="stopped answering at the first request"):
        profile_target(server.url, home, "tiny", None, (1,), 8, "m", "", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_the_memory_of_a_server_on_another_machine_is_not_seen():
    assert memory_behind("http://192.0.2.1:8000/v1") is None
    assert memory_behind("http://127.0.0.1:1") is None, "nothing listens there"


def test_drafts_change_the_speed_and_no_token_in_either_engine(checkpoint, tmp_path):
    convert_checkpoint(open_source(checkpoint), tmp_path / "m.gguf", "gguf")
    answers = []
    for is_drafting in (False, True):
        access = Access(is_drafting=is_drafting)
        with running_model_server(tmp_path / "m.gguf", RESOURCES, tmp_path / "log", access=access) as server:
            answers.append(served_answers(server.url, checkpoint, 12))
    for drafts in (compare_drafts(LLAMA_SERVER, *answers), measure_own_drafts(checkpoint, 12)):
        assert drafts.num_equal == drafts.num_answers == 4 and 0 <= drafts.acceptance_rate <= 1
        assert drafts.gain == drafts.tokens_per_second_with_drafts / drafts.tokens_per_second > 0
    assert math.isnan(answers[0].acceptance_rate), "a server without drafts makes none"
    other = answers[1]._replace(token_ids=[[0], *answers[1].token_ids[1:]])
    assert compare_drafts(LLAMA_SERVER, answers[0], other).num_equal == 3


def formats_of(*names: str) -> FormatComparison:
    """Figures of formats before their speed is measured."""
    figure = FigureChange(
        value=0.9,
        interval=None,
        before=0.9,
        change=0.0,
        change_interval=(-0.1, 0.1),
        is_worse=False,
        noise_floor=0.0,
        disagreement=0.0,
        num_items=20,
        num_answers=80,
    )
    shown = {
        "computed_by": "llama.cpp",
        "num_bytes": 1,
        "num_original_bytes": 2,
        "bits_per_byte_change": 0.0,
        "figures": {"pass_at_1": figure},
        "routing_agreement": None,
    }
    return FormatComparison(target="m version 1", formats=tuple(FormatFigures(name=name, **shown) for name in names))


def test_each_file_is_timed_beside_the_f32_one_and_what_nothing_here_reads_is_said(checkpoint, tmp_path, home):
    """A quantized checkpoint has a row, too."""
    files = {}
    for name in ("F32", "Q8_0"):
        files[name] = tmp_path / f"{name}.gguf"
        write_gguf(checkpoint, checkpoint / "tokenizer.json", files[name], gguf_type=name, name="m")
    found = measure_speeds(files, home)
    assert found["F32"].ratio == 1 and set(found) == set(files)
    for each in found.values():
        low, high = each.ratio_range
        assert 0 < low <= each.ratio <= high and each.tokens_per_second > 0
    compared = with_speeds(formats_of("F32", "Q8_0", "AWQ_W4A16"), found)
    rows = {line.split()[0]: line for line in compared.describe().splitlines()[2:]}
    assert rows["Q8_0"].rstrip().endswith(f"{found['Q8_0'].ratio_range[1]:.2f}]")
    assert rows["AWQ_W4A16"].split()[-2:] == ["none", "-"]
    assert "tokens/s of AWQ_W4A16: none, no engine on this machine reads it" in compared.describe()


def test_files_that_do_not_fit_beside_each_other_are_not_timed(tmp_path, home, monkeypatch):
    files = {name: tmp_path / name for name in ("F32", "Q8_0")}
    for path in files.values():
        path.write_bytes(bytes(10**6))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10**6))
    compared = with_speeds(formats_of(*files), measure_speeds(files, home))
    assert "tokens/s of F32, Q8_0: none, both files take 0.0 GB of 0.0 GB that are free" in compared.describe()


@pytest.mark.parametrize("text", ["", "0,1", "2,1", "1,1", "a"])
def test_levels_that_do_not_rise_are_refused(text):
    with pytest.raises(ValueError, match="write rising numbers of requests"):
        parse_levels(text)
