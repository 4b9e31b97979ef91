"""Train a model: `python -m perex_t5x.train --gin_file=runs/quickstart.gin --gin.MODEL_DIR=...`

    python -m perex_t5x.train --gin_file=models/tiny.gin --gin_file=runs/pretrain.gin \\
      --gin.MODEL_DIR=runs/first --gin.MIXTURE_OR_TASK_NAME=python_stdlib_lm \\
      --gin.TASK_FEATURE_LENGTHS="{'targets': 128}" --gin.TRAIN_STEPS=1000

The same command, started again, resumes from the newest checkpoint in MODEL_DIR.
"""

from __future__ import annotations

if __name__ == "__main__":
    # First of all: processes have to find each other before anything that is imported uses a device. Does not return, so
    # there is one `perex_t5x.train`, the imported one, which Gin configures.
    from perex_t5x import cli

    cli.run_gin("perex_t5x.train.train", __doc__)

import contextlib
import functools
import os
import time
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Annotated, Any

import jax
from absl import logging

from perex_t5x import (
    checkpoints,
    distributed,
    evaluation,
    gin_utils,
    loop,
    profiling,
    run_dir,
    saving,
)
from perex_t5x.actions import ActionMap
from perex_t5x.arguments import Count, Interval, PositiveInt, Seed, hints
from perex_t5x.arguments import check as check_arguments
from perex_t5x.bad_numbers import BadNumbers, SkippingFeed, to_leave_out
from perex_t5x.cli import status
from perex_t5x.data import lookup
from perex_t5x.data.feed import Feed, make_feed
from perex_t5x.errors import ConfigError, DivergedError
from perex_t5x.goodput import Recorder, process_begun
from perex_t5x.hardware.compiler_options import describe_options
from perex_t5x.metrics import MetricsWriter, loss_metric
from perex_t5x.models import protocol
from perex_t5x.partitioning import PjitPartitioner
from perex_t5x.trainer import Trainer, TrainState
from perex_t5x.training_setup import (
    Programs,
    Setup,
    check_arguments_of_t5x,
    make_actions,
    make_setup,
    timed,
    where_to_start,
)
from perex_t5x.utils import CheckpointConfig, DatasetConfig


