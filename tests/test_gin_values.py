"""Values that Gin has bound, against the annotations of what they are bound to: meant, refused, or left alone."""

import atexit
import contextlib
import dataclasses
import functools
import inspect
import io
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gin
import pytest
import seqio
from hypothesis import example, given
from hypothesis import strategies as st

from perex_t5x import arguments, bench, gin_utils, optimizers, train, utils
from perex_t5x.errors import ConfigError, DivergedError
from perex_t5x.eval import evaluate
from perex_t5x.experiments.sweep import Sweep
from perex_t5x.infer import infer
from tests import fuzzing, tiny

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


def test_an_argument_that_nothing_is_bound_to_is_named(tmp_path):
    path = tmp_path / "few.gin"
    path.write_text(
        "from __gin__ import dynamic_registration\nfrom perex_t5x import train as train_script\n"
        "train_script.train.total_steps = 3\n"
    )
    gin_utils.parse_gin_flags([], [str(path)], [], finalize_config=False)
    with pytest.raises(ConfigError, match=r"Nothing is bound to train.model, .*train.partitioner"):
        gin_utils.call(train.train, dry_run=True)


def test_what_a_library_refuses_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot be built: ValueError: .*pytree"):
        tiny.train(tmp_path, "TRAIN_STEPS = 2", "optax.adamw.mask = {'no': True}")
    with pytest.raises(ConfigError, match=r"missing 6 required positional arguments.*\(in DatasetConfig"):
        tiny.train(tmp_path, "TRAIN_STEPS = 2", "train.infer_eval_dataset_cfg = @nowhere/utils.DatasetConfig()")


# --- fuzz -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Command:
    """A configured function, and what it is configured with; {here} in it is an empty folder, {run} a trained run."""

    function: Callable[..., Any]
    files: tuple[str, ...]
    bindings: tuple[str, ...] = ()
    is_run: bool = True  # by the slow test

    def configure(self, folder: str, *bindings: str) -> None:
        run = trained() if any("{run}" in b for b in self.bindings) else ""
        fuzzing.forget_gin()
        known = [b for b in tiny.BINDINGS if self.function is train.train or not re.match(r"train|WARM|EVAL_|RAND", b)]
        own = [b.replace("{here}", folder).replace("{run}", run) for b in self.bindings]
        gin_utils.parse_gin_flags([], self.files, [*known, *own, *bindings])

    def dry_run(self) -> None:
        gin_utils.call(self.function, dry_run=True)

    def run(self) -> None:
        gin_utils.call(self.function)


@dataclasses.dataclass(frozen=True)
class SweepCommand:
    """The same for a sweep, which is described by a file of its own; its runs are checked, and not run."""

    file: str
    bindings: tuple[str, ...] = ()
    is_run: bool = False

    def configure(self, folder: str, *bindings: str) -> None:
        fuzzing.forget_gin()
        gin_utils.parse_gin_flags([], [self.file], [*self.bindings, *bindings])

    def dry_run(self) -> None:
        sweep = gin_utils.call(Sweep)
        fuzzing.forget_gin()
        sweep.plan([], tiny.BINDINGS)
        print("the configuration is fine")


