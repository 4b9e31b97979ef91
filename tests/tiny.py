"""A tiny task and a tiny model for whole-run tests: 60 documents of uneven length, a decoder of width 32."""

from __future__ import annotations

import gin
import jax.numpy as jnp
import numpy as np
import optax

from perex_t5x import gin_utils

TASK = "uneven_documents_lm"
PAIRS_TASK = "uneven_pairs"  # the same with inputs, for encoder-decoder models
PREDICTED_TASK = "uneven_predictions"  # the same, evaluated by predictions
LENGTH = 16

BINDINGS = (
    "models.T5Config.emb_dim = 32",
    "models.T5Config.num_heads = 4",
    "models.T5Config.head_dim = 8",
    "models.T5Config.mlp_dim = 64",
    f"MIXTURE_OR_TASK_NAME = '{TASK}'",
    "MIXTURE_OR_TASK_MODULE = 'tests.tiny_tasks'",
    f"TASK_FEATURE_LENGTHS = {{'targets': {LENGTH}}}",
    "BATCH_SIZE = 16",
    "RANDOM_SEED = 7",
    "train/utils.DatasetConfig.seed = 3",
    "train/utils.DatasetConfig.feed = 'cached'",
    "train_eval/utils.DatasetConfig.feed = 'cached'",
    "WARMUP_STEPS = 5",
    "EVAL_PERIOD = 1000",
    "EVAL_STEPS = 2",
)


# The schedule has a floor of its own.
RATE_0 = ("BASE_LEARNING_RATE = 0.0", "utils.create_learning_rate_scheduler.min_learning_rate = 0.0")


def configure(*bindings: str, files=("models/tiny.gin", "runs/pretrain.gin")) -> None:
    """Parses the shipped files with the tiny sizes, then `bindings`."""
    gin.config._CONFIG_IS_LOCKED = False
    gin.clear_config(clear_constants=False)
    gin_utils.parse_gin_flags([], list(files), [*BINDINGS, *bindings])


def train(model_dir, *bindings: str, files=("models/tiny.gin", "runs/pretrain.gin")):
    """Runs `perex_t5x.train.train` under Gin; returns (last step, state)."""
    from perex_t5x import train as train_script

    configure(f"MODEL_DIR = '{model_dir}'", *bindings, files=files)
    return gin_utils.call(train_script.train)


def losses(model_dir) -> dict[int, float]:
    """Step -> training loss, from metrics.jsonl."""
    import json

    rows = [json.loads(line) for line in open(f"{model_dir}/metrics.jsonl", encoding="utf-8")]
    return {row["step"]: row["loss"] for row in rows if row["name"] == "train" and "loss" in row}


def overflowing(learning_rate) -> optax.GradientTransformation:
    """SGD that also keeps something huge: it leaves float32 in the second step, while the parameters stay as they should."""
    sgd = optax.sgd(learning_rate)

    def init(params):
        return sgd.init(params), jnp.ones(2), jnp.array(np.inf)

    def update(updates, state, params=None):
        updates, inner = sgd.update(updates, state[0], params)
        return updates, (inner, state[1] * 1e30, state[2])

    return optax.GradientTransformation(init, update)


def random_batch(batch_size: int, length: int = LENGTH, seed: int = 0) -> dict[str, np.ndarray]:
    """A packed batch whose rows differ in their number of tokens."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(3, 250, (batch_size, length)).astype(np.int32)
    kept = rng.integers(2, length + 1, batch_size)
    mask = np.arange(length)[None, :] < kept[:, None]
    targets = np.where(mask, tokens, 0)
    inputs = np.pad(targets[:, :-1], ((0, 0), (1, 0)))
    return {
        "decoder_input_tokens": inputs,
        "decoder_target_tokens": targets,
        "decoder_loss_weights": mask.astype(np.int32),
        "decoder_segment_ids": mask.astype(np.int32),
        "decoder_positions": np.where(mask, np.arange(length, dtype=np.int32)[None, :], 0),
    }
