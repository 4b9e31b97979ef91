"""Studies: tuning and its extension, what analyses say of made-up runs with known answers, and one study from end to end."""

import dataclasses
import io
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from perex_t5x.errors import ConfigError
from perex_t5x.experiments import studies, study
from perex_t5x.experiments.report.load import load_folders
from perex_t5x.experiments.studies import base, overhead, preconditioner, sign_placement
from perex_t5x.experiments.studies.base import arms
from perex_t5x.experiments.sweep import Sweep, axes
from perex_t5x.experiments.sweep.runs import Result, Run
from tests.experiments.report import support as report_support
from tests.experiments.sweep.support import BINDINGS, plan

FILES = {"optimizer": ["optimizers/adamw.gin", "optimizers/micro_adam.gin"]}


def analysed(name, folder):
    (loaded,) = load_folders([str(folder)])
    return studies.find(name).analyse(loaded, str(folder))


def tuned(sweep, loss, extensions=4):
    """Plays the runs: `loss(values)`, None for one that fails. Returns what was found, and every stage's new rates."""
    stages, asked, outcomes = base.tune(sweep, arms(sweep), extensions), [], {}
    parts = next(stages)
    try:
        while True:
            before = len(outcomes)
            for part in parts:
                combinations = axes.product([
                    [{"optimizer": f} for f in part.files["optimizer"]],
                    [{"rate_factor": r} for r in part.rate_factors], [{"seed": s} for s in part.seeds],
                ])  # fmt: skip
                for values in combinations:
                    run = Run(str(values), values, (), (), (), 8, 0.1, 5, values["seed"], 40)
                    outcomes.setdefault(run.name, (run, Result(run.name, eval_loss=loss(values))))
            asked.append(len(outcomes) - before)
            parts = stages.send(list(outcomes.values()))
    except StopIteration as end:
        return end.value, asked


def basin(best, failing=math.inf):
    def loss(values):
        rate = values["rate_factor"]
        if rate >= failing:
            return None
        return 1.0 + math.log2(rate / best[values["optimizer"]]) ** 2 + 0.001 * values["seed"]

    return loss


def test_a_best_on_the_edge_extends_that_grid_alone():
    sweep = Sweep("t", files=FILES, rate_factors=[1.0, 2.0, 4.0], seeds=[0, 1, 2])
    best = {"optimizers/adamw.gin": 2.0, "optimizers/micro_adam.gin": 16.0}
    found, asked = tuned(sweep, basin(best))
    assert [t.best for t in found] == [2.0, 16.0]
    assert sorted(found[0].losses) == [1.0, 2.0, 4.0] and sorted(found[1].losses) == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    assert asked == [12, 2, 2, 2], "two seeds tune, and only what is new is run"
    assert not any(t.beyond() for t in found)
    best["optimizers/adamw.gin"] = 0.25
    found, _ = tuned(sweep, basin(best))
    assert sorted(found[0].losses)[0] == 0.125 and found[0].best == 0.25


def test_extension_ends_and_failed_rates_count_as_tried():
    sweep = Sweep("t", files=FILES, rate_factors=[1.0, 2.0], seeds=[0])
    far = {"optimizers/adamw.gin": 2.0**20, "optimizers/micro_adam.gin": 2.0**20}
    found, asked = tuned(sweep, basin(far), extensions=2)
    assert len(asked) == 3 and found[0].best == 8.0 and found[0].beyond() == [16.0]
    found, _ = tuned(sweep, basin(far, failing=4.0))
    assert found[0].best == 2.0 and found[0].losses[4.0] == math.inf and not found[0].beyond()


