"""Command lines as people mistype them: done, or an error of ours with its exit code, and never a stack trace."""

import contextlib
import functools
import io
import sys
import tempfile
import types
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from perex_t5x import cli
from perex_t5x import main as main_command
from perex_t5x.cli import gin_command
from perex_t5x.errors import ConfigError, Reason
from perex_t5x.launching import local
from tests import fuzzing, tiny
from tests.cli import in_process
from tests.cli.in_process import Command

TRAINING = ["--gin_file=models/tiny.gin", "--gin_file=runs/pretrain.gin", "--gin.MODEL_DIR=run", "--gin.TRAIN_STEPS=2"]
EVALUATION = ["--gin_file=models/tiny.gin", "--gin.MIXTURE_OR_TASK_NAME=python_stdlib_lm", "--gin.CHECKPOINT_PATH=."]
TRAINING += [f"--gin.{binding.replace(' = ', '=', 1)}" for binding in tiny.BINDINGS]


LAUNCH = Path(__file__).parents[2] / "launch"
# Where nothing says "--dry_run" in the end, something is missing, so that nothing is compiled, started or sent.
COMMANDS = {
    "train": Command("perex_t5x.train", tuple(TRAINING), ("--dry_run",)),
    "eval": Command(
        "perex_t5x.eval", ("--gin_file=runs/eval.gin", *EVALUATION, "--gin.EVAL_OUTPUT_DIR=out"), ("--dry_run",)
    ),
    "infer": Command(
        "perex_t5x.infer",
        (
            "--gin_file=runs/infer.gin",
            *EVALUATION,
            "--gin.INFER_OUTPUT_DIR=out",
            "--gin.TASK_FEATURE_LENGTHS={'targets': 8}",
        ),
        ("--dry_run",),
    ),
    "bench": Command("perex_t5x.bench", ("--gin_file=models/tiny.gin", "--gin_file=runs/bench.gin"), ("--dry_run",)),
    "engine": Command("perex_t5x.bench", (), ("--engine=no_such_model",)),
    "checkpoints": Command("perex_t5x.checkpoints", ("verify", ".")),
    "chaos": Command("perex_t5x.chaos", (), ("--faults=no_such_fault",)),
    "preflight": Command("perex_t5x.preflight"),
    "collectives": Command("perex_t5x.preflight.collectives"),
    "breakdown": Command("perex_t5x.preflight.breakdown"),
    "overhead": Command("perex_t5x.preflight.overhead", (), ("--models=no_such_model",)),
    "throughput": Command("perex_t5x.preflight.throughput", (), ("--cases=no_such_case",)),
    "sweep": Command(
        "perex_t5x.experiments.sweep", ("--sweep=sweeps/learning_rate.gin", "--sweep.seeds=[0]"), ("--dry_run",)
    ),
    "study": Command("perex_t5x.experiments.study", (), ("--dry_run", "--quick")),
    "report": Command("perex_t5x.experiments.report", (".",)),
    "gcloud": Command(str(LAUNCH / "gcloud_tpu.py"), (), ("--dry_run",)),
    "gke": Command(str(LAUNCH / "gke.py"), (), ("--dry_run",)),
    "build_image": Command(str(LAUNCH / "build_image.py"), (), ("--dry_run",)),
}


@functools.cache
def flag_names(command: str) -> list[str]:
    """As --help lists them, so that none is forgotten."""
    _, text = run(command, ["--help"])
    found = [word.split(":")[0].replace("[no]", "") for word in text.split() if word.startswith("--")]
    assert found, text
    # Of several processes, which would wait for each other.
    return sorted({name.lstrip("-") for name in found} - {"process_count", "coordinator_address"})


VALUES = [
    "",
    " ",
    "0",
    "-1",
    "1",
    "2",
    "1.5",
    "1e9",
    "99999999999999999999",
    "nan",
    "inf",
    "²",
    "٣",
    "true",
    "no",
    "x",
    "é",
    "\udcff",
    "\x00",
    "a,b",
    ",",
    "a/b",
    ".",
    "/",
    "/dev/null/x",
    "/proc/x",
    "gs://",
    "gs:/x",
    "gs://\x00",
    "[",
    "(",
    "'",
    "{}",
    "1:2",
    "2:1",
    "²:³",
    "0:0",
    "--x",
    "%",
    "x" * 300,
]
ODD_WORDS = [
    "--",
    "-",
    "---",
    "--=",
    "-=x",
    "--no",
    "--nono_such",
    "--no_such",
    "--no_such=1",
    "--gin",
    "--gin.",
    "--gin.=",
    "--gin.X",
    "--gin.X=",
    "--gin.TRAIN_STEPS=",
    "--gin.TRAIN_STEPS=\x00",
    "--gin.a.b=1",
    "--gin.\udcff=1",
    "-gin.TRAIN_STEPS=3",
    "--gin_file",
    "--gin_file=.",
    "--gin_file=/",
    "--gin_bindings=",
    "--gin_bindings=x",
    "--sweep.",
    "--sweep.seeds",
    "--sweep.x=1",
    "--flagfile=no_such_file",
    "--flagfile",
    "--undefok=x",
    "--help=x",
    "--helpfull",
    "--helpxml",
    "--v=x",
    "--verbosity=9",
    "word",
    "é",
    "\udcff",
    "",
]


