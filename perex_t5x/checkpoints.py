"""Checkpoints through Orbax: state, RNG and data position in one commit, `checkpoint_<step>/`.

checkpoint_1000/
  state/    OCDBT arrays: {'target': params, 'state': {'step', 'param_states', 'monitor'}, 'rng'}
  run/      JSON: data position and whatever else belongs to the run
  data/     iterator state of a streaming feed, one file per process
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from flax import traverse_util

from perex_t5x import buckets, distributed, files
from perex_t5x.errors import ConfigError, is_denied, writing_failed
from perex_t5x.train_state import TrainState
from perex_t5x.utils import RestoreCheckpointConfig, SaveCheckpointConfig

PREFIX = "checkpoint"
_NAME = re.compile(rf"{PREFIX}_(\d+)")
_MONITOR = "state/monitor/"  # averages for the log: where they are missing they start from zero


class _FeedHandler(ocp.CheckpointHandler):
    """Lets a streaming feed write its iterator's state inside Orbax's commit."""

    def save(self, directory: epath.Path, args: FeedSave) -> None:
        args.feed.save_state(os.fspath(directory), args.step)

    def restore(self, directory: epath.Path, args: Any = None) -> None:
        raise NotImplementedError("a feed restores its own state: see data_dir")


@ocp.args.register_with_handler(_FeedHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class FeedSave(ocp.args.CheckpointArgs):
    feed: Any = None
    step: int = 0


# Orbax knows one save at a time in a process: its threads find each other by the number of the newest.
_saving = threading.Lock()


class Checkpointer:
    """Writes and prunes a run's own checkpoints.

    Args:
      model_dir: the run's folder.
      config: when to save, and how; None: never.
      in_background: `save` returns once the arrays are copied; False: once all is written, for several runs in a process.
    """

    def __init__(self, model_dir: str, config: SaveCheckpointConfig | None, in_background: bool = True):
        self._config, self._in_background = config, in_background
        self._model_dir = absolute(model_dir)
        if files.is_remote(model_dir) and jax.process_index() == 0:
            _remove_unfinished(epath.Path(self._model_dir))
        options = ocp.CheckpointManagerOptions(
            step_prefix=PREFIX, max_to_keep=config.keep if config else None, create=True
        )
        if files.is_remote(model_dir) and config is not None and distributed.is_writer():
            _remove_half_written(epath.Path(self._model_dir))
        self._manager = ocp.CheckpointManager(self._model_dir, options=options)

    def latest_step(self) -> int | None:
        """The newest whole checkpoint; a half-written one does not count."""
        return self._manager.latest_step()

    def is_due(self, step: int, last: bool) -> bool:
        if self._config is None:
            return False
        return last or bool(self._config.period and step % self._config.period == 0)

    def save(self, state: TrainState, run: Mapping[str, Any], feed: Any = None) -> None:
        """Saves everything at the state's step."""
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        tree = state.state_dict()
        if self._config is not None and self._config.dtype is not None:
            tree["target"] = jax.tree.map(lambda x: _cast(x, np.dtype(self._config.dtype)), tree["target"])
        items = {"state": ocp.args.PyTreeSave(tree), "run": ocp.args.JsonSave(dict(run))}
        if feed is not None:
            items["data"] = FeedSave(feed, step)
        with _explained(self._model_dir), contextlib.nullcontext() if self._in_background else _saving:
            self._manager.save(step, args=ocp.args.Composite(**items))
            if not self._in_background:
                self._manager.wait_until_finished()

    def raise_errors(self) -> None:
        """Raises the error of a write in the background, if there was one; does not wait."""
        with _explained(self._model_dir):
            self._manager.check_for_errors()

    def wait(self) -> None:
        """Blocks until everything is on disk."""
        with _explained(self._model_dir):
            self._manager.wait_until_finished()

    def close(self) -> None:
        self.wait()
        self._manager.close()


def _remove_unfinished(folder: epath.Path) -> None:
    """Removes half-written checkpoints from an object store, where they carry the name of a whole one, and are paid for.

    Orbax's own `cleanup_tmp_directories` would remove every folder without its marker: metrics, event files, profiles.
    """
    for path in folder.iterdir() if folder.exists() else ():
        if _NAME.fullmatch(path.name) and not _is_whole(os.fspath(path)):
            logging.info("removing %s, which was not finished", path)
            path.rmtree()


@contextlib.contextmanager
def _explained(model_dir: str) -> Iterator[None]:
    """Turns a failed write into an error that says what is safe."""
    try:
        yield
    except Exception as e:
        text = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        cause = "a permission is missing" if is_denied(e) else "the disk is full or the folder is gone"
        raise writing_failed(
            f"writing a checkpoint to {model_dir} failed: {text}. Earlier checkpoints are complete. If {cause}, fix that "
            "and start the same command again: it resumes from the newest one.",
            e,
        ) from e


