"""Gin files found from anywhere; errors named with their place and the nearest known name; every shipped file works."""

import re
from pathlib import Path

import gin
import jax
import pytest

from perex_t5x import gin_utils, models, train, utils
from perex_t5x.errors import ConfigError
from tests import fuzzing, tiny

SHIPPED = Path(gin_utils.shipped_gin_dir())
FILES = ["models/tiny.gin", "runs/pretrain.gin"]
REQUIRED = [
    "MODEL_DIR='x'",
    "TRAIN_STEPS=1",
    "MIXTURE_OR_TASK_NAME='python_stdlib_lm'",
    "TASK_FEATURE_LENGTHS={'targets':8}",
]


def parse(*bindings, files=FILES, paths=()):
    gin_utils.parse_gin_flags(list(paths), list(files), [*REQUIRED, *bindings])


@pytest.mark.parametrize(
    "binding,message",
    [
        (
            "TRAIN_STEP=5",
            "--gin.TRAIN_STEP: no gin file defines or uses.*Did you mean 'TRAIN_STEPS'.*Known macros: .*MODEL_DIR",
        ),
        (
            "train/utils.DatasetConfig.packk=True",
            "n't have a parameter named 'packk'[^$]*--gin.train/utils[^$]*Did you mean 'pack'",
        ),
        (
            "train/DatasetConfig.batch_sise=2",
            "parameter named 'batch_sise'[^$]*Did you mean 'batch_size'[^$]*It has: mixture_or_task_name",
        ),
        ("utils.DatasetConfg.pack=True", "has no attribute DatasetConfg[^$]*Did you mean 'DatasetConfig'"),
        ("utilz.DatasetConfig.pack=True", "No configurable matching 'utilz.DatasetConfig'"),
        ("train_script.train.total_step=1", "parameter named 'total_step'[^$]*Did you mean 'total_steps'"),
        ("MODEL=%MODLE", "--gin.MODEL: the macro %MODLE is used but nowhere defined. Did you mean 'MODEL'"),
        ("TRAIN_STEPS=(1, 2", "is not a value gin can read"),
        ("TRAIN_STEPS", "has no value: write --gin.NAME=VALUE"),
    ],
)
def test_slips_on_the_command_line(binding, message):
    with pytest.raises(ConfigError, match=message):
        parse(binding)


def test_required_macros_are_listed_together():
    with pytest.raises(ConfigError, match="required but not given: MODEL_DIR, .*TRAIN_STEPS.*--gin.MODEL_DIR=..."):
        gin_utils.parse_gin_flags([], FILES, [])


def test_missing_file_says_where_it_looked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as e:
        gin_utils.parse_gin_flags(["/somewhere"], ["runs/pretran.gin"], [])
    text = str(e.value)
    assert "Did you mean 'runs/pretrain.gin'" in text
    for place in (tmp_path, "/somewhere", SHIPPED):
        assert f"{place}/runs/pretran.gin" in text


def test_slips_in_a_file_carry_file_and_line(tmp_path):
    path = tmp_path / "mine.gin"
    path.write_text(
        "from __gin__ import dynamic_registration\nfrom perex_t5x import utils\nutils.DatasetConfig.pakc = True\n"
    )
    with pytest.raises(ConfigError, match=r"mine.gin.*line 3[^$]*Did you mean 'pack'"):
        parse(files=[*FILES, str(path)])
    path.write_text("A = %B\n")
    with pytest.raises(ConfigError, match="mine.gin, line 1: the macro %B is used but nowhere defined"):
        parse(files=[*FILES, str(path)])
    path.write_text("A = = 1\n")
    with pytest.raises(ConfigError, match="mine.gin, line 1"):
        parse(files=[*FILES, str(path)])
    path.write_text("A = (1,\n")
    with pytest.raises(ConfigError, match="mine.gin: .*bracket or a quote is not closed"):
        parse(files=[*FILES, str(path)])
    path.write_text("include 'other.gin'\n")
    with pytest.raises(ConfigError, match="mine.gin, line 1: gin file 'other.gin' not found"):
        parse(files=[*FILES, str(path)])


