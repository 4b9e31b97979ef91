"""The eval and infer commands' functions on a trained tiny run."""

import json
import os

import gin
import pytest
import tensorflow as tf

from perex_t5x import eval as eval_script
from perex_t5x import gin_utils, infer
from perex_t5x.errors import ConfigError
from perex_t5x.inference import BatchRunner
from tests import tiny


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    model_dir = tmp_path_factory.mktemp("run")
    tiny.train(model_dir, "TRAIN_STEPS = 4", "utils.SaveCheckpointConfig.period = 2")
    return model_dir


def configure(file, *bindings):
    gin.config._CONFIG_IS_LOCKED = False
    gin.clear_config(clear_constants=False)
    sizes = [b for b in tiny.BINDINGS if b.startswith(("models.", "MIXTURE", "TASK_FEATURE"))]
    gin_utils.parse_gin_flags([], ["models/tiny.gin", file], [*sizes, "BATCH_SIZE = 16", *bindings])


def evaluate(run, output, *bindings):
    configure("runs/eval.gin", f"CHECKPOINT_PATH = '{run}'", f"EVAL_OUTPUT_DIR = '{output}'", *bindings)
    return gin.get_configurable(eval_script.evaluate)()


def predict(run, output, *bindings):
    configure("runs/infer.gin", f"CHECKPOINT_PATH = '{run}'", f"INFER_OUTPUT_DIR = '{output}'", *bindings)
    (path,) = gin.get_configurable(infer.infer)()
    return [json.loads(line) for line in open(path, encoding="utf-8")]


def test_eval_scores_every_checkpoint_asked_for(run, tmp_path):
    forced = (
        "eval_script.evaluate.training_evaluator_cls = @trainer.Trainer",
        "trainer.Trainer.learning_rate_fn = 0.0",
    )
    results = evaluate(run, tmp_path, "utils.RestoreCheckpointConfig.mode = 'all'", *forced)
    assert sorted(results) == [2, 4]
    losses = [results[step].pop(f"training_eval/{tiny.TASK}")["loss_per_nonpadding_target_token"] for step in (2, 4)]
    assert losses[1] < losses[0] < 7
    scores = {step: next(iter(result.values())) for step, result in results.items()}
    assert all(v < 0 for s in scores.values() for k, v in s.items() if "likelihood" in k)
    rows = [json.loads(line) for line in open(tmp_path / "metrics.jsonl", encoding="utf-8")]
    assert [row["step"] for row in rows] == [2, 2, 4, 4]
    assert any(p.suffix == ".jsonl" and p.name != "metrics.jsonl" for p in tmp_path.rglob("*"))


@pytest.mark.parametrize("mode", ["specific", "latest"])
def test_a_checkpoint_is_named_from_the_working_directory(run, tmp_path, monkeypatch, mode):
    monkeypatch.chdir(run.parent)
    name = f"{run.name}/checkpoint_4" if mode == "specific" else run.name
    bindings = (
        "infer_script.infer.mode = 'score'",
        "NUM_EXAMPLES = 2",
        f"utils.RestoreCheckpointConfig.mode = '{mode}'",
    )
    assert len(predict(name, tmp_path, *bindings)) == 2


def test_scores_do_not_depend_on_the_batch_size(run, tmp_path):
    a = predict(run, tmp_path / "a", "infer_script.infer.mode = 'score'")
    b = predict(run, tmp_path / "b", "infer_script.infer.mode = 'score'", "BATCH_SIZE = 8", "NUM_EXAMPLES = 20")
    assert len(b) == 20 and len(a) > 20
    for x, y in zip(a, b, strict=False):
        assert x["inputs"] == y["inputs"]
        assert x["score"] == pytest.approx(y["score"], rel=1e-4)