def test_sqrt_scaling_finds_the_rule_and_the_exponent(tmp_path):
    runs = []
    for rule, spread in (("sqrt", 0.002), ("linear", 0.2)):
        runs += [{**run, "values": {**run["values"], "rule": rule, "rate_factor": 1.0}}
                 for run in report_support.scaling_runs(spread, rule, sizes=(8, 16, 32, 64), seeds=(0, 1, 2))]  # fmt: skip
    for size in (8, 32):  # basins around B^0.5
        for factor in (0.25, 0.5, 2.0, 4.0):
            rate = 0.004 * factor * (size / 16) ** 0.5
            shift = 0.1 * math.log2(factor) ** 2
            values = {"batch_size": size, "rule": "sqrt", "rate_factor": factor, "seed": 0}
            runs.append({"values": values, "batch_size": size, "seed": 0, "steps": 12800 // size, "warmup": 1280 // size,
                         "rate": rate, "shift": shift, "noise": 0.0, "name": f"tune-b{size}-x{factor}"})  # fmt: skip
    report_support.write_sweep(str(tmp_path), runs, name="sqrt_scaling", rule=["sqrt", "linear"])
    collapse, reach, where, exponent = analysed("sqrt_scaling", tmp_path)
    assert collapse["title"] == "Closest under the sqrt rule" and collapse["plot"] == "collapse"
    first, second = collapse["table"]["rows"]
    assert first[0].startswith("sqrt") and second[0].startswith("linear") and second[1] > 10 * first[1]
    assert "not clearly apart" not in collapse["text"]
    numbers = {row[0]: row[1:] for row in reach["table"]["rows"]}
    assert reach["table"]["columns"] == ["rule", "to 32", "to 64"] and "linear" not in reach["text"]
    assert all(10 * near < far for near, far in zip(numbers["sqrt"], numbers["linear"], strict=True))
    ends = {row[0].split(",")[0]: row[-1] for row in where["table"]["rows"]}
    assert float(ends["linear"].split()[0]) == pytest.approx(0.6, abs=0.05)
    assert float(exponent["title"].rpartition("^")[2]) == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("rules", [("sqrt",), ("sqrt", "linear")])
def test_a_batch_size_with_one_seed_so_far_has_a_number_and_no_interval(tmp_path, rules):
    """As where a study was interrupted: without that seed only one batch size is left, and nothing to collapse."""
    runs = [{**run, "values": {**run["values"], "rule": rule}, "status": status} for rule in rules
            for run in report_support.scaling_runs(0.2, rule, sizes=(8, 32))
            if (status := "waiting" if run["batch_size"] == 32 and run["seed"] else "done")]  # fmt: skip
    report_support.write_sweep(str(tmp_path), runs, name="sqrt_scaling", rule=list(rules))
    collapse, *_ = analysed("sqrt_scaling", tmp_path)
    assert all(row[1] > 1 and row[2] == "one seed" for row in collapse["table"]["rows"])
    assert collapse["text"].count("not clearly apart") == len(rules) - 1


def test_preconditioner_orders_with_intervals(tmp_path):
    runs = report_support.basin_runs({"adamw": 0.004, "micro_adam": 0.008, "micro_adam_msq": 0.002}, seeds=(0, 1, 2, 3))
    clipped = [{**run, "values": {**run["values"], "Trainer.clip_norm": 2.0}, "shift": run["shift"] + 0.5}
               for run in runs if run["optimizer"] == "adamw"]  # fmt: skip
    plain = [{**run, "values": {**run["values"], "Trainer.clip_norm": None}} for run in runs]
    report_support.write_sweep(str(tmp_path), [*plain, *clipped], name="preconditioner")
    order, clipping, rates = analysed("preconditioner", tmp_path)
    names = [row[0] for row in order["table"]["rows"]]
    assert names == ["adamw", "micro_adam", "micro_adam_msq", "adamw, clipped at 2"]
    assert order["title"] == "adamw ends lowest" and "No best rate is on an edge" in order["text"]
    assert "Clearly above adamw: micro_adam, micro_adam_msq, adamw, clipped at 2." in order["text"]
    assert [row[1] for row in order["table"]["rows"]] == [0.004, 0.008, 0.002, 0.004]
    (row,) = clipping["table"]["rows"]
    assert row[0] == "adamw" and row[1].startswith("+0.5") and row[2] == pytest.approx(0.05, abs=0.03)
    assert rates["table"]["columns"][1:] == ["0.001", "0.002", "0.004", "0.008", "0.016"]
    assert preconditioner.label(("adamw", "")) == "adamw"


def test_preconditioner_says_that_a_best_is_on_the_edge(tmp_path):
    runs = report_support.basin_runs({"adamw": 0.016, "micro_adam": 0.004})
    report_support.write_sweep(str(tmp_path), runs, name="preconditioner")
    order = analysed("preconditioner", tmp_path)[0]
    assert "On the edge of its grid is the best rate of adamw." in order["text"]


