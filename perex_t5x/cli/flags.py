"""The flags that commands share, and how a command line is read."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

from perex_t5x.errors import ConfigError


def rewrite_gin_args(args: Sequence[str]) -> list[str]:
    """Rewrites `--gin.NAME=VALUE` to `--gin_bindings=NAME = VALUE`, as absl flags need it.

    >>> rewrite_gin_args(["train", "--gin.TRAIN_STEPS=5", "--alsologtostderr"])
    ['train', '--gin_bindings=TRAIN_STEPS = 5', '--alsologtostderr']
    """
    rewritten = []
    for arg in args:
        match = re.match(r"--?gin\.(.+)", arg, flags=re.DOTALL)
        if match:
            name, separator, value = match[1].partition("=")
            if not separator:
                raise ConfigError(f"{arg}: write --gin.NAME=VALUE, with an equals sign and no spaces.")
            arg = f"--gin_bindings={name} = {value}"
        rewritten.append(arg)
    return rewritten


def rewrite_sweep_args(args: Sequence[str]) -> list[str]:
    """Rewrites `--sweep.NAME=VALUE` to `--sweep_bindings=NAME = VALUE`.

    >>> rewrite_sweep_args(["sweep", "--sweep.seeds=[0]", "--dir=a"])
    ['sweep', '--sweep_bindings=seeds = [0]', '--dir=a']
    """
    return [re.sub(r"^--?sweep\.(\w+)=", r"--sweep_bindings=\1 = ", arg, flags=re.DOTALL) for arg in args]


def rewrite(args: Sequence[str]) -> list[str]:
    """A command line as absl reads it."""
    return rewrite_sweep_args(rewrite_gin_args(args))


def parse(args: Sequence[str]) -> list[str]:
    """Parses the flags; returns the other arguments. An unknown flag or a bad value is a configuration error."""
    from absl import flags

    try:
        return flags.FLAGS(args)
    except (flags.Error, ValueError) as e:  # the second of --noNAME=VALUE
        message = str(e).replace(" ?", "?")
        raise ConfigError(f"{message}{'' if message[-1:] in '.?' else '.'} --help lists the flags.") from None


@contextlib.contextmanager
def defined(definitions: Callable[[], None] | None, usage: str | None) -> Iterator[None]:
    """Defines a command's flags for a while; --help then prints `usage` and these flags, wherever they are defined."""
    from absl import flags

    before = set(flags.FLAGS)
    if definitions is not None:
        definitions()
    own = set(flags.FLAGS) - before
    show_in_help(usage, own)
    try:
        yield
    finally:
        for name in own:  # another command may be run in this process
            with contextlib.suppress(AttributeError):
                delattr(flags.FLAGS, name)


def show_in_help(usage: str | None, names: Iterable[str]) -> None:
    """Has --help print `usage` and these flags; by default absl shows only those that the main module defines."""
    from absl import flags

    sys.modules["__main__"].__doc__ = usage
    for name in names:
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])


def define_training_flags() -> None:
    """T5X's flags, once: Gin files and bindings, data, several processes."""
    from absl import flags

    if "gin_file" in flags.FLAGS:
        return
    flags.DEFINE_multi_string(
        "gin_file", [], "Gin file; later files win. Searched in the working directory, in "
        "--gin_search_paths and among the shipped files (runs/, models/, optimizers/, meshes/)")  # fmt: skip
    flags.DEFINE_multi_string(
        "gin_bindings", [], "A binding, such as 'TRAIN_STEPS = 100'. Shorter: --gin.TRAIN_STEPS=100")  # fmt: skip
    flags.DEFINE_list("gin_search_paths", [], "Further folders in which Gin files are searched.")
    flags.DEFINE_string("tfds_data_dir", None, "Where TFDS datasets are stored.")
    flags.DEFINE_list("seqio_additional_cache_dirs", [], "Folders with offline SeqIO caches.")
    flags.DEFINE_bool("dry_run", False, "Check the configuration, print what would run, and stop.")
    flags.DEFINE_string("coordinator_address", None, "host:port of process 0, for several processes.")
    flags.DEFINE_integer("process_count", None, "Number of processes.")
    flags.DEFINE_integer("process_index", None, "Index of this process, from 0.")
    flags.DEFINE_bool(
        "multiprocess_gpu", False, "Of T5X, and not needed: processes are found by --coordinator_address or "
        "--cluster_detection, whatever the hardware.")  # fmt: skip
    flags.DEFINE_string(
        "cluster_detection", "auto", "Whether TPU pods, GKE, SLURM and Open MPI are asked for the other processes: auto, "
        "off, or a method that JAX knows, such as mpi4py.")  # fmt: skip
    flags.DEFINE_integer("initialization_timeout", 300, "Seconds to wait for the other processes at the start.")
    flags.DEFINE_integer(
        "heartbeat_timeout", 100, "Seconds after which a process that is silent, or makes no progress between two steps, "
        "ends the run.")  # fmt: skip
    flags.DEFINE_integer(
        "phase_timeout", 3600, "The same for a process that is behind the others in compiling, restoring, evaluating or "
        "saving.")  # fmt: skip
    flags.DEFINE_integer("shard_id", None, "Of infer: overrides infer.shard_id, the part of the examples to take.")
    flags.DEFINE_string(
        "profile_steps", None, "Write a profiler trace of these steps, FIRST:LAST, into MODEL_DIR/profile.")  # fmt: skip
    flags.DEFINE_bool(
        "dump_hlo", False, "Write the training step into MODEL_DIR/hlo, as the compiler gets it (StableHLO) and as it comes "
        "out (optimised HLO).")  # fmt: skip


def define_sweep_flags() -> None:
    """Those that say what a sweep is."""
    from absl import flags

    flags.DEFINE_string("sweep", None, "Gin file of the sweep, such as sweeps/sqrt_lr.gin.")
    flags.DEFINE_multi_string("sweep_bindings", [], "Overrides 'seeds = [0]' of the file. Shorter: --sweep.seeds=[0]")
    flags.DEFINE_string("dir", None, "The sweep's folder; default sweeps/<name>.")
    flags.DEFINE_string("only", None, "Regular expression: run only the runs whose names it matches somewhere.")
