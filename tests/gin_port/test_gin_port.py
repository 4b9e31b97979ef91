"""Gin files of our own in T5X's style pass a dry run once ported; a line stays or is commented out with a reason."""

import json
import subprocess
import sys

import gin
import pytest

from perex_t5x import gin_utils
from perex_t5x import train as train_script
from perex_t5x.errors import ConfigError
from perex_t5x.gin_port import rules
from perex_t5x.gin_port.porting import Port, port_files
from tests import tiny

MODEL = """# A small decoder, as T5X says it.
from __gin__ import dynamic_registration

import seqio
from t5x import adafactor
from t5x import decoding
from t5x import models
from t5x.examples.decoder_only import network

Z_LOSS = 0.0001
DROPOUT_RATE = %gin.REQUIRED
VOCABULARY = @seqio.ByteVocabulary()

OPTIMIZER = @adafactor.Adafactor()
adafactor.Adafactor:
  decay_rate = 0.8
  step_offset = 0
  multiply_by_parameter_scale = True
  logical_factor_rules = @adafactor.standard_logical_factor_rules()

MODEL = @models.DecoderOnlyModel()
models.DecoderOnlyModel:
  module = @network.DecoderWrapper()
  vocabulary = %VOCABULARY
  optimizer_def = %OPTIMIZER
  decode_fn = @decoding.temperature_sample
  z_loss = %Z_LOSS

decoding.temperature_sample:
  temperature = 0.7
  topk = 40

network.DecoderWrapper.config = @network.TransformerConfig()
network.TransformerConfig:
  vocab_size = 384
  emb_dim = 32
  num_heads = 4
  num_layers = 2
  head_dim = 8
  mlp_dim = 64
  mlp_activations = ('gelu', 'linear')
  dropout_rate = %DROPOUT_RATE
  float32_attention_logits = True
"""

RUN = f"""# A run of it. The model's file uses names that this one has not imported.
include 'models/small.gin'
from __gin__ import dynamic_registration

import __main__ as train_script
import optax
from t5x import checkpoints
from t5x import export_lib
from t5x import optimizers
from t5x import partitioning as p
from t5x import trainer
from t5x import utils  # where most of it is

include "t5x/configs/runs/pretrain.gin"

MIXTURE_OR_TASK_NAME = '{tiny.TASK}'
MIXTURE_OR_TASK_MODULE = 'tests.tiny_tasks'
TASK_FEATURE_LENGTHS = {{
    'targets': 16,  # a value over several lines
}}
TRAIN_STEPS = 3
DROPOUT_RATE = 0.0
BATCH_SIZE = 16

OPTIMIZER = @optimizers.chain()
optimizers.chain.transformations = [@optax.clip(), @optimizers.adam()]  # clipped
optax.clip.max_delta = 1.0
optimizers.adam.b1 = 0.8
optimizers.adam:
  b2 = 0.98
  eps_root = 0.0

train_script.train:
  eval_period = 2
  random_seed = 0
  use_hardware_rng = True
  concurrent_metrics = False
  use_orbax = True
  gc_period = 10
  run_eval_before_training = True
  train_eval_get_dataset_fn = @utils.get_training_eval_datasets
  actions = {{'TRAIN_EVAL': [@trainer.TerminateOnNanAction(), @trainer.EarlyStoppingAction()]}}

trainer.TerminateOnNanAction.task = %MIXTURE_OR_TASK_NAME
trainer.EarlyStoppingAction:
  metric = (%MIXTURE_OR_TASK_NAME, 'accuracy')
  mode = 'max'
  patience = 5

utils.get_training_eval_datasets:
  deterministic = False

train/utils.DatasetConfig:
  use_memory_cache = True
  num_workers = 2

p.PjitPartitioner:
  num_partitions = 1
  params_on_devices = True
  backend = 'cpu'

trainer.Trainer.num_microbatches = 0

utils.SaveCheckpointConfig:
  period = 2
  keep = 1
  checkpoint_steps = [1, 3]
  keep_dataset_checkpoints = 2
  checkpointer_cls = @checkpoints.SaveBestCheckpointer
  no_such_argument = [1,
    2]
checkpoints.SaveBestCheckpointer:
  metric_name_to_monitor = 'train/accuracy'
  metric_mode = 'max'

export_lib.save.model_name = 'none'
"""


