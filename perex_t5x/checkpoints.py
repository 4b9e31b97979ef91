"""Checkpoints through Orbax: state, RNG and data position in one commit, `checkpoint_<step>/`.

checkpoint_1000/
  state/    OCDBT arrays: {'target': params, 'state': {'step', 'param_states', 'monitor'}, 'rng'}
  run/      JSON: data position and whatever else belongs to the run
  data/     iterator state of a streaming feed, one file per process
  checksums.json   of all of these, written before the commit: `perex_t5x.checksums`

    python -m perex_t5x.checkpoints verify PATH [PATH ...]
    python -m perex_t5x.checkpoints inspect PATH [PATH ...] [--json]
    python -m perex_t5x.checkpoints convert PATH TARGET --to=orbax|legacy|safetensors [--dry_run]

`verify` says of checkpoints, or of all in a run's folder, whether they are as they were written; exit code 1 if one of them
is not. `inspect` lists what is in them. `convert` goes between this format, T5X's legacy one, and safetensors files with
Hugging Face's names: docs/checkpoints.md. `perex_t5x.saving` writes checkpoints; here they are read.
"""

from __future__ import annotations

if __name__ == "__main__":
    from perex_t5x import cli

    command = "perex_t5x.checkpoint_files.command"
    cli.run(command, __doc__, flags="perex_t5x.checkpoint_files.define_flags", positional=True)

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from flax import traverse_util

from perex_t5x import buckets
from perex_t5x.best_checkpoints import (  # noqa: F401 (of this module's interface)
    OrbaxCheckpointManagerInterface,
    SaveBestCheckpointer,
)
from perex_t5x.checkpoint_files import (
    DamagedError,
    absolute,
    is_whole,
    legacy_file,
    newest,  # noqa: F401 (of this module's interface)
    read_run,
    step_of,
    whole,
)
from perex_t5x.checkpoint_formats import (
    Leaf,
    heads,
    hugging_face,
    layers,
    open_checkpoint,
    optimizer_states,
    safetensors_files,
)
from perex_t5x.checkpoint_formats.leaves import reading
from perex_t5x.checkpoint_formats.sharded import read_sharded
from perex_t5x.errors import ConfigError
from perex_t5x.saving import Checkpointer  # noqa: F401 (of this module's interface)
from perex_t5x.train_state import TrainState
from perex_t5x.utils import RestoreCheckpointConfig

_MONITOR = "state/monitor/"  # averages for the log: where they are missing they start from zero


@dataclasses.dataclass
class Restored:
    """What was read: leaves by name (those the assignment map left out are missing), and the run's JSON."""

    step: int
    leaves: dict[str, jax.Array]
    run: dict[str, Any]
    path: str


def data_dir(path: str) -> str:
    """Where a checkpoint holds a streaming feed's state; the folder exists only if it had one."""
    return os.path.join(path, "data")


def checkpoint_paths(path: Any, mode: str) -> list[str]:
    """Checkpoints that `path` names under a restore mode, oldest first. Raises `ConfigError` where there are none."""
    buckets.check(path, "RestoreCheckpointConfig.path", writes=False)
    binding = f"RestoreCheckpointConfig.path = {path!r}"
    path = absolute(path)  # Orbax reads no others
    folder = epath.Path(path)
    if not folder.exists():
        raise ConfigError(f"{binding}: this path does not exist.")
    if safetensors_files.is_here(path):
        return [os.fspath(folder)]
    if file := legacy_file(path):
        named = file.endswith("/checkpoint")  # T5X takes the path of the file, too
        return [os.path.dirname(file) if named else file]
    if mode == "specific" or (folder / "state").exists():
        if not (folder / "state").exists():
            inside = whole(os.fspath(folder))
            hint = f" It holds {', '.join(os.path.basename(p) for p in inside)}: name one, or set mode = 'latest'."
            raise ConfigError(f"{binding} with mode 'specific' is not a checkpoint.{hint if inside else ''}")
        if not is_whole(os.fspath(folder)):
            raise ConfigError(f"{binding} is not a whole checkpoint: parts of it are missing. Name another one.")
        return [os.fspath(folder)]
    paths = whole(os.fspath(folder))
    if not paths:
        raise ConfigError(f"{binding}: no checkpoint_<step> folder in it.")
    return paths if mode == "all" else paths[-1:]