def words_for(command: str) -> st.SearchStrategy[list[str]]:
    names = st.sampled_from(flag_names(command))
    values = st.one_of(st.sampled_from(VALUES), st.text(max_size=4))
    word = st.one_of(
        st.tuples(names, values).map("--{0[0]}={0[1]}".format),
        st.tuples(names, values).map("--{0[0]}={0[1]}".format),
        names.map("--{}".format),
        names.map("--no{}".format),
        st.sampled_from(ODD_WORDS),
    )
    return st.lists(word, max_size=3)


def lines(names=tuple(COMMANDS)) -> st.SearchStrategy[tuple[str, list[str]]]:
    return st.sampled_from(names).flatmap(lambda name: st.tuples(st.just(name), st.deferred(lambda: words_for(name))))


def run(command: str, words: list[str]) -> tuple[int, str]:
    """(exit code, all that was printed) of a command in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        return in_process.run(COMMANDS[command], words, folder)


def check_line(command: str, words: list[str]) -> None:
    last = COMMANDS[command].last
    code, said = run(command, [*COMMANDS[command].first, *words, *last, *last])  # twice: one may become a flag's value
    assert code in {reason.exit_code for reason in Reason}
    assert "Traceback" not in said
    if code:
        assert said.strip()


@example(("train", ["--cluster_detection="]))  # asked a cluster for five minutes
@example(("train", ["--profile_steps=²:³"]))
@example(("train", ["--coordinator_address=localhost:²", "--process_index=0"]))
@example(("build_image", ["--nopush=x"]))
@fuzzing.few(30)
@given(line=lines())
def test_any_command_line_is_done_or_refused_in_our_words(line):
    check_line(*line)


@pytest.mark.slow
@fuzzing.many(3000)
@given(line=lines())
def test_many_command_lines_are_done_or_refused_in_our_words(line):
    check_line(*line)


# --- launch/local, which reads its own flags --------------------------------------------------------------------------

LOCAL = st.one_of(
    st.tuples(
        st.sampled_from(["processes", "devices", "module", "timeout", "grace", "restarts"]), st.sampled_from(VALUES)
    ).map("--{0[0]}={0[1]}".format),
    st.sampled_from(["--processes", "--timeout", *ODD_WORDS, *VALUES]),
)


def check_local(words: list[str]) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            options, _ = local._parse(words)
        except SystemExit as e:
            assert e.code == 0 or (e.code == 2 and "error: " in said.getvalue())
            return
    assert 1 <= options.processes <= 1024 and 1 <= options.devices <= 1024 and options.restarts >= 0
    assert options.timeout >= 0 and options.grace >= 0  # which nan is not


@example(["--timeout=nan"])  # a limit that was never reached
@example(["--processes=99999999999999999999"])
@example(["--processes=²"])
@fuzzing.few(100)
@given(words=st.lists(LOCAL, max_size=4))
def test_flags_of_launch_local(words):
    check_local(words)


def test_shard_id_goes_to_infer():
    args = types.SimpleNamespace(dry_run=False, shard_id=2, dump_hlo=False, profile_steps=None)
    assert gin_command._run_flags("infer", args) == {"shard_id": 2}
    with pytest.raises(ConfigError, match="--shard_id is for perex_t5x.infer only"):
        gin_command._run_flags("train", args)


def test_what_gin_files_find_in_main(monkeypatch):
    """T5X's `import __main__ as infer_script`, then @infer_script.create_task_from_tfexample_file()."""
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert cli.imported("perex_t5x.infer.infer", in_main=True) is main.infer
    assert main.create_task_from_tfexample_file and not hasattr(main, "lookup")


def test_run_modes(monkeypatch):
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert main_command.chosen("eval")() is main.evaluate
    with pytest.raises(ConfigError, match=r"--run_mode=precompile: python -m perex_t5x.preflight"):
        main_command.chosen("precompile")
    with pytest.raises(ConfigError, match=r"no --run_mode given. It is one of train, eval, infer"):
        main_command.chosen("")