def test_two_modules_of_one_name_are_explained(tmp_path, monkeypatch):
    """Gin's own text recommends an interactive mode."""
    (tmp_path / "layers_of_two").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in ("first", "second"):  # not ours: what others of this process have named first would decide
        (tmp_path / "layers_of_two" / f"{module}.py").write_text("class Config:\n  def __init__(self, width=1): pass\n")
        (tmp_path / f"{module}.gin").write_text(
            "from __gin__ import dynamic_registration\n"
            f"from layers_of_two import {module} as layers\nlayers.Config.width = 8\n"
        )
    path = tmp_path / "both.gin"
    path.write_text("include 'first.gin'\ninclude 'second.gin'\n")
    with pytest.raises(ConfigError, match="two imports give the name layers_of_two.layers, and both have Config") as e:
        gin_utils.parse_gin_flags([], [str(path)], [])
    assert "second.gin" in str(e.value) and "interactive" not in str(e.value)


def test_t5xs_functions_of_values(tmp_path):
    path = tmp_path / "values.gin"
    path.write_text(
        "from __gin__ import dynamic_registration\nimport seqio\n"
        "from perex_t5x import gin_utils\nfrom perex_t5x import models\nfrom perex_t5x import utils\n"
        "TRAIN_STEPS = @gin_utils.sum_fn()\ngin_utils.sum_fn:\n  var1 = 3\n  var2 = 4\n"
        "models.T5Config.vocab_size = @utils.round_vocab_size_to_multiple()\n"
        "utils.round_vocab_size_to_multiple.vocabulary = @seqio.ByteVocabulary()\n"
    )
    gin_utils.parse_gin_flags([], [*FILES, str(path)], [b for b in REQUIRED if "TRAIN_STEPS" not in b])
    assert gin.get_bindings(train.train)["total_steps"] == 7
    assert gin.get_bindings(models.T5Config)["vocab_size"] == 256 + 128


def test_includes_beside_the_file_and_from_another_directory(tmp_path, monkeypatch):
    folder = tmp_path / "configs"
    folder.mkdir()
    (folder / "mine.gin").write_text("include 'sizes.gin'\ninclude 'runs/pretrain.gin'\n")
    (folder / "sizes.gin").write_text("include 'models/tiny.gin'\nEVAL_STEPS = 3\n")
    monkeypatch.chdir("/")
    parse(files=[str(folder / "mine.gin")])
    # Later wins: pretrain.gin, included last, sets it to 20.
    assert gin.query_parameter("EVAL_STEPS/gin.macro.value") == 20


def test_a_file_beside_the_including_one_comes_before_one_in_the_working_directory(tmp_path, monkeypatch):
    """A ported configuration in a folder of its own includes its own files, not those that it was ported from."""
    (tmp_path / "ported").mkdir()
    (tmp_path / "ported" / "run.gin").write_text(
        "include 'middle.gin'  # as it was\ninclude 'models/tiny.gin'\ninclude 'runs/pretrain.gin'\n"
    )
    (tmp_path / "ported" / "middle.gin").write_text("include 'size.gin'\n")
    (tmp_path / "ported" / "size.gin").write_text("SIZE = 2\n")
    (tmp_path / "size.gin").write_text("SIZE = 1\n")
    (tmp_path / "middle.gin").write_text("from nowhere import something\n")
    monkeypatch.chdir(tmp_path)
    parse(files=["ported/run.gin"])
    assert gin.query_parameter("SIZE/gin.macro.value") == 2


def test_a_folder_of_the_same_name_in_the_working_directory_does_no_harm(tmp_path, monkeypatch):
    """MODEL_DIR = 'runs/first' makes a folder `runs`, which Python would take for a package of that name."""
    (tmp_path / "runs" / "first").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    parse(files=["models/tiny.gin", "runs/bench.gin"])
    assert gin.query_parameter("STEPS/gin.macro.value") == 50


def test_bindings_by_alias_by_suffix_and_bare_strings(tmp_path):
    parse(
        "train_script.train.eval_period=7",
        "DatasetConfig.memory_limit_bytes=5",
        f"MODEL_DIR={tmp_path}/a-b_1",
        "Trainer.weight_metrics_computer=@trainer.WeightMetricsComputer()",  # a reference in the files' names, too
    )
    assert gin.query_parameter("train.eval_period") == 7
    assert gin.query_parameter("DatasetConfig.memory_limit_bytes") == 5
    assert gin.query_parameter("MODEL_DIR/gin.macro.value") == f"{tmp_path}/a-b_1"


