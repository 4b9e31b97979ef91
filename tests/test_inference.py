"""The eval and infer commands' functions on a trained tiny run."""

import json

import gin
import pytest

from perex_t5x import eval as eval_script
from perex_t5x import gin_utils, infer
from perex_t5x.errors import ConfigError
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
    results = evaluate(run, tmp_path, "utils.RestoreCheckpointConfig.mode = 'all'")
    assert sorted(results) == [2, 4]
    scores = {step: next(iter(result.values())) for step, result in results.items()}
    assert all(v < 0 for s in scores.values() for k, v in s.items() if "likelihood" in k)
    rows = [json.loads(line) for line in open(tmp_path / "metrics.jsonl", encoding="utf-8")]
    assert [row["step"] for row in rows] == [2, 4]
    assert any(p.suffix == ".jsonl" and p.name != "metrics.jsonl" for p in tmp_path.rglob("*"))


def test_scores_do_not_depend_on_the_batch_size(run, tmp_path):
    a = predict(run, tmp_path / "a", "infer_script.infer.mode = 'score'")
    b = predict(run, tmp_path / "b", "infer_script.infer.mode = 'score'", "BATCH_SIZE = 8", "NUM_EXAMPLES = 20")
    assert len(b) == 20 and len(a) > 20
    for x, y in zip(a, b, strict=False):
        assert x["targets"] == y["targets"]
        assert x["score"] == pytest.approx(y["score"], rel=1e-4)


def test_predictions_by_each_method(run, tmp_path):
    few = ("NUM_EXAMPLES = 3", "BATCH_SIZE = 8")
    greedy = predict(run, tmp_path / "a", *few)
    beam = predict(
        run,
        tmp_path / "b",
        *few,
        "DECODE_METHOD = 'beam'",
        "NUM_DECODES = 2",
        "infer_script.infer.mode = 'predict_with_aux'",
    )
    sample = predict(run, tmp_path / "c", *few, "DECODE_METHOD = 'temperature'", "TOP_K = 5")
    again = predict(run, tmp_path / "d", *few, "DECODE_METHOD = 'temperature'", "TOP_K = 5")
    assert [r["index"] for r in greedy] == [0, 1, 2] and isinstance(greedy[0]["prediction"], str)
    assert all(r["score"] < 0 for r in beam)
    assert sample == again


def test_prompts_are_continued(run, tmp_path):
    """A task with inputs: the prediction is what follows them, and greedy does not look at the targets."""
    task = ("MIXTURE_OR_TASK_NAME = 'python_stdlib_continuation'", "NUM_EXAMPLES = 8", "BATCH_SIZE = 8")
    short = predict(run, tmp_path / "a", *task, "TASK_FEATURE_LENGTHS = {'inputs': 8, 'targets': 4}")
    long = predict(run, tmp_path / "b", *task, "TASK_FEATURE_LENGTHS = {'inputs': 8, 'targets': 8}")
    for x, y in zip(short, long, strict=True):
        assert len(x["inputs"]) == 8 and x["inputs"] == y["inputs"] and y["targets"].startswith(x["targets"])
        assert y["prediction"].startswith(x["prediction"]) and len(x["prediction"]) <= 5
    with pytest.raises(ConfigError, match="no length for 'inputs'"):
        predict(run, tmp_path / "c", *task, "TASK_FEATURE_LENGTHS = {'targets': 8}")


@pytest.mark.parametrize(
    "bindings,message",
    [
        (["infer_script.infer.mode = 'predcit'"], "infer.mode = 'predcit'.*Did you mean 'predict'"),
        (["DECODE_METHOD = 'gredy'"], "Did you mean 'greedy'"),
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
    ("num_decodes = 4", "predict_batch_with_aux: decode_method 'greedy' has one result: use 'beam'"),
    ("decode_method = 'bean'", "predict_batch_with_aux: decode_method: unknown 'bean'. Did you mean 'beam'"),
    ("alpha = -1.0", "predict_batch_with_aux: alpha = -1.0: must not be negative"),
    ("max_decode_len = 0", "predict_batch_with_aux: max_decode_len = 0: must be at least 1"),
    ("return_all_decodes = True", "gives arrays of 3 and 2 dimensions.* Is return_all_decodes bound"),
]


def dry_run(command, run, output, *bindings):
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
        return gin_utils.call(train.train, dry_run=True)
    name, function = {"eval": ("EVAL", eval_script.evaluate), "infer": ("INFER", infer.infer)}[command]
    own = (f"CHECKPOINT_PATH = '{run}'", f"{name}_OUTPUT_DIR = '{output}'")
    configure(f"runs/{command}.gin", *own, *PREDICTED, *bindings)
    return gin_utils.call(function, dry_run=True)


@pytest.mark.parametrize(("binding", "message"), REFUSED)
def test_a_dry_run_of_training_refuses_what_its_evaluation_would(binding, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        dry_run("train", None, tmp_path, f"{METHOD}.{binding}")


def test_dry_runs_of_evaluation_and_inference_do_too(run, tmp_path):
    for binding, message in (REFUSED[0], REFUSED[-1]):
        with pytest.raises(ConfigError, match=message):
            dry_run("eval", run, tmp_path, f"{METHOD}.{binding}")
    for binding, message in (REFUSED[3], REFUSED[-1]):  # the other arguments are those of `infer`
        with pytest.raises(ConfigError, match=message):
            dry_run("infer", run, tmp_path, f"{METHOD}.{binding}")


def test_what_a_dry_run_accepts_evaluates(run, tmp_path, capsys):
    """Beams and samples, too: the evaluation has keys to draw with."""
    for n, bindings in enumerate(
        [
            (f"{METHOD}.decode_method = 'beam'", f"{METHOD}.num_decodes = 2"),
            (f"{METHOD}.decode_method = 'temperature'", f"{METHOD}.num_decodes = 2", f"{METHOD}.top_k = 3"),
        ]
    ):
        dry_run("train", None, tmp_path / f"t{n}", *bindings)
        dry_run("eval", run, tmp_path / f"e{n}", *bindings)
    assert list(evaluate(run, tmp_path / "samples", *PREDICTED, *bindings)) == [4]
    assert capsys.readouterr().out.count("the configuration is fine") == 4
