"""The page in a headless Chromium: it renders, its switches work, it asks the network for nothing."""

import pytest

from perex_t5x.experiments import report
from tests.experiments.report.browser import CHROMIUM, Browser
from tests.experiments.report.support import basin_runs, scaling_runs, write_sweep

pytest.importorskip("vl_convert", reason="vl-convert-python is not installed (extra 'reports')")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here (on Debian: apt install chromium)")

DRAWN = "report.plots.every((plot) => plot.section.dataset.drawn)"
WIDTHS = {"narrow": 390, "wide": 1400}


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Two pages: basins with HTML in their names, and rules side by side."""
    folder = tmp_path_factory.mktemp("pages")
    runs = basin_runs({"adamw": 0.004, "micro_adam": 0.008, "sign<b>ema</b>": 0.002}, seeds=(0, 1), diverge=0.016)
    write_sweep(
        folder / "basins", [{**run, "name": f"<i>run</i>{i}"} for i, run in enumerate(runs)], name="<b>rates</b>"
    )
    (folder / "basins.html").write_text(report.make([str(folder / "basins")]))
    rules = []
    for rule, spread in (("sqrt", 0.005), ("linear", 0.06)):
        write_sweep(folder / rule, scaling_runs(spread, rule, monitor=True), name=rule, rule=rule)
        rules.append(str(folder / rule))
    (folder / "rules.html").write_text(report.make(rules))
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("browser")) as started:
        yield started


@pytest.fixture
def shown(browser, pages):
    """Opens a page; at the end nothing may be in the console, and nothing but the file may have been asked for."""
    browser.console.clear()
    browser.requests.clear()

    def show(name, width=1400, scheme="light"):
        browser.size(width)
        browser.scheme(scheme)
        browser.open(f"{pages}/{name}.html")
        browser.wait(DRAWN)
        return browser

    yield show
    browser.js("Promise.all(report.plots.map((plot) => plot.drawing)).then(() => true)")
    assert browser.console == []
    assert [url for url in browser.requests if not url.startswith(("file://", "data:"))] == []


def lines(browser, plot, colour=None):
    """How many lines with a course a plot has, of one colour or of all."""
    found = browser.js(
        f"[...document.querySelectorAll('#{plot} .view .mark-line path')].filter((p) => p.getAttribute('d').length > 20)"
        ".map((p) => p.getAttribute('stroke'))"
    )
    return len([stroke for stroke in found if colour in (None, stroke)])


def settle(browser, plot):
    browser.js(f"report.plots.find((p) => p.plot.id == '{plot}').drawing.then(() => true)")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["basins", "rules"])
def test_it_renders(shown, name, width, scheme):
    browser = shown(name, WIDTHS[width], scheme)
    plots = browser.js("report.plots.map((plot) => plot.plot.id)")
    assert plots == {
        "basins": ["curves", "basins", "noise_scale", "snr"],
        "rules": ["curves", "collapse", "noise_scale", "snr"],
    }[name]  # fmt: skip
    marks = browser.js(
        "report.plots.map((p) => p.place.querySelectorAll('svg [role=graphics-symbol], svg [class*=mark-] path').length)"
    )
    assert min(marks) > 3, dict(zip(plots, marks, strict=True))
    assert browser.js("document.documentElement.scrollWidth") <= WIDTHS[width]
    clipped = (
        "report.plots.filter((p) => Number(p.place.querySelector('svg').getAttribute('width')) > p.place.clientWidth)"
    )
    assert browser.js(f"{clipped}.map((p) => p.plot.id)") == []
    assert browser.js("document.documentElement.dataset.theme") == scheme
    light = browser.js("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert light == (scheme == "light")
    assert browser.js("document.querySelectorAll('#runs b, #runs i, .legend b, h1 b').length") == 0


def test_legend_buttons_take_lines_away_and_bring_them_back(shown):
    browser = shown("basins")
    assert lines(browser, "basins") == 3
    first = "document.querySelector('#basins .legend button')"
    browser.js(f"{first}.click()")
    settle(browser, "basins")
    assert lines(browser, "basins") == 2 and browser.js(f"{first}.getAttribute('aria-pressed')") == "false"
    browser.js(f"{first}.click()")
    settle(browser, "basins")
    assert lines(browser, "basins") == 3


def test_all_and_none(shown):
    browser = shown("rules")
    for plot in ("curves", "collapse", "noise_scale"):
        drawn = lines(browser, plot)
        for expected in (0, drawn):
            browser.js(f"document.querySelector('#{plot} .legend .all').click()")
            settle(browser, plot)
            assert lines(browser, plot) == expected


def test_keys_do_what_clicks_do(shown):
    browser = shown("basins")
    browser.js("document.querySelector('#basins .legend button').focus()")
    browser.key("Tab", 9)
    browser.key("Enter", 13)
    assert browser.js("document.activeElement.getAttribute('aria-pressed')") == "false"
    settle(browser, "basins")
    assert lines(browser, "basins") == 2


def choose(browser, plot, label, option):
    browser.js(f"""(() => {{
      const labels = [...document.querySelectorAll('#{plot} .controls label')];
      const box = labels.find((l) => l.textContent.includes({label!r})).querySelector('select, input');
      if (box.type == 'checkbox') box.click();
      else {{
        box.value = [...box.options].find((o) => o.textContent.includes({option!r})).value;
        box.dispatchEvent(new Event('change'));
      }}
    }})()""")
    settle(browser, plot)


def axis_title(browser, plot):
    return browser.js(f"[...document.querySelectorAll('#{plot} .role-axis-title text')].map((t) => t.textContent)")


def test_curves_switch_axes_losses_and_bands(shown):
    browser = shown("basins")
    assert "examples seen" in axis_title(browser, "curves") and lines(browser, "curves") == 3  # best rates only
    choose(browser, "curves", "best rates", "")
    assert lines(browser, "curves") == 15
    choose(browser, "curves", "against", "steps")
    assert "steps" in axis_title(browser, "curves")
    before = browser.js("document.querySelector('#curves .mark-line path').getAttribute('d')")
    choose(browser, "curves", "show", "train")
    after = browser.js("document.querySelector('#curves .mark-line path').getAttribute('d')")
    assert before != after
    choose(browser, "curves", "logarithmic", "")
    assert browser.js("document.querySelector('#curves .mark-line path').getAttribute('d')") != after
    bands = "document.querySelectorAll('#curves .mark-area path[d^=M]').length"
    assert browser.js(bands) > 0
    choose(browser, "curves", "seed bands", "")
    assert browser.js(bands) == 0
    choose(browser, "curves", "colours", "learning rate")
    assert browser.js("document.querySelector('#curves .legend button').textContent") == "rate 0.001"


def test_differences_show_which_rule_collapses(shown):
    browser = shown("rules")
    steep = browser.js("document.querySelector('#collapse .mark-line path').getBBox().height")
    choose(browser, "collapse", "show", "difference")
    assert browser.js("document.querySelector('#collapse .mark-line path').getBBox().height") < steep / 4


def test_hover_shows_the_nearest_point(shown):
    browser = shown("rules")
    browser.js("document.querySelector('#collapse').scrollIntoView()")
    left, top = browser.js("(() => { const r = document.querySelector('#collapse .view').getBoundingClientRect(); "
                           "return [r.left, r.top]; })()")  # fmt: skip
    for i in range(3):  # a move, not a jump
        browser.move(left + 200 + i, top + 120 + i)
    text = browser.wait("document.querySelector('#vg-tooltip-element.visible')?.textContent")
    assert "batch " in text and "seeds3" in text and "undefined" not in text and "NaN" not in text


def test_the_switch_for_dark(shown):
    browser = shown("rules", scheme="light")
    colour = "document.querySelector('#curves .legend line').style.stroke"
    light = browser.js(colour)
    browser.js("document.querySelector('#theme').click()")
    assert browser.js("document.documentElement.dataset.theme") == "dark" and browser.js(colour) != light
    settle(browser, "curves")
    assert lines(browser, "curves") == 10


def test_the_table_sorts(shown):
    browser = shown("basins")
    column = "[...document.querySelectorAll('#runs tbody tr')].map((row) => row.cells[2].dataset.key)"
    head = "document.querySelectorAll('#runs th')[2]"
    for direction, sign in (("ascending", 1), ("descending", -1)):
        browser.js(f"{head}.querySelector('button').click()")
        keys = browser.js(column)
        losses = [float(key) for key in keys if key]
        assert losses == sorted(losses, key=lambda loss, sign=sign: sign * loss)
        assert browser.js(f"{head}.getAttribute('aria-sort')") == direction
        assert "" not in keys[: len(losses)]  # failed runs have no loss, and come last


def test_a_narrower_window_redraws(shown):
    browser = shown("rules")
    browser.size(500)
    browser.wait("report.plots.every((plot) => plot.section.dataset.drawn == '2')")
    assert browser.js("document.documentElement.scrollWidth") <= 500
