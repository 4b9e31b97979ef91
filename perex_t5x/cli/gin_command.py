"""Commands that are Gin-configured functions: other processes, Gin files, data flags, in this order."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import gin
from absl import logging

from perex_t5x import gin_utils
from perex_t5x.cli import console, status
from perex_t5x.errors import ConfigError


def call(load: Callable[[], Callable[..., Any]], args: Any) -> None:
    """Calls the function that `load()` imports, configured by the flags' Gin files, as one of possibly several processes."""
    if not args.gin_file:
        raise ConfigError(
            "no --gin_file given. For a first run: python -m perex_t5x.train --gin_file=runs/quickstart.gin"
        )
    status.is_run()
    if args.multiprocess_gpu:
        logging.info(
            "--multiprocess_gpu has no effect: other processes are looked for in any case (--cluster_detection)."
        )
    _connect_processes(args)
    console.import_tensorflow_quietly()
    function = load()
    gin_utils.parse_gin_flags(args.gin_search_paths, args.gin_file, args.gin_bindings)
    configure_data(args)
    _compare_processes(function.__name__)
    try:
        gin.get_configurable(function)
    except Exception:
        raise ConfigError(
            f"the gin files bind nothing on {function.__module__}.{function.__name__}: they are for another command."
        ) from None
    gin_utils.call(function, **_run_flags(function.__name__, args))
    from perex_t5x import distributed

    distributed.finish()


def load_training(args: Any) -> None:
    """For commands that read a training's Gin files without being one: what has to be there before they are parsed."""
    console.import_tensorflow_quietly()
    from perex_t5x import train as train_script

    vars(sys.modules["__main__"])["train"] = train_script.train  # ported files say `import __main__ as train_script`
    configure_data(args)


def configure_data(args: Any) -> None:
    """Hands the data flags to TFDS and SeqIO."""
    if args.tfds_data_dir:
        os.environ["TFDS_DATA_DIR"] = args.tfds_data_dir
    if args.tfds_data_dir or args.seqio_additional_cache_dirs:
        import seqio

        if args.tfds_data_dir:
            seqio.set_tfds_data_dir_override(args.tfds_data_dir)
        seqio.add_global_cache_dirs(args.seqio_additional_cache_dirs)


def _connect_processes(args: Any) -> None:
    """Joins the other processes, if there are any. Before the first use of a device."""
    from perex_t5x import distributed

    here = distributed.connect(
        args.coordinator_address,
        args.process_count,
        args.process_index,
        cluster_detection=args.cluster_detection,
        initialization_timeout=args.initialization_timeout,
        heartbeat_timeout=args.heartbeat_timeout,
        phase_timeout=args.phase_timeout,
    )
    if here is None:
        return
    console.set_up(everything=args.alsologtostderr, quiet=here.index > 0)
    logging.info("%d processes, found through %s; coordinator %s", here.count, here.source, here.address)
    distributed.check_same("software", {**distributed.consistency.software_items(), "--dry_run": str(args.dry_run)})


def _compare_processes(command: str) -> None:
    """Stops all processes if one was configured otherwise; nothing is compiled yet."""
    from perex_t5x import distributed

    if distributed.group() is None:
        return
    distributed.check_same("configuration", {"command": command, **distributed.consistency.configuration_items()})
    distributed.check_same("devices", distributed.consistency.device_items())


def _run_flags(command: str, args: Any) -> dict[str, Any]:
    """Flags that go to the function rather than to Gin."""
    given: dict[str, Any] = {}
    if args.dry_run:
        given["dry_run"] = True
    if args.shard_id is not None:
        if command != "infer":
            raise ConfigError("--shard_id is for perex_t5x.infer only.")
        given["shard_id"] = args.shard_id
    if args.dump_hlo:
        if command != "train":
            raise ConfigError("--dump_hlo is for perex_t5x.train only.")
        given["dump_hlo"] = True
    if args.profile_steps:
        if command != "train":
            raise ConfigError("--profile_steps is for perex_t5x.train only.")
        first, _, last = args.profile_steps.partition(":")
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
            raise ConfigError(f"--profile_steps={args.profile_steps}: write FIRST:LAST, such as 10:15.")
        given["profile_steps"] = (int(first), int(last))
    return given
