"""Which optional dependencies a command needs, checked before anything that might miss them is imported.

`pip install perex_t5x` brings what `perex_t5x.per_example` and `perex_t5x.optimizers` need. Everything else is in extras.
"""

from __future__ import annotations

import importlib.util

from perex_t5x.errors import ConfigError

_TRAIN = (
    "absl", "etils", "flax", "gin", "google_crc32c", "grain", "orbax", "rich", "seqio", "tensorflow", "tensorstore",
)  # fmt: skip
# What every command that names the extra imports; extras build on [train]. What only some of them need (libtpu, XManager) is
# missed where it is used.
_MODULES = {
    "train": _TRAIN,
    "gcs": ("google.cloud.storage",),
    "convert": ("safetensors",),
    "reports": (*_TRAIN, "vl_convert"),
    "launch": _TRAIN,
}


class MissingExtraError(ConfigError):
    """An optional dependency is not installed."""


def missing(extra: str) -> list[str]:
    """The modules of an extra that are not installed; nothing is imported."""
    return [name for name in _MODULES[extra] if not is_installed(name)]


def require(extra: str, who: str) -> None:
    """Raises `MissingExtraError`, a single line, if an extra that `who` needs is not installed.

    >>> require("train", "perex_t5x.train")
    """
    if absent := missing(extra):
        raise MissingExtraError(
            f"{who} needs the extra [{extra}]: pip install 'perex_t5x[{extra}]' (missing: {', '.join(absent)})"
        )


def is_installed(name: str) -> bool:
    """Whether a module can be imported; nothing but the packages around it is.

    >>> is_installed("numpy.linalg"), is_installed("no.such.module")
    (True, False)
    """
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
