"""Shell completion for `perex`: commands, their flags, Gin files and macros.

    perex completion bash > ~/.local/share/bash-completion/completions/perex
    perex completion zsh > ~/.zfunc/_perex                       (a folder of your fpath)
    perex completion fish > ~/.config/fish/completions/perex.fish

Made from the flags that the commands define themselves: make it again after an update. Takes a few seconds. Commands whose
extra is not installed are completed without their flags.
"""

from __future__ import annotations

import contextlib
import functools
import io
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from perex_t5x import cli
from perex_t5x.cli import dispatch
from perex_t5x.errors import ConfigError, did_you_mean

GIN_FILES = ("gin_file", "sweep")  # flags that name one


@dataclass(frozen=True)
class Flag:
    """`--name`; `choices`: its values, where they are few."""

    name: str
    summary: str
    is_switch: bool = False
    choices: tuple[str, ...] = ()

    @property
    def word(self) -> str:
        """As it is completed: a value follows the equals sign."""
        return f"--{self.name}" + ("" if self.is_switch else "=")


def flags_of(command: dispatch.Command) -> list[Flag]:
    """The flags that a command defines, as it lists them itself; none where it cannot say them."""
    before = list(sys.argv), dict(vars(sys.modules["__main__"]))
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()):
            with contextlib.suppress(SystemExit, ConfigError):
                dispatch.run(command, ["--help" if command.is_argparse else "--helpxml"])
    finally:
        cli.forget_failure()  # of a command whose extra is not installed
        sys.argv[:] = before[0]
        vars(sys.modules["__main__"]).update(before[1])
    said = out.getvalue()
    if command.is_argparse:
        listed = re.findall(r"^  (?:-\w, )?--([\w-]+) (?:[A-Z]+)\s+(.*)", said, re.MULTILINE)
        return [Flag(name, summary) for name, summary in listed]
    if "<?xml" not in said:
        return []
    flags = ElementTree.fromstring(said[said.index("<?xml") :]).iter("flag")
    return [_flag(flag) for flag in flags if flag.findtext("key") == "yes"]


def _flag(flag: ElementTree.Element) -> Flag:
    values = tuple(value.text or "" for value in flag.iter("enum_value"))
    summary = " ".join((flag.findtext("meaning") or "").split())
    return Flag(flag.findtext("name") or "", summary, flag.findtext("type") == "bool", values)


def shipped_gin_files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.gin"))


def macros(folder: Path) -> list[str]:
    """The names that shipped Gin files bind for a user to bind again: `TRAIN_STEPS = 1000`."""
    texts = [path.read_text(encoding="utf-8") for path in folder.rglob("*.gin")]
    return sorted({name for text in texts for name in re.findall(r"^([A-Z][A-Z0-9_]+) *=", text, re.MULTILINE)})


def _gin_folder() -> Path | None:
    try:
        from perex_t5x import gin_utils
    except ImportError:  # the core alone: no command of it reads Gin files
        return None
    return Path(gin_utils.shipped_gin_dir())


def _quoted(words: Sequence[str]) -> str:
    return "'" + " ".join(words) + "'"


def _cases(flags: Mapping[str, Sequence[Flag]], line: Callable[[Sequence[Flag]], str]) -> str:
    return "\n".join(f"    {name}) {line(own)} ;;" for name, own in flags.items() if own)


def _choices(flags: Mapping[str, Sequence[Flag]]) -> str:
    rows = [(name, flag) for name, own in flags.items() for flag in own if flag.choices]
    return "\n".join(f"    {name}:--{flag.name}) values={_quoted(flag.choices)} ;;" for name, flag in rows)


def bash(flags: Mapping[str, Sequence[Flag]], gin_files: Sequence[str], names: Sequence[str]) -> str:
    bindings = [f"--gin.{name}=" for name in names]

    def words(own: Sequence[Flag]) -> str:
        more = ' "$bindings"' if any(flag.name == "gin_file" for flag in own) else ""
        return f"flags={_quoted([flag.word for flag in own])}{more}"

    return f"""# bash completion for perex. Made by: perex completion bash
_perex() {{
  local line=${{COMP_LINE:0:COMP_POINT}} cur value values="" flags="" IFS=$' \\t\\n'
  local command=${{COMP_WORDS[1]-}}
  local bindings={_quoted(bindings)}
  local gin_files={_quoted(gin_files)}
  cur=${{line##*[[:space:]]}}  # bash itself splits --name=value
  COMPREPLY=()
  if ((COMP_CWORD == 1)); then
    COMPREPLY=($(compgen -W {_quoted([*flags, "--help", "--version"])} -- "$cur"))
    return
  fi
  case $command in
{_cases(flags, words).replace(' "$bindings"', '" $bindings"')}
  esac
  value=${{cur#*=}}
  case $command:${{cur%%=*}} in
    completion:*) values="bash zsh fish" ;;
{_choices(flags)}
  esac
  case $cur in
    {"|".join(f"--{name}=*" for name in GIN_FILES)})
      COMPREPLY=($(compgen -W "$gin_files" -- "$value") $(compgen -f -X '!*.gin' -- "$value") $(compgen -d -S / -- "$value"))
      compopt -o nospace 2>/dev/null
      ;;
    --*=*)
      if [[ $values ]]; then COMPREPLY=($(compgen -W "$values" -- "$value")); else COMPREPLY=($(compgen -f -- "$value")); fi
      ;;
    -*)
      COMPREPLY=($(compgen -W "$flags --help" -- "$cur"))
      [[ ${{COMPREPLY[0]-}} == *= ]] && compopt -o nospace 2>/dev/null
      ;;
    *)
      if [[ $values ]]; then COMPREPLY=($(compgen -W "$values" -- "$cur")); else COMPREPLY=($(compgen -f -- "$cur")); fi
      ;;
  esac
  if [[ $cur == --*=* && $COMP_WORDBREAKS != *=* ]]; then COMPREPLY=("${{COMPREPLY[@]/#/${{cur%%=*}}=}}"); fi
}}
complete -F _perex perex
"""