def train(
    *,
    model: protocol.Model,
    train_dataset_cfg: DatasetConfig,
    train_eval_dataset_cfg: DatasetConfig | None = None,
    infer_eval_dataset_cfg: DatasetConfig | None = None,
    checkpoint_cfg: CheckpointConfig,
    partitioner: PjitPartitioner,
    trainer_cls: Callable[..., Trainer],
    model_dir: str,
    total_steps: Count,
    eval_steps: Annotated[int, Interval("[-1, ∞)")] | None = 20,
    eval_period: Count = 1000,
    stats_period: PositiveInt | None = None,
    relative_steps: PositiveInt | None = None,
    random_seed: Seed | None = None,
    use_hardware_rng: bool = False,
    summarize_config_fn: Callable[..., None] = gin_utils.summarize_gin_config,
    inference_evaluator_cls: Callable[..., Any] | None = None,
    bad_numbers: BadNumbers | None = None,
    profile_steps: tuple[PositiveInt, PositiveInt] | None = None,
    dump_hlo: bool = False,
    actions: ActionMap | None = None,
    run_eval_before_training: bool = False,
    gc_period: Count = 0,
    verify_matching_vocabs_fn: Callable[..., None] | None = lookup.verify_matching_vocabs,
    concurrent_metrics: bool = True,
    use_orbax: bool = True,
    get_dataset_fn: Callable[..., Any] | None = None,
    train_eval_get_dataset_fn: Callable[..., Any] | None = None,
    train_state_initializer_cls: Callable[..., Any] | None = None,
    dry_run: bool = False,
) -> tuple[int, TrainState]:
    """Trains, and returns (last step, state).

    Args:
      model: see `perex_t5x.models.protocol`; carries its optimizer (`optimizer_def`).
      train_dataset_cfg: what to train on.
      train_eval_dataset_cfg: teacher-forced evaluation every `eval_period` steps; None: none.
      infer_eval_dataset_cfg: evaluation by decoding with a SeqIO evaluator, at the same steps; None: none.
      checkpoint_cfg: saving and restoring. Restored is, in this order: the newest checkpoint in `model_dir`,
        `checkpoint_cfg.restore.path`, nothing.
      partitioner: the mesh.
      trainer_cls: makes the trainer from (model, partitioner); in Gin `@trainer.Trainer`.
      model_dir: everything the run writes is in here.
      total_steps: the step to stop at, earlier training included. 0, with `run_eval_before_training`: nothing is trained.
      eval_steps: batches per evaluation; None: the whole split.
      eval_period: steps between evaluations, the last step's besides; 0: none while training.
      stats_period: steps between log lines; None: `eval_period`, at most 100.
      relative_steps: stop this many steps after the restored one, instead of at `total_steps`.
      random_seed: of initialisation and dropout; None: drawn once, and kept by the checkpoint.
      use_hardware_rng: of T5X. Masks here belong to examples, which a hardware generator cannot give: ignored.
      summarize_config_fn: writes `config.gin`.
      inference_evaluator_cls: `@seqio.Evaluator`, with its loggers bound.
      bad_numbers: what is done about losses and updates that are not finite; None: the first one stops the run.
      profile_steps: (first, last) steps to write a profiler trace of.
      dump_hlo: write the step as the compiler gets it and as it comes out of it, as text.
      actions: {'TRAIN' | 'TRAIN_EVAL' | 'INFER_EVAL': [@trainer.EarlyStoppingAction(), ...]}, see `perex_t5x.actions`.
      run_eval_before_training: whether the parameters that the run starts with are evaluated, too.
      gc_period: steps between runs of Python's garbage collector; 0: it comes when it likes.
      verify_matching_vocabs_fn: is called with (dataset configuration, model) for training and each evaluation, and raises
        where their vocabularies differ; None: nothing is compared.
      concurrent_metrics, use_orbax: of T5X. Metrics are always written in a thread, and checkpoints by Orbax.
      get_dataset_fn, train_eval_get_dataset_fn, train_state_initializer_cls: of T5X; only None.
      dry_run: stop after all checks, before the first compile.
    """
    arguments = dict(locals())  # the first statement: nothing but the arguments is local yet
    with gin_utils.building():
        training = Training(arguments)
    if dry_run:
        if distributed.is_writer():
            print(
                f"dry run: the configuration is fine. {training.setup.summary}. Starts from "
                f"{training.source or 'scratch'}. Nothing was compiled."
            )
        return 0, training.setup.shapes
    with training, _background_compiler() as compiler:
        training.describe()
        # The step compiles in the background while examples are read and parameters are made.
        programs = training.compile(compiler)
        rollbacks = 0
        while True:
            feed = training.make_feed()
            try:
                return training.run(programs, feed)
            except DivergedError as e:
                rollbacks += 1
                left_out = training.batches_to_leave_out(e, feed, rollbacks)
            training = Training(arguments, training.setup, left_out)


