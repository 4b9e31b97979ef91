"""The benchmark of everything: its programs agree, its sections are stored one by one, and its page says who is ahead."""

import dataclasses
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from perex_t5x.bench import children, engine_sections, page, programs, proof, results, trainer_sections
from perex_t5x.bench.engine import MODELS, Size
from perex_t5x.bench.programs import CLIPPED, MICRO_GRAD, MOMENTS, NORMS, OURS, PLAIN, VMAP
from perex_t5x.errors import ConfigError

SIZE = Size(width=64, mlp=128, layers=1, vocabulary=64, length=8, examples=1)


def options(**changes):
    here = sys.executable
    return engine_sections.Options(1, True, here, here, note=lambda words: None, **changes)


# --- programs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("statistic", programs.STATISTICS)
def test_programs_compute_the_same(statistic):
    """As a loop over examples does."""
    import jax

    loss, params, batch = MODELS["mlp"](SIZE)
    batch = batch.at[0].multiply(1e-2)  # one that is not clipped
    each = [jax.grad(loss)(params, row[None]) for row in batch]
    flat = np.array([np.concatenate([g.ravel() for g in one]) for one in each])
    norms = np.linalg.norm(flat, axis=1)
    assert norms[0] < programs.CLIP_NORM < norms[1]
    expected = {
        MOMENTS: np.sqrt((flat**2).mean(0).sum()),
        NORMS: norms.sum(),
        CLIPPED: np.linalg.norm((flat * np.minimum(1, programs.CLIP_NORM / norms)[:, None]).mean(0)),
    }[statistic]
    for peer in engine_sections.PEERS[engine_sections.JAX][statistic]:
        for size in (None, 4):
            program = programs.of_library(peer, statistic, loss, size)
            if program is not None:
                assert programs.digest(statistic, program(params, batch)) == pytest.approx(expected, rel=1e-4), peer
    assert programs.of_library(OURS, statistic, loss, None) and programs.of_library(VMAP, statistic, loss, None)


def test_the_plain_gradient_in_microbatches():
    loss, params, batch = MODELS["mlp"](SIZE)
    whole, parts = (programs.plain(loss, size)(params, batch) for size in (None, 2))
    np.testing.assert_allclose(whole[0], parts[0], rtol=1e-5, atol=1e-6)


def test_rows_of_a_section(monkeypatch):
    """All at once and in microbatches; PyTorch's peers are named although its Python is one that has none of them."""
    monkeypatch.setattr(engine_sections, "_SMALLEST", SIZE)
    monkeypatch.setattr(engine_sections, "Child", no_torch)
    rows = list(engine_sections.table("mlp", options()))
    assert {row["peer"] for row in rows if row["framework"] == "PyTorch"} == {
        PLAIN, "Opacus", "Opacus, ghost clipping", "BackPACK",
    }  # fmt: skip
    assert {row["problem"] for row in rows if row["framework"] == "PyTorch"} == {"not installed"}
    measured = [row for row in rows if row["framework"] == "JAX" and "problem" not in row]
    assert all(len(row["seconds"]) == 1 and row["bytes"] > 0 for row in measured)
    assert {(row["peer"], row["size"]) for row in measured} >= {(OURS, None), (OURS, 4), (VMAP, None), (MICRO_GRAD, 1)}


def no_torch(*_):
    raise children.ChildFailedError("ModuleNotFoundError: No module named 'torch'")


def test_a_program_with_another_result_is_not_timed(monkeypatch):
    monkeypatch.setattr(engine_sections, "_SMALLEST", SIZE)
    right = programs.of_library

    def wrong(peer, statistic, loss, size):
        if peer != MICRO_GRAD:
            return right(peer, statistic, loss, size)
        return right(peer, statistic, lambda params, x: 2 * loss(params, x), size)

    monkeypatch.setattr(programs, "of_library", wrong)
    rows = list(
        engine_sections._measured({}, "mlp", SIZE, {"JAX": {NORMS: (OURS, MICRO_GRAD)}}, (None, 1), None, options())
    )
    (row,) = [row for row in rows if row["peer"] == MICRO_GRAD]
    assert row["problem"].startswith("its result is another") and "seconds" not in row


