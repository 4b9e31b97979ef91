"""Gin files that are not shipped with the package travel along; so does what they include."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gin import config_parser

from perex_t5x import gin_utils
from perex_t5x.errors import ConfigError

FOLDER = "gin_files"  # beside jobs.json; the jobs run there and search it


@dataclass
class Travelling:
    """Files on their way, by the name under which the jobs find them.

    Attributes:
      search_paths: --gin_search_paths, where they are searched here.
      found: name in `FOLDER` -> path here.
    """

    search_paths: Sequence[str] = ()
    found: dict[str, str] = field(default_factory=dict)

    def add(self, name: str) -> str:
        """Takes a --gin_file along, if it is not shipped; returns its name over there."""
        path = gin_utils._find(name, ["", *self.search_paths, gin_utils.shipped_gin_dir()], "--gin_file")
        beside = os.path.dirname(os.path.abspath(path))
        new_name = name
        if not _is_shipped(path):
            if os.path.isabs(name) or ".." in Path(name).parts:
                new_name = os.path.basename(name)  # its folder is not there
            new_name = os.path.normpath(new_name)
            self._take(new_name, path)
        elif os.path.isabs(name) or not os.path.isfile(os.path.join(gin_utils.shipped_gin_dir(), name)):
            # Given by its path here: over there it is found by its name among the shipped ones.
            new_name = os.path.relpath(os.path.realpath(path), os.path.realpath(gin_utils.shipped_gin_dir()))
        self._includes(path, ["", *self.search_paths, beside, gin_utils.shipped_gin_dir()])
        return new_name

    def _take(self, name: str, path: str) -> None:
        if os.path.realpath(self.found.get(name, path)) != os.path.realpath(path):
            raise ConfigError(
                f"two Gin files would both travel as {name}: {self.found[name]} and {path}. Rename one of them."
            )
        self.found[name] = path

    def _includes(self, path: str, search_paths: Sequence[str]) -> None:
        with open(path, encoding="utf-8") as f:
            statements = list(config_parser.ConfigParser(f, gin_utils._Names()))
        for statement in statements:
            if not isinstance(statement, config_parser.IncludeStatement):
                continue
            name = statement.filename
            included = gin_utils._find(name, search_paths, path)
            if os.path.isabs(name) or ".." in Path(name).parts:
                raise ConfigError(
                    f"{path}: include {name!r} will not be found on another machine. Include it by a name within "
                    "the working directory or a folder of --gin_search_paths."
                )
            if not _is_shipped(included):
                self._take(os.path.normpath(name), included)
            self._includes(included, search_paths)


def _is_shipped(path: str) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(gin_utils.shipped_gin_dir()))
