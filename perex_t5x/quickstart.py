"""The first run: train `runs/quickstart.gin`, then say what happened, what to look at and what to try next."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np


def fresh_model_dir(parent: str = "runs") -> str:
    """runs/quickstart, or the first of runs/quickstart-2, -3, ... that does not exist yet."""
    n = 1
    while os.path.exists(path := os.path.join(parent, "quickstart" + (f"-{n}" if n > 1 else ""))):
        n += 1
    return path


def unigram_entropy(tokens: np.ndarray) -> float:
    """H = −Σ p log p in nats, with p the frequencies of the tokens; padding (0) does not count.

    >>> round(unigram_entropy(np.array([1, 1, 2, 2, 0])), 4)
    0.6931
    """
    counts = np.bincount(tokens[tokens > 0])
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def validation_losses(model_dir: str) -> list[tuple[int, float]]:
    """(step, nats per token) of every evaluation, from the run's metrics."""
    from perex_t5x.metrics import read_rows

    return [
        (row["step"], row["loss_per_nonpadding_target_token"])
        for row in read_rows(model_dir)
        if row["name"].startswith("training_eval/")
    ]


def last_noise_scale(model_dir: str) -> float | None:
    """The smoothed noise scale of the last measurement; None if nothing was measured."""
    from perex_t5x.metrics import read_rows

    name = "per_example/noise_scale_smoothed/all"
    found = [float(row[name]) for row in read_rows(model_dir) if name in row]  # infinity is a string in JSON
    return found[-1] if found else None


def _dataset_config(scope: str) -> Any:
    """`train` or `train_eval` of the configuration that Gin holds."""
    import gin

    from perex_t5x import utils

    with gin.config_scope(scope):
        return gin.get_configurable(utils.DatasetConfig)()


def _validation_tokens() -> np.ndarray:
    """The tokens the run was evaluated on."""
    import seqio

    from perex_t5x.data.feed import make_feed

    feed = make_feed(_dataset_config("train_eval"), seqio.DecoderFeatureConverter, pad_remainder=True, repeat=False)
    return np.concatenate([batch["decoder_target_tokens"].ravel() for batch in feed.epoch()])


def signal_and_noise(noise_scale: float | None, batch_size: int) -> str:
    """Two lines on what SNR and noise scale mean, with a run's numbers.

    >>> print(signal_and_noise(400.0, 16))
    <BLANKLINE>
    SNR 0.05: in one example's gradient the signal, which all examples share, is 0.05 times as long as the noise.
    Noise scale 400: a batch of that many examples has as much signal as noise. With 16 the noise is 5 times the signal.
    <BLANKLINE>
    """
    if noise_scale is None:
        return ""
    if not 0 < noise_scale < float("inf"):
        return f"\nNo signal stood out of the noise between examples: a batch of {batch_size} is too small to see it.\n"
    ratio = (noise_scale / batch_size) ** 0.5  # of noise to signal in the batch gradient
    which = (
        f"the noise is {ratio:.2g} times the signal" if ratio >= 1 else f"the signal is {1 / ratio:.2g} times the noise"
    )
    snr = f"{noise_scale**-0.5:.2g}"
    return f"""
SNR {snr}: in one example's gradient the signal, which all examples share, is {snr} times as long as the noise.
Noise scale {noise_scale:.3g}: a batch of that many examples has as much signal as noise. With {batch_size} {which}.
"""


def closing_words(
    model_dir: str,
    losses: Sequence[tuple[int, float]],
    entropy: float,
    noise_scale: float | None = None,
    batch_size: int = 1,
) -> str:
    """What a newcomer reads at the end."""
    where = shlex.quote(model_dir)
    samples = shlex.quote(os.path.join(model_dir, "samples"))
    step, loss = losses[-1]
    return f"""
Done: {step} steps. Validation loss {loss:.3f} nats per byte; guessing by the bytes' frequencies gives {entropy:.3f}.
{signal_and_noise(noise_scale, batch_size)}
What to look at
  TensorBoard   .venv/bin/tensorboard --logdir {where}
  metrics       {os.path.join(model_dir, "metrics.jsonl")}   (one JSON line a log step; signal and noise under per_example/)
  checkpoints   {os.path.join(model_dir, "checkpoint_" + str(step))}
  configuration {os.path.join(model_dir, "config.gin")}, {os.path.join(model_dir, "model-info.txt")}

What to try next
  1. Let it write code:
     .venv/bin/python -m perex_t5x.infer --gin_file=models/tiny.gin --gin_file=runs/infer.gin \\
       --gin.CHECKPOINT_PATH={where} --gin.INFER_OUTPUT_DIR={samples} \\
       --gin.MIXTURE_OR_TASK_NAME=python_stdlib_continuation --gin.NUM_EXAMPLES=8 --gin.BATCH_SIZE=8 \\
       --gin.decoding.temperature_sample.topk=0 --gin.decoding.temperature_sample.temperature=0.7 \\
       --gin.TASK_FEATURE_LENGTHS="{{'inputs': 64, 'targets': 64}}" && cat {samples}/*.jsonl-00000-of-00001
  2. Train it longer; the run resumes where it stopped:
     .venv/bin/python -m perex_t5x.train --gin_file=runs/quickstart.gin --gin.MODEL_DIR={where} --gin.TRAIN_STEPS=4000
  3. Train with Adam on the batch gradient, to compare (others: gin/optimizers/):
     .venv/bin/python -m perex_t5x.train --gin_file=runs/quickstart.gin --gin_file=optimizers/adamw.gin \\
       --gin.MODEL_DIR=runs/adamw
  4. Train on text of your own:
     .venv/bin/python -m perex_t5x.train --gin_file=runs/quickstart.gin --gin.MODEL_DIR=runs/mine \\
       --gin.MIXTURE_OR_TASK_NAME=text_files_lm --gin.tasks.register_text_files.glob="'/path/to/**/*.txt'"
"""


def main() -> None:
    from perex_t5x import cli

    arguments = list(sys.argv[1:])
    if not any(a.startswith("--gin_file") for a in arguments):
        arguments.insert(0, "--gin_file=runs/quickstart.gin")
    given = [a.partition("=")[2].strip("'\"") for a in arguments if a.startswith("--gin.MODEL_DIR=")]
    model_dir = given[-1] if given else fresh_model_dir()
    if not given:
        arguments.append(f"--gin.MODEL_DIR='{model_dir}'")
    print(f"Training a small language model on the source text of the Python standard library; it goes to {model_dir}.")
    try:
        cli.run_gin("perex_t5x.train.train", __doc__, [sys.argv[0], *arguments])
    except SystemExit as e:
        if e.code:
            raise
    if any(a.startswith("--dry_run") for a in arguments):
        return
    losses = validation_losses(model_dir)
    if losses:  # none, if a binding switched evaluation off
        entropy = unigram_entropy(_validation_tokens())
        batch_size = _dataset_config("train").batch_size
        print(closing_words(model_dir, losses, entropy, last_noise_scale(model_dir), batch_size))


if __name__ == "__main__":
    main()
