"""Values that Gin has bound, against the annotations of what they are bound to: meant, refused, or left alone."""

import contextlib
import inspect
import io
import tempfile
from pathlib import Path

import gin
import optax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perex_t5x import gin_utils, models, optimizers, partitioning, schedules, train, trainer, utils
from perex_t5x.errors import ConfigError, TrainingError
from tests import tiny

RUN = ("MODEL_DIR = 'x'", "TRAIN_STEPS = 2")


@pytest.mark.parametrize("word", ["false", "False", "FALSE"])
def test_bare_words_mean_what_they_say(word):
    tiny.configure(*RUN, f"SHUFFLE_TRAIN_EXAMPLES={word}", f"train/DatasetConfig.pack={word}", "RANDOM_SEED=none")
    with gin.config_scope("train"):
        bound = gin.get_bindings("DatasetConfig")
    assert bound["shuffle"] is False and bound["pack"] is False
    assert gin.query_parameter("%RANDOM_SEED") is None


@pytest.mark.parametrize(
    "binding,message",
    [
        ("optax.adamw.b1=2.5", r"^adamw.b1 = 2.5 \(--gin.optax.adamw.b1\): must be a number in \[0, 1\)\.$"),
        ("optax.adamw.eps='small'", "adamw.eps = 'small' .*must be a number, at least 0"),
        ("optax.adamw.mu_dtype='float31'", "adamw.mu_dtype = 'float31' .*must be a floating-point type"),
        ("optax.adamw.nesterov='false'", "adamw.nesterov = 'false' .*must be True or False, not a text"),
        ("TRAIN_STEPS=1e5", r"total_steps = 100000.0 \(the macro TRAIN_STEPS, --gin.TRAIN_STEPS\).*write 100000\.$"),
        ("BATCH_SIZE='16'", r"^train/DatasetConfig.batch_size = '16' \(the macro BATCH_SIZE.*, not a text\.$"),
        ("BATCH_SIZE=99999999999", "batch_size = 99999999999 .*this is too large"),
        ("TASK_FEATURE_LENGTHS={'targets': -1}", r"must be a dictionary \(text: whole number, at least 1\), or None"),
        ("T5Config.attention='splah'", "must be 'auto', 'splash', 'jax_splash' or 'xla'. Did you mean 'splash'?"),
        ("T5Config.remat_policy=none", "remat_policy = None .*must be a text; a text is quoted: \"'none'\""),
        ("T5Config.mlp_activations=('gelu', 3)", r"must be a list \(each a text\)"),
        ("DROPOUT_RATE=1.0", r"T5Config.dropout_rate = 1.0 \(the macro DROPOUT_RATE.*must be a number in \[0, 1\)"),
        ("train.train_dataset_cfg=@utils.DatasetConfig", "must be a DatasetConfig, .*: the parentheses are missing"),
        ("train.checkpoint_cfg=3", "train.checkpoint_cfg = 3 .*must be a CheckpointConfig"),
        ("train.model=@optax.adamw", "train.model = @optax.adamw .*must be a Model"),
        ("SaveCheckpointConfig.period=-1", "SaveCheckpointConfig.period = -1 .*at least 1, or None"),
        ("PjitPartitioner.ici_mesh_shape=(1, 'a', 2)", "PjitPartitioner.ici_mesh_shape = .*must be a list"),
        ("Trainer.learning_rate_fn=-1.0", r"must be a number, at least 0, or a function \(@...\)"),
    ],
)
def test_refused_at_the_edge(binding, message):
    with pytest.raises(ConfigError, match=message):
        tiny.configure(*RUN, binding)


def test_file_and_line_are_named(tmp_path):
    path = tmp_path / "mine.gin"
    path.write_text("include 'runs/pretrain.gin'\n\nutils.SaveCheckpointConfig:\n  keep = 0\nBATCH_SIZE = 0.5\n")
    with pytest.raises(ConfigError) as e:
        tiny.configure(*RUN, files=("models/tiny.gin", str(path)))
    keep = str(e.value)
    assert f"SaveCheckpointConfig.keep = 0 ({path}, line 4): must be a whole number, at least 1, or None." in keep
    with pytest.raises(ConfigError, match=rf"batch_size = 0.5 \(the macro BATCH_SIZE, {path}, line 5\)"):
        gin.clear_config()
        bindings = [b for b in tiny.BINDINGS if not b.startswith("BATCH_SIZE")]
        gin_utils.parse_gin_flags([], ["models/tiny.gin", str(path)], [*bindings, *RUN])


def somebody_elses(size: int, kind: "NoSuchName", path: Path, names: list[str] = None):  # noqa: F821, RUF013
    """Annotated with what cannot be evaluated, with a class that stands for more, and with None against its annotation."""