# --- children ---------------------------------------------------------------------------------------------------------


def test_a_child_answers_and_says_why_it_ends(tmp_path):
    script = tmp_path / "child.py"
    script.write_text(
        "import json, sys\n"
        "print(json.dumps({'arguments': sys.argv[1:]}), flush=True)\n"
        "for line in sys.stdin:\n"
        "    question = json.loads(line)\n"
        "    if question['x'] < 0: raise ValueError('negative')\n"
        "    print(json.dumps({'x': question['x'] + 1}), flush=True)\n"
    )
    with children.Child(sys.executable, str(script), ("a", "b")) as child:
        assert child.greeting == {"arguments": ["a", "b"]}
        assert child.ask(x=1) == {"x": 2}
        with pytest.raises(children.ChildFailedError, match="^ValueError: negative$"):
            child.ask(x=-1)
    with pytest.raises(ConfigError, match="no/such/python: cannot be started: No such file"):
        children.Child("no/such/python", str(script))
    script.write_text("import time; time.sleep(60)")
    with pytest.raises(children.ChildFailedError, match="no answer within"):
        children.Child(sys.executable, str(script), timeout=0.2)


# --- results ----------------------------------------------------------------------------------------------------------


def row(peer, statistic, seconds, size_bytes, size=None, framework="JAX", **more):
    dimensions = dataclasses.asdict(SIZE)
    head = {"framework": framework, "peer": peer, "statistic": statistic, "size": size, "dimensions": dimensions}
    return {**head, "seconds": seconds, "bytes": size_bytes, **more}


ROWS = [
    row(PLAIN, PLAIN, [1.0, 2.0, 1.0], 100),
    row(OURS, MOMENTS, [2.0, 4.0, 2.0], 300),
    row(OURS, MOMENTS, [3.0, 6.0, 3.0], 200, size=4),
    row(VMAP, MOMENTS, [4.0, 8.0, 4.0], 800),
    row(MICRO_GRAD, MOMENTS, [6.0, 9.0, 6.0], 100, size=1),
]
STARTED = {"--help": 1, "dry run": 2, "quickstart, first step": 3} | dict.fromkeys(
    trainer_sections.BASELINES.values(), 1
)
STARTUP = [{"section": "startup", "peer": peer, "seconds": [seconds]} for peer, seconds in STARTED.items()]
LOOPS = [
    {"section": "overhead", "peer": "bare JAX loop", "seconds": [1.0, 1.0], "dimensions": {"batch": 8, "length": 16}},
    {"section": "overhead", "peer": "perex_t5x", "seconds": [1.02, 1.04], "dimensions": {"batch": 8, "length": 16}},
]


def section(rows):
    return {"rows": rows, "versions": {"jax": "0.1"}, "machine": "a machine", "date": "2030-01-02", "quick": False}


SECTIONS = {"mlp": section(ROWS), "overhead": section(LOOPS), "startup": section(STARTUP)}


def test_ratios_are_of_the_same_round_at_the_best_size():
    found = {r.peer: r for r in results.ratios(ROWS)}
    ours = found[OURS]
    assert (ours.time, ours.low, ours.high, ours.size) == (
        2.0,
        2.0,
        2.0,
        None,
    )  # although rounds differ by a factor of 2
    assert (ours.memory, ours.least, ours.least_size) == (3.0, 2.0, 4)
    assert found[MICRO_GRAD].time == 6.0 and found[MICRO_GRAD].low == pytest.approx(5.25)


