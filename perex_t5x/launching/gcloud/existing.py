"""What is there already: a launch finds the one that is running, and never makes a second one for the same folder."""

from __future__ import annotations

import sys
from collections.abc import Callable

from perex_t5x.errors import ConfigError
from perex_t5x.launching.checks import answer, say
from perex_t5x.launching.gcloud import resource
from perex_t5x.launching.gcloud.resource import GONE, Description
from perex_t5x.launching.gcloud.steps import Steps
from perex_t5x.launching.request import Request


def check_folder(request: Request, steps: Steps) -> None:
    """Raises `ConfigError` if a launch of another name writes into the same folder."""
    for other in steps.list():
        same_folder = other.labels.get(resource.LABEL_RUN) == request.work.fingerprint
        if same_folder and other.name != request.name and other.coming_or_there:
            raise ConfigError(
                f"{request.work.root} is written by the launch {other.name!r}, which is {other.state}. Follow it with "
                f"--name={other.name}, delete it, or choose another folder."
            )


def look(request: Request, steps: Steps, ask: Callable[[str], str] = input) -> Description:
    """The launch of this name and folder that is there and shall be followed; `GONE`: nothing is in the way.

    A failed or suspended one of ours, which uses up quota and nothing else, is deleted.

    Raises:
      ConfigError: the name or the folder is taken, or one would have to be asked and is not there.
    """
    found = steps.describe()
    check_folder(request, steps)
    if found == GONE:
        return GONE
    if not found.ours:
        raise ConfigError(f"{steps.target.what} exists and is not one of a launch. Choose another --name.")
    if found.labels.get(resource.LABEL_RUN) != request.work.fingerprint:
        raise ConfigError(
            f"{steps.target.what} belongs to a launch into another folder than {request.work.root}. Choose another --name."
        )
    if found.slices != request.slices and found.coming_or_there:
        raise ConfigError(
            f"{steps.target.what} has {found.slices} slice(s), and {request.slices} would be asked for: give "
            f"--slices={found.slices} to follow it, or delete it first."
        )
    if not found.coming_or_there:
        say(f"{steps.target.what} is {found.state}: it is deleted and made anew.")
        steps.delete()
        return GONE
    say(f"{steps.target.what} is there already: {found.state}.")
    if not request.yes:
        if not sys.stdin.isatty():
            raise ConfigError(
                f"this launch runs already. Follow it: launch/gcloud_tpu.py follow --name={request.name} "
                f"{' '.join(steps.target.where)}, or give --yes, which also starts it again where its slice is taken away."
            )
        print("Follow it? [Y/n] ", end="", file=sys.stderr, flush=True)
        if answer(ask) in ("n", "no"):
            raise ConfigError("nothing was created.")
    return found
