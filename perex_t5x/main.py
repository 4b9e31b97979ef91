"""T5X's one command for all: `python -m perex_t5x.main --run_mode=train --gin_file=...`

    --run_mode=train     python -m perex_t5x.train
    --run_mode=eval      python -m perex_t5x.eval
    --run_mode=infer     python -m perex_t5x.infer

All other flags are those of the command it stands for.
"""

from __future__ import annotations

if __name__ == "__main__":
    from perex_t5x import cli

    cli.run("perex_t5x.main.command", __doc__, flags="perex_t5x.main.define_flags")

from collections.abc import Callable
from typing import Any

from perex_t5x.cli import flags as flags_lib
from perex_t5x.errors import ConfigError, did_you_mean

_FUNCTIONS = {"train": "train", "eval": "evaluate", "infer": "infer"}  # the module and its function
_ELSEWHERE = {
    "precompile": "python -m perex_t5x.preflight compiles a step for TPUs that are not there",
    "export": "there is no export to SavedModel; python -m perex_t5x.infer reads a checkpoint",
}


def define_flags() -> None:
    from absl import flags

    flags_lib.define_training_flags()
    flags.DEFINE_string("run_mode", None, f"What to do: {', '.join(_FUNCTIONS)}.")


def command(args: Any) -> None:
    """Calls the function of a run mode, configured by the flags' Gin files."""
    from perex_t5x.cli import gin_command

    gin_command.call(chosen((args.run_mode or "").lower()), args)


def chosen(mode: str) -> Callable[[], Callable[..., Any]]:
    """What imports the function of a run mode, when the other processes are found; ported files look for it in `__main__`.

    >>> chosen("evl")
    Traceback (most recent call last):
    perex_t5x.errors.ConfigError: --run_mode=evl is none of train, eval, infer. Did you mean 'eval'?
    """
    if mode in _ELSEWHERE:
        raise ConfigError(f"--run_mode={mode}: {_ELSEWHERE[mode]}.")
    if mode not in _FUNCTIONS:
        given = f"--run_mode={mode} is none of" if mode else "no --run_mode given. It is one of"
        raise ConfigError(f"{given} {', '.join(_FUNCTIONS)}.{did_you_mean(mode, _FUNCTIONS)}")
    from perex_t5x import cli

    return lambda: cli.imported(f"perex_t5x.{mode}.{_FUNCTIONS[mode]}", in_main=True)
