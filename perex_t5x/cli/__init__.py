"""What the commands `python -m perex_t5x.{train,eval,infer}` share: flags, Gin, logging, exit codes."""

from __future__ import annotations

import importlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from absl import app, flags, logging

from perex_t5x import gin_utils
from perex_t5x.cli import console
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
    flags.DEFINE_string(
        "cluster_detection", "auto", "Whether TPU pods, GKE, SLURM and Open MPI are asked for the other processes: auto, "
        "off, or a method that JAX knows, such as mpi4py.")  # fmt: skip
    flags.DEFINE_integer("initialization_timeout", 300, "Seconds to wait for the other processes at the start.")
    flags.DEFINE_integer(
        "heartbeat_timeout", 100, "Seconds after which a process that is silent, or stands still between two steps, "
        "ends the run.")  # fmt: skip
    flags.DEFINE_integer(
        "phase_timeout", 3600, "The same for a process that is behind the others in compiling, restoring, evaluating or "
        "saving.")  # fmt: skip
    flags.DEFINE_bool("dry_run", False, "Check the configuration, print what would run, and stop.")
    flags.DEFINE_string(
        "profile_steps", None, "Write a profiler trace of these steps, FIRST:LAST, into MODEL_DIR.")  # fmt: skip


def _connect_processes() -> None:
    """Joins the other processes, if there are any. Before the first use of a device."""
    from perex_t5x import distributed

    here = distributed.connect(
        FLAGS.coordinator_address,
        FLAGS.process_count,
        FLAGS.process_index,
        cluster_detection=FLAGS.cluster_detection,
        initialization_timeout=FLAGS.initialization_timeout,
        heartbeat_timeout=FLAGS.heartbeat_timeout,
        phase_timeout=FLAGS.phase_timeout,
    )
    if here is None:
        return
    console.set_up(everything=FLAGS.alsologtostderr, quiet=here.index > 0)
    logging.info("%d processes, found through %s; coordinator %s", here.count, here.source, here.address)
    distributed.check_same("software", {**distributed.sameness.software_items(), "--dry_run": str(FLAGS.dry_run)})


def _compare_processes(command: str) -> None:
    """Stops all processes if one was configured otherwise; nothing is compiled yet."""
    from perex_t5x import distributed

    if distributed.group() is None:
        return
    distributed.check_same("configuration", {"command": command, **distributed.sameness.configuration_items()})
    distributed.check_same("devices", distributed.sameness.device_items())


def _configure_data() -> None:
    """Hands the data flags to TFDS and SeqIO; without them neither is imported here."""
    if FLAGS.tfds_data_dir:
        os.environ["TFDS_DATA_DIR"] = FLAGS.tfds_data_dir
    if FLAGS.tfds_data_dir or FLAGS.seqio_additional_cache_dirs:
        import seqio

        if FLAGS.tfds_data_dir:
            seqio.set_tfds_data_dir_override(FLAGS.tfds_data_dir)
        seqio.add_global_cache_dirs(FLAGS.seqio_additional_cache_dirs)


def run(function: Callable[..., Any] | str, usage: str | None, argv: Sequence[str] | None = None) -> None:
    """Runs `function`, its arguments bound by Gin, as a command; never returns.

    A function given as 'module.name' is imported only once the other processes are found: an import may use a device.

    Exit status: 0 done; 2 a slip in the configuration (the message says where and how to mend it); 1 the run could not
    go on; 130 interrupted, after saving. Of several processes all end with the status of the first that fails.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    define_flags()

    def main(_: Sequence[str]) -> None:
        nonlocal function
        import gin

        console.set_up(everything=FLAGS.alsologtostderr)
        if not FLAGS.gin_file:
            raise ConfigError(
                "no --gin_file given. For a first run: python -m perex_t5x.train --gin_file=runs/quickstart.gin"
            )
        _connect_processes()
        console.import_tensorflow_quietly()
        if isinstance(function, str):
            function = _imported(function)
        gin_utils.parse_gin_flags(FLAGS.gin_search_paths, FLAGS.gin_file, FLAGS.gin_bindings)
        _configure_data()
        _compare_processes(function.__name__)
        try:
            configurable = gin.get_configurable(function)
        except Exception:
            raise ConfigError(
                f"the gin files bind nothing on {function.__module__}.{function.__name__}: "
                "they are for another command."
            ) from None
        configurable(**_run_flags(function.__name__))
        _finish_processes()

    try:
        args = gin_utils.rewrite_gin_args(sys.argv if argv is None else argv)
        sys.modules["__main__"].__doc__ = usage
        app.run(_reporting(main), argv=args, flags_parser=parse_flags)
    except ConfigError as e:
        _fail(str(e), EXIT_CONFIG)


def parse_flags(args: Sequence[str]) -> list[str]:
    """The arguments that are no flags. An unknown flag, or a value it cannot take, is a slip like any other."""
    try:
        return FLAGS(args)
    except flags.Error as e:
        message = str(e).replace(" ?", "?")
        raise ConfigError(f"{message}{'' if message[-1:] in '.?' else '.'} --help lists the flags.") from None


def _imported(name: str) -> Callable[..., Any]:
    """The function of a module that runs as `__main__`, where ported files (`import __main__ as train_script`) look."""
    module, _, attribute = name.rpartition(".")
    function = getattr(importlib.import_module(module), attribute)
    setattr(sys.modules["__main__"], attribute, function)
    return function


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
            _fail(str(e), EXIT_CONFIG, e)
        except TrainingError as e:
            _fail(str(e), EXIT_ERROR, e)
        except KeyboardInterrupt as e:
            _stop_together()
            _fail(str(e) or "interrupted", EXIT_INTERRUPTED, e)
        except Exception as e:
            _end_all_processes(f"{type(e).__name__}: {cleaned(str(e))}", EXIT_ERROR, e, traceback.format_exc())
            raise

    return wrapped


def _fail(message: str, status: int, error: BaseException | None = None) -> None:
    message = cleaned(message)
    shown = f"\nERROR: {message}" if status != EXIT_INTERRUPTED else f"\n{message}"
    _end_all_processes(message, status, error, shown)
    print(shown, file=sys.stderr, flush=True)
    sys.exit(status)


def cleaned(message: str) -> str:
    """Gin adds a line for every configurable that was being made; the messages name their bindings themselves."""
    return re.sub(r"\n\s*In call to configurable .*", "", message)


def _end_all_processes(message: str, status: int, error: BaseException | None, shown: str) -> None:
    """Ends this process and the others, if there are any. Looked up: most slips are found before JAX is imported."""
    if distributed := sys.modules.get("perex_t5x.distributed"):
        distributed.fail(message, status, error=error, shown=shown)


def _finish_processes() -> None:
    from perex_t5x import distributed

    distributed.finish()


def _stop_together() -> None:
    """Where all processes have stopped at the same step, one of them says so."""
    distributed = sys.modules.get("perex_t5x.distributed")
    if distributed and distributed.stop_together() and not distributed.is_writer():
        sys.exit(EXIT_INTERRUPTED)