def test_costs_and_checks():
    costs = {cost.name: cost for cost in results.costs(SECTIONS)}
    assert costs["mlp, mean and mean square, time"].value == 0.5  # beside vmap
    assert costs["mlp, mean and mean square, memory"].value == 2.0  # beside micro_grad
    assert costs["mlp, mean and mean square, memory"].baseline == MICRO_GRAD
    assert costs["overhead, step"].value == pytest.approx(1.03)
    assert costs["startup, --help"].value == 1.0
    assert results.too_large(SECTIONS, 2.1) == []
    (problem,) = results.too_large(SECTIONS, 1.5)
    assert problem == "mlp, mean and mean square, memory: 2.00 times that of micro_grad"
    slower = {**SECTIONS, "overhead": section([LOOPS[0], {**LOOPS[1], "seconds": [2.0, 2.0]}])}
    (problem,) = results.too_large(slower, 1.9, {"overhead": SECTIONS["overhead"]})[-1:]
    assert problem == "overhead, step: 2.00 times bare JAX loop; it was 1.03"


def test_results_are_read_or_refused(tmp_path):
    path = str(tmp_path / "benchmarks.json")
    assert results.read(path) == {}
    results.write(path, SECTIONS)
    assert results.read(path) == json.loads(json.dumps(SECTIONS))
    for text in ("", "[]", '{"sections": 3}', "\xff"):
        (tmp_path / "benchmarks.json").write_text(text, encoding="latin-1")
        with pytest.raises(ConfigError, match="not a benchmarks.json of this command"):
            results.read(path)


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page(tmp_path):
    more = [
        row("jax_privacy", NORMS, [], 0, problem="not installed"),
        row(PLAIN, PLAIN, [1.0] * 3, 100, framework="PyTorch", threads=2, versions={"torch": "2.0"}),
        row("BackPACK", MOMENTS, [1.5] * 3, 500, framework="PyTorch"),
    ]
    del more[0]["seconds"]
    grown = [
        {**r, "value": value, "seconds": [s * value**2 for s in r["seconds"]], "bytes": r["bytes"] * value}
        for value in (8, 16, 32)
        for r in ROWS
    ]
    sections = {**SECTIONS, "mlp": section([*ROWS, *more]), "batch": section(grown)}
    written = page.write(str(tmp_path), sections, "python -m perex_t5x.bench --rounds=3")
    text = (tmp_path / "benchmarks.md").read_text()
    assert [path.rpartition("/")[2] for path in written] == ["bench_growth.svg", "benchmarks.md"]
    assert "<svg" in (tmp_path / "images" / "bench_growth.svg").read_text()
    assert "| mean and mean square | JAX: **perex_t5x** | 2.00 (2.00 to 2.00) | all | 3.00 | 2.00 (4) |" in text
    assert "| mean and mean square | PyTorch: BackPACK | **1.50** (1.50 to 1.50) | all | 5.00 | 5.00 (all) |" in text
    assert "| norms | JAX: jax_privacy | not installed | | | |" in text
    assert "- mlp, mean and mean square: BackPACK (PyTorch) is faster (1.50, ours 2.00)." in text
    assert "- mlp, mean and mean square: micro_grad (JAX) is smaller (1.00, ours 2.00)." in text
    assert "| JAX: vmap(grad), mean and mean square | 2.00 | 1.00 |" in text  # seconds ~ batch², bytes ~ batch
    assert "no section has been measured" in page.text({}, "python -m perex_t5x.bench", has_plot=False)
    assert "with 2 threads" in text and "jax 0.1, torch 2.0" in text
    assert "| perex_t5x | 1.030 | 1.030 (1.025 to 1.035) |" in text and "| --help | 1.00 (1.00 to 1.00) |" in text


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Runs it with sections that take no time: `calls` has their names, those in `broken` fail."""
    calls, broken = [], set()

    def measured(name):
        def measure(options):
            calls.append(name)
            if name in broken:
                raise RuntimeError("out of memory")
            yield from SECTIONS[name]["rows"]

        return proof.Section(f"about {name}", measure)

    monkeypatch.setattr(proof, "SECTIONS", {name: measured(name) for name in SECTIONS})

    def run(**flags):
        defaults = {"sections": None, "check": None, "reference": None, "torch_python": None, "t5x_python": None}
        defaults |= {"rounds": 3, "quick": False, "dry_run": False, "folder": str(tmp_path)}
        return proof.run(SimpleNamespace(**defaults | flags))

    return SimpleNamespace(run=run, calls=calls, broken=broken, folder=tmp_path)


def test_sections_are_stored_one_by_one(command, capsys):
    command.broken.add("overhead")
    assert command.run() == 1
    out, err = capsys.readouterr()
    assert command.calls == list(SECTIONS)  # those behind it are measured
    assert [json.loads(line) for line in out.splitlines()] == ROWS + STARTUP
    assert "RuntimeError: out of memory" in err and "--sections=overhead tries them again" in err
    assert set(results.read(str(command.folder / "benchmarks.json"))) == {"mlp", "startup"}
    command.broken.clear()
    command.calls.clear()
    assert command.run(sections=["overhead"]) == 0 and command.calls == ["overhead"]
    assert set(results.read(str(command.folder / "benchmarks.json"))) == set(SECTIONS)
    assert "## Start-up" in (command.folder / "benchmarks.md").read_text()


def test_a_check_fails(command, capsys):
    assert command.run(check=2.1) == 0
    assert command.run(check=1.5) == 1
    assert "--check=1.5: mlp, mean and mean square, memory: 2.00 times that of micro_grad" in capsys.readouterr().err
    assert command.run(check=1.5, sections=["startup"]) == 0  # of what was measured in this run


def test_what_is_refused(command):
    for flags, message in (
        ({"sections": ["mpl"]}, "--sections=mpl: no section of this name. Did you mean 'mlp'"),
        ({"check": 0.0}, "--check=0.0: a factor above 0"),
        ({"check": float("nan")}, "--check=nan: a factor above 0"),
        ({"reference": "x"}, "--reference is read by --check"),
        ({"reference": "/no/such", "check": 2.0}, "--reference=/no/such: there is no such file"),
    ):
        with pytest.raises(ConfigError, match=message):
            command.run(**flags)
    assert command.calls == []


def test_a_dry_run_lists_the_sections(command, capsys):
    assert command.run(dry_run=True) == 0
    out = capsys.readouterr().out
    assert out.startswith("mlp: about mlp\n") and command.calls == []
    assert f"peers in {sys.executable}: t5x" in out
    with pytest.raises(ConfigError, match="/no/python: cannot be started"):
        command.run(dry_run=True, torch_python="/no/python")


def test_peers_are_found_without_importing_them():
    assert children.found(sys.executable, ["json", "no_such_module"]) == ["json"]


# --- for real ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "decoder"])
def test_peers_in_pytorch_compute_the_same(name):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    rows = list(engine_sections.table(name, options()))
    problems = {row["peer"]: row["problem"] for row in rows if "problem" in row}
    assert set(problems.values()) <= {"not installed"}


@pytest.mark.slow
def test_loops_in_processes_and_starts():
    rows = {row["peer"]: row for row in trainer_sections.processes(options())}
    assert rows["T5X"].get("problem", "not installed") == "not installed"
    for peer in ("bare JAX loop", "perex_t5x"):
        assert rows[peer]["first_step_seconds"][0] > rows[peer]["seconds"][0] > 0 < rows[peer]["peak_bytes"][0]
    starts = {row["peer"]: row["seconds"][0] for row in trainer_sections.startup(options())}
    assert all(starts[ours] > starts[base] for ours, base in trainer_sections.BASELINES.items())
    loops = {row["peer"]: row for row in trainer_sections.overhead(options())}
    assert len(loops["perex_t5x"]["seconds"]) == len(loops["bare JAX loop"]["seconds"]) == 1
