"""From text to batches: SeqIO tasks, and two feeds that hand them to the training loop.

Nothing heavy is imported here: the names below load SeqIO and TensorFlow when first used.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "Feed": "feed",
    "feature_converter": "feed",
    "make_feed": "feed",
    "get_mixture_or_task": "lookup",
    "register_all": "tasks",
    "register_text_files": "tasks",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