def test_later_files_win_and_scopes_hold():
    parse("train/utils.DatasetConfig.batch_size=4", "train_eval/utils.DatasetConfig.batch_size=6")
    make = gin.get_configurable(utils.DatasetConfig)
    with gin.config_scope("train"):
        assert make().batch_size == 4
    with gin.config_scope("train_eval"):
        assert make().batch_size == 6


def test_a_ported_file_may_say_main_and_rewrite_args():
    args = gin_utils.rewrite_gin_args(["x", "--gin.A.b='c = d'", "-gin.N=1", "--gin_file=f"])
    assert args == ["x", "--gin_bindings=A.b = 'c = d'", "--gin_bindings=N = 1", "--gin_file=f"]
    with pytest.raises(ConfigError, match="with an equals sign"):
        gin_utils.rewrite_gin_args(["x", "--gin.A"])


def test_written_configuration_can_be_read_again(tmp_path):
    parse("train/utils.DatasetConfig.batch_size=4")
    gin_utils.summarize_gin_config(str(tmp_path))
    text = (tmp_path / "config.gin").read_text()
    gin.config._CONFIG_IS_LOCKED = False
    gin.clear_config(clear_constants=False)
    gin_utils.parse_gin_flags([], [str(tmp_path / "config.gin")], [])
    with gin.config_scope("train"):
        assert gin.get_configurable(utils.DatasetConfig)().batch_size == 4
    gin_utils.summarize_gin_config(str(tmp_path))
    assert (tmp_path / "config.gin").read_text() == text and not (tmp_path / "config.1.gin").exists()


# --- includes ---------------------------------------------------------------------------------------------------------


HEAD = "from __gin__ import dynamic_registration\n"


def rate(tmp_path, text, *more, **files):
    """BASE_LEARNING_RATE after parsing a file, and files given after it."""
    # Gin's search path only grows, so other tests' folders come first: a test's included files have names of their own.
    own = lambda text: re.sub(r"include '(\w+)\.gin'", rf"include '{tmp_path.name}_\1.gin'", text)  # noqa: E731
    for name, content in files.items():
        (tmp_path / f"{tmp_path.name}_{name}.gin").write_text(HEAD + own(content))
    (tmp_path / "mine.gin").write_text(HEAD + own(text))
    fuzzing.forget_gin()
    parse(files=["models/tiny.gin", "runs/pretrain.gin", str(tmp_path / "mine.gin"), *more])
    return gin.query_parameter("%BASE_LEARNING_RATE")


@pytest.mark.parametrize("order", [("runs/pretrain.gin", "models/tiny.gin"), ("models/tiny.gin", "runs/pretrain.gin")])
@pytest.mark.parametrize("how", ["flags", "includes"])
def test_run_and_model_files_go_in_any_order(order, how, tmp_path):
    """In T5X's, too: a model file has no learning rate."""
    files = list(order)
    if how == "includes":
        (tmp_path / "mine.gin").write_text(HEAD + "".join(f"include '{name}'\n" for name in order))
        files = [str(tmp_path / "mine.gin")]
    parse(files=files)
    assert gin.query_parameter("%BASE_LEARNING_RATE") == 0.001
    assert gin.query_parameter("optax.adamw.b2") == 0.98


@pytest.mark.parametrize("name", sorted(str(p.relative_to(SHIPPED)) for p in (SHIPPED / "models").glob("*.gin")))
def test_no_model_file_sets_what_is_the_run_files(name):
    parse(files=["runs/pretrain.gin", name])
    assert gin.query_parameter("%BASE_LEARNING_RATE") == 0.001