def test_noise_scale_reads_the_course(tmp_path):
    runs = report_support.scaling_runs(0.0, "sqrt", sizes=(8, 32), monitor=True)
    report_support.write_sweep(str(tmp_path), runs, name="noise_scale")
    course, groups = analysed("noise_scale", tmp_path)
    first, last = (float(course["table"]["rows"][0][i].split()[0]) for i in (2, -1))
    assert 20 < first < 80 and 75 < last < 130, "20·(1 + 4·share of the run)"
    assert [row[0] for row in groups["table"]["rows"]] == sorted(report_support.LAYERS)
    assert "clearest signal is that of attention" in groups["text"] and "weakest that of norm" in groups["text"]


def test_sign_placement_orders_and_predicts(tmp_path):
    best = {"sign_ema": 0.002, "sign_sgd": 0.004, "micro_sign": 0.008}
    report_support.write_sweep(str(tmp_path), report_support.basin_runs(best), name="sign_placement")
    measured = {"example 16": {"k": 1, "measured": 0.1, "predicted": 0.2, "pooled": 0.1, "snr": 0.1, "wrong": 0.25}}
    entry = {"run": "a", "batch_sizes": [16], "measured": [{"step": 5, "examples": 80, "signs": measured}]}
    (tmp_path / sign_placement.FILE).write_text(json.dumps(entry))
    order, snr, measured = analysed("sign_placement", tmp_path)
    assert "batch size 16: sign_ema < sign_sgd < micro_sign" in order["text"]
    entering = {row[1]: row[4] / row[2] for row in snr["table"]["rows"]}
    expected = {"micro_sign": 1, "sign_sgd": 4, "sign_ema": math.sqrt(16 * 19)}
    assert entering == pytest.approx(expected, rel=0.05)
    assert "25% at step 5" in measured["text"] and measured["table"]["rows"][0][5:7] == [0.1, 0.2]


def test_signs_of_heavy_tails_are_early_right():
    """The argument is about normal gradients; where tails are heavy, single examples' signs beat its prediction."""
    gradients_NxC = np.random.default_rng(0).standard_t(1.5, (4000, 40)) + 0.3
    found = sign_placement.agreement(gradients_NxC, {"example": 1, "batch": 64})
    assert found["example"]["measured"] > 3 * found["example"]["predicted"]
    assert found["batch"]["k"] == 64 and "wrong" not in found["batch"]


@pytest.mark.slow
def test_signs_are_measured_after_the_warm_up_and_at_the_end(tmp_path):
    (run,) = plan(seeds=[0]).runs
    measured = sign_placement.along_training(run, [16], examples=64)
    assert [(m["step"], m["examples"]) for m in measured["measured"]] == [(2, 32), (8, 128)]
    assert measured["run"] == "s0" and set(measured["measured"][0]["signs"]) == {"example 16", "batch 16", "average 16"}
    assert not (tmp_path / "runs").exists(), "it trains apart from the sweep's runs"


def test_overhead_times_compiled_steps():
    (run,) = plan(seeds=[0]).runs
    timed = overhead.time_steps([run], turns=2)
    assert timed["s0"]["values"] == {"seed": 0} and len(timed["s0"]["seconds"]) == 2
    assert all(seconds > 0 for seconds in timed["s0"]["seconds"]) and timed["s0"]["temp_bytes"] > 0


def test_overhead_compares_in_turns(tmp_path):
    values = {"model": "models/nano.gin", "optimizer": "optimizers/adamw.gin", "Trainer.clip_norm": None}
    micro = {**values, "optimizer": "optimizers/micro_adam.gin", "Trainer.clip_norm": 2.0}
    known = {
        "a": {"seconds": [0.1, 0.2, 0.4], "temp_bytes": 1 << 20, "values": values},
        "b": {"seconds": [0.15, 0.3, 0.6], "temp_bytes": 2 << 20, "values": micro},
    }
    (tmp_path / overhead.FILE).write_text(json.dumps(known))
    (found,) = overhead.analyse(None, str(tmp_path))
    plain, clipped = found["table"]["rows"]
    assert plain[:3] == ["adamw", 200.0, 1.0] and clipped[0] == "micro_adam, clip_norm 2.0"
    assert clipped[2] == 1.5 and clipped[3] == "1.500 to 1.500" and clipped[-1] == 2.0