def test_predictions_by_each_method(run, tmp_path):
    few = ("NUM_EXAMPLES = 3", "BATCH_SIZE = 8")
    greedy = predict(run, tmp_path / "a", *few)
    aux = "infer_script.infer.mode = 'predict_with_aux'"
    two = (f"{METHOD}.num_decodes = 2", f"{METHOD}.return_all_decodes = True")
    beam = predict(run, tmp_path / "b", *few, *two, aux, "models.DecoderOnlyModel.decode_fn = @decoding.beam_search")
    samples = ("decoding.temperature_sample.topk = 5", "decoding.temperature_sample.temperature = 2.0")
    sample = predict(run, tmp_path / "c", *few, *samples, aux)
    again = predict(run, tmp_path / "d", *few, *samples, aux)
    assert len(greedy) == 3 and list(greedy[0]) == ["inputs", "prediction"]
    assert isinstance(greedy[0]["prediction"], str) and greedy[0]["inputs"]["targets_pretokenized"]
    assert all(len(r["prediction"]) == 2 and max(r["aux"]["scores"]) < 0 for r in beam)
    assert sample == again and all(r["aux"]["scores"] < 0 for r in sample)


def infer_into(folder, run, *bindings):
    configure(
        "runs/infer.gin", f"CHECKPOINT_PATH = '{run}'", f"INFER_OUTPUT_DIR = '{folder}'", "BATCH_SIZE = 8", *bindings
    )
    return gin.get_configurable(infer.infer)()


SCORE = "infer_script.infer.mode = 'score'"
EVERY_TWO = (SCORE, "NUM_EXAMPLES = 40", "CHECKPOINT_PERIOD = 2")  # chunks of 16, 16 and 8


def test_an_inference_that_was_killed_goes_on_where_it_was(run, tmp_path, monkeypatch):
    (whole,) = infer_into(tmp_path / "whole", run, *EVERY_TWO)
    assert os.path.basename(whole) == f"{tiny.TASK}-score.jsonl-00000-of-00001"
    assert sorted(os.listdir(tmp_path / "whole")) == [
        "config.gin", os.path.basename(whole), os.path.basename(whole) + ".COMPLETED",
    ]  # fmt: skip
    wanted = open(whole, encoding="utf-8").read()
    assert len(wanted.splitlines()) == 40
    computed = []
    original = BatchRunner._run

    def counted(self, params, items):
        computed.append(items[0][0])
        if len(computed) == 4:
            raise KeyboardInterrupt
        return original(self, params, items)

    monkeypatch.setattr(BatchRunner, "_run", counted)
    with pytest.raises(KeyboardInterrupt):
        infer_into(tmp_path / "killed", run, *EVERY_TWO)
    with pytest.raises(ConfigError, match="some results of another inference: examples per chunk was 16, and is 24"):
        infer_into(tmp_path / "killed", run, *EVERY_TWO, "CHECKPOINT_PERIOD = 3")
    (path,) = infer_into(tmp_path / "killed", run, *EVERY_TWO)
    assert computed == [0, 8, 16, 24, 16, 24, 32]
    assert open(path, encoding="utf-8").read() == wanted
    infer_into(tmp_path / "killed", run, *EVERY_TWO)  # complete
    assert len(computed) == 7
    with pytest.raises(ConfigError, match="results of another inference: num_examples was 40, and is 8"):
        infer_into(tmp_path / "killed", run, *EVERY_TWO, "NUM_EXAMPLES = 8")


@pytest.mark.slow
def test_shards_are_the_whole_and_chunks_may_stay_apart(run, tmp_path):
    every = [json.loads(line) for line in open(infer_into(tmp_path, run, SCORE)[0], encoding="utf-8")]
    rows = []
    for shard in (0, 1):
        (path,) = infer_into(tmp_path, run, SCORE, "NUM_SHARDS = 2", f"SHARD_ID = {shard}")
        assert path.endswith(f"{tiny.TASK}-score.jsonl-0000{shard}-of-00002")
        rows.append([json.loads(line) for line in open(path, encoding="utf-8")])
    assert len(rows[0]) > 10 and len(rows[1]) > 10
    key = lambda row: (row["inputs"]["targets_pretokenized"], row["score"])  # noqa: E731
    joined = sorted(map(key, rows[0] + rows[1]))
    assert [x for x, _ in joined] == sorted(x for x, _ in map(key, every))
    assert [x for _, x in joined] == pytest.approx([x for _, x in sorted(map(key, every))], rel=1e-4)
    apart = ("infer_script.infer.merge_chunked_results = False", "infer_script.infer.file_extension = 'json'")
    (folder,) = infer_into(tmp_path / "apart", run, *EVERY_TWO, *apart)
    chunks = sorted(name for name in os.listdir(folder) if "chunk" in name and not name.endswith("COMPLETED"))
    assert chunks == [f"{tiny.TASK}-score.json-00000-of-00001-chunk0000{n}" for n in range(3)]
    with pytest.raises(ConfigError, match="shard_id = 2: must be below infer.num_shards = 2"):
        infer_into(tmp_path, run, "NUM_SHARDS = 2", "SHARD_ID = 2")