def _cast(x: Any, dtype: np.dtype) -> Any:
    """Casts floating-point leaves; float64 is left alone, since narrowing it would lose bits unasked."""
    if jax.numpy.issubdtype(x.dtype, jax.numpy.floating) and x.dtype != np.float64:
        return x.astype(dtype)
    return x


@dataclasses.dataclass
class Restored:
    """What was read: leaves by name (those the assignment map left out are missing), and the run's JSON."""

    step: int
    leaves: dict[str, jax.Array]
    run: dict[str, Any]
    path: str


def absolute(path: str) -> str:
    """An absolute path; remote ones (gs://...) already are."""
    return path.rstrip("/") if files.is_remote(path) else os.path.abspath(path)


def data_dir(path: str) -> str:
    """Where a checkpoint holds a streaming feed's state; the folder exists only if it had one."""
    return os.path.join(path, "data")


def newest(model_dir: str) -> str | None:
    """The newest whole checkpoint in a run's folder."""
    folder = epath.Path(model_dir)
    paths = _whole_checkpoints(folder) if folder.exists() else []
    return absolute(paths[-1]) if paths else None


def step_of(path: str) -> int | None:
    match = _NAME.fullmatch(os.path.basename(path.rstrip("/")))
    return int(match[1]) if match else None


def checkpoint_paths(path: str, mode: str) -> list[str]:
    """Checkpoints that `path` names under a restore mode, oldest first. Raises `ConfigError` where there are none."""
    folder = epath.Path(path)
    buckets.check(path, "RestoreCheckpointConfig.path", writes=False)
    binding = f"RestoreCheckpointConfig.path = {path!r}"
    if not folder.exists():
        raise ConfigError(f"{binding}: this path does not exist.")
    if mode == "specific" or (folder / "state").exists():
        if (folder / "checkpoint").exists():
            raise ConfigError(
                f"{binding} is a checkpoint in T5X's legacy format (msgpack and zarr), which is not read here. Convert "
                "it to Orbax with T5X first."
            )
        if not (folder / "state").exists():
            inside = _whole_checkpoints(folder)
            hint = f" It holds {', '.join(os.path.basename(p) for p in inside)}: name one, or set mode = 'latest'."
            raise ConfigError(f"{binding} with mode 'specific' is not a checkpoint.{hint if inside else ''}")
        return [os.fspath(folder)]
    paths = _whole_checkpoints(folder)
    if not paths:
        raise ConfigError(f"{binding}: no checkpoint_<step> folder in it.")
    return paths if mode == "all" else paths[-1:]


def _remove_half_written(folder: epath.Path) -> None:
    """In a bucket they carry the name of a whole one, and are paid for. (Orbax would look at all folders, not only ours.)"""
    for path in folder.iterdir() if folder.exists() else ():
        if _NAME.fullmatch(path.name) and not ocp.utils.is_checkpoint_finalized(path):
            logging.info("removing %s, which is not whole", path)
            path.rmtree()
            path.rmtree(missing_ok=True)  # TensorFlow leaves what was below the marks of folders


def _whole_checkpoints(folder: epath.Path) -> list[str]:
    steps = sorted((int(m[1]), os.fspath(p)) for p in folder.iterdir() if (m := _NAME.fullmatch(p.name)))
    return [path for _, path in steps if _is_whole(path)]


def _is_whole(path: str) -> bool:
    """Whether it was committed: under its last name on a file system, with a marker in an object store."""
    return (epath.Path(path) / "state").exists() and ocp.utils.is_checkpoint_finalized(path)


def check(path: str, shapes: TrainState, config: RestoreCheckpointConfig | None = None) -> int:
    """Raises `ConfigError` if `restore` with these arguments would; reads names and shapes only.

    Returns:
      The step that the run would begin at.
    """
    sources = _sources(path, {k: v for k, v in flatten(shapes.state_dict()).items() if k != "rng"}, config)
    return (step_of(path) or 0) if "state/step" in sources else 0


def _sources(path: str, wanted: Mapping[str, Any], config: RestoreCheckpointConfig | None) -> dict[str, str]:
    """Which of the checkpoint's leaves each wanted leaf is read from; all of them have the wanted shapes."""
    saved = flatten(ocp.PyTreeCheckpointHandler().metadata(epath.Path(path) / "state").tree)
    try:
        sources = _assign(path, wanted, saved, config or RestoreCheckpointConfig())
        _check_shapes(path, wanted, saved, sources)
    except ConfigError as e:
        if config is not None:
            raise
        raise ConfigError(
            f"{e} This is the run's own checkpoint, which is always restored as a whole: for a change like this start "
            f"a new MODEL_DIR with RestoreCheckpointConfig.path = {path!r}."
        ) from e
    return sources


