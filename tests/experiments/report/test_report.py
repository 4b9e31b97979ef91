"""Reports of made-up folders: what is read, what is said, what is refused."""

import json
import re
import subprocess
import sys

import pytest

from perex_t5x import goodput
from perex_t5x.errors import ConfigError
from perex_t5x.experiments import report
from perex_t5x.experiments.report import basins, collapse, curves, dataset, goodput_bars, load, noise, page, plot
from perex_t5x.experiments.report.__main__ import main
from perex_t5x.experiments.report.plot import LeftOut
from tests.experiments.report.support import basin_runs, scaling_runs, write_run, write_sweep

pytest.importorskip("vl_convert", reason="vl-convert-python is not installed (extra 'reports')")


@pytest.fixture(autouse=True)
def _no_library(monkeypatch):
    """Putting the library into the page takes a second each; the tests in a browser have it."""
    monkeypatch.setattr(page, "library", lambda: "")


def data_of(*paths):
    return dataset.gather(load.load_folders([str(p) for p in paths]))


def content(html):
    return json.loads(re.search(r'id="content">(.*?)</script>', html)[1])


def test_rules_are_compared_by_their_collapse(tmp_path):
    for rule, spread in (("linear", 0.06), ("sqrt", 0.002), ("constant", 0.03)):
        write_sweep(tmp_path / rule, scaling_runs(spread, rule), name=rule, rule=rule)
    data = data_of(tmp_path / "linear", tmp_path / "sqrt", tmp_path / "constant")
    plot = collapse.collapse_plot(data)
    assert [p.label for p in sorted(collapse.panels(data), key=lambda p: p.result.number)] == [
        "sqrt",
        "constant",
        "linear",
    ]
    assert "closest under sqrt" in plot.sentence and "batch sizes 8 to 128" in plot.sentence
    assert plot.spec["facet"]["sort"][0].startswith("sqrt: ")
    assert [e.key for e in plot.legends["line"][1]] == [f"batch {b}" for b in (8, 16, 32, 64, 128)]


def test_of_several_base_rates_a_rule_is_shown_at_its_best(tmp_path):
    runs = []
    for base, worse in ((0.004, 0.0), (0.016, 0.4)):
        for run in scaling_runs(0.01, f"r{base}", seeds=(0, 1)):
            values = {**run["values"], "learning_rate": base}
            runs.append({**run, "values": values, "rate": run["rate"] * base / 0.004, "shift": run["shift"] + worse})
    write_sweep(tmp_path, runs, rule="sqrt")
    (panel,) = collapse.panels(data_of(tmp_path))
    assert panel.label == "sqrt, learning_rate 0.004" and len(panel.runs) == 10


def test_one_seed_is_said(tmp_path):
    write_sweep(tmp_path, scaling_runs(0.05, "sqrt", seeds=(0,)), rule="sqrt")
    data = data_of(tmp_path)
    assert "With one seed there is no collapse number" in collapse.collapse_plot(data).sentence
    assert "One seed" in curves.learning_curves(data).sentence


def test_basins_find_the_best_rates_and_warn_at_edges(tmp_path):
    runs = basin_runs(
        {"adamw": 0.004, "micro_adam": 0.016}, rates=(0.001, 0.002, 0.004, 0.008, 0.016, 0.032), diverge=0.032
    )
    write_sweep(tmp_path, runs)
    data = data_of(tmp_path)
    found = {basin.label: basin for basin in basins.find(data)}
    assert found["adamw"].best() == 0.004 and found["micro_adam"].best() == 0.016
    assert not found["micro_adam"].on_edge()  # a rate beyond it was tried, and failed
    plot = basins.rate_loss_basins(data)
    assert plot.sentence.index("adamw") < plot.sentence.index("micro_adam") and "Crosses" in plot.sentence
    assert not any("edge" in warning for warning in plot.warnings)
    write_sweep(tmp_path / "edge", basin_runs({"adamw": 0.016}))
    (warning,) = basins.rate_loss_basins(data_of(tmp_path / "edge")).warnings
    assert "best rate, 0.016, lies on the edge" in warning
    shown = curves.learning_curves(data)
    best = {data.groups[row[0]].label for row in shown.rows if row[-1]}
    assert best == {"adamw, rate 0.004", "micro_adam, rate 0.016"}


