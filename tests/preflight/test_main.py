"""`python -m perex_t5x.preflight`: columns, parts, pages, files, errors."""

import json
import os
import re
import subprocess
import sys
import types
from html.parser import HTMLParser

import jax
import pytest

from perex_t5x import preflight
from perex_t5x.cli import progress
from perex_t5x.errors import ConfigError
from perex_t5x.preflight import __main__ as preflight_command
from perex_t5x.preflight import account, render, render_html, report_cache, search, step
from tests import tiny
from tests.preflight.support import needs_libtpu

FILES = ["models/tiny.gin", "runs/pretrain.gin"]
BINDINGS = [b for b in tiny.BINDINGS if "TASK_NAME" not in b and "TASK_MODULE" not in b]


def measured(where, optimizer="micro_adam", mesh="fsdp", folder=None, layers=2, bindings=()):
    files = [*FILES, f"optimizers/{optimizer}.gin", f"meshes/{mesh}.gin"]
    bindings = [*BINDINGS, f"models.T5Config.num_decoder_layers = {layers}", *bindings]
    trainer, spec = step.build(files, bindings, where.devices())
    return (
        trainer,
        spec,
        account.measure(
            optimizer, where, trainer, spec, report_cache.ReportCache(folder), progress.Working(open(os.devnull, "w"))
        ),
    )


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def on_cpus(kept):
    return measured(step.CompileTarget("", cpus=4), folder=kept / "perex_t5x" / "preflight")


def test_statistics_that_see_the_optimizers_state(capsys):
    _, _, found = measured(step.CompileTarget("", cpus=2), "micro_lion")
    assert found.statistics == ("mean", "mean_step_sign_0.9") and found.reductions
    render.show([found], [], sys.stdout)
    assert "mean, mean_step_sign_0.9" in capsys.readouterr().out
    assert json.loads(json.dumps(found.as_dict()))["statistics"] == list(found.statistics)


def test_an_optimizer_that_clips_examples():
    _, _, found = measured(step.CompileTarget("", cpus=2), "dp_adamw", bindings=["NOISE_SEED = 1"])
    assert found.reductions and all(r.norm_reduction for r in found.reductions)


def test_parts_add_up_to_the_peak(on_cpus):
    trainer, spec, found = on_cpus
    shapes, _, _ = trainer.abstract_state({k: s.shape for k, s in spec.items()})
    sizes = jax.tree_util.tree_leaves_with_path(jax.tree.map(lambda x: x.size * x.dtype.itemsize, shapes.params))
    # FSDP over 4 devices, the scales of norms whole on each; two moments.
    mine = sum(size if "scale" in jax.tree_util.keystr(path) else size / 4 for path, size in sizes)
    assert found.parts["parameters"] == mine
    assert found.parts["optimizer state"] == pytest.approx(2 * mine, rel=0.01)
    assert found.parts["batch"] == sum(s.size * s.dtype.itemsize for s in spec.values()) / 4
    assert sum(found.memory_parts().values()) == pytest.approx(found.step.peak_bytes, abs=1000)
    assert found.fits is None and found.seconds is None and found.mfu is None  # a CPU
    assert found.target_tokens == 16 * tiny.LENGTH


def test_the_plain_step_beside_it(on_cpus):
    trainer, spec, found = on_cpus
    assert found.statistics == ("mean", "mean_square")
    other = account.plain_trainer(trainer)
    shapes, _, _ = other.abstract_state({k: s.shape for k, s in spec.items()})
    assert other.has_plain_gradient(shapes.params) and not trainer.has_plain_gradient(shapes.params)
    assert trainer.model.optimizer_def is not other.model.optimizer_def  # the real one is left as it was
    # Two statistics are scattered where the plain step scatters one gradient.
    assert found.plain.collectives != found.step.collectives
    assert found.temp_ratio == found.step.temp_bytes / found.plain.temp_bytes


