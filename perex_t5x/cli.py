"""What the commands `python -m perex_t5x.{train,eval,infer}` share: flags, Gin, logging, exit codes."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from absl import app, flags

from perex_t5x import console, gin_utils
from perex_t5x.errors import ConfigError, TrainingError

EXIT_ERROR = 1
EXIT_CONFIG = 2
EXIT_INTERRUPTED = 130

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Defines T5X's flags once."""
    if "gin_file" in FLAGS:
        return
    flags.DEFINE_multi_string(
        "gin_file", [], "Gin file; repeatable, later files win. Searched in the working directory, in "
        "--gin_search_paths and among the shipped files (runs/, models/, optimizers/, meshes/).")  # fmt: skip
    flags.DEFINE_multi_string(
        "gin_bindings", [], "A binding, such as 'TRAIN_STEPS = 100'. Shorter: --gin.TRAIN_STEPS=100.")  # fmt: skip
    flags.DEFINE_list("gin_search_paths", [], "Further folders in which Gin files are searched.")
    flags.DEFINE_string("tfds_data_dir", None, "Where TFDS datasets are stored.")
    flags.DEFINE_list("seqio_additional_cache_dirs", [], "Folders with offline SeqIO caches.")
    flags.DEFINE_string("coordinator_address", None, "host:port of process 0, for several processes.")
    flags.DEFINE_integer("process_count", None, "How many processes take part.")
    flags.DEFINE_integer("process_index", None, "Which of them this one is.")
    flags.DEFINE_bool("dry_run", False, "Check the configuration, print what would run, and stop.")
    flags.DEFINE_string(
        "profile_steps", None, "Write a profiler trace of these steps, FIRST:LAST, into MODEL_DIR.")  # fmt: skip


def _connect_processes() -> None:
    """Joins the other processes, if the flags speak of any. Before the first use of a device."""
    if FLAGS.process_count is None and FLAGS.coordinator_address is None:
        return
    if None in (FLAGS.process_count, FLAGS.coordinator_address, FLAGS.process_index):
        raise ConfigError("--coordinator_address, --process_count and --process_index go together: give all three.")
    import jax

    if os.environ.get("JAX_PLATFORMS", "") == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(FLAGS.coordinator_address, FLAGS.process_count, FLAGS.process_index)


def _configure_data() -> None:
    """Hands the data flags to TFDS and SeqIO; without them neither is imported here."""
    if FLAGS.tfds_data_dir:
        os.environ["TFDS_DATA_DIR"] = FLAGS.tfds_data_dir
    if FLAGS.tfds_data_dir or FLAGS.seqio_additional_cache_dirs:
        import seqio

        if FLAGS.tfds_data_dir:
            seqio.set_tfds_data_dir_override(FLAGS.tfds_data_dir)
        seqio.add_global_cache_dirs(FLAGS.seqio_additional_cache_dirs)


def run(function: Callable[..., Any], usage: str, argv: Sequence[str] | None = None) -> None:
    """Runs `function`, its arguments bound by Gin, as a command; never returns.

    Exit status: 0 done; 2 a slip in the configuration (the message says where and how to mend it); 1 the run could not
    go on; 130 interrupted, after saving.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    define_flags()

    def main(_: Sequence[str]) -> None:
        import gin

        console.set_up(everything=FLAGS.alsologtostderr)
        if not FLAGS.gin_file:
            raise ConfigError(
                "no --gin_file given. For a first run: python -m perex_t5x.train --gin_file=runs/quickstart.gin"
            )
        _connect_processes()
        console.import_tensorflow_quietly()
        gin_utils.parse_gin_flags(FLAGS.gin_search_paths, FLAGS.gin_file, FLAGS.gin_bindings)
        _configure_data()
        try:
            configurable = gin.get_configurable(function)
        except Exception:
            raise ConfigError(
                f"the gin files bind nothing on {function.__module__}.{function.__name__}: "
                "they are for another command."
            ) from None
        configurable(**_run_flags(function.__name__))

    try:
        args = gin_utils.rewrite_gin_args(sys.argv if argv is None else argv)
        sys.modules["__main__"].__doc__ = usage
        app.run(_reporting(main), argv=args)
    except ConfigError as e:
        _fail(str(e), EXIT_CONFIG)


def _run_flags(command: str) -> dict[str, Any]:
    """Flags that go to the function rather than to Gin."""
    given: dict[str, Any] = {}
    if FLAGS.dry_run:
        given["dry_run"] = True
    if FLAGS.profile_steps:
        if command != "train":
            raise ConfigError("--profile_steps is for perex_t5x.train only.")
        first, _, last = FLAGS.profile_steps.partition(":")
        if not (first.isdigit() and last.isdigit() and int(first) <= int(last)):
            raise ConfigError(f"--profile_steps={FLAGS.profile_steps}: write FIRST:LAST, such as 10:15.")
        given["profile_steps"] = (int(first), int(last))
    return given


def _reporting(main: Callable[[Sequence[str]], None]) -> Callable[[Sequence[str]], None]:
    """Prints a user's error as its message alone, without a stack trace."""

    def wrapped(argv: Sequence[str]) -> None:
        try:
            main(argv)
        except ConfigError as e:
            _fail(str(e), EXIT_CONFIG)
        except TrainingError as e:
            _fail(str(e), EXIT_ERROR)
        except KeyboardInterrupt as e:
            _fail(str(e) or "interrupted", EXIT_INTERRUPTED)

    return wrapped


def _fail(message: str, status: int) -> None:
    # Gin adds a line for every configurable that was being made; the messages name their bindings themselves.
    message = re.sub(r"\n\s*In call to configurable .*", "", message)
    print(f"\nERROR: {message}" if status != EXIT_INTERRUPTED else f"\n{message}", file=sys.stderr, flush=True)
    sys.exit(status)