def test_fields_are_chosen_and_written_by_ones_own_function(run, tmp_path):
    ids = ("write_inferences_to_file.output_ids = True", "write_inferences_to_file.include_all_inputs = True")
    own = "infer_script.infer.write_fn = @infer_script.write_inferences_to_file"
    (row,) = predict(run, tmp_path, "NUM_EXAMPLES = 1", "BATCH_SIZE = 8", own, *(f"infer_script.{x}" for x in ids))
    assert 0 not in row["prediction_tokens"] and set(row["inputs"]) == {"targets", "targets_pretokenized"}
    with pytest.raises(ConfigError, match="output_vocab_feature_name = 'target'"):
        predict(run, tmp_path / "b", "infer_script.infer.output_vocab_feature_name = 'target'")


TFEXAMPLES = """
from __gin__ import dynamic_registration
import seqio
from perex_t5x import infer as infer_script
from perex_t5x import models
from perex_t5x import utils
include 'models/tiny.gin'
include 'runs/infer.gin'
MIXTURE_OR_TASK_NAME = @infer_script.create_task_from_tfexample_file()
MIXTURE_OR_TASK_MODULE = None
MIXTURE_OR_TASK_SPLIT = 'infer'
TASK_FEATURE_LENGTHS = {'inputs': 8, 'targets': 4}
BATCH_SIZE = 8
infer_script.create_task_from_tfexample_file:
  paths = %PATHS
  file_type = 'tfrecord'
  inputs_key = 'question'
  targets_key = None
  features = {'inputs': @inputs/seqio.Feature(), 'targets': @outputs/seqio.Feature()}
inputs/seqio.Feature.vocabulary = @models.get_input_vocabulary()
models.get_input_vocabulary.model = %MODEL
outputs/seqio.Feature.vocabulary = @models.get_output_vocabulary()
models.get_output_vocabulary.model = %MODEL
"""


def test_a_file_of_examples_is_a_task(run, tmp_path):
    """As T5X's runs/infer_from_tfexample_file.gin has it."""
    with tf.io.TFRecordWriter(str(tmp_path / "a.tfrecord")) as writer:
        for text in (b"one", b"two"):
            feature = {"question": tf.train.Feature(bytes_list=tf.train.BytesList(value=[text]))}
            writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
    (tmp_path / "file.gin").write_text(f"PATHS = '{tmp_path}/*.tfrecord'\n" + TFEXAMPLES)
    gin.config._CONFIG_IS_LOCKED = False
    gin.clear_config(clear_constants=False)
    sizes = [b for b in tiny.BINDINGS if b.startswith("models.")]
    given = [f"CHECKPOINT_PATH = '{run}'", f"INFER_OUTPUT_DIR = '{tmp_path}/out'"]
    gin_utils.parse_gin_flags([], [str(tmp_path / "file.gin")], [*sizes, *given])
    (path,) = gin.get_configurable(infer.infer)()
    rows = [json.loads(line) for line in open(path, encoding="utf-8")]
    assert [row["inputs"]["inputs_pretokenized"] for row in rows] == ["one", "two"]
    assert all(isinstance(row["prediction"], str) for row in rows)


@pytest.mark.slow
def test_parameters_that_the_checkpoint_lacks_may_be_drawn(run, tmp_path):
    lacking = "utils.RestoreCheckpointConfig.assignment_map = [('.*/logits_dense/.*', None)]"
    few = ("NUM_EXAMPLES = 1", "BATCH_SIZE = 8", SCORE)
    with pytest.raises(ConfigError, match="gives no value for target/decoder/logits_dense/kernel"):
        predict(run, tmp_path / "a", *few, lacking)
    seeds = [f"infer_script.infer.fallback_init_rng = {seed}" for seed in (0, 0, 1)]
    scores = [predict(run, tmp_path / f"b{n}", *few, lacking, seed)[0]["score"] for n, seed in enumerate(seeds)]
    assert len(set(scores)) == 2