@pytest.fixture
def written(tmp_path):
    """The two files in a folder that looks like a project of T5X's."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "small.gin").write_text(MODEL)
    (tmp_path / "run.gin").write_text(RUN)
    return tmp_path


def dry_run(*files, bindings=("MODEL_DIR = '/nowhere/run'",)):
    gin.config._CONFIG_IS_LOCKED = False
    gin.clear_config(clear_constants=False)
    gin_utils.parse_gin_flags([], list(files), list(bindings))
    return gin_utils.call(train_script.train, dry_run=True)


def ported(folder, to):
    texts, notes = port_files([str(folder / "run.gin")], [], with_includes=True)
    texts = {name.rpartition("/")[2]: text for name, text in texts.items()}
    to.mkdir()
    for name, text in texts.items():
        (to / name).write_text(text)
    return texts, notes


def test_a_project_passes_a_dry_run(written, tmp_path):
    texts, notes = ported(written, tmp_path / "ported")
    assert set(texts) == {"run.gin", "models_small.gin"}
    step, shapes = dry_run(str(tmp_path / "ported" / "run.gin"), bindings=(f"MODEL_DIR = '{tmp_path}/model'",))
    assert step == 0 and any("ScaleByAdamState" in type(s).__name__ for s in shapes.opt_state[1])
    assert gin.query_parameter("utils.create_learning_rate_scheduler.factors") == "constant * rsqrt_decay"
    assert gin.query_parameter("optax.adam.b1") == 0.8 and gin.query_parameter("optax.adam.b2") == 0.98
    left_out = {note.text: note.reason for note in notes if note.what == "left out"}
    assert {text.split(" =")[0]: reason.split(";")[0] for text, reason in left_out.items()} == {
        "from t5x import export_lib": "there is no export to SavedModel",
        "export_lib.save.model_name": "there is no export to SavedModel",
        "train_eval_get_dataset_fn": "evaluations read their examples in a fixed order",
        "utils.get_training_eval_datasets:": "evaluations read their examples in a fixed order",
        "deterministic": "its block is left out",
        "no_such_argument": "perex_t5x.utils.SaveCheckpointConfig has no argument no_such_argument",
    }


def test_no_line_is_lost(written, tmp_path):
    """Every line is there: as it was, rewritten and listed, or commented out under its reason."""
    texts, notes = ported(written, tmp_path / "ported")
    for name, original in (("run.gin", RUN), ("models_small.gin", MODEL)):
        lines = texts[name].split("\n")
        changed = {note.line for note in notes if note.what == "rewritten" and note.file.endswith(name.split("_")[-1])}
        for number, line in enumerate(original.split("\n"), 1):
            assert (
                number in changed
                or line in lines
                or any(line.strip() == k.strip().removeprefix("#").strip() for k in lines)
            ), line
    text = texts["run.gin"]
    assert "from perex_t5x import utils  # where most of it is" in text
    assert "transformations = [@optax.clip(), @optax.adam()]  # clipped" in text
    assert "from perex_t5x import partitioning as p" in text
    assert "  # no_such_argument = [1,\n  #   2]" in text
    assert texts["run.gin"] == Port(texts["run.gin"], "run.gin", lambda path: None).run()  # nothing is left to be done


def test_names_that_a_file_does_not_import_are_imported():
    text = "# A size.\ninclude 't5x/examples/t5/t5_1_1/base.gin'\n\nnetwork.T5Config:\n  emb_dim = 8\n"
    assert Port(text, "tiny.gin", lambda path: None).run() == (
        "# A size.\nfrom __gin__ import dynamic_registration\n\nfrom perex_t5x.models import network\n\n"
        "include 'models/t5_1_1_base.gin'\ninclude 'from_t5x/model_defaults.gin'\n\nnetwork.T5Config:\n  emb_dim = 8\n"
    )
    scalable = Port(
        text.replace("examples/t5/t5_1_1", "examples/scalable_t5/t5_1_1"), "a.gin", lambda path: "found"
    ).run()
    assert "from perex_t5x.models import scalable_network as network" in scalable


def test_t5x_as_a_whole():
    text = (
        "import t5x\nimport t5x.utils\nt5x.utils.SaveCheckpointConfig.period = 3\nOPTIMIZER = @t5x.adafactor.Adafactor()\n"
        "t5x.export_lib.save.model_name = 'a'\n"
    )
    assert Port(text, "a.gin", lambda path: None).run() == (
        "import perex_t5x.optimizers.adafactor\nimport perex_t5x.utils\nimport perex_t5x.utils\n"
        "perex_t5x.utils.SaveCheckpointConfig.period = 3\nOPTIMIZER = @perex_t5x.optimizers.adafactor.Adafactor()\n"
        "# gin_port: this module of T5X's has no counterpart.\n# t5x.export_lib.save.model_name = 'a'\n"
    )


def test_what_main_is(written):
    for line, module in (
        ("s.evaluate.model = 1", "eval"),
        ("s.infer:\n  mode = 'score'", "infer"),
        ("s.train.model = 1", "train"),
    ):
        assert (
            f"from perex_t5x import {module} as s"
            in Port(f"import __main__ as s\n{line}\n", "a.gin", lambda p: None).run()
        )
    port = Port("import __main__ as s\ns.precompile.model = 1\n", "a.gin", lambda p: None)
    assert all(line.startswith("#") for line in port.run().splitlines()) and "preflight" in port.notes[0].reason


@pytest.mark.parametrize(
    "text, message",
    [
        ("a.b = (1,\n", "line"),
        ("what is this\n", "line 1: cannot be read as Gin"),
        ("  a = 1\n", "line 1: "),
    ],
)
def test_what_is_no_gin(text, message):
    with pytest.raises(ConfigError, match=message):
        Port(text, "a.gin", lambda path: None)


def test_every_file_that_stands_for_one_of_t5x_is_shipped():
    paths = [f"t5x/configs/runs/{name}.gin" for name in ("pretrain", "finetune", "eval", "infer")]
    paths += [f"t5x/examples/t5/{family}/{size}.gin" for family, sizes in rules.SIZES.items() for size in sizes]
    paths += [f"t5x/examples/decoder_only/models/{size}.gin" for size in ("base", "large", "xl", "xxl")]
    for path in paths:
        shipped = rules.shipped_includes(path)
        assert shipped, path
        for name in shipped:
            gin_utils.find_file(name, [gin_utils.shipped_gin_dir()], "here")


def test_files_of_t5x_that_need_not_be_ported_are_named(tmp_path):
    file = tmp_path / "t5x" / "configs" / "runs" / "eval.gin"
    file.parent.mkdir(parents=True)
    file.write_text("MIXTURE_OR_TASK_NAME = %gin.REQUIRED\n")
    (note,) = port_files([str(file)], [], with_includes=False)[1]
    assert (note.what, note.text) == ("note", "--gin_file=from_t5x/eval.gin")


def test_the_command(written, tmp_path):
    def run(*flags):
        command = [sys.executable, "-m", "perex_t5x.gin_port", *flags]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)

    done = run("run.gin", "--in_place", "--report=report.json")
    assert done.returncode == 1 and "6 left out" in done.stderr and not done.stdout
    notes = json.loads((tmp_path / "report.json").read_text())["notes"]
    assert {"file": "run.gin", "line": 4, "what": "rewritten"}.items() <= notes[0].items() or notes
    assert (tmp_path / "run.gin").read_text().startswith("# A run of it.")
    missing = run("no.gin")
    assert missing.returncode == 2 and "no.gin: cannot be read" in missing.stderr