def test_includes_do_not_change_what_the_including_file_sets(tmp_path):
    assert rate(tmp_path, "BASE_LEARNING_RATE = 0.5\ninclude 'optimizers/adamw.gin'\n") == 0.5
    assert rate(tmp_path, "include 'optimizers/adamw.gin'\nBASE_LEARNING_RATE = 0.5\n") == 0.5
    assert rate(tmp_path, "include 'optimizers/adamw.gin'\n") == 0.008  # it sets none itself
    # Of several files the later one wins, includes and all.
    assert rate(tmp_path, "BASE_LEARNING_RATE = 0.5\ninclude 'b.gin'\n", b="") == 0.5
    assert rate(tmp_path, "BASE_LEARNING_RATE = 0.5\ninclude 'b.gin'\n", "optimizers/adamw.gin", b="") == 0.008
    two = "include 'b.gin'\ninclude 'c.gin'\n"
    assert rate(tmp_path, two, b="BASE_LEARNING_RATE = 0.2\n", c="BASE_LEARNING_RATE = 0.3\n") == 0.3
    # Each included file holds its own against those that it includes.
    nested = "BASE_LEARNING_RATE = 0.2\ninclude 'c.gin'\n"
    assert rate(tmp_path, "include 'b.gin'\n", b=nested, c="BASE_LEARNING_RATE = 0.3\n") == 0.2
    # A required macro is not one that is set.
    asked = "BASE_LEARNING_RATE = %gin.REQUIRED\ninclude 'b.gin'\n"
    assert rate(tmp_path, asked, b="BASE_LEARNING_RATE = 0.2\n") == 0.2


def test_arguments_in_blocks_hold_against_includes_too(tmp_path):
    text = "import optax\n\noptax.adamw:\n  b2 = 0.5  # mine\n\ninclude 'optimizers/adamw.gin'\n"
    assert rate(tmp_path, text) == 0.008
    assert gin.query_parameter("optax.adamw.b2") == 0.5
    assert gin.query_parameter("optax.adamw.b1") == 0.9


def test_errors_after_an_include_still_have_file_and_line(tmp_path):
    with pytest.raises(ConfigError, match=r"(?s)named 'packk'.*mine.gin\", line 5"):
        rate(tmp_path, "from perex_t5x import utils\ninclude 'b.gin'\n\nutils.DatasetConfig.packk = True\n", b="")
    with pytest.raises(ConfigError, match=r"(?s)BASE_LEARNING_RATE, .*mine.gin, line 2\)"):
        rate(tmp_path, "BASE_LEARNING_RATE = 'x'\ninclude 'optimizers/adamw.gin'\n")


ALL_FILES = sorted(str(p.relative_to(SHIPPED)) for p in SHIPPED.rglob("*.gin"))
VALUES = {
    "MODEL_DIR": "'x'", "TRAIN_STEPS": "1", "MIXTURE_OR_TASK_NAME": "'python_stdlib_lm'",
    "TASK_FEATURE_LENGTHS": "{'targets': 8}", "INITIAL_CHECKPOINT_PATH": "'x'", "CHECKPOINT_PATH": "'x'",
    "EVAL_OUTPUT_DIR": "'x'", "INFER_OUTPUT_DIR": "'x'", "NOISE_SEED": "1", "DROPOUT_RATE": "0.0",
}  # fmt: skip


def required_by(files):
    try:
        gin_utils.parse_gin_flags([], files, [], finalize_config=False)
    except ConfigError as e:
        names = str(e).split("required but not given: ")[1].split(".")[0].split(", ")
        return [f"{name}={VALUES[name]}" for name in names]
    finally:
        gin.clear_config(clear_constants=False)
    return []


LARGE = tuple(f"_{size}.gin" for size in ("large", "xl", "xxl", "3b", "11b"))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n.endswith(LARGE) else n for n in ALL_FILES]
)
def test_every_shipped_file_parses_and_its_model_initialises(name):
    brings_its_model = name.startswith("models/") or name == "runs/quickstart.gin"
    files = [name] if brings_its_model else ["models/tiny.gin", name]
    if name.startswith("optimizers/"):  # which come last, and may use what a run file sets
        files.insert(1, "runs/pretrain.gin")
    gin_utils.parse_gin_flags([], files, required_by(files))
    cls = models.EncoderDecoderModel if "t5_1" in name or "mt5" in name or "byt5" in name else models.DecoderOnlyModel
    model = gin.get_configurable(cls)()
    inputs = {feature: (2, 8) for feature in model.REQUIRED_FEATURES}
    shapes = jax.eval_shape(lambda: model.get_initial_variables(jax.random.key(0), inputs))
    assert len(jax.tree.leaves(shapes["params"])) > 5


def test_gin_folder_is_no_package():
    """An __init__.py here would shadow the gin library."""
    assert not (SHIPPED / "__init__.py").exists()


def test_train_is_found_under_gin():
    tiny.configure("MODEL_DIR = 'x'", "TRAIN_STEPS = 1")
    assert gin.get_configurable(train.train).__name__ == "train"
