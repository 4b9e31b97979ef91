"""The configurations that one call of preflight looks at: the columns of its table."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from perex_t5x import gin_utils
from perex_t5x.errors import ConfigError, did_you_mean
from perex_t5x.preflight import step

if TYPE_CHECKING:
    from perex_t5x.trainer import Trainer


@dataclass(frozen=True)
class Case:
    """Gin files and bindings under a name."""

    name: str
    files: tuple[str, ...]
    bindings: tuple[str, ...] = ()
    search_paths: tuple[str, ...] = ()

    def parse(self, *changes: str) -> None:
        """Parses them; `changes` are bindings that win over all others."""
        step.parse_gin(self.files, (*self.bindings, *changes), self.search_paths)

    def build(self, devices: Sequence[Any], *changes: str) -> tuple[Trainer, dict[str, jax.ShapeDtypeStruct]]:
        self.parse(*changes)
        return step.build_parsed(devices)


def cases(
    files: Sequence[str], bindings: Sequence[str], search_paths: Sequence[str], compare: Sequence[str]
) -> list[Case]:
    """One case, or one for every entry of `compare`: the same with an optimizer or Gin files added.

    >>> [case.files for case in cases(["a.gin"], [], [], ["adamw", "b.gin+c.gin"])]
    [('a.gin', 'optimizers/adamw.gin'), ('a.gin', 'b.gin', 'c.gin')]
    """
    common = (tuple(bindings), tuple(search_paths))
    if not compare:
        names = [name.removesuffix(".gin") for name in files]
        shown = [os.path.basename(name) for name in names if not name.startswith("runs/")]
        return [Case(" + ".join(shown) or names[0], tuple(files), *common)]
    found = []
    for entry in compare:
        added = [part if part.endswith(".gin") else _optimizer_file(part) for part in entry.split("+")]
        found.append(Case(entry.replace(".gin", ""), (*files, *added), *common))
    return found


def _optimizer_file(name: str) -> str:
    known = sorted(path.stem for path in (Path(gin_utils.shipped_gin_dir()) / "optimizers").glob("*.gin"))
    if name not in known:
        raise ConfigError(
            f"--compare: {name!r} is neither a shipped optimizer nor a file that ends in .gin.{did_you_mean(name, known)} "
            f"Optimizers: {', '.join(known)}."
        )
    return f"optimizers/{name}.gin"
