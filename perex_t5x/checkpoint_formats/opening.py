"""Which format a path is in."""

from __future__ import annotations

from perex_t5x import files
from perex_t5x.checkpoint_files import legacy_file
from perex_t5x.checkpoint_formats import legacy, orbax, safetensors_files
from perex_t5x.checkpoint_formats.leaves import Contents
from perex_t5x.errors import ConfigError


def open_checkpoint(path: str) -> Contents:
    """What is in a checkpoint of any format; reads no arrays. Raises `ConfigError` where there is none, or a damaged one."""
    path = path.rstrip("/")
    folder = files.as_path(path)
    if not folder.exists():
        raise ConfigError(f"{path}: there is no such file or folder.")
    if (folder / "state" / "_METADATA").exists() or (folder / "_METADATA").exists():
        return orbax.read(path)
    if safetensors_files.is_here(path):
        return safetensors_files.read(path)
    if legacy_file(path) is not None:
        return legacy.read(path)
    raise ConfigError(
        f"{path} is no checkpoint that can be read: it has neither state/_METADATA (Orbax) nor a file `checkpoint` (T5X's "
        "legacy format) nor a file *.safetensors."
    )