@functools.cache
def trained() -> str:
    """The folder of a run of two steps."""
    folder = tempfile.mkdtemp(prefix="perex_t5x_fuzz_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with contextlib.redirect_stdout(io.StringIO()):
        tiny.train(folder, "TRAIN_STEPS = 2")
    return folder


EVERY = os.path.join(os.path.dirname(__file__), "every_configurable.gin")
TRAIN = ("MODEL_DIR = '{here}/run'", "TRAIN_STEPS = 2")
DECODER = ("models/tiny.gin", "runs/pretrain.gin", "runs/monitor.gin", "meshes/fsdp_tp.gin")
RESTORED = ("CHECKPOINT_PATH = '{run}'",)
CACHED = "train/DatasetConfig.feed = 'cached'"
PAIRS = (
    "VOCABULARY = @seqio.ByteVocabulary()",
    f"MIXTURE_OR_TASK_NAME = '{tiny.PAIRS_TASK}'",
    "TASK_FEATURE_LENGTHS = {'inputs': 16, 'targets': 16}",
    "models.T5Config.vocab_size = @utils.round_vocab_size_to_multiple()",
    "utils.round_vocab_size_to_multiple.vocabulary = @seqio.ByteVocabulary()",
    "models.T5Config.dtype = 'float32'",
    "models.T5Config.num_encoder_layers = 1",
    "models.T5Config.num_decoder_layers = 1",
)
T5X_DECODER = (
    "VOCABULARY = @seqio.ByteVocabulary()",
    f"MIXTURE_OR_TASK_NAME = '{tiny.PREDICTED_TASK}'",
    "TASK_FEATURE_LENGTHS = {'inputs': 8, 'targets': 8}",
    "models.TransformerConfig.vocab_size = 384",
    "models.TransformerConfig.dtype = 'float32'",
    "models.TransformerConfig.emb_dim = 32",
    "models.TransformerConfig.num_heads = 4",
    "models.TransformerConfig.head_dim = 8",
    "models.TransformerConfig.mlp_dim = 64",
    "models.TransformerConfig.num_layers = 1",
)
PIECES = Path(seqio.__file__).parent / "test_data" / "sentencepiece" / "sentencepiece.model"


def parameters(configurable: Any) -> dict[str, inspect.Parameter]:
    try:
        found = inspect.signature(configurable).parameters
    except ValueError:  # a class without a constructor of its own
        return {}
    return {k: p for k, p in found.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}


def needs(configurable: Any) -> list[str]:
    return [name for name, parameter in parameters(configurable).items() if parameter.default is parameter.empty]


OPTIMIZERS = [
    name
    for name in optimizers.__all__
    if needs(getattr(optimizers, name)) == ["learning_rate"] and "optax" not in getattr(optimizers, name).__module__
]
COMMANDS = {
    "train": Command(train.train, (*DECODER, EVERY), ("MODEL_PARALLEL = 1", *TRAIN)),
    "pairs": Command(train.train, ("models/t5_1_1_small.gin", "runs/pretrain.gin"), (*PAIRS, *TRAIN)),
    "t5x_decoder": Command(
        train.train, ("models/t5_decoder_base.gin", "runs/pretrain.gin", EVERY), (*T5X_DECODER, *TRAIN)
    ),
    "pieces": Command(
        train.train,
        ("models/t5_1_1_small.gin", "runs/pretrain.gin"),
        (*PAIRS[2:], *TRAIN, f"VOCABULARY_FILE = '{PIECES}'", "MIXTURE_OR_TASK_NAME = 'python_stdlib_span_corruption'"),
        is_run=False,  # the whole corpus would be tokenised
    ),
    "eval": Command(evaluate, ("models/tiny.gin", "runs/eval.gin"), ("EVAL_OUTPUT_DIR = '{here}/out'", *RESTORED)),
    "infer": Command(
        infer, ("models/tiny.gin", "runs/infer.gin"), ("INFER_OUTPUT_DIR = '{here}/out'", "NUM_EXAMPLES = 3", *RESTORED)
    ),
    "bench": Command(bench.benchmark, ("models/tiny.gin", "runs/bench.gin"), ("STEPS = 1", "ROUNDS = 1", CACHED)),
    "sweep": SweepCommand("sweeps/sqrt_lr.gin", ("Sweep.batch_sizes = [8, 16]", "Sweep.seeds = [0]")),
    **{
        name: Command(
            train.train, ("models/tiny.gin", "runs/pretrain.gin", EVERY), (f"OPTIMIZER = @optimizers.{name}", *TRAIN)
        )
        for name in OPTIMIZERS
    },
    "adafactor": Command(
        train.train, ("models/tiny.gin", "runs/pretrain.gin", "optimizers/adafactor.gin"), ("BATCH_SIZE = 8", *TRAIN)
    ),
    "dp": Command(
        train.train, ("models/tiny.gin", "runs/pretrain.gin", "optimizers/dp_adamw.gin"), ("NOISE_SEED = 1", *TRAIN)
    ),
    "lion": Command(train.train, ("models/tiny.gin", "runs/pretrain.gin", "optimizers/lion.gin"), TRAIN),
}


@functools.cache
def bindable(name: str) -> dict[str, Any]:
    """Every configurable, with its scope, that a command's Gin files bind or refer to: name -> what it wraps."""
    with tempfile.TemporaryDirectory() as folder:
        COMMANDS[name].configure(folder)
    found: dict[str, Any] = {}

    def add(scope: str, configurable: Any) -> None:
        if configurable.module != "gin":
            short = ".".join(configurable.selector.split(".")[-2:])
            found[f"{scope}/{short}" if scope else short] = configurable.wrapped

    def look(value: Any) -> None:
        if isinstance(value, gin.config.ConfigurableReference):
            add("/".join(value.scopes), value.configurable)
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
            look(item)

    for (scope, selector), bound in gin.config._CONFIG.items():
        add(scope, gin.config._REGISTRY[selector])
        look(list(bound.values()))
    if isinstance(COMMANDS[name], Command):
        add("", gin.config._REGISTRY["perex_t5x.data.tasks.register_all"])
        add("", gin.config._REGISTRY["perex_t5x.data.tasks.register_text_files"])
    fuzzing.forget_gin()
    return found


# Given by the commands themselves, or of Flax.
NOT_BOUND = ("dry_run", "dump_hlo", "profile_steps", "self", "parent")
# Of a run: not so long that nobody waits for it; and a folder outside of the example's own.
NOT_RUN = ("total_steps", "relative_steps", "steps", "rounds", "pause", "cache_dir", "path", "output_dir", "model_dir")


@functools.cache
def bindings_of(name: str, is_run: bool) -> st.SearchStrategy[str]:
    """Bindings of every argument that a command's Gin files can bind."""
    each = []
    for configurable, wrapped in bindable(name).items():
        hints = arguments.hints(wrapped)
        for argument in parameters(wrapped):
            if argument in NOT_BOUND or (is_run and argument in NOT_RUN):
                continue
            suiting = fuzzing.suiting(hints.get(argument))
            is_small = is_run or "layers" in argument  # a thousand layers take a minute to describe
            values = st.one_of(suiting, fuzzing.SMALL if is_small else fuzzing.ANYTHING)
            each.append(values.map(f"{configurable}.{argument} = {{}}".format))
    return st.one_of(each)


def bindings(is_run: bool = False) -> st.SearchStrategy[tuple[str, str]]:
    """(command, binding); commands are as frequent as they have arguments of their own."""
    commands = (
        ["train"] * 6
        + ["eval", "infer", "bench", "sweep", "pairs", "t5x_decoder", "pieces", "dp", "adafactor", "lion"]
        + OPTIMIZERS
    )
    chosen = [name for name in commands if COMMANDS[name].is_run or not is_run]
    return st.deferred(
        lambda: st.sampled_from(chosen).flatmap(lambda name: st.tuples(st.just(name), bindings_of(name, is_run)))
    )


def check_binding(name: str, binding: str, is_run: bool = False) -> None:
    """Ours are the only errors; and a configuration that a dry run has accepted runs, or diverges, but is not refused."""
    command = COMMANDS[name]
    # A folder that is fuzzed, MODEL_DIR itself, is one in the working directory.
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        contextlib.redirect_stdout(io.StringIO()) as said,
    ):

        def configure() -> None:
            command.configure(folder, binding)
            command.dry_run()

        if not fuzzing.refused(configure):
            assert "is fine" in said.getvalue()
            if is_run:
                with contextlib.suppress(DivergedError), fuzzing.ends():
                    command.run()


