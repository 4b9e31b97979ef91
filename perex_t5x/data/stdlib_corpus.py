"""The embedded corpus: the source text of the running interpreter's standard library.

It needs no download, is there on every machine, and is about 12 MB of real text. Its size and hash
differ between Python versions; both are logged, and the hash is part of a run's data fingerprint.
"""

from __future__ import annotations

import os
import sysconfig

from perex_t5x.errors import ConfigError

# Tests are excluded for their size and sameness; the rest is not the standard library's own text.
_EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "_bundled"}
)


def list_stdlib_files(root: str | None = None) -> list[tuple[str, str]]:
    """Returns sorted (relative path, path) of the standard library's `*.py` files.

    >>> names = [name for name, _ in list_stdlib_files()]
    >>> "json/decoder.py" in names, any("site-packages" in n for n in names)
    (True, False)
    """
    root = root or sysconfig.get_paths()["stdlib"]
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [s for s in subfolders if s not in _EXCLUDED_FOLDERS]
        for name in names:
            if name.endswith(".py"):
                path = os.path.join(folder, name)
                found.append((os.path.relpath(path, root).replace(os.sep, "/"), path))
    if not found:
        raise ConfigError(
            f"The standard library at {root} holds no *.py files (a zipped or stripped Python). "
            "Use MIXTURE_OR_TASK_NAME = 'text_files_lm' with files of your own."
        )
    return sorted(found)