def test_annotations_of_others_are_left_alone_where_they_are_not_plain(tmp_path):
    path = tmp_path / "theirs.gin"
    path.write_text(
        "from __gin__ import dynamic_registration\nfrom tests import test_gin_values as theirs\n"
        "theirs.somebody_elses:\n  size = 3\n  kind = 1.5\n  path = 'a/b'\n  names = None\n"
    )
    gin_utils.parse_gin_flags([], [str(path)], [], finalize_config=False)
    with pytest.raises(ConfigError, match=r"somebody_elses.size = 'three' \(--gin.theirs.somebody_elses.size\)"):
        gin_utils.parse_gin_flags([], [str(path)], ["theirs.somebody_elses.size = 'three'"])


@pytest.mark.parametrize("argument", ["learning_rate_fn", "weight_metrics_computer"])
def test_a_function_of_another_kind_is_found_by_a_dry_run(argument):
    tiny.configure(*RUN, f"trainer.Trainer.{argument} = @optax.adamw")
    with pytest.raises(ConfigError, match="cannot be built: TypeError"):
        gin_utils.call(train.train, dry_run=True)


def test_what_a_library_refuses_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot be built: ValueError: .*pytree"):
        tiny.train(tmp_path, "TRAIN_STEPS = 2", "optax.adamw.mask = {'no': True}")
    with pytest.raises(ConfigError, match=r"missing 6 required positional arguments.*\(in DatasetConfig"):
        tiny.train(tmp_path, "TRAIN_STEPS = 2", "train.infer_eval_dataset_cfg = @nowhere/utils.DatasetConfig()")


# --- fuzz -------------------------------------------------------------------------------------------------------------

CONFIGURABLES = {
    "train_script.train": train.train,
    "train/utils.DatasetConfig": utils.DatasetConfig,
    "train_eval/utils.DatasetConfig": utils.DatasetConfig,
    "utils.CheckpointConfig": utils.CheckpointConfig,
    "utils.SaveCheckpointConfig": utils.SaveCheckpointConfig,
    "utils.RestoreCheckpointConfig": utils.RestoreCheckpointConfig,
    "trainer.Trainer": trainer.Trainer,
    "partitioning.PjitPartitioner": partitioning.PjitPartitioner,
    "partitioning.standard_logical_axis_rules": partitioning.standard_logical_axis_rules,
    "utils.create_learning_rate_scheduler": schedules.create_learning_rate_scheduler,
    "models.T5Config": models.T5Config,
    "models.DecoderOnlyModel": models.DecoderOnlyModel,
    "optax.adamw": optax.adamw,
    "optimizers.micro_adam": optimizers.micro_adam,
}
ARGUMENTS = [
    f"{name}.{argument}"
    for name, configurable in CONFIGURABLES.items()
    for argument in inspect.signature(configurable).parameters
    if argument not in ("dry_run", "dump_hlo", "profile_steps", "cache_dir")
]
FILES = ("models/tiny.gin", "runs/pretrain.gin", "optimizers/micro_adam.gin", "optimizers/adamw.gin")
WORDS = ["x", "", "false", "16", "float32", "a/b", "(", "../x", "train[:5]", "%", "\x00", "é", "auto", "nan"]
LITERALS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([0.5, 1e-9, 1e400, 2.0**40, -1.0]),
    st.sampled_from(WORDS),
    st.text(max_size=5),
)
CONTAINERS = st.one_of(
    st.lists(LITERALS, max_size=3),
    st.lists(LITERALS, max_size=3).map(tuple),
    st.dictionaries(st.sampled_from([*WORDS, "targets"]), LITERALS, max_size=2),
)
REFERENCES = st.sampled_from(
    [
        "@optax.adamw",
        "@utils.DatasetConfig()",
        "@utils.DatasetConfig",
        "%BATCH_SIZE",
        "%MODEL_DIR",
        "true",
        "NONE",
        "some/path",
    ]
)
VALUES = st.one_of(LITERALS.map(repr), CONTAINERS.map(repr), REFERENCES)


def run_twice(binding: str, runs: bool) -> None:
    """Ours are the only errors; and a configuration that a dry run has accepted trains, or diverges, but is not refused."""
    # A folder that is fuzzed, MODEL_DIR itself, is one in the working directory.
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        contextlib.redirect_stdout(io.StringIO()) as said,
    ):
        try:
            tiny.configure(f"MODEL_DIR = '{folder}/run'", "TRAIN_STEPS = 2", binding, files=FILES)
            gin_utils.call(train.train, dry_run=True)
        except ConfigError as e:
            assert str(e).strip()
            return
        assert "the configuration is fine" in said.getvalue()
        if runs:
            with contextlib.suppress(TrainingError):
                gin_utils.call(train.train)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(argument=st.sampled_from(ARGUMENTS), value=VALUES)
def test_any_value_is_refused_in_our_words_or_accepted(argument, value):
    run_twice(f"{argument} = {value}", runs=False)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(argument=st.sampled_from(ARGUMENTS), value=VALUES)
def test_nothing_that_a_dry_run_accepted_is_refused_later(argument, value):
    run_twice(f"{argument} = {value}", runs=True)