def test_prompts_are_continued(run, tmp_path):
    """A task with inputs: the prediction is what follows them, and greedy does not look at the targets."""
    task = ("MIXTURE_OR_TASK_NAME = 'python_stdlib_continuation'", "NUM_EXAMPLES = 8", "BATCH_SIZE = 8")
    short = predict(run, tmp_path / "a", *task, "TASK_FEATURE_LENGTHS = {'inputs': 8, 'targets': 4}")
    long = predict(run, tmp_path / "b", *task, "TASK_FEATURE_LENGTHS = {'inputs': 8, 'targets': 8}")
    for x, y in zip(short, long, strict=True):
        (x_in, x_out), (y_in, y_out) = (
            [r["inputs"][f"{f}_pretokenized"] for f in ("inputs", "targets")] for r in (x, y)
        )
        assert len(x_in) == 8 and x_in == y_in and y_out.startswith(x_out)
        assert y["prediction"].startswith(x["prediction"]) and len(x["prediction"]) <= 5
    with pytest.raises(ConfigError, match="no length for 'inputs'"):
        predict(run, tmp_path / "c", *task, "TASK_FEATURE_LENGTHS = {'targets': 8}")


@pytest.mark.parametrize(
    "bindings,message",
    [
        (["infer_script.infer.mode = 'predcit'"], "infer.mode = 'predcit'.*Did you mean 'predict'"),
        (["decoding.temperature_sample.topp = 0.5"], "Set topk = 0"),
        (["CHECKPOINT_PATH = 'nowhere'"], "this path does not exist"),
        (["BATCH_SIZE = 12"], "not divisible by the 8 data shards"),
        (["MIXTURE_OR_TASK_SPLIT = 'test'"], "test"),
        (["models.T5Config.emb_dim = 64"], r"other shapes.*checkpoint \(32"),
    ],
)
def test_bad_input(run, tmp_path, bindings, message):
    with pytest.raises(ConfigError, match=message):
        predict(run, tmp_path, *bindings)


# --- what is bound to the model's own methods -------------------------------------------------------------------------

PREDICTED = (f"MIXTURE_OR_TASK_NAME = '{tiny.PREDICTED_TASK}'", "TASK_FEATURE_LENGTHS = {'inputs': 8, 'targets': 4}")
METHOD = "models.DecoderOnlyModel.predict_batch_with_aux"
REFUSED = [
    ("num_decodes = 0", "num_decodes = 0"),
    (
        "decoder_params = {'topq': 1}",
        "predict_batch_with_aux: decoder_params: temperature_sample takes no 'topq'. Did you",
    ),
    ("decoder_params = {'topp': 0.5}", "predict_batch_with_aux: .*topp = 0.5 and topk = 1: only one .* Set topk = 0"),
    ("max_decode_len = 0", "max_decode_len = 0"),
    ("return_all_decodes = True", "gives arrays of 3 and 2 dimensions.* Is return_all_decodes bound"),
]


def dry_run(command, run, output, *bindings, **given):
    """Of a training with a decoding evaluation, of an evaluation, or of an inference."""
    if command == "train":
        from perex_t5x import train

        evaluation = [
            "train_script.train.infer_eval_dataset_cfg = @infer_eval/utils.DatasetConfig()",
            f"infer_eval/utils.DatasetConfig.mixture_or_task_name = '{tiny.PREDICTED_TASK}'",
            "infer_eval/utils.DatasetConfig.task_feature_lengths = {'inputs': 8, 'targets': 4}",
            "infer_eval/utils.DatasetConfig.split = 'validation'",
            "infer_eval/utils.DatasetConfig.batch_size = 16",
            "infer_eval/utils.DatasetConfig.shuffle = False",
            "infer_eval/utils.DatasetConfig.seed = 42",
        ]
        tiny.configure(f"MODEL_DIR = '{output}'", "TRAIN_STEPS = 1", *evaluation, *bindings)
        return gin_utils.call(train.train, dry_run=True, **given)
    name, function = {"eval": ("EVAL", eval_script.evaluate), "infer": ("INFER", infer.infer)}[command]
    own = (f"CHECKPOINT_PATH = '{run}'", f"{name}_OUTPUT_DIR = '{output}'")
    configure(f"runs/{command}.gin", *own, *PREDICTED, *bindings)
    return gin_utils.call(function, dry_run=True)