def test_reductions_are_those_of_the_real_step(on_cpus):
    _, spec, found = on_cpus
    by_name = {f.parameter: f for f in found.reductions}
    assert by_name["token_embedder/embedding"].reduction == "sparse"
    assert by_name["token_embedder/embedding"].shape == (384, 8)  # the part that this device has
    clipped, _ = step.build(
        [*FILES, "optimizers/micro_adam.gin"],
        [*BINDINGS, "models.T5Config.num_decoder_layers = 1", "Trainer.clip_norm = 1.0"],
        jax.devices()[:1],
    )
    assert all(f.norm_reduction for f in account.reductions_of_step(clipped, spec))


def test_layers_alike_are_one_line(on_cpus):
    lines = render.reduction_rows(on_cpus[2].reductions)
    assert [line[0] for line in lines if "wo" in line[0]] == ["decoder/layers_*/mlp/wo/kernel (2 layers)"]


def test_columns():
    found = search.cases(FILES, ["X = 1"], [], ["adamw", "my.gin+micro_sign"])
    assert [c.name for c in found] == ["adamw", "my+micro_sign"]
    assert found[1].files == (*FILES, "my.gin", "optimizers/micro_sign.gin")
    assert search.cases([*FILES, "meshes/dp.gin"], [], [], [])[0].name == "models/tiny + dp".replace("models/", "")
    with pytest.raises(ConfigError, match="'adam_w' is neither .* Did you mean 'adamw'"):
        search.cases(FILES, [], [], ["adam_w"])


class _Elements(HTMLParser):
    """Fails where tags do not nest; collects what a page would load."""

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.links = [], [], []

    def handle_starttag(self, tag, attributes):
        self.seen.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_stands_alone(on_cpus):
    text = render_html.html_page([on_cpus[2]], [], "preflight --gin.X='<b>'")
    elements = _Elements()
    elements.feed(text)
    assert elements.open == [] and elements.links == []
    assert "http" not in text and "url(" not in text and "script" not in elements.seen
    assert elements.seen.count("svg") == 2  # memory and traffic; a CPU has no cycles
    assert "&lt;b&gt;" in text and "prefers-color-scheme: dark" in text
    assert "token_embedder/embedding" in text
    assert set(re.findall(r"var\((--\w+)\)", text)) <= set(re.findall(r"(--\w+):", text))


def test_the_terminal(on_cpus, capsys):
    render.show([on_cpus[2], on_cpus[2]], [], sys.stdout)
    out = capsys.readouterr().out
    assert out.startswith("4 fake CPU devices, 4 x cpu: global batch 16")
    assert "optax.adamw on the plain gradient" in out and "all-gather over data" in out


def test_the_line_while_working(tmp_path):
    path, now = tmp_path / "log", iter([0.0, 41.6])
    with open(path, "w") as stream:
        with progress.Working(stream, clock=lambda: next(now))("compiling"):
            pass
    assert path.read_text() == "compiling: 42 s\n"
    with open(path, "w") as stream, pytest.raises(KeyError):
        with progress.Working(stream)("compiling"):
            raise KeyError
    assert "compiling: stopped after 0 s" in path.read_text()


@needs_libtpu
@pytest.mark.parametrize(
    "topology,devices,peak",
    [
        pytest.param("v5e:2x2", 4, 4 * 197e12, marks=pytest.mark.slow),
        ("tpu7x:2x2x1", 8, 4 * 2307e12),  # a TPU7x chip is two devices
    ],
)
def test_a_slice(topology, devices, peak):
    _, _, found = measured(step.CompileTarget(topology), mesh="dp", layers=1)
    assert found.fits is True and found.devices == devices
    assert 0 < found.mfu < 1
    assert found.mfu == pytest.approx(found.flops / found.seconds / peak)
    assert found.tokens_per_second == pytest.approx(found.target_tokens / found.seconds)
    assert found.cycles_ratio == found.step.cycles / found.plain.cycles
    # Two statistics over the network instead of one gradient.
    assert found.network_bytes("ICI") == pytest.approx(2 * found.parts["parameters"], rel=0.02)
    assert found.network_bytes("DCN") == 0
    assert sum(found.memory_parts().values()) == pytest.approx(found.step.peak_bytes, abs=1000)
    cells = dict(render.summary_lines([found]))
    assert cells["fits"] == ["yes"]
    assert re.fullmatch(r"\d\.\d\d x(, \d+ more not counted)?", cells["  cycles"][0])