def test_nothing_finished_is_nothing_to_say(tmp_path):
    runs = [{"values": {"seed": 0}, "status": "waiting"}]
    for name in studies.NAMES:
        report_support.write_sweep(str(tmp_path / name), runs, name=name)
        assert analysed(name, tmp_path / name) == []


@pytest.mark.parametrize("name", studies.NAMES)
def test_shipped_descriptions(name):
    """Every study's sweep can be planned, quick or not, and its stages begin."""
    found = studies.find(name)
    for bindings in ((), found.quick):
        sweep = Sweep.load(found.file, bindings)
        assert sweep.name == name and sweep.question.endswith("?")
        assert len(sweep.plan(check=False).runs) > 1
        assert next(found.stages(sweep, 1))


@pytest.mark.parametrize("name", studies.NAMES)
def test_every_section_of_the_docs_begins_alike(name):
    """Claim, finding, how sure, command: in this order, once for every study."""
    text = (Path(__file__).parents[3] / "docs" / "studies.md").read_text(encoding="utf-8")
    rows = r"\n\n\| \| \|\n\|---\|---\|\n" + "".join(
        rf"\| \*\*{label}\*\* \| [^\n]+ \|\n" for label in ("the paper", "we see", "how sure")
    )
    command = rf"\| \*\*command\*\* \| `python -m perex_t5x.experiments.study {name}` \|\n"
    assert len(re.findall(rf"\n## [^\n]+{rows}{command}", text)) == 1


def test_problems_are_reported_at_once(tmp_path, capsys):
    with pytest.raises(ConfigError, match="no study 'overhed'.*sign_placement.*Did you mean"):
        studies.find("overhed")
    found = studies.find("preconditioner")
    sweep = Sweep.load(found.file, ["rate_factors = []", "batch_sizes = [0]"])
    with pytest.raises(ConfigError, match=r"(?s)2 problems.*batch_sizes.*rate_factors is empty"):
        base.run_stages(found, sweep, str(tmp_path / "a"))
    assert not (tmp_path / "a").exists()
    with pytest.raises(ConfigError, match="holds no study yet"):
        study.conclude(found, str(tmp_path))
    report_support.write_sweep(str(tmp_path / "b"), [{"values": {"seed": 0}}], name="other")
    with pytest.raises(ConfigError, match="holds the sweep 'other', not 'preconditioner'"):
        study.conclude(found, str(tmp_path / "b"))


def test_a_study_from_end_to_end(tmp_path, capsys):
    """Tunes, extends, runs the best on all seeds, says what it found; started again, it runs nothing."""
    found = studies.find("preconditioner")
    sweep = dataclasses.replace(
        Sweep.load(found.file),
        files={"optimizer": ["optimizers/adamw.gin"]},
        grid={},
        rate_factors=[0.01, 0.02],
        seeds=[0, 1, 2],
        gin_bindings={},
    )
    options = {
        "gin_files": ["models/tiny.gin", "runs/pretrain.gin"],
        "gin_bindings": [*BINDINGS, "TRAIN_STEPS = 4"],
        "extensions": 1,
    }
    results = base.run_stages(found, sweep, str(tmp_path), overview=io.StringIO(), **options)
    assert {r.status for r in results} == {"done"}
    assert len(results) == 3 * 2 + 1, "two rates and one beyond, with two seeds; the best with a third"
    before = {p: p.stat().st_mtime_ns for p in tmp_path.glob("runs/*/*")}
    again = base.run_stages(found, sweep, str(tmp_path), overview=io.StringIO(), **options)
    assert [r.eval_loss for r in again] == [r.eval_loss for r in results]
    assert before == {p: p.stat().st_mtime_ns for p in tmp_path.glob("runs/*/*")}
    study.conclude(found, str(tmp_path))
    shown = capsys.readouterr().out
    written = json.loads((tmp_path / "findings.json").read_text())
    assert all(f["title"] in shown for f in written) and "On the edge" in written[0]["text"]
    assert "<h1>Preconditioners</h1>" in (tmp_path / "report.html").read_text()
    assert base.notes(str(tmp_path))["seeds"] == [0, 1, 2]