class Training:
    """One run of `train`: the constructor checks, `compile` compiles, `run` trains.

    All but `run` reads the configuration that Gin holds; `run` does not. From its constructor to the end of `run`, or of a
    `with` block, no other run can write to the folder.

    Args:
      arguments: those of `train`, by name.
      setup: of a run that is already checked, and differs from this one in learning rate and seed only; None: made here.
      left_out: numbers of batches, besides those that the checkpoint has left out; of a run that was rolled back.
    """

    def __init__(self, arguments: Mapping[str, Any], setup: Setup | None = None, left_out: Sequence[int] = ()):
        self._begun = time.monotonic()
        self._left_out = left_out
        # A run that was rolled back is an attempt of its own.
        self._recorder = Recorder(process_begun() if status.is_single_run() and not left_out else None)
        args = self._args = types.SimpleNamespace(**arguments)
        check_arguments("train", hints(train), arguments)
        if not args.model_dir:
            raise ConfigError("MODEL_DIR = '': give a path, as a string: --gin.MODEL_DIR=\"'runs/first'\".")
        self.model_dir = os.path.expanduser(args.model_dir)
        check_arguments_of_t5x(args)
        self._bad_numbers = args.bad_numbers or BadNumbers()
        self.trainer: Trainer = args.trainer_cls(model=args.model, partitioner=args.partitioner)
        self.trainer.skip_non_finite_updates = self._bad_numbers.most_skipped > 0
        if not self.trainer.optimizer.uses_rate:
            logging.warning(
                "OPTIMIZER is made with a learning rate of its own, so Trainer.learning_rate_fn is not used. To use it, "
                "bind no learning_rate, and refer to a function that takes one, OPTIMIZER = @optax.adamw."
            )
        self.setup = make_setup(args, self.trainer) if setup is None else setup
        self._lock = run_dir.WriterLock(self.model_dir)
        weakref.finalize(self, self._lock.release)  # of one that nobody runs
        try:
            to_store = 0 if args.checkpoint_cfg.save is None else run_dir.tree_bytes(self.setup.shapes)
            run_dir.prepare(self.model_dir, to_store, args.dry_run, lock=self._lock)
            self._find_start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets other runs write to the folder. May be called twice."""
        self._lock.release()

    def _find_start(self) -> None:
        args = self._args
        # One process looks: another might see a checkpoint more, or less.
        self.source: str | None = distributed.from_process_0(
            "where to start", lambda: where_to_start(self.model_dir, args.checkpoint_cfg, args.dry_run)
        )
        own = self.source is not None and os.path.dirname(self.source) == checkpoints.absolute(self.model_dir)
        self._is_resumed = own
        # A run resumes with all of its own state; what another one's checkpoint is used for is configurable.
        self._restore_cfg = None if own else args.checkpoint_cfg.restore
        self._first_step = 0
        if self.source is not None:
            self._first_step = checkpoints.check(self.source, self.setup.shapes, self._restore_cfg)
        nothing = args.relative_steps is None and not args.run_eval_before_training
        if args.total_steps == 0 and nothing:
            raise ConfigError(
                "TRAIN_STEPS = 0: give at least 1; or set train.run_eval_before_training, to evaluate alone."
            )
        if self.source is not None and not own and nothing and self._first_step >= args.total_steps:
            raise ConfigError(
                f"{self.source} is at step {self._first_step}, and TRAIN_STEPS = {args.total_steps} counts its steps, so "
                f"there is nothing to train. Set TRAIN_STEPS above {self._first_step}, or TRAIN_STEPS_RELATIVE to the "
                "number of further steps."
            )
        self._saved_run = checkpoints.read_run(self.source) if self.source and own and not args.dry_run else {}
        self.last_step = self._stops_at()

    def _stops_at(self) -> int:
        relative, saved = self._args.relative_steps, self._saved_run
        if relative is None:
            return self._args.total_steps
        if saved.get("relative_steps") == relative and saved["last_step"] > self._first_step:
            return saved["last_step"]  # a resumed run still stops where it set out to
        return self._first_step + relative

    def compile(self, compiler: Executor) -> Programs:
        """Starts compiling; `compiler` has one thread, which takes one program after the other."""
        setup = self.setup
        parts = (setup.shapes, setup.shardings, setup.spec)
        step = compiler.submit(timed, self._compiled_step)
        evaluators = self.make_evaluators(compiler)
        return Programs(setup.init, step, compiler.submit(setup.trainer.compiled_monitor, *parts), evaluators)

    def _compiled_step(self) -> Any:
        setup = self.setup
        trainer, observe = setup.trainer, {}
        if self._args.dump_hlo and distributed.is_writer():
            observe = {"observe": functools.partial(profiling.write_program, self.model_dir)}
        compiled = trainer.compiled_step(setup.shapes, setup.shardings, setup.spec, **observe)
        if trainer.remat_choice is not None:
            for line in (f"remat_policy = 'auto': {line}" for line in trainer.remat_choice.lines()):
                logging.info("%s", line)
                if distributed.is_writer():
                    run_dir.append_model_info(self.model_dir, line)
        return compiled

    def make_evaluators(self, compiler: Executor, keep_batches: bool = False) -> list[loop.Evaluator]:
        """Teacher-forced and decoding evaluation, whichever is configured; they start compiling."""
        args, setup = self._args, self.setup
        evaluators: list[loop.Evaluator] = []
        if args.train_eval_dataset_cfg is not None:
            evaluators.append(
                evaluation.TrainEvaluator(setup.trainer, args.train_eval_dataset_cfg, args.eval_steps, keep_batches)
            )
        if args.infer_eval_dataset_cfg is not None:
            log_dir = os.path.join(self.model_dir, "inference_eval")
            model, partitioner = setup.trainer.model, setup.trainer.partitioner
            evaluators.append(
                evaluation.InferenceEvaluator(
                    model, partitioner, args.infer_eval_dataset_cfg, args.inference_evaluator_cls, log_dir
                )
            )
        for evaluator in evaluators:
            evaluator.compile(compiler, setup.shapes.params, setup.shardings.params)
        return evaluators

    def describe(self) -> None:
        """Writes model-info.txt and config.gin."""
        if distributed.is_writer():
            setup = self.setup
            options = describe_options(setup.trainer.used_compiler_options())
            lines = [setup.summary, setup.computation, options]
            run_dir.write_model_info(self.model_dir, setup.boxed_params, setup.shardings.params, lines)
            self._args.summarize_config_fn(self.model_dir, None, 0)

    def make_feed(self) -> Feed:
        """The training batches, at the position at which the run starts."""
        converter = protocol.feature_converter_cls(self.trainer.model)
        feed: Feed = make_feed(self._args.train_dataset_cfg, converter, saved_position=self._saved_run.get("data"))
        position = self._saved_run.get("data", {})
        if left_out := [*position.get("skipped", ()), *self._left_out]:
            feed = SkippingFeed(feed, left_out, position.get("step", 0))
        logging.info("%s", feed.description)
        if self._is_resumed and self.source is not None:
            feed.restore(checkpoints.data_dir(self.source))
        return feed

    def batches_to_leave_out(self, error: DivergedError, feed: Feed, rollbacks: int) -> list[int]:
        """Those of the steps that are to blame, where the run is rolled back to its newest checkpoint; or raises `error`."""
        rules = self._bad_numbers
        newest = distributed.from_process_0("newest checkpoint", lambda: checkpoints.newest(self.model_dir))
        if rules.then == "stop" or rollbacks > rules.rollbacks or newest is None:
            raise error
        logging.warning("%s. Rolled back to %s, %d of %d times.", error.finding, newest, rollbacks, rules.rollbacks)
        return to_leave_out(feed, error.first_step, error.step, checkpoints.step_of(newest) or 0)

    def run(
        self, programs: Programs, feed: Feed, *, saves_in_background: bool = True, **options: Any
    ) -> tuple[int, TrainState]:
        """Trains to `last_step`; returns (last step, state). `options` of `loop.Loop`: learning_rates, progress, stop."""
        with self:
            return self._run(programs, feed, saves_in_background, options)

    def _run(
        self, programs: Programs, feed: Feed, saves_in_background: bool, options: Mapping[str, Any]
    ) -> tuple[int, TrainState]:
        args, setup, saved = self._args, self.setup, self._saved_run
        init_begun = time.monotonic()
        seed = saved.get("random_seed", args.random_seed)
        seed = distributed.draw_seed() if seed is None else seed
        with self._recorder.phase("restore"):
            state = self._initial_state(programs.init, seed)
            first_step = int(state.step)
        init_seconds = time.monotonic() - init_begun
        with self._recorder.phase("compile"):  # the part of it that is waited for
            step_fn, compile_seconds = programs.step.result()
            monitor_fn = programs.monitor.result()
        writer = MetricsWriter(self.model_dir, enabled=distributed.is_writer())
        reached = writer.forget_after(first_step)
        if distributed.is_writer() and first_step < self.last_step:
            self._recorder.follow(self.model_dir, first_step, reached)
        timing = {
            "timing/compilation_seconds": compile_seconds,
            "timing/init_or_restore_seconds": init_seconds,
            "timing/start_seconds": time.monotonic() - self._begun,
        }
        actions = make_actions(self._args)
        ended = (
            self._is_resumed and args.actions is not None and actions.remember(self._rows(writer, programs.evaluators))
        )
        left_out = {"batches_left_out": len(feed.skipped)} if isinstance(feed, SkippingFeed) else {}
        writer.write("train", first_step, {**timing, **left_out})
        run = loop.Loop(
            trainer=setup.trainer,
            step_fn=step_fn,
            feed=feed,
            evaluators=programs.evaluators,
            checkpointer=self._make_checkpointer(writer, programs.evaluators, saves_in_background),
            writer=writer,
            last_step=self.last_step,
            eval_period=args.eval_period,
            stats_period=args.stats_period or min(args.eval_period or 100, 100),
            run_info={"random_seed": seed, "relative_steps": args.relative_steps, "last_step": self.last_step},
            profile_steps=args.profile_steps,
            model_dir=self.model_dir,
            monitor_fn=monitor_fn,
            recorder=self._recorder,
            unlogged=saved.get("unlogged"),
            bad_numbers=self._bad_numbers,
            watched=saved.get("watched"),
            evaluated=self._evaluated(writer, first_step),
            actions=actions,
            ended=ended,
            evaluate_first=args.run_eval_before_training,
            gc_period=args.gc_period,
            **options,
        )
        try:
            state = run(state)
        except BaseException:
            with _logged("after the error of this run"):  # what follows must not hide it
                run.close()
            raise
        run.close()
        return int(state.step), state

    def _make_checkpointer(
        self, writer: MetricsWriter, evaluators: Sequence[loop.Evaluator], in_background: bool
    ) -> saving.Checkpointer:
        config = self._args.checkpoint_cfg.save
        evaluations = []
        if config is not None and config.keep_best and self._is_resumed:
            evaluations = self._rows(writer, evaluators)
        return saving.Checkpointer(
            self.model_dir,
            config,
            in_background,
            self._lock.raise_if_lost,
            best_metric=(config and config.keep_best_metric) or loss_metric(self.trainer.model),
            evaluations=evaluations,
        )

    def _rows(self, writer: MetricsWriter, evaluators: Sequence[loop.Evaluator]) -> list[Any]:
        """(folder, step, metrics) of what training and evaluations have written before the run was resumed."""
        names = {"train"} | {folder for evaluator in evaluators for folder in evaluator.folders}
        return distributed.from_process_0("metrics so far", lambda: writer.rows_of(names))

    def _evaluated(self, writer: MetricsWriter, step: int) -> list[str] | None:
        """The names of the lines that a resumed run has of the step at which it starts."""
        if not self._is_resumed:
            return None
        return distributed.from_process_0("lines of the first step", lambda: writer.names_at(step))

    def _initial_state(self, init: Callable[[jax.Array], TrainState], seed: int) -> TrainState:
        """Restored where there is something to restore; what is missing is initialised."""
        if self.source is None:
            return init(jax.random.key(seed))
        shapes, shardings = self.setup.shapes, self.setup.shardings
        # Another run's checkpoint gives parameters and optimizer state; the dropout of this run is its own.
        parts = ("target", "state", "rng") if self._is_resumed else ("target", "state")
        restored = checkpoints.restore(self.source, shapes, shardings, self._restore_cfg, parts)
        base = init(jax.random.key(seed)) if checkpoints.leaves_missing(shapes, restored) else shapes
        logging.info("starting from %s (step %d)", self.source, restored.step)
        return checkpoints.merge(base, restored)


@contextlib.contextmanager
def _background_compiler() -> Iterator[Executor]:
    """One thread. After an error or a signal what it compiles is not waited for: that may take longer than there is time."""
    compiler = ThreadPoolExecutor(1)
    try:
        yield compiler
    except BaseException:
        compiler.shutdown(wait=False, cancel_futures=True)
        raise
    compiler.shutdown()


@contextlib.contextmanager
def _logged(when: str) -> Iterator[None]:
    """Logs an error instead of raising it."""
    try:
        yield
    except Exception as e:
        logging.error("%s: %s", when, e)
