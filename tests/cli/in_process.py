"""Commands run in this process, as a shell would: each in a folder; its exit code, and what it printed."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import runpy
import sys
import warnings
from pathlib import Path
from unittest import mock

from absl import flags as absl_flags

from perex_t5x import cli
from tests import fuzzing


@dataclasses.dataclass(frozen=True)
class Command:
    """A module, or a script; words that make it a command that does something; and words that keep it from doing much."""

    place: str
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()

    def __call__(self, words: list[str]) -> int:
        """Its exit code."""
        sys.argv[1:] = words
        with warnings.catch_warnings(action="ignore"):
            try:
                if self.place.endswith(".py"):
                    runpy.run_path(self.place, run_name="__main__")
                else:
                    runpy.run_module(self.place, run_name="__main__")
            except SystemExit as e:
                assert e.code is None or isinstance(e.code, int), e.code
                return e.code or 0
        raise AssertionError("it returned")


@contextlib.contextmanager
def same_flags():
    """Flags of libraries have their values again. absl's own helper would also delete those that were just defined."""
    every = absl_flags.FLAGS
    before = {name: every[name].value for name in every}
    try:
        yield
    finally:
        for name in every:
            every[name].unparse()
            every[name].value = before.get(name, every[name].default)


def run(command: Command, words: list[str], folder: Path | str) -> tuple[int, str]:
    """(exit code, all that was printed)."""
    fuzzing.forget_gin()
    argv, main = list(sys.argv), dict(vars(sys.modules["__main__"]))
    with (
        contextlib.chdir(folder),
        same_flags(),
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(out),
        mock.patch.object(cli, "_end_within"),  # a thread for every failure, which waits for the end of the process
        fuzzing.ends(),
    ):
        try:
            code = command(words)
        finally:
            sys.argv[:] = argv
            vars(sys.modules["__main__"]).update(main)
    return code, out.getvalue()