def check(path: str, shapes: TrainState, config: RestoreCheckpointConfig | None = None) -> int:
    """Raises `ConfigError` if `restore` with these arguments would; reads names and shapes only.

    Returns:
      The step that the run would begin at.
    """
    sources, saved = _given(path, shapes, config, ("target", "state"))
    return _step(path, saved) if "state/step" in sources else 0


def leaves_given(
    path: str, shapes: TrainState, config: RestoreCheckpointConfig | None, parts: tuple[str, ...]
) -> set[str]:
    """Names of the leaves that `restore` with these arguments would read. Raises `ConfigError` if it would."""
    return set(_given(path, shapes, config, parts)[0])


def _given(
    path: str, shapes: TrainState, config: RestoreCheckpointConfig | None, parts: tuple[str, ...]
) -> tuple[dict[str, str], Saved]:
    """Says which of the checkpoint's parameters the model has not, and would be left out."""
    sources, saved = _sources(path, _wanted(shapes, parts), config)
    rules = (config.assignment_map if config else None) or ()
    left_out = sorted(
        name
        for name in saved.unused(sources.values())
        if name.startswith("target/") and not any(re.fullmatch(pattern, name) for pattern, _ in rules)
    )
    if left_out:
        logging.warning(
            "checkpoint %s has %d parameters that the model has not; they are left out: %s",
            path,
            len(left_out),
            _some(left_out),
        )
    return sources, saved


def _check_map(path: str, wanted: Mapping[str, Any], saved: Mapping[str, Any], config: RestoreCheckpointConfig) -> None:
    """Raises for a rule that concerns no leaf, of the run or of the checkpoint: it is misspelt."""
    if not any(name.startswith("state/") for name in wanted):
        return  # parameters alone are wanted: the optimizer's rules have nothing to match
    for pattern, _ in config.assignment_map or ():
        if not any(re.fullmatch(pattern, name) for name in (*wanted, *saved)):
            raise ConfigError(
                f"RestoreCheckpointConfig.assignment_map: {pattern!r} matches no leaf of this run, and none of {path}. A "
                f"rule has to match a whole name, such as {next(iter(wanted))!r}."
            )


def _wanted(shapes: TrainState, parts: tuple[str, ...]) -> dict[str, Any]:
    return {k: v for k, v in flatten(shapes.state_dict()).items() if k.split("/")[0] in parts}


def _sources(
    path: str, wanted: Mapping[str, Any], config: RestoreCheckpointConfig | None
) -> tuple[dict[str, str], Saved]:
    """Which of the checkpoint's leaves each wanted leaf is read from, all of the wanted shapes; and all of its leaves."""
    with _readable(path):
        saved = Saved.of(path, wanted)
    try:
        _check_map(path, wanted, saved.leaves, config or RestoreCheckpointConfig())
        sources = _assign(path, wanted, saved, config or RestoreCheckpointConfig())
        _check_shapes(path, wanted, saved.leaves, sources)
    except ConfigError as e:
        if config is not None:
            raise
        raise ConfigError(
            f"{e} This is the run's own checkpoint, which is always restored as a whole: for a change like this start "
            f"a new MODEL_DIR with RestoreCheckpointConfig.path = {path!r}."
        ) from e
    return sources, saved


@dataclasses.dataclass
class Saved:
    """The leaves of a checkpoint of any format, under its own names and under those that the run has for the same.

    Attributes:
      leaves: by name; also with layers laid out as the run has them.
      made_of: the checkpoint's own leaves that each of these is made of.
      own: names of the checkpoint's own leaves.
      format: of the checkpoint.
    """

    leaves: dict[str, Leaf]
    made_of: dict[str, tuple[str, ...]]
    own: frozenset[str]
    format: str

    @classmethod
    def of(cls, path: str, wanted: Mapping[str, Any]) -> Saved:
        contents = hugging_face.in_t5x_names(open_checkpoint(path))
        leaves = dict(contents.leaves)
        made_of: dict[str, tuple[str, ...]] = {name: (name,) for name in leaves}
        layout, present = layers.layout_of(wanted), layers.layout_of(contents.leaves)
        if layout is None or present is None:
            return cls(leaves, made_of, frozenset(contents.leaves), contents.format)
        moved = layers.rearranged(contents.leaves, layout)
        if layout != present:
            logging.info("%s has its layers as %r, this run as %r: converted while reading", path, present, layout)
            leaves |= {name: m.leaf for name, m in moved.items()}
            made_of |= {name: m.sources for name, m in moved.items()}
        current = {name: leaf for name, leaf in leaves.items() if name in moved}
        if heads.head_dim_of(current) and not heads.head_dim_of(wanted):
            logging.info("%s has an axis for heads in its kernels of attention: joined while reading", path)
            for name, (new, leaf) in heads.changed(current, None).items():
                leaves[new], made_of[new] = leaf, moved[name].sources
        return cls(leaves, made_of, frozenset(contents.leaves), contents.format)

    def unused(self, sources: Iterable[str]) -> set[str]:
        """The checkpoint's own leaves of which nothing is read."""
        return set(self.own) - {name for source in sources for name in self.made_of[source]}


