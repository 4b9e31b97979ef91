"""Reads the text of a run's `config.gin`: bindings as written, macros, and what differs among runs.

Text is enough: the modules that a configuration imports need not be there, and nothing is executed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

_BINDING = re.compile(r"^([\w./]+)\s*=\s*(.*)$")
_PLACES = {"MODEL_DIR"}  # differs for every run, and says nothing
Config = dict[str, str]


def parse(text: str) -> Config:
    r"""Binding -> value, both as written; a value over several lines becomes one.

    >>> parse("import optax\n# Macros:\nBATCH_SIZE = 16\noptax.adamw.b1 = \\\n    0.9\nX = [1,\n     2]\n")
    {'BATCH_SIZE': '16', 'optax.adamw.b1': '0.9', 'X': '[1, 2]'}
    """
    config: Config = {}
    name = None
    for line in text.splitlines():
        found = _BINDING.match(line)
        if found:
            name = found[1]
            config[name] = found[2].rstrip("\\").strip()
        elif not line.startswith((" ", "\t")) or line.lstrip().startswith("#"):
            name = None
        elif name:
            config[name] = f"{config[name]} {line.strip().rstrip(chr(92))}".strip()
    return config


def lookup(config: Mapping[str, str], *names: str) -> Any:
    """The value of the first of these names that is bound, macros followed; None if none is.

    A name stands for every binding that ends in it: 'DatasetConfig.batch_size' for 'utils.DatasetConfig.batch_size'.

    >>> lookup({"B": "16", "train/utils.DatasetConfig.batch_size": "%B"}, "train/utils.DatasetConfig.batch_size")
    16
    >>> lookup({"OPTIMIZER": "@optax.adamw"}, "OPTIMIZER")
    '@optax.adamw'
    """
    for name in names:
        for key, value in config.items():
            if key == name or key.endswith((f".{name}", f"/{name}")):
                return literal(_followed(config, value))
    return None


def _followed(config: Mapping[str, str], value: str) -> str:
    for _ in range(10):  # a macro may name another; a circle ends here
        if not (value.startswith("%") and value[1:] in config):
            break
        value = config[value[1:]]
    return value


def literal(value: str) -> Any:
    """A Python value if the text is one, else the text."""
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value


def differences(configs: Sequence[Mapping[str, str]]) -> tuple[list[str], list[str]]:
    """Names of the bindings that differ: those that all configurations have, and those that only some have.

    >>> differences([{"B": "8", "a.x": "1", "c": "1"}, {"B": "16", "b.y": "2", "c": "1"}])
    (['B'], ['a.x', 'b.y'])
    """
    configs = [c for c in configs if c]  # a run that has not begun has none
    names = dict.fromkeys(name for config in configs for name in config if name not in _PLACES)
    everywhere = [n for n in names if all(n in c for c in configs)]
    differing = [n for n in everywhere if len({c[n] for c in configs}) > 1]
    return differing, [n for n in names if n not in set(everywhere)]
