"""--gin.NAME=VALUE and --sweep.NAME=VALUE under `xmanager launch`, which reads flags before a script can rewrite them."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from absl import flags

_DOTTED = re.compile(r"--?((?:gin|sweep)\.[^=]+)(=|$)", re.DOTALL)


def define_dotted(argv: Sequence[str]) -> None:
    """Makes the dotted flags of a command line known to absl, each by its own name. `reparsed` gives them their meaning."""
    for arg in argv:
        match = _DOTTED.match(arg)
        if match and match[1] not in flags.FLAGS:
            flags.DEFINE_multi_string(match[1], [], "A binding.")


def script_arguments(argv: Sequence[str]) -> list[str]:
    """What of XManager's command line is for the script.

    >>> script_arguments(["xmanager", "launch", "launch/xm_launch.py", "--", "--gin_file=a.gin"])
    ['launch/xm_launch.py', '--gin_file=a.gin']
    >>> script_arguments(["launch/xm_launch.py", "--gin_file=a.gin"])
    ['launch/xm_launch.py', '--gin_file=a.gin']
    """
    script = next((i for i, arg in enumerate(argv) if arg.endswith(".py")), 0)
    rest = list(argv[script + 1 :])
    return [argv[script], *(rest[1:] if rest[:1] == ["--"] else rest)]


def reparsed(argv: Sequence[str] | None = None) -> list[str]:
    """Reads the flags anew with the dotted ones rewritten; returns the words that are no flags.

    Raises:
      ConfigError: --gin.NAME without a value.
    """
    from perex_t5x import gin_utils
    from perex_t5x.experiments.sweep.command import rewritten

    script, *given = script_arguments(sys.argv if argv is None else argv)
    given = rewritten(gin_utils.rewrite_gin_args(given))
    known = flags.FLAGS
    xm_launch_script = known.xm_launch_script if "xm_launch_script" in known else None
    known.unparse_flags()
    words = known([script, *given])
    if xm_launch_script:  # XManager's own, which it has put in
        known.xm_launch_script = xm_launch_script
    return words[1:]