def restore(
    path: str,
    shapes: TrainState,
    shardings: TrainState,
    config: RestoreCheckpointConfig | None = None,
    parts: tuple[str, ...] = ("target", "state", "rng"),
) -> Restored:
    """Reads a checkpoint onto the given shardings, whatever mesh it was written from.

    Args:
      path: a `checkpoint_<step>` folder.
      shapes, shardings: of the state wanted.
      config: assignment map, fallback, dtype; None: everything must match.
      parts: which top-level parts to read; evaluation reads only ('target',).
    """
    wanted = {k: v for k, v in flatten(shapes.state_dict()).items() if k.split("/")[0] in parts}
    places = flatten(shardings.state_dict())
    with ocp.PyTreeCheckpointer() as checkpointer:
        sources = _sources(path, wanted, config)
        item = {}
        for name, source in sources.items():
            dtype = config.dtype if config and config.dtype and name.startswith("target/") else wanted[name].dtype
            item[source] = jax.ShapeDtypeStruct(wanted[name].shape, dtype, sharding=places[name])
        tree = traverse_util.unflatten_dict(item, sep="/")
        read = checkpointer.restore(
            os.path.join(path, "state"),
            args=ocp.args.PyTreeRestore(
                item=tree,
                restore_args=jax.tree.map(
                    lambda s: ocp.ArrayRestoreArgs(sharding=s.sharding, global_shape=s.shape, dtype=s.dtype), tree
                ),
                partial_restore=True,
            ),
        )
    read = flatten(read)
    leaves = {name: read[source] for name, source in sources.items()}
    logging.info("restored %d leaves from %s", len(leaves), path)
    return Restored(step_of(path) or 0, leaves, read_run(path), path)


def read_run(path: str) -> dict[str, Any]:
    """The run's own JSON in a checkpoint: data position, seed."""
    if not (epath.Path(path) / "run").exists():
        return {}
    with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
        return reader.restore(os.path.join(path, "run"))


def flatten(tree: Any) -> dict[str, Any]:
    """{'target': {'a': x}} -> {'target/a': x}; empty subtrees vanish."""
    return traverse_util.flatten_dict(tree, sep="/")


def leaves_missing(shapes: TrainState, restored: Restored) -> bool:
    """Whether some leaf has to be initialised."""
    return bool(set(flatten(shapes.state_dict())) - set(restored.leaves))


def _assign(
    path: str, wanted: Mapping[str, Any], saved: Mapping[str, Any], config: RestoreCheckpointConfig
) -> dict[str, str]:
    """Which of the checkpoint's leaves each wanted leaf is read from."""
    sources: dict[str, str] = {}
    missing = []
    for name in wanted:
        source: str | None = name
        for pattern, replacement in config.assignment_map or ():
            match = re.fullmatch(pattern, name)
            if match:
                source = match.expand(replacement) if replacement is not None else None
                break
        if source is None:
            continue
        if source in saved:
            sources[name] = source
        elif config.fallback_to_scratch or name.startswith(_MONITOR):
            logging.info("%s is not in %s: initialised", name, path)
        else:
            missing.append(f"{name}" + (f" (as {source})" if source != name else ""))
    if missing:
        raise ConfigError(
            f"checkpoint {path} does not have {len(missing)} of the leaves this run needs: {_some(missing)}. Another "
            "model or another optimizer wrote it. To continue with a new optimizer set RestoreCheckpointConfig."
            "assignment_map = [('.*param_states.*', None)]; to initialise what is missing set "
            "fallback_to_scratch = True."
        )
    unused = sorted(set(saved) - set(sources.values()))
    optimizer = "state/param_states/"
    restored_optimizer = any(name.startswith(optimizer) for name in sources)
    if restored_optimizer and (foreign := [name for name in unused if name.startswith(optimizer)]):
        raise ConfigError(
            f"checkpoint {path} was written by another optimizer: this one has no use for {_some(foreign)}. To continue "
            "with a fresh optimizer state set RestoreCheckpointConfig.assignment_map = [('.*param_states.*', None)]."
        )
    unused = [name for name in unused if not name.startswith(_MONITOR)]
    if config.strict and unused:
        raise ConfigError(
            f"checkpoint {path} has {len(unused)} leaves that this run does not use: {_some(unused)}. Set "
            "RestoreCheckpointConfig.strict = False to leave them."
        )
    return sources


def _check_shapes(path: str, wanted: Mapping[str, Any], saved: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    differing = [
        f"{name}: checkpoint {tuple(saved[source].shape)}, this run {tuple(wanted[name].shape)}"
        for name, source in sources.items()
        if tuple(saved[source].shape) != tuple(wanted[name].shape)
    ]
    if differing:
        raise ConfigError(
            f"checkpoint {path} has other shapes for {len(differing)} leaves: {_some(differing)}. Use the model it was "
            "written with, or leave these leaves out with RestoreCheckpointConfig.assignment_map."
        )


def _some(names: list[str], most: int = 4) -> str:
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return "; ".join(names[:most]) + more


def merge(state: TrainState, restored: Restored) -> TrainState:
    """A state whose leaves are the restored ones, and the given (fresh) ones where none was restored."""
    fresh = traverse_util.flatten_dict(state.state_dict(), sep="/", keep_empty_nodes=True)
    return state.from_state_dict(traverse_util.unflatten_dict(fresh | restored.leaves, sep="/"))
