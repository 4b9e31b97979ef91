"""A run's checkpoints as folders: which of them are whole, which are damaged, and what is done about the others.

`is_whole` is what "there is a checkpoint" means, everywhere. It looks at names and marks alone; `damage` reads the files
and compares them with the checksums that were stored with the commit.

This module imports neither JAX nor Orbax: launchers and `python -m perex_t5x.checkpoints verify` start at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from typing import Any

from absl import logging

from perex_t5x import buckets, checksums, files
from perex_t5x.errors import ConfigError, did_you_mean

PREFIX = "checkpoint"
RECORDED = {"checksums": "crc32c"}  # in Orbax's metadata of a checkpoint that has checksums: they cannot vanish unseen
_NAME = re.compile(rf"{PREFIX}_(\d+)")
_UNFINISHED = re.compile(rf"{PREFIX}_\d+\.orbax-checkpoint-tmp.*")
_TEMPORARY = re.compile(r".+\.\d+\.\d+\.tmp")  # of `files.atomic_writer`, whose process was killed
_COMMITTED, _METADATA = "commit_success.txt", "_CHECKPOINT_METADATA"


class DamagedError(ConfigError):
    """A checkpoint that was named cannot be used: its files are not those that were written."""


# --- names ------------------------------------------------------------------------------------------------------------


def absolute(path: str) -> str:
    """An absolute path; remote ones (gs://...) already are."""
    return path.rstrip("/") if files.is_remote(path) else os.path.abspath(path)


def step_of(path: str) -> int | None:
    """
    >>> step_of("runs/first/checkpoint_30"), step_of("runs/first/checkpoint_30.damaged")
    (30, None)
    """
    match = _NAME.fullmatch(os.path.basename(path.rstrip("/")))
    return int(match[1]) if match else None


def is_whole(path: str) -> bool:
    """Whether there is a checkpoint at `path`: committed, by its last name on a file system, by a mark in an object store,
    with the description of its arrays in it."""
    if files.is_remote(path) and not _is_marked(path):
        return False
    folder = files.as_path(path)
    return not _UNFINISHED.fullmatch(folder.name) and (folder / "state" / "_METADATA").exists()


def legacy_file(path: str) -> str | None:
    """The msgpack file of a checkpoint in T5X's legacy format, that file or a folder with it; None where there is none.

    It says no more than that a file is there: `perex_t5x.checkpoint_formats.legacy` reads it.
    """
    path = path.rstrip("/")
    folder = files.as_path(path)
    if folder.is_file():
        return path
    if (folder / "state" / "_METADATA").exists() or not (folder / "checkpoint").is_file():
        return None
    return f"{path}/checkpoint"


def is_legacy(path: str) -> bool:
    """Whether a folder is a checkpoint in T5X's legacy format, as far as can be seen."""
    return legacy_file(path) not in (None, path.rstrip("/"))


def _is_marked(path: str) -> bool:
    """Whether it has been committed, whatever has become of it since. Earlier versions left no mark on file systems."""
    return (files.as_path(path) / _COMMITTED).exists()


def whole(folder: str) -> list[str]:
    """The whole checkpoints in a run's folder, ours and T5X's, oldest first."""
    return [path for path in _named(folder) if is_whole(path) or is_legacy(path)]


def newest(folder: str) -> str | None:
    """The newest whole checkpoint of ours in a run's folder."""
    return next((path for path in reversed(_named(folder)) if is_whole(path)), None)


def _named(folder: str) -> list[str]:
    """Everything that is called checkpoint_<step>, by step."""
    root = files.as_path(absolute(folder))
    if not root.is_dir():
        return []
    return sorted(
        (os.fspath(p).rstrip("/") for p in root.iterdir() if step_of(p.name) is not None),
        key=lambda path: step_of(path) or 0,
    )


# --- damage -----------------------------------------------------------------------------------------------------------


def damage(path: str, own: bool = False, contents: bool = True) -> str:
    """What is wrong with a committed checkpoint, in a line; "" if nothing is, or nothing can be known.

    Args:
      path: a `checkpoint_<step>` folder.
      own: whether the run resumes from it, and needs the position in its data, too.
      contents: False: only look whether all files are there, in their sizes.
    """
    if not is_whole(path) and is_of_others(path):
        return _damage_of_others(path, decode=False)
    if not is_whole(path):
        return "state/_METADATA is missing"
    found = checksums.problems(path, contents=contents)
    if found is None:
        found = _without_checksums(path, own)
    return _shortened(found)


def _shortened(found: list[str]) -> str:
    return "; ".join(found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")


def is_of_others(path: str) -> bool:
    """Whether there is a checkpoint in a format that is read, and not written by runs."""
    from perex_t5x.checkpoint_formats import safetensors_files

    return safetensors_files.is_here(path) or legacy_file(path) is not None


def _damage_of_others(path: str, *, decode: bool) -> str:
    """What is wrong with a checkpoint without checksums. Raises `ConfigError` where it is none that is read.

    Args:
      decode: read everything; else only whether all parts and their descriptions are there.
    """
    from perex_t5x.checkpoint_formats import open_checkpoint

    try:
        return _shortened(open_checkpoint(path).problems(decode=decode))
    except DamagedError as e:
        return str(e).removeprefix(f"checkpoint {path} cannot be read: ")


def _refuse_foreign(path: str) -> None:
    """Raises `ConfigError` for a checkpoint that no run of ours has written: it holds no position in the data, so that
    no run can resume from it."""
    folder = files.as_path(path)
    ours = (folder / "run").exists() or (folder / checksums.FILE).exists()
    if is_legacy(path) or (is_whole(path) and not ours):
        raise ConfigError(
            f"{path} was written by T5X, or converted: it holds no position in the data, so this run cannot resume from it. "
            f"Start a new MODEL_DIR from it, with RestoreCheckpointConfig.path = {path!r}."
        )


def _without_checksums(path: str, own: bool) -> list[str]:
    """As far as can be seen of a checkpoint of an earlier version."""
    folder = files.as_path(path)
    try:
        metadata = folder / _METADATA
        recorded = json.loads(files.read_bytes(metadata)).get("custom_metadata") if metadata.exists() else None
        if (recorded or {}).get("checksums"):
            return [f"{checksums.FILE} is missing"]
        if own and "data" not in read_run(path):
            return ["run/metadata, with the position in the data, is missing"]
    except DamagedError as e:
        return [str(e)]
    except (OSError, ValueError, AttributeError, RecursionError):
        return [f"{_METADATA} cannot be read"]
    logging.info("%s was written without checksums: whether it is damaged is not known", path)
    return []


def refusal(path: str) -> str:
    """Why a checkpoint that a user has named cannot be used; "" if it can be, as far as is known."""
    found = damage(path)
    if not found:
        return ""
    others = [p for p in reversed(whole(os.path.dirname(absolute(path)))) if p != absolute(path)]
    usable = next((p for p in others if not damage(p)), None)
    hint = f" The newest valid one beside it is {usable}." if usable else ""
    return f"checkpoint {path} is damaged: {found}. Name another one.{hint}"


def read_run(path: str) -> dict[str, Any]:
    """The run's own JSON in a checkpoint: data position, seed. {} where it has none, as one that was converted."""
    file = files.as_path(path) / "run" / "metadata"
    if not file.exists():
        return {}
    try:
        content = json.loads(files.read_bytes(file))
    except (ValueError, RecursionError) as e:
        raise DamagedError(f"{file} cannot be read: {e}") from e
    if not isinstance(content, dict):
        raise DamagedError(f"{file} does not hold a JSON object")
    return content


def newest_valid(model_dir: str, *, dry_run: bool = False) -> str | None:
    """The newest checkpoint of a run that is not damaged. Damaged ones that are newer are moved aside, with one warning.

    To be called by one process, which holds the run's folder.
    """
    damaged: list[str] = []
    last = 0
    for path in reversed(_named(model_dir)):
        _refuse_foreign(path)
        if not (is_whole(path) or _is_marked(path)):
            continue
        last = last or step_of(path) or 0
        found = damage(path, own=True)
        if not found:
            break
        aside = "" if dry_run else f" (now {os.path.basename(set_aside(path))})"
        damaged.append(f"{os.path.basename(path)}{aside}: {found}")
    else:
        path = None
    if damaged:
        where = "from the beginning, since no other is there" if path is None else f"from {os.path.basename(path)}"
        logging.warning(
            "%s: damaged: %s. The run starts %s: %d steps are lost and made again.",
            model_dir, " | ".join(damaged), where, last - ((path and step_of(path)) or 0),
        )  # fmt: skip
    return path


def set_aside(path: str) -> str:
    """Renames a checkpoint to a name that nobody takes for one, `checkpoint_30.damaged`; returns the new path."""
    path = path.rstrip("/")
    target = files.free_path(path, "damaged")
    if files.is_remote(path):
        buckets.copy_folder(path, target, leave_out=r"(?!)")
        _remove(files.as_path(path))
    else:
        os.rename(path, target)
    return target


def tidy(model_dir: str, *, prunes: bool = False) -> None:
    """Removes what killed processes have left half-written in a run's folder, which this process holds.

    In an object store an unfinished checkpoint carries the name of a whole one, and is paid for. On a file system nobody
    leaves one under that name by being killed: what is called so and is none is moved aside, unless it is empty.

    Args:
      model_dir: the run's folder.
      prunes: whether the run removes old checkpoints; a killed one may have left one half-removed.
    """
    root = files.as_path(absolute(model_dir))
    last = (step_of(newest(model_dir) or "") or 0) if prunes else 0
    for path in _named(model_dir):
        if (step_of(path) or 0) < last and damage(path, contents=False):
            logging.info("removing the rest of %s, which is older than the newest", path)
            _remove(files.as_path(path))
    for path in list(root.iterdir()) if root.is_dir() else ():
        name = path.name.rstrip("/")
        if _UNFINISHED.fullmatch(name):
            logging.info("removing %s, which was not finished", path)
            _remove(path)
        elif _TEMPORARY.fullmatch(name) and path.is_file():
            logging.info("removing %s, which was not finished", path)
            path.unlink()
        elif _NAME.fullmatch(name) and not is_whole(os.fspath(path)) and not is_legacy(os.fspath(path)):
            unmarked = files.is_remote(model_dir) and not _is_marked(os.fspath(path))
            if unmarked or (path.is_dir() and not any(path.iterdir())):
                logging.info("removing %s, which is not whole", path)
                _remove(path)
            else:
                logging.warning("%s is not a whole checkpoint: moved to %s", path, set_aside(os.fspath(path)))


def _remove(path: Any) -> None:
    from etils import epath

    if not files.is_remote(path) and (os.path.islink(path) or not os.path.isdir(path)):
        os.unlink(path)
        return
    folder = epath.Path(path)
    folder.rmtree()
    if files.is_remote(path):
        with contextlib.suppress(FileNotFoundError):
            folder.rmtree(missing_ok=True)  # TensorFlow leaves what was below the marks of folders


# --- python -m perex_t5x.checkpoints verify ---------------------------------------------------------------------------


def define_flags() -> None:
    from absl import flags

    flags.DEFINE_bool("json", False, "Print a line of JSON for each checkpoint.")
    flags.DEFINE_enum("to", None, ["legacy", "orbax", "safetensors"], "convert: the format.")
    flags.DEFINE_bool("dry_run", False, "convert: say what would happen to each leaf, and write nothing.")
    flags.DEFINE_enum("names", "hugging_face", ["hugging_face", "t5x"], "convert: names in safetensors files.")
    layouts = ["keep", "unrolled", "axis0", "axis1"]
    flags.DEFINE_enum("layers", "keep", layouts, "convert: layers by themselves, or in one array along an axis.")
    flags.DEFINE_enum("heads", "keep", ["keep", "joined", "split"], "convert: an axis of kernels for heads, or none.")
    states = ["keep", "t5x", "drop"]
    flags.DEFINE_enum("optimizer_state", "keep", states, "convert: as it is, or as T5X's optimizers have it.")
    flags.DEFINE_bool(
        "params_only", False, "convert: leave out the optimizer's state and whatever else is no parameter."
    )
    flags.DEFINE_string("config_gin", None, "convert: the run's Gin file, for config.json. Default: the one beside it.")
    flags.DEFINE_multi_string("set", [], "convert: NAME=VALUE of T5Config, for config.json")
    flags.DEFINE_multi_string("ignore", [], "convert: a setting of config.json that may differ from ours")
    flags.DEFINE_string("max_shard_size", "5GB", "convert: above it, a model gets several safetensors files.")


def command(args: Any, words: list[str]) -> int:
    """Inspects, converts or verifies checkpoints; returns 1 if one that is verified is damaged, else 0."""
    verb, paths = words[:1], words[1:]
    if verb == ["inspect"] and paths:
        from perex_t5x.checkpoint_formats.command import inspect_command

        return inspect_command(args, paths)
    if verb == ["convert"]:
        from perex_t5x.checkpoint_formats.command import convert_command

        return convert_command(args, paths)
    if verb != ["verify"] or not paths:
        hint = did_you_mean(verb[0], ("inspect", "convert", "verify")) if verb else ""
        raise ConfigError(f"what is to be done? python -m perex_t5x.checkpoints inspect|convert|verify PATH.{hint}")
    has_damage = False
    for path in paths:
        for checkpoint in checkpoints_at(path):
            status, detail = verify(checkpoint)
            has_damage = has_damage or status not in ("valid", "unknown")
            if args.json:
                print(json.dumps({"path": checkpoint, "status": status, "detail": detail}))
            else:
                print(f"{checkpoint}: {status}{f' ({detail})' if detail else ''}")
    return int(has_damage)


def verify(path: str) -> tuple[str, str]:
    """One of 'valid', 'damaged', 'unfinished' and 'unknown' (an earlier version's, without checksums), and a detail.

    What other programs have written is valid if all of it can be read."""
    if not is_whole(path) and is_of_others(path):
        found = _damage_of_others(path, decode=True)
        return ("damaged", found) if found else ("valid", "written without checksums; every leaf was read")
    if not (is_whole(path) or _is_marked(path)):
        return "unfinished", "not a whole checkpoint"
    if found := damage(path):
        return "damaged", found
    if not (files.as_path(path) / checksums.FILE).exists():
        return "unknown", "written without checksums"
    return "valid", ""


def checkpoints_at(path: str) -> Iterator[str]:
    """The checkpoint that a path names, or all in a run's folder."""
    buckets.check(path, "PATH", writes=False, public=True)
    path = absolute(os.path.expanduser(path))
    folder = files.as_path(path)
    if not folder.exists():
        raise ConfigError(f"{path}: there is no such folder.")
    if step_of(path) is not None or (folder / "state").exists() or is_of_others(path):
        yield path
        return
    inside = _named(path)
    if not inside:
        raise ConfigError(f"{path}: this is no checkpoint, and no checkpoint_<step> is in it.")
    yield from inside
