"""The paper's studies, each a sweep in Gin and an analysis. See docs/studies.md."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from perex_t5x.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from perex_t5x.experiments.studies.base import Study

NAMES = ("sign_placement", "preconditioner", "clipping", "sqrt_scaling", "noise_scale", "overhead")


def find(name: str) -> Study:
    """A study by its name.

    >>> find("sqrt_scaling").file
    'sweeps/sqrt_scaling.gin'
    """
    if name not in NAMES:
        raise ConfigError(f"there is no study {name!r}; there are {', '.join(NAMES)}.{did_you_mean(name, NAMES)}")
    return importlib.import_module(f"{__name__}.{name}").STUDY