def run(*flags, cache):
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    command = [sys.executable, "-m", "perex_t5x.preflight", *flags]
    environment["XDG_CACHE_HOME"] = str(cache)
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


RUN = ("--gin_file=models/tiny.gin", "--gin_file=runs/pretrain.gin", "--gin.TASK_FEATURE_LENGTHS={'targets': 16}")


def test_the_command_writes_its_files(on_cpus, kept, tmp_path, monkeypatch, capsys):
    """In this process; its start, tried below, sets up logging for a process of its own."""
    monkeypatch.setattr(preflight, "start", lambda args: None)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(kept))
    args = types.SimpleNamespace(
        gin_file=[*FILES, "optimizers/micro_adam.gin"], gin_search_paths=[], topology=None,
        gin_bindings=[*BINDINGS, "models.T5Config.num_decoder_layers = 2"],
        slices=None, devices=4, compare=["meshes/fsdp.gin"], no_search=False, breakdown=True, schedules=False, remat=None,
        json=f"{tmp_path}/found.json", html=f"{tmp_path}/found.html",
    )  # fmt: skip
    assert preflight_command._main(args) == 0
    assert "all-gather over data" in capsys.readouterr().out
    (case,) = json.loads((tmp_path / "found.json").read_text())["cases"]
    assert case["name"] == "meshes/fsdp"
    assert case["fits"] is None and case["cycles"] is None
    assert case["overhead"]["temporaries"] == on_cpus[2].temp_ratio
    assert case["coverage"][-1]["reduction"] == "sparse"
    assert (tmp_path / "found.html").read_text().startswith("<!doctype html>")


@needs_libtpu
@pytest.mark.slow
def test_the_command_for_a_slice(tmp_path):
    """Columns side by side, nothing of libtpu's noise, and from the cache the second time."""
    flags = (*RUN, "--gin.BATCH_SIZE=16", "--topology=v5e:2x2", "--compare=adamw,micro_adam", "--breakdown")
    first = run(*flags, cache=tmp_path)
    assert first.returncode == 0, first.stderr
    assert all(re.match(r"(adamw|micro_adam): [\w' :]+", line) for line in first.stderr.splitlines())
    kept = set((tmp_path / "perex_t5x" / "preflight").iterdir())
    programs = [path for path in kept if not path.name.startswith("kernel-")]
    assert len(programs) == 3  # two steps, and the plain one beside micro_adam, whose weight decay is not adamw.gin's
    assert len(kept) > len(programs)
    second = run(*flags, cache=tmp_path)
    assert second.stdout == first.stdout
    assert set((tmp_path / "perex_t5x" / "preflight").iterdir()) == kept
    assert "norms and rotary" in first.stdout and "Calibration: MaxText" in first.stdout
    # Schedules can only raise the lower bound, and change nothing else.
    values = []
    for more in ((), ("--schedules",)):
        assert run(*flags, f"--json={tmp_path}/found.json", *more, cache=tmp_path).returncode == 0
        values.append(json.loads((tmp_path / "found.json").read_text())["cases"][0])
    plain, scheduled = values
    assert (plain["bound_has_schedules"], scheduled["bound_has_schedules"]) == (False, True)
    assert 0 < plain["cycles_bound"] < scheduled["cycles_bound"]
    assert plain["cycles"] == scheduled["cycles"] == sum(part["cycles"] for part in plain["breakdown"])
    assert scheduled["mfu"] < scheduled["mfu_bound"] < plain["mfu_bound"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags,message",
    [
        ((), "no --gin_file given"),
        (RUN, "nothing to compile for: give --topology=v5e:4x4"),
        ((*RUN, "--topology=v5e:5x5"), "Did you mean 'v5e:4x8'"),
        ((*RUN, "--topology=v5e:4x4", "--gin_file=meshes/v5e_256.gin"), "devices"),
        ((*RUN, "--devices=2", "--compare=adam_w"), "Did you mean 'adamw'"),
        ((*RUN, "--devices=2", "--json=/no/such/folder/x.json"), "there is no folder /no/such/folder"),
    ],
)
def test_slips(flags, message, tmp_path):
    done = run(*flags, cache=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