def _described(word: str, summary: str) -> str:
    """For zsh's _describe: a colon ends the word."""
    return "'" + word + ":" + _short(summary).replace("'", "'\\''") + "'"


def _short(summary: str) -> str:
    return re.split(r"(?<=[.;:]) ", summary)[0].rstrip(".;:")[:90]


def zsh(flags: Mapping[str, Sequence[Flag]], gin_files: Sequence[str], names: Sequence[str]) -> str:
    def words(own: Sequence[Flag]) -> str:
        listed = " ".join(_described(flag.word, flag.summary) for flag in own)
        more = f" bindings=({' '.join(f'--gin.{name}=' for name in names)})"
        return f"flags=({listed})" + (more if any(flag.name == "gin_file" for flag in own) else "")

    commands = [_described(name, dispatch.COMMANDS[name].summary) for name in flags]
    return f"""#compdef perex
# zsh completion for perex. Made by: perex completion zsh
_perex() {{
  local -a commands flags bindings gin_files
  local values=""
  commands=({" ".join(commands)})
  gin_files=({" ".join(gin_files)})
  if ((CURRENT == 2)); then
    _describe command commands
    return
  fi
  case $words[2] in
{_cases(flags, words)}
  esac
  case $words[2]:${{PREFIX%%=*}} in
    completion:*) values="bash zsh fish" ;;
{_choices(flags)}
  esac
  case $PREFIX in
    {"|".join(f"--{name}=*" for name in GIN_FILES)})
      compset -P '*='
      compadd -a gin_files
      _files -g '*.gin(-.)'
      ;;
    --*=*)
      compset -P '*='
      if [[ -n $values ]]; then compadd -- ${{=values}}; else _files; fi
      ;;
    -*)
      _describe flag flags -S ''
      compadd -S '' -a bindings
      ;;
    *) if [[ -n $values ]]; then compadd -- ${{=values}}; else _files; fi ;;
  esac
}}
if [[ $funcstack[1] == _perex ]]; then _perex "$@"; else compdef _perex perex; fi
"""


def fish(flags: Mapping[str, Sequence[Flag]], gin_files: Sequence[str], names: Sequence[str]) -> str:
    def escaped(text: str) -> str:
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

    lines = ["# fish completion for perex. Made by: perex completion fish"]
    lines += ["function __perex_gin_files", "  string join \\n " + " ".join(gin_files)]
    lines += ["  __fish_complete_suffix .gin", "end"]
    for name, own in flags.items():
        is_it = escaped(f"__fish_seen_subcommand_from {name}")
        summary = escaped(dispatch.COMMANDS[name].summary)
        lines.append(f"complete -c perex -f -n __fish_use_subcommand -a {name} -d {summary}")
        for flag in own:
            start = f"complete -c perex -n {is_it} -l {flag.name} -d {escaped(_short(flag.summary))}"
            if flag.name in GIN_FILES:
                start += " -x -a '(__perex_gin_files)'"
            elif flag.choices:
                start += f" -x -a {escaped(' '.join(flag.choices))}"
            lines.append(start if flag.is_switch else start + ("" if " -x" in start else " -r"))
        if any(flag.name == "gin_file" for flag in own):
            lines += [f"complete -c perex -n {is_it} -l gin.{macro} -x" for macro in names]
    lines.append("complete -c perex -f -n '__fish_seen_subcommand_from completion' -a 'bash zsh fish'")
    return "\n".join(lines) + "\n"


SHELLS = {"bash": bash, "zsh": zsh, "fish": fish}


@functools.cache
def _known() -> tuple[dict[str, list[Flag]], list[str], list[str]]:
    """All commands' flags, the shipped Gin files, and the names that these bind."""
    own = {name: [] if name == "completion" else flags_of(command) for name, command in dispatch.COMMANDS.items()}
    folder = _gin_folder()
    return own, *(([], []) if folder is None else (shipped_gin_files(folder), macros(folder)))


def script(shell: str) -> str:
    """The completion script for a shell of `SHELLS`."""
    return SHELLS[shell](*_known())


def main() -> None:
    words = sys.argv[1:]
    if len(words) != 1 or words[0] not in SHELLS:
        if words[:1] in (["--help"], ["-h"], ["help"]):
            print(__doc__)
            return
        said = f"{words[0]!r} is not a known shell.{did_you_mean(words[0], SHELLS)} " if words else ""
        print(f"ERROR: {said}Write perex completion {'|'.join(SHELLS)}.", file=sys.stderr)
        sys.exit(ConfigError.reason.exit_code)
    print(script(words[0]), end="")


if __name__ == "__main__":
    main()
