"""Rewrites Gin files of T5X's, so that our commands take them: `python -m perex_t5x.gin_port FILE [FILE ...]`

    python -m perex_t5x.gin_port run.gin                        the ported file, on standard output
    python -m perex_t5x.gin_port run.gin --in_place             instead of the file
    python -m perex_t5x.gin_port run.gin --output_dir=ported --search_path=$HOME/t5x
                                                                into a folder, and what it includes, too

Imports, includes and names are changed, line by line; comments and all other lines stay. T5X's own run and model files
become shipped ones. What has no counterpart is commented out with the reason, and listed on standard error with file and
line; --report=FILE writes the list as JSON. The exit code is 1 if something was left out, else 0.
"""

from __future__ import annotations

if __name__ == "__main__":
    from perex_t5x import cli

    cli.run(
        "perex_t5x.gin_port.__main__.main", __doc__, flags="perex_t5x.gin_port.__main__.define_flags", positional=True
    )

import json
import os
import sys
from typing import Any

from etils import epath

from perex_t5x import files as files_lib
from perex_t5x.cli import console
from perex_t5x.errors import ConfigError, writing_failed
from perex_t5x.gin_port.porting import port_files


def define_flags() -> None:
    from absl import flags

    flags.DEFINE_string("output_dir", None, "Folder for the ported files, and for those that they include.")
    flags.DEFINE_bool("in_place", False, "Write each file where it was.")
    flags.DEFINE_list("search_path", [], "Folders in which included files are looked for, such as T5X's checkout.")
    flags.DEFINE_string("report", None, "File for the list of what was done, as JSON.")


def main(args: Any, given: list[str]) -> int:
    if not given:
        raise ConfigError("no file given: python -m perex_t5x.gin_port FILE")
    if args.in_place and args.output_dir:
        raise ConfigError("--in_place and --output_dir exclude each other.")
    console.import_tensorflow_quietly()
    own = {os.path.basename(file) for file in given}
    if args.output_dir and len(own) < len(given):
        raise ConfigError("two files of the same name would be one in --output_dir: port them one by one.")
    ported, notes = port_files(given, args.search_path, with_includes=bool(args.output_dir))
    for name, text in ported.items():
        if args.output_dir:
            _write(os.path.join(args.output_dir, os.path.basename(name)), text)
        elif args.in_place:
            _write(name, text)
        else:
            print(text, end="")
    left_out = [note for note in notes if note.what == "left out"]
    for note in notes:
        print(note, file=sys.stderr)
    done = sum(note.what == "rewritten" for note in notes)
    print(f"{len(ported)} file(s): {done} rewritten, {len(left_out)} left out.", file=sys.stderr)
    if args.report:
        report = {"files": list(ported), "notes": [note.as_dict() for note in notes]}
        _write(args.report, json.dumps(report, indent=2) + "\n")
    return int(bool(left_out))


def _write(path: str, text: str) -> None:
    try:
        epath.Path(path).parent.mkdir(parents=True, exist_ok=True)
        files_lib.write_atomically(epath.Path(path), text)
    except OSError as e:
        raise writing_failed(f"{path} cannot be written: {e.strerror or e}.", e) from e
