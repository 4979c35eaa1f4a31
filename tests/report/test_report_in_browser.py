"""The report and the trend page in a real headless browser: nothing asked for, nothing complained about, readable on a
phone and in print. Skipped where no Chromium is installed."""

from __future__ import annotations

import pytest

from infra.home import Home
from infra.storage.open_store import open_store
from tasks.report.report_page import Figure, Section, table
from tasks.report.report_page import page as page_of
from tasks.report.trend_page import TrendRun, trend_page
from tests.report.browser import browser_path, opened_browser
from tests.support.report_fakes import STEPS, reported_phases, write_toy_report
from tests.support.reported_data import reported_data

PHONE, DESK = 380, 1200
CUT_OFF = """[...document.querySelectorAll('td, p, h1, h2, h3, figure, .fact, summary')]
    .filter(each => each.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
    .map(each => each.textContent.slice(0, 40))"""
FIRST_SCREENS = "document.querySelector('.pictures').getBoundingClientRect().top"

pytestmark = pytest.mark.skipif(browser_path() is None, reason="no Chromium is installed")


@pytest.fixture(scope="module")
def page():
    program = browser_path()
    assert program is not None
    with opened_browser(program) as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    store = open_store(None, Home(tmp_path_factory.mktemp("report")))
    report = write_toy_report(store, reported_data(store), reported_phases(store, tuple(STEPS)))
    trend = tmp_path_factory.mktemp("trend") / "trend.html"
    runs = [TrendRun(f"2026-01-0{day} 02:00", {"pass@1": 0.5, "minutes": 60.0 + day}, {}) for day in range(1, 6)]
    trend.write_text(trend_page("nightly", runs))
    return {"report": report.path("report.html"), "trend": trend}


@pytest.mark.parametrize("name", ["report", "trend"])
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_a_page_fits_its_screen_and_asks_nobody_for_anything(page, pages, name, width):
    page.load(pages[name], width)
    assert page.requests == [pages[name].as_uri()], "only itself"
    assert page.complaints == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert page.evaluate(CUT_OFF) == []


def test_headers_of_figures_wrap_so_that_the_table_of_a_whole_run_fits_a_window(page, tmp_path):
    """The columns of the training table of `tiny`: the last ones had to be scrolled to."""
    columns = ("phase", "objective", "steps", "tokens", "last loss", "final reward", "tokens per second", "MFU")
    figures = map(Figure, ("384", "393,216", "3.3035", "0.9049", "7,356", "13.4%", "96.9%", "0 s", "1.88 GiB"))
    rows = [("pretrain_code_reasoning", "pretrain", *figures)]
    path = tmp_path / "wide.html"
    section = Section("Training", table((*columns, "effective time", "lost", "peak memory"), rows))
    path.write_text(page_of("wide", "", "", [], [section]))
    page.load(path, 1000)
    assert page.evaluate("(each => each.scrollWidth <= each.clientWidth)(document.querySelector('section'))")


def test_on_a_phone_the_pictures_come_before_the_tiles_and_cells_name_their_columns(page, pages):
    page.load(pages["report"], PHONE)
    tiles = [
        page.evaluate(f"document.querySelectorAll('.fact')[{number}].getBoundingClientRect().top") for number in (0, 1)
    ]
    assert tiles[0] == tiles[1], "two in a row"
    assert page.evaluate(FIRST_SCREENS) < min(tiles[0], 800), "on the first screen"
    label = "getComputedStyle(document.querySelectorAll('#in-short td')[1], '::before').content"
    assert page.evaluate(label) in ("attr(data-label)", '"after mid_reasoning"')
    page.load(pages["report"], DESK)
    assert page.evaluate(FIRST_SCREENS) < 900 and page.evaluate(label) == "none"


def test_a_console_error_a_request_and_an_overflow_would_be_seen(page, tmp_path):
    broken = tmp_path / "broken.html"
    broken.write_text(
        '<meta name="viewport" content="width=device-width"><img src="missing.png"><script>null.x</script>'
        '<p style="width: 600px">wide</p>'
    )
    page.load(broken, PHONE)
    assert page.requests[1:] == [(tmp_path / "missing.png").as_uri()] and len(page.complaints) >= 1
    assert page.evaluate(CUT_OFF) == ["wide"]


@pytest.mark.parametrize("name", ["report", "trend"])
def test_a_page_prints(page, pages, name):
    page.load(pages[name], DESK)
    printed = page.pdf()
    assert printed.startswith(b"%PDF-") and printed.count(b"/Type /Page\n") >= 1
    page.call("Emulation.setEmulatedMedia", media="print")
    hidden = "[...document.querySelectorAll('details')].filter(each => each.getBoundingClientRect().height < 40).length"
    assert page.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"
    assert page.evaluate(hidden) == 0, "folded parts are printed"
    page.call("Emulation.setEmulatedMedia", media="")
