"""Damage to the folder of a run that has ended: files cut off, gone or changed. Each says in a few words what it did."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from perex_t5x import checkpoint_files

FILES = {
    "arrays": "state/**/d/*",
    "manifest": "state/**/manifest.ocdbt",
    "metadata": "**/_*METADATA",
    "run_json": "run/metadata",
    "checksums": "checksums.json",
    "iterator": "data/**/*",
}


def _truncate(path: Path, rng: random.Random) -> str:
    size = rng.randrange(path.stat().st_size)
    os.truncate(path, size)
    return f"to {size} bytes"


def _delete(path: Path, rng: random.Random) -> str:
    path.unlink()
    return ""


def flip(path: Path, rng: random.Random) -> str:
    content = bytearray(path.read_bytes())
    where, bit = rng.randrange(len(content)), rng.randrange(8)
    content[where] ^= 1 << bit
    path.write_bytes(content)
    return f"bit {bit} of byte {where}"


WAYS = {"truncate": _truncate, "delete": _delete, "flip": flip}


def _newest(folder: Path) -> Path:
    newest = checkpoint_files.newest(str(folder))
    assert newest is not None, "faults are put into runs that have saved"
    return Path(newest)


def in_checkpoint(damage: Callable[[Path, random.Random], str], kind: str) -> Callable[[Path, random.Random], str]:
    """Damages a file of the newest checkpoint."""

    def act(folder: Path, rng: random.Random) -> str:
        checkpoint = _newest(folder)
        candidates = sorted(p for p in checkpoint.glob(FILES[kind]) if p.is_file() and p.stat().st_size)
        path = rng.choice(candidates)
        return f"{path.relative_to(folder)} {damage(path, rng)}".strip()

    return act


def in_run(damage: Callable[[Path, random.Random], str], name: str) -> Callable[[Path, random.Random], str]:
    """Damages a file of a run that has steps left to make: it lacks its last checkpoint."""

    def act(folder: Path, rng: random.Random) -> str:
        shutil.rmtree(_newest(folder))
        return f"{name} {damage(folder / name, rng)}".strip()

    return act


def torn_line(folder: Path, rng: random.Random) -> str:
    """The last line of the metrics is half there, as after a crash of the machine."""
    shutil.rmtree(_newest(folder))
    path = folder / "metrics.jsonl"
    content = path.read_bytes()
    start = content.rstrip(b"\n").rindex(b"\n") + 1
    os.truncate(path, rng.randrange(start + 1, len(content)))
    return "metrics.jsonl"


def empty_checkpoint(folder: Path, rng: random.Random) -> str:
    path = _newest(folder)
    shutil.rmtree(path)
    path.mkdir()
    return path.name


def in_all_checkpoints(folder: Path, rng: random.Random) -> str:
    """One bit in every checkpoint: the run starts from the beginning."""
    for path in checkpoint_files.whole(str(folder)):
        arrays = [p for p in Path(path).glob(FILES["arrays"]) if p.is_file()]
        flip(max(arrays, key=os.path.getsize), rng)
    return "a bit in each"