@example(("pieces", "seqio.SentencePieceVocabulary.sentencepiece_model_file = 'x'"))  # was accepted by a dry run
@example(("bench", "train/utils.DatasetConfig.feed = 'streaming'"))  # the same, and ended with a ValueError
@example(("bench", "bench_script.benchmark.steps = 0"))
@example(("eval", "models.T5Config.emb_dim = 64"))  # other shapes than the checkpoint's
@example(("infer", "models.T5Config.emb_dim = 64"))
@example(("eval", "utils.DatasetConfig.batch_size = 3"))
@fuzzing.few(40)
@given(bound=bindings())
def test_any_value_is_refused_in_our_words_or_accepted(bound):
    check_binding(*bound)


@pytest.mark.slow
@fuzzing.many(4000)
@given(bound=bindings())
def test_any_value_of_many_is_refused_in_our_words_or_accepted(bound):
    check_binding(*bound)


@pytest.mark.slow
@fuzzing.many(400)
@given(bound=bindings(is_run=True))
def test_nothing_that_a_dry_run_accepted_is_refused_later(bound):
    check_binding(*bound, is_run=True)


@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_field_that_the_evaluator_would_look_for_in_vain_is_found_by_a_dry_run(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    COMMANDS[command].configure(str(tmp_path), "seqio.Evaluator.target_field_name = 'target'")
    with pytest.raises(ConfigError, match="target_field_name = 'target': examples of .* Did you mean 'targets'"):
        COMMANDS[command].dry_run()
    COMMANDS[command].configure(str(tmp_path), "seqio.Evaluator.target_field_name = 'targets'")
    COMMANDS[command].dry_run()


# --- nothing is forgotten ---------------------------------------------------------------------------------------------


def test_every_configurable_of_the_shipped_files_is_fuzzed():
    """By the names that they bind or refer to: a Gin file with a new one needs a command above that reads it.

    Without their modules: Gin keeps what is in two modules under the one that some file has named first in this process.
    """
    covered = {short.rpartition(".")[2] for name in COMMANDS for short in bindable(name)}
    text = "".join(path.read_text() for path in Path(gin_utils.shipped_gin_dir()).rglob("*.gin"))
    text = re.sub(r"#.*", "", text)
    written = set(re.findall(r"@(?:\w+/)*(\w+\.\w+)", text)) | set(
        re.findall(r"^(?:\w+/)*([a-z]\w*\.\w+)[.:]", text, re.M)
    )
    assert len(written) > 20
    of_studies = {"preconditioner.adam_between", "clipping.batch_clipped"}
    missing = written - of_studies - {"seqio.PyLoggingLogger", "seqio.TensorBoardLogger"}
    assert not {name for name in missing if name.rpartition(".")[2] not in covered}


def test_every_public_configurable_with_defaults_is_fuzzed():
    """Of the modules whose names are for Gin alone, and of optimizers, whatever can be an OPTIMIZER."""
    covered = {short.rpartition("/")[2] for name in COMMANDS for short in bindable(name)}
    public = {f"utils.{name}" for name in utils.__all__} | {f"optimizers.{name}" for name in OPTIMIZERS}
    public |= {
        "bad_numbers.BadNumbers",
        "monitoring.Monitor",
        "trainer.Trainer",
        "sweep.Sweep",
        "models.EncoderDecoderModel",
    }
    assert sorted(public - covered) == []


@pytest.mark.parametrize("name", ["train", "pairs", "t5x_decoder", "pieces", "eval", "infer", "bench", "sweep", "dp"])
def test_commands_that_are_fuzzed_are_fine_as_they_are(name, tmp_path, capsys):
    """Else everything would be refused, whatever its value."""
    COMMANDS[name].configure(str(tmp_path))
    COMMANDS[name].dry_run()
    assert "is fine" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name,binding,message",
    [
        ("pieces", "VOCABULARY_FILE = 'x'", "sentencepiece_model_file = 'x': there is no such file"),
        ("bench", "train/utils.DatasetConfig.feed = 'streaming'", "the benchmark reads batches again"),
        ("bench", "STEPS = 0", "benchmark.steps = 0 .*at least 1"),
        ("eval", "models.T5Config.emb_dim = 64", "has other shapes"),
        ("infer", "models.T5Config.emb_dim = 64", "has other shapes"),
        ("t5x_decoder", "decoding.temperature_sample.topp = 0.5", "Set topk = 0"),
        ("t5x_decoder", "decoding.temperature_sample.topk = -1", "topk = -1"),
        ("eval", "seqio.Evaluator.logger_cls = ['x']", r"Evaluator.logger_cls = \['x'\] .*a class"),
    ],
)
def test_a_dry_run_finds_what_a_run_would_end_with(name, binding, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        COMMANDS[name].configure(str(tmp_path), binding)
        COMMANDS[name].dry_run()