@contextlib.contextmanager
def _readable(path: str) -> Iterator[None]:
    """Errors of the libraries that read a checkpoint, in a line: one without checksums may be damaged unseen."""
    try:
        with reading(path):
            yield
    except DamagedError as e:
        raise DamagedError(
            f"{e}. If its files are damaged, move the folder away: the same command then starts from the checkpoint "
            "before it."
        ) from e


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
    wanted = _wanted(shapes, parts)
    places = flatten(shardings.state_dict())
    sources, saved = _sources(path, wanted, config)
    into = {}
    for name in sources:
        dtype = config.dtype if config and config.dtype and name.startswith("target/") else wanted[name].dtype
        into[name] = jax.ShapeDtypeStruct(wanted[name].shape, dtype, sharding=places[name])
    if saved.format == "orbax" and all(saved.leaves[source].origin is None for source in sources.values()):
        leaves = _restore_by_orbax(path, sources, into)
    else:
        with _readable(path):
            leaves = read_sharded({name: saved.leaves[source] for name, source in sources.items()}, into)
    logging.info("restored %d leaves from %s", len(leaves), path)
    return Restored(_step(path, saved), leaves, {} if legacy_file(path) else read_run(path), path)


def _restore_by_orbax(
    path: str, sources: Mapping[str, str], into: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """Reads leaves of one of Orbax's checkpoints as they are."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        item = {source: into[name] for name, source in sources.items()}
        tree = traverse_util.unflatten_dict(item, sep="/")
        restore_args = jax.tree.map(
            lambda s: ocp.ArrayRestoreArgs(sharding=s.sharding, global_shape=s.shape, dtype=s.dtype), tree
        )
        args = ocp.args.PyTreeRestore(item=tree, restore_args=restore_args, partial_restore=True)
        with _readable(path):
            read = checkpointer.restore(os.path.join(path, "state"), args=args)
    read = flatten(read)
    return {name: read[source] for name, source in sources.items()}


def _step(path: str, saved: Saved) -> int:
    """The step of a checkpoint, by its name, or by what is in it."""
    step = step_of(path)
    if step is None and "state/step" in saved.own:
        step = int(saved.leaves["state/step"].read())
    return step or 0


def flatten(tree: Any) -> dict[str, Any]:
    """{'target': {'a': x}} -> {'target/a': x}; empty subtrees vanish."""
    return traverse_util.flatten_dict(tree, sep="/")


def leaves_missing(shapes: TrainState, restored: Restored) -> bool:
    """Whether some leaf has to be initialised."""
    return bool(set(flatten(shapes.state_dict())) - set(restored.leaves))


def _assign(path: str, wanted: Mapping[str, Any], saved: Saved, config: RestoreCheckpointConfig) -> dict[str, str]:
    """Which of the checkpoint's leaves each wanted leaf is read from."""
    sources: dict[str, str] = {}
    missing = []
    same = optimizer_states.counterparts(wanted, saved.leaves)
    for name in wanted:
        source: str | None = name
        for pattern, replacement in config.assignment_map or ():
            match = re.fullmatch(pattern, name)
            if match:
                source = match.expand(replacement) if replacement is not None else None
                break
        if source is None:
            continue
        if source == name and source not in saved.leaves:
            source = same.get(name, name)
        if source in saved.leaves:
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
    unused = sorted(saved.unused(sources.values()))
    optimizer = optimizer_states.STATES
    restored_optimizer = any(name.startswith(optimizer) for name in sources)
    slots = optimizer_states.slots(unused, optimizer_states.parameters_of(saved.own))
    unused = [n for n in unused if not optimizer_states.is_negligible(n, saved.leaves[n].shape, slots.get(n))]
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
