"""report.html in Debian's Chromium, as a user opens it: from a file, without a server."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megazero.observe.report.comparison import comparison
from megazero.observe.report.page import write_report
from tests.helpers.browser import CHROMIUM, Browser

pytestmark = [
    pytest.mark.second,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium: apt-get install chromium"),
]
ITERATIONS, LENGTH, SPIKE = 5000, 128, 2630
# pixels of a chart's canvas that are not transparent
DRAWN = """(() => {{ const c = document.querySelectorAll("canvas")[{}];
  return c.getContext("2d").getImageData(0, 0, c.width, c.height).data.filter((v, i) => i % 4 == 3 && v).length }})()"""
# opacity at a place of the chart of losses, and next to it
SHADE = """(() => {{ const u = plots.get("Loss"), at = (x) => Math.max(...u.ctx.getImageData(
    u.valToPos(x, "x", true) - 2, u.valToPos({}, "y", true), 5, 1).data.filter((v, i) => i % 4 == 3));
  return [at({}), at({})] }})()"""
SCALE = "(() => {{ const s = plots.get('{}').scales; return [s.x.min, s.x.max, s.y.min, s.y.max] }})()"
BOX = """(() => {{ const chart = plots.get('{}').over; chart.scrollIntoView({{ block: "center" }});
  const b = chart.getBoundingClientRect(); return [b.x, b.y, b.width, b.height] }})()"""
NEXT_FRAME = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


def records() -> Iterator[dict[str, Any]]:
    for i in range(1, ITERATIONS + 1):
        loss = 2.0 + 6.0 / math.sqrt(i) + (3.0 if i == SPIKE else 0.0)
        found = {"iteration": i, "loss": loss, "grad_norm": 1.0 + 1.0 / i, "lr": 1e-3, "step_seconds": 0.36}
        found["tokens_per_second"] = 4 * LENGTH / 0.36
        yield found | ({"validation_loss": loss + 0.1} if i % 500 == 0 else {})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "a run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records()))
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, folder: Path) -> Iterator[Browser]:
    browser.open("about:blank")
    browser.open(write_report(folder, live=3600).as_uri())
    yield browser
    assert browser.faults == []


def scale(page: Browser, title: str = "Loss") -> list[float]:
    page.run(NEXT_FRAME)
    return list(page.run(SCALE.format(title)))


def press(page: Browser, selector: str) -> None:
    page.run(f"document.querySelector({selector!r}).click()")


def drag(page: Browser, title: str, begin: tuple[float, float], end: tuple[float, float]) -> None:
    """Drag in a chart between two places, as shares of its width and height."""
    left, top, width, height = page.run(BOX.format(title))
    (x0, y0), (x1, y1) = ((left + x * width, top + y * height) for x, y in (begin, end))
    middle = (x0 + x1) / 2, (y0 + y1) / 2
    page.mouse(("mouseMoved", x0, y0), ("mousePressed", x0, y0), ("mouseMoved", *middle), ("mouseMoved", x1, y1))
    page.mouse(("mouseReleased", x1, y1))


def test_the_curves_are_drawn(page: Browser) -> None:
    titles = ["Loss", "Gradient norm, before clipping", "Learning rate", "Throughput, tokens/s"]
    assert page.run("[...plots.keys()]") == titles
    assert all(page.run(DRAWN.format(number)) > 2000 for number in range(4))
    low, high, least, most = scale(page)
    assert (low, high) == (2, ITERATIONS)  # a point has two or three iterations
    assert 1.9 < least < 2.1 and 7 < most < 9  # the first loss is 8, one of the others 5
    spike, none = page.run(SHADE.format(4.6, SPIKE, SPIKE + 100))
    assert spike > 50 and none == 0
    rows = "[...plots.get('Loss').root.querySelectorAll('.u-series:not(.helper)')]"
    legend = page.run(f"{rows}.map((row) => [...row.children].map((cell) => cell.textContent))")
    last = sum(2 + 6 / math.sqrt(i) for i in range(ITERATIONS - 49, ITERATIONS + 1)) / 50  # smoothed by a hundredth
    assert legend == [["iteration", "last"], ["training", f"{last:.4f}"], ["validation", "2.1848"]]


def test_a_drag_zooms_into_all_charts_and_a_reload_keeps_it(page: Browser) -> None:
    """It keeps the smoothing, the log scale, a hidden line and the scroll too. A drag up or down is for one chart."""
    before = scale(page)
    drag(page, "Loss", (0.25, 0.5), (0.75, 0.5))
    low, high, least, most = scale(page)
    width = before[1] - before[0]
    assert low == pytest.approx(before[0] + width / 4, abs=width / 100) and high - low == pytest.approx(
        width / 2, rel=0.02
    )
    assert least > before[2] and most < before[3] and scale(page, "Learning rate")[:2] == [low, high]
    page.run("$('smooth').value = 4, $('smooth').oninput()")
    press(page, "[data-log='Loss']")
    page.run("plots.get('Loss').root.querySelectorAll('.u-legend .u-series:not(.helper) th')[2].click()")
    zoomed = scale(page)
    assert "mean of 500 iterations" in page.run("document.body.innerText")
    page.run("scrollTo(0, 200)")
    page.send("Page.reload")
    page.wait_for("Page.loadEventFired")
    assert scale(page) == zoomed and page.run("scrollY") == 200
    assert page.run("[state.smooth, [...state.flipped], [...state.off]]") == [4, ["Loss"], ["validation"]]
    press(page, "#reset")
    assert scale(page)[:2] == before[:2]
    low, high = scale(page, "Learning rate")[2:]
    drag(page, "Learning rate", (0.5, 0.25), (0.5, 0.75))
    zoomed = scale(page, "Learning rate")
    assert zoomed[:2] == before[:2] and zoomed[3] - zoomed[2] == pytest.approx((high - low) / 2, rel=0.03)
    assert scale(page)[2:] != zoomed[2:]


def test_axes_and_units(page: Browser) -> None:
    iterations = scale(page)
    press(page, "[data-x=tokens]")
    assert scale(page)[1] == ITERATIONS * 4 * LENGTH
    press(page, "[data-x=hours]")
    assert scale(page)[1] == pytest.approx(0.5)
    press(page, "[data-x=iteration]")
    press(page, "[data-log='Loss']")  # linear: 4 % below the least value
    linear = scale(page)
    assert linear[:2] == iterations[:2] and linear[3] < iterations[3]
    press(page, "[data-unit=perplexity]")
    assert scale(page)[3] == pytest.approx(math.exp(8), rel=0.2)
    assert page.run("UNITS.bits(3 * Math.LN2, 4)") == pytest.approx(0.75)  # 3 bits for 4 bytes
    press(page, "[data-unit=bits]")
    page.run(NEXT_FRAME)
    assert page.run("plots.has('Loss')") is False and page.run("plots.has('Learning rate')")
    assert (
        page.run("getComputedStyle($('chart0'), '::after').content")
        == '"unknown: no tokenizer of the corpus was found"'
    )


def test_runs_of_a_comparison_are_hidden_and_shown(browser: Browser, folder: Path, tmp_path: Path) -> None:
    """The button of a run hides it in all charts, a name of the legend its line."""
    path = tmp_path / "comparison.html"
    path.write_text(comparison([folder, folder]))
    browser.open("about:blank")
    browser.open(path.as_uri())
    shown = "plots.get('Loss').series.filter((one) => one.line && one.show).map((one) => one.label)"
    names = [f"a run ({number}): {line}" for number in (1, 2) for line in ("training", "validation")]
    assert browser.run(shown) == names
    press(browser, "[data-run='a run (1)']")
    browser.run(NEXT_FRAME)
    assert browser.run(shown) == names[2:] and browser.run(shown.replace("Loss", "Learning rate")) == ["a run (2)"]
    press(browser, "[data-run='a run (1)']")
    browser.run(NEXT_FRAME)
    browser.run("plots.get('Loss').root.querySelectorAll('.u-legend .u-series:not(.helper) th')[1].click()")
    browser.run(NEXT_FRAME)
    assert browser.run(shown) == names[1:] and browser.faults == []


def test_the_page_reloads_until_the_run_has_ended(browser: Browser, folder: Path) -> None:
    """Every page reports its `live` when it is loaded: once a second until it is 0."""
    report = "addEventListener('load', () => console.log('live', DATA.live))"
    script = browser.send("Page.addScriptToEvaluateOnNewDocument", source=report)["identifier"]

    def reports(live: int) -> Callable[[dict[str, Any]], bool]:
        return lambda params: [arg.get("value") for arg in params["args"]] == ["live", live]

    browser.send("Page.navigate", url=write_report(folder, live=1).as_uri())
    browser.wait_for("Runtime.consoleAPICalled", reports(1))
    browser.wait_for("Runtime.consoleAPICalled", reports(1))
    events = folder / "events.jsonl"
    events.write_text('{"event": "start", "time": "t"}\n{"event": "end", "time": "t", "why": "done"}\n')
    write_report(folder, live=1)
    browser.wait_for("Runtime.consoleAPICalled", reports(0))
    assert "This page is final." in browser.run("document.body.innerText") and browser.faults == []
    browser.send("Page.removeScriptToEvaluateOnNewDocument", identifier=script)
    events.unlink()