@pytest.mark.parametrize(("binding", "message"), REFUSED)
def test_a_dry_run_of_training_refuses_what_its_evaluation_would(binding, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        dry_run("train", None, tmp_path, f"{METHOD}.{binding}")


@pytest.mark.parametrize(
    ("binding", "message"),
    [
        (
            "seqio.Evaluator.logger_cls = [@seqio.JSONLogger()]",
            r"if JSONLogger itself is needed there, leave the paren",
        ),
        ("models.DecoderOnlyModel.decode_fn = @decoding.beam_search()", "if beam_search itself is needed there, leave"),
    ],
)
def test_a_function_that_is_called_too_early_is_found(binding, message, tmp_path):
    evaluator = "train_script.train.inference_evaluator_cls = @seqio.Evaluator"
    with pytest.raises(ConfigError, match=message):
        dry_run("train", None, tmp_path, evaluator, binding)


def test_dry_runs_of_evaluation_and_inference_do_too(run, tmp_path):
    for binding, message in (REFUSED[0], REFUSED[-1]):
        with pytest.raises(ConfigError, match=message):
            dry_run("eval", run, tmp_path, f"{METHOD}.{binding}")
    for binding, message in (REFUSED[1], REFUSED[2]):
        with pytest.raises(ConfigError, match=message):
            dry_run("infer", run, tmp_path, f"{METHOD}.{binding}")


@pytest.mark.parametrize("command", ["eval", "infer"])
def test_a_task_of_another_vocabulary_is_refused(command, run, tmp_path):
    """Its predictions would be decoded wrongly without a word."""
    (tmp_path / "a.model").touch()  # is not read
    file = f"seqio.SentencePieceVocabulary.sentencepiece_model_file = '{tmp_path}/a.model'"
    with pytest.raises(ConfigError, match=r"with ByteVocabulary.*, but the model's VOCABULARY is SentencePiece"):
        dry_run(command, run, tmp_path, file, "VOCABULARY = @seqio.SentencePieceVocabulary()")


def test_the_vocabularies_of_each_evaluation_are_compared(tmp_path):
    compared = []
    dry_run("train", None, tmp_path, verify_matching_vocabs_fn=lambda config, _: compared.append(config))
    assert [config.mixture_or_task_name for config in compared] == [tiny.TASK, tiny.TASK, tiny.PREDICTED_TASK]


def test_a_number_of_decodes_that_models_do_not_use_is_said(tmp_path, caplog):
    dry_run("train", None, tmp_path, "models.DecoderOnlyModel.decode_fn = @decoding.beam_search")
    assert "not used" not in caplog.text
    for decode_fn in ("beam_search", "temperature_sample"):  # one that is named, and the default
        bindings = [f"decoding.{decode_fn}.num_decodes = 3"]
        if decode_fn == "beam_search":
            bindings.append("models.DecoderOnlyModel.decode_fn = @decoding.beam_search")
        dry_run("train", None, tmp_path, *bindings)
        assert f"{decode_fn}.num_decodes is not used, since the model gives its own: bind predict" in caplog.text


def test_what_a_dry_run_accepts_evaluates(run, tmp_path, capsys):
    """Beams and samples, too: the evaluation has keys to draw with."""
    for n, bindings in enumerate(
        [
            ("models.DecoderOnlyModel.decode_fn = @decoding.beam_search", f"{METHOD}.num_decodes = 2"),
            (f"{METHOD}.num_decodes = 2", f"{METHOD}.decoder_params = {{'topk': 3}}"),
        ]
    ):
        dry_run("train", None, tmp_path / f"t{n}", *bindings)
        dry_run("eval", run, tmp_path / f"e{n}", *bindings)
    assert list(evaluate(run, tmp_path / "samples", *PREDICTED, *bindings)) == [4]
    assert capsys.readouterr().out.count("the configuration is fine") == 4