def test_noise_and_snr_of_monitored_runs(tmp_path):
    write_sweep(tmp_path, scaling_runs(0.01, "sqrt", monitor=True), rule="sqrt")
    data = data_of(tmp_path)
    plot = noise.noise_scale(data)
    assert "grows" in plot.sentence and "8, 16, 32, 64 lie below" in plot.sentence
    assert any("saw no signal" in warning for warning in plot.warnings)
    snr = noise.snr_histograms(data)
    assert "largest in attention" in snr.sentence and "smallest in norm" in snr.sentence
    drawn = sum(row[-1] for row in snr.rows)
    missing, total = map(int, re.findall(r"\d+", snr.warnings[0])[:2])
    assert drawn + missing == total == 15 * 20 * 5


def test_plots_without_data_say_why(tmp_path):
    write_run(tmp_path / "one", evaluate=False)
    html = report.make([str(tmp_path / "one")])
    assert html.count("Not drawn:") == 5 and "no run was monitored" in html
    assert "No run has evaluated: the curves are train losses." in html
    data = data_of(tmp_path / "one")
    assert isinstance(basins.rate_loss_basins(data), LeftOut) and data.runs[0].final_loss is None


def test_a_folder_of_plain_runs_finds_its_axes(tmp_path):
    for size in (8, 16):
        for seed in (0, 1):
            write_run(tmp_path / f"b{size}s{seed}", batch_size=size, seed=seed, steps=1600 // size, warmup=160 // size)
    data = data_of(tmp_path)
    assert [axis.name for axis in data.axes] == ["batch size"]  # steps and warm-up follow from it
    assert [(group.label, len(group.runs)) for group in data.groups] == [("batch 8", 2), ("batch 16", 2)]
    assert load.differences([run.config for run in data.runs])[0] == [
        "BATCH_SIZE",
        "RANDOM_SEED",
        "TRAIN_STEPS",
        "WARMUP_STEPS",
    ]


def test_a_failed_seed_does_not_end_the_mean(tmp_path):
    runs = [{"values": {"seed": s}, "seed": s, "diverge_at": 40 if s == 2 else None} for s in range(3)]
    data = data_of(write_sweep(tmp_path, runs))
    rows = [row for row in curves.learning_curves(data).rows if row[1] == "validation"]
    assert rows[-1][4] == 100 and rows[-1][8] == 2
    html = report.make([str(tmp_path)])
    assert "diverged at step 40" in html and "1 failed" in html


def test_half_written_lines_and_nan(tmp_path):
    write_run(tmp_path, diverge_at=60)
    text = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(
        'not json\n[1]\n{"step": null, "name": "train"}\n' + text + '{"step": 70, "na'
    )
    (run,) = data_of(tmp_path).runs
    assert run.status == "failed" and "is nan" in run.error and run.best_loss < 3 and run.final_loss is None
    assert "3 line(s) of metrics.jsonl" in report.make([str(tmp_path)])


def test_waiting_runs_and_a_sweep_under_way(tmp_path):
    runs = scaling_runs(0.01, "sqrt", seeds=(0,), sizes=(8, 16))
    write_sweep(tmp_path, [runs[0], {**runs[1], "status": "waiting"}], rule="sqrt")
    (tmp_path / "results.csv").unlink()
    html = report.make([str(tmp_path)])
    assert "2 runs: 1 done, 1 waiting." in html


def test_names_are_escaped(tmp_path):
    evil = "<img src=x onerror=alert(1)>"
    finding = {
        "title": evil,
        "text": evil,
        "paper": evil,
        "table": {"columns": [evil], "rows": [[evil], [None]]},
        "plot": evil,
    }
    runs = [
        {"values": {"x": v}, "name": f"{v}&", "optimizer": "adamw", "rate": r} for v, r in ((evil[:8], 0.1), ("b", 0.2))
    ]
    write_sweep(tmp_path, runs, name=evil, title="</script>" + evil, question=evil, findings=[finding])
    html = report.make([str(tmp_path)])
    assert "<img" not in html and "</script><" not in html.replace("</script><script", "").replace(
        "</script></body", ""
    )
    assert [group["line"] for group in content(html)["groups"]] == ["rate 0.1", "rate 0.2"]


def test_findings_are_shown_with_the_papers_word(tmp_path):
    finding = {
        "title": "A",
        "text": "we saw",
        "paper": "they saw",
        "table": {"columns": ["c"], "rows": [[0.123456]]},
        "plot": "curves",
    }
    write_sweep(tmp_path, [{"values": {}}], findings=[finding])
    html = report.make([str(tmp_path)])
    assert "we saw" in html and "they saw" in html and "0.12346" in html and 'href="#curves"' in html


def test_odd_findings_and_descriptions(tmp_path):
    odd = [{}, 3, {"table": {"rows": [1, ["x"]]}, "plot": ["curves"]}]
    html = report.make([str(write_sweep(tmp_path / "odd", [{"values": {}}], findings=odd))])
    assert html.count("<h2>Finding</h2>") == 2 and "<td>x</td>" in html
    for runs in ([], [1], [{"values": {}}], None):
        (tmp_path / "odd" / "sweep.json").write_text(json.dumps({"name": "odd", "runs": runs}))
        with pytest.raises(ConfigError, match="not the description of a sweep"):
            load.load_folders([str(tmp_path / "odd")])


def test_many_runs_stay_small(tmp_path):
    runs = [
        {"values": {"x": i // 2, "seed": i % 2}, "seed": i % 2, "points": 400, "steps": 4000, "name": f"r{i}"}
        for i in range(300)
    ]
    html = report.make([str(write_sweep(tmp_path, runs))])
    assert len(html) < 3e6 and len(content(html)["plots"][0]["rows"]) <= 14_000


def test_problems_are_reported_at_once(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "sweep.json").write_text('{"name": ')
    with pytest.raises(ConfigError) as e:
        load.load_folders([str(tmp_path / name) for name in ("missing", "empty", "broken")])
    assert re.search(r"1\. .*no such folder(.|\n)*2\. .*no sweep\.json(.|\n)*3\. .*cannot be read", str(e.value))


def test_goodput_is_a_bar_for_each_run(tmp_path):
    for name, begun in (("a", 1000), ("b", 2000)):
        write_run(tmp_path / name)
        (tmp_path / name / "goodput").mkdir()
        for i in range(2):
            attempt = goodput.Attempt(begun + 10_000 * i, {"start": 500, "steps": 4500}, 0, 5)
            (tmp_path / name / "goodput" / f"{i}.json").write_text(attempt.to_json())
    write_run(tmp_path / "before_it_was_recorded")
    data = data_of(tmp_path)
    drawn = goodput_bars.goodput_bars(data)
    shares = {(row[0], row[1]): row[4] for row in drawn.rows}
    assert shares["a", "productive steps"] == 9 / 15 and shares["b", "down"] == 5 / 15 and len(shares) == 6
    assert drawn.sentence.startswith("All 2 runs together: goodput 60.0 % of 30 s in 4 attempts; down 33.3 %, starting")
    colours = [entry.light for entry in drawn.legends["phase"][1]]
    assert len(set(colours)) == len(goodput.PHASES)
    svg, _ = plot.write_figures(str(tmp_path / "figures"), [drawn], plot.group_fields(data))
    assert "productive steps" in open(svg, encoding="utf-8").read()
    assert '"id":"goodput"' in report.make([str(tmp_path)])


def test_the_command_writes_a_page_and_figures(tmp_path, capsys):
    write_sweep(tmp_path / "s", basin_runs({"adamw": 0.004}, seeds=(0, 1)), name="rates")
    with pytest.raises(SystemExit) as e:
        main([str(tmp_path / "s"), f"--out={tmp_path}/r.html", f"--figures={tmp_path}/f", "--title=Mine & yours"])
    assert not e.value.code
    assert "<title>Mine &amp; yours</title>" in (tmp_path / "r.html").read_text()
    assert "written:" in capsys.readouterr().out
    made = {p.name: p.read_bytes() for p in (tmp_path / "f").iterdir()}
    assert set(made) == {
        f"{name}.{kind}" for name in ("curves", "basins", "noise_scale", "snr") for kind in ("svg", "png")
    }
    assert made["basins.png"].startswith(b"\x89PNG") and made["basins.svg"].count(b"<path") > 10


def test_bad_arguments_end_with_a_message(tmp_path, capsys):
    for argv in ([str(tmp_path / "missing")], [str(tmp_path), f"--out={tmp_path}/no/r.html"]):
        with pytest.raises(SystemExit) as e:
            main(argv)
        assert e.value.code == 2 and "ERROR: " in capsys.readouterr().err


def test_without_the_library_the_message_says_how_to_get_it(tmp_path):
    write_run(tmp_path / "one")
    code = "import runpy, sys; sys.modules['vl_convert'] = None; "
    code += "runpy.run_module('perex_t5x.experiments.report', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "one")], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 2 and "pip install 'perex_t5x[reports]'" in done.stderr and "Traceback" not in done.stderr
