"""One training loop in a process of its own, run by `perex_t5x.bench.children`: how soon its first step is done, how long
the others take, and the most memory that it had.

    python loop_child.py KIND BATCH_SIZE LENGTH STEPS     KIND: perex_t5x, bare, t5x or quickstart

All train a decoder of 2 layers, width 128 (models/tiny.gin) with AdamW in float32. `bare` is our model in a loop without a
framework, on random ids, so without reading data. `t5x` needs T5X in the environment, and takes its own decoder at the same
sizes, on the same task. `quickstart` stops after the first step of runs/quickstart.gin.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, cast

WARM_UP = 2  # steps
TASK = "python_stdlib_lm"


class Clock:
    """Times the calls of a step. It waits for the first, for the last, and before the first that counts."""

    def __init__(self, steps: int):
        self._steps, self._calls, self._begun = steps, 0, 0.0
        self.times: dict[str, float] = {}

    def __call__(self, step: Callable[..., Any]) -> Callable[..., Any]:
        import jax

        def timed(state: Any, *arguments: Any) -> Any:
            self._calls += 1
            if self._calls == WARM_UP + 1:
                jax.block_until_ready(state)
                self._begun = time.monotonic()
            result = step(state, *arguments)
            if self._calls == 1:
                jax.block_until_ready(result)
                self.times["first_step_seconds"] = time.monotonic() - float(os.environ["BENCH_STARTED"])
            if self._calls == self._steps:
                jax.block_until_ready(result)
                self.times["step_seconds"] = (time.monotonic() - self._begun) / max(1, self._steps - WARM_UP)
            return result

        return timed


def ours(clock: Clock, folder: str, files: tuple[str, ...], bindings: tuple[str, ...], **given: Any) -> None:
    """`perex_t5x.train`, whole, with its step timed."""
    import gin

    from perex_t5x import gin_utils, train, trainer
    from perex_t5x.cli import console

    console.import_tensorflow_quietly()
    gin_utils.parse_gin_flags([], files, [f"MODEL_DIR = '{folder}/run'", *bindings])

    class Timed(trainer.Trainer):
        def compiled_step(self, *arguments: Any, **options: Any) -> Any:
            return clock(super().compiled_step(*arguments, **options))

    def make(**arguments: Any) -> trainer.Trainer:
        return Timed(**{**gin.get_bindings(trainer.Trainer), **arguments})

    gin_utils.call(train.train, trainer_cls=make, **given)


def bare(clock: Clock, batch_size: int, length: int, steps: int) -> None:
    """What one would write without a framework, on random ids that are there already."""
    import gin
    import jax
    import numpy as np
    import optax

    from perex_t5x import gin_utils

    gin_utils.parse_gin_flags([], ["models/tiny.gin"], [])
    model = gin.query_parameter("%MODEL").scoped_configurable_fn()
    optimizer = optax.adamw(1e-3)
    names = ("decoder_input_tokens", "decoder_target_tokens", "decoder_loss_weights")
    random = np.random.default_rng(0)

    def make_batch() -> dict[str, Any]:
        ids = random.integers(1, 256, (batch_size, length), np.int32)
        return dict(zip(names, (np.roll(ids, 1, axis=1), ids, np.ones_like(ids)), strict=True))

    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state
        gradient = jax.value_and_grad(model.loss_fn, has_aux=True)
        (loss, _), grads = gradient(params, batch, None, model.loss_normalizer(batch))
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    @jax.jit
    def init(key: Any) -> Any:
        params = model.get_initial_variables(key, {name: (batch_size, length) for name in names})["params"]
        params = jax.tree.map(lambda x: getattr(x, "value", x), params, is_leaf=lambda x: hasattr(x, "value"))
        return params, optimizer.init(params)

    state = init(jax.random.key(0))
    timed = clock(jax.jit(step, donate_argnums=0))
    for _ in range(steps):
        state, loss = timed(state, jax.device_put(make_batch()))
    float(loss)


def t5x(clock: Clock, folder: str, batch_size: int, length: int, steps: int) -> None:
    """T5X's own training, with its step timed."""
    import jax.numpy as jnp
    import seqio

    # In an environment of its own; where there is none, the name is that of the file beside this one.
    from t5x import decoding, models, optimizers, partitioning, train, trainer, utils  # pyright: ignore[reportMissingImports]
    from t5x.examples.decoder_only import network  # pyright: ignore[reportMissingImports]

    from perex_t5x.data import tasks  # noqa: F401 registers the task

    sizes = {"vocab_size": 384, "emb_dim": 128, "num_heads": 4, "num_layers": 2, "head_dim": 32, "mlp_dim": 256}
    config = network.TransformerConfig(
        **sizes, dtype=jnp.float32, mlp_activations=("silu", "linear"), dropout_rate=0.0, logits_via_embedding=False
    )
    model = models.DecoderOnlyModel(
        module=network.DecoderWrapper(config),
        vocabulary=seqio.get_mixture_or_task(TASK).output_features["targets"].vocabulary,
        optimizer_def=optimizers.adamw(learning_rate=1e-3),
        decode_fn=decoding.temperature_sample,
        z_loss=1e-4,
        loss_normalizing_factor="NUM_REAL_TARGET_TOKENS",
    )

    rate = utils.create_learning_rate_scheduler(base_learning_rate=1e-3)

    class Timed(trainer.Trainer):
        def compile_train(self, batch: Any) -> None:
            super().compile_train(batch)
            self._compiled_train_step = clock(self._compiled_train_step)

    train.train(
        model=model,
        train_dataset_cfg=utils.DatasetConfig(
            mixture_or_task_name=TASK,
            task_feature_lengths={"targets": length},
            split="train",
            batch_size=batch_size,
            shuffle=True,
            seed=0,
            pack=True,
        ),
        train_eval_dataset_cfg=None,
        infer_eval_dataset_cfg=None,
        checkpoint_cfg=utils.CheckpointConfig(save=None, restore=None),
        partitioner=partitioning.PjitPartitioner(
            num_partitions=1, logical_axis_rules=partitioning.standard_logical_axis_rules()
        ),
        trainer_cls=functools.partial(cast(Any, Timed), num_microbatches=None, learning_rate_fn=rate),
        model_dir=folder,
        total_steps=steps,
        eval_steps=0,
        eval_period=steps,
        random_seed=0,
        summarize_config_fn=lambda *_: None,
    )


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    kind, (batch_size, length, steps) = sys.argv[1], map(int, sys.argv[2:5])
    clock = Clock(steps)
    versions = {}
    with tempfile.TemporaryDirectory() as folder:
        if kind == "bare":
            bare(clock, batch_size, length, steps)
        elif kind == "t5x":
            t5x(clock, folder, batch_size, length, steps)
            import t5x as package  # pyright: ignore[reportMissingImports]

            versions["t5x"] = getattr(package, "__version__", "?")
        elif kind == "quickstart":
            bindings = (f"TRAIN_STEPS = {steps}", "EVAL_PERIOD = 1000")
            ours(clock, folder, ("runs/quickstart.gin",), bindings, train_eval_dataset_cfg=None)
        else:
            sizes = (f"BATCH_SIZE = {batch_size}", f"TASK_FEATURE_LENGTHS = {{'targets': {length}}}")
            bindings = (*sizes, f"TRAIN_STEPS = {steps}", f"MIXTURE_OR_TASK_NAME = '{TASK}'", "RANDOM_SEED = 0")
            bindings += ("utils.CheckpointConfig.save = None",)
            files = ("models/tiny.gin", "runs/pretrain.gin")
            ours(clock, folder, files, bindings, train_eval_dataset_cfg=None)
    from perex_t5x.bench.turns import peak_resident_bytes

    result = {**clock.times, "peak_bytes": peak_resident_bytes(), "versions": versions}
    print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    main()
