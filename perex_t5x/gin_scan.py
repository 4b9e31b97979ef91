"""Gin files and bindings read as text: which macros are defined, which are used, and where.

This first pass builds nothing and imports nothing that a file names. Errors are reported from it, all with file and line,
before any module is configured; `perex_t5x.gin_utils` then has gin itself parse.
"""

from __future__ import annotations

import io
import os
import re
import tokenize
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gin import config_parser

from perex_t5x.errors import ConfigError, did_you_mean

_REQUIRED = "gin.REQUIRED"
_CONSTANTS = {"true": "True", "false": "False", "none": "None"}
_PLAIN_STRING = re.compile(r"[\w.~][\w./:~+=-]*|/[\w./:~+=-]*")


def shipped_gin_dir() -> str:
    """The folder of the shipped Gin files: inside the package when installed, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "gin"
    return str(inside if inside.is_dir() else package.parent / "gin")


@dataclass
class Scan:
    """What the files and bindings say."""

    imports: dict[str, str] = field(default_factory=dict)  # import line -> the name it gives
    modules: dict[str, str] = field(default_factory=dict)  # that name -> the module it stands for
    defined: dict[str, Any] = field(default_factory=dict)  # macro -> last value, parsed
    used: dict[str, str] = field(default_factory=dict)  # macro -> where it is first used
    places: dict[tuple[str, str], str] = field(default_factory=dict)  # as `gin_values.check` takes them
    includes: dict[str, dict[int, str]] = field(default_factory=dict)  # file -> line: the file that it includes
    skipped: dict[str, set[int]] = field(default_factory=dict)  # file -> lines that are not its own settings


class BindingNames(config_parser.ParserDelegate):
    """Stands in for gin's objects where statements are only read: remembers macro names, builds nothing."""

    def __init__(self) -> None:
        self.macros: list[str] = []

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> str:
        return f"@{scoped_configurable_name}"

    def macro(self, macro_name: str) -> str:
        self.macros.append(macro_name)
        return f"%{macro_name}"


def find_file(filename: str, search_paths: Sequence[str], source: str) -> str:
    """The path of a Gin file in the first of the folders that has it; `source` says in errors who asked for it."""
    candidates = [filename] if os.path.isabs(filename) else [os.path.join(p, filename) for p in search_paths]
    for candidate in candidates:
        if os.path.isfile(candidate):
            return candidate
    shipped = shipped_gin_dir()
    known = [str(p.relative_to(shipped)) for p in sorted(Path(shipped).rglob("*.gin"))]
    looked = "\n".join(f"  {os.path.abspath(c)}" for c in candidates)
    raise ConfigError(
        f"{source}: gin file {filename!r} not found.{did_you_mean(filename, known)} Looked for:\n{looked}\n"
        "Give a path that exists, or add its folder with --gin_search_paths."
    )


def scan_statements(
    text: Any, where: str, search_paths: Sequence[str], scan: Scan, including: tuple[str, ...] = ()
) -> None:
    names, own = BindingNames(), Scan()
    included_files, skipped = scan.includes[where], scan.skipped[where] = {}, set()
    try:
        for statement in config_parser.ConfigParser(text, names):
            location = getattr(statement, "location", None)
            line = location.line_num if location else 0
            place = f"{where}, line {line}" if location and not where.startswith("--") else where
            if isinstance(statement, config_parser.ImportStatement):
                if not statement.module.startswith("__gin__"):
                    name = statement.bound_name()
                    whole = statement.is_from or statement.alias
                    scan.imports[statement.format()] = name
                    scan.modules[name] = statement.module if whole else name
            elif isinstance(statement, config_parser.IncludeStatement):
                beside = [os.path.dirname(where)] if including else []  # a folder's files belong together
                included = find_file(statement.filename, [*beside, *search_paths], place)
                if os.path.realpath(included) in including:
                    raise ConfigError(f"{place}: {included} includes itself, directly or through others. Take it out.")
                scan_file(included, search_paths, scan, including)
                included_files[line] = included
                skipped.add(line)
            elif isinstance(statement, config_parser.BindingStatement):
                selector = statement.selector.rpartition(".")[2] if statement.arg_name else statement.selector
                name = f"{statement.scope}/{selector}" if statement.scope else selector
                scan.places[name, statement.arg_name] = place
                if not statement.arg_name:
                    scan.defined[name] = statement.value
                if statement.value == f"%{_REQUIRED}" and not statement.arg_name:
                    skipped.add(line)  # asks for a value, and sets none
                else:
                    own.places[name, statement.arg_name] = place
                    own.defined |= {} if statement.arg_name else {name: statement.value}
            for macro in names.macros:
                scan.used.setdefault(macro, place)
            names.macros.clear()
        if included_files:
            scan.places |= own.places
            scan.defined |= own.defined
    except ConfigError:
        raise
    except SyntaxError as e:
        line = (e.text or "").strip()[:200]
        raise ConfigError(f"{where}, line {e.lineno}: {e.msg[:500]}\n    {line}") from None
    except tokenize.TokenError as e:
        raise ConfigError(f"{where}: {e.args[0]} (a bracket or a quote is not closed).") from None
    except Exception as e:  # Python's parser has many ways to say that it is too deep, too long or no text
        raise ConfigError(f"{where}: cannot be read as Gin: {_first_line(e)}.") from None


def scan_file(path: str, search_paths: Sequence[str], scan: Scan, including: tuple[str, ...] = ()) -> None:
    try:
        content = Path(path).read_bytes()
        text = content.decode("utf-8")
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e.strerror or e}.") from None
    except UnicodeDecodeError as e:
        line = content[: e.start].count(b"\n") + 1
        raise ConfigError(f"{path}, line {line}: is not text in UTF-8 (byte 0x{content[e.start]:02x}).") from None
    if "\x00" in text:  # the tokenizer would stop there and take the rest for nothing
        line = text.partition("\x00")[0].count("\n") + 1
        raise ConfigError(f"{path}, line {line}: holds a zero byte: it is no text, or was not written to its end.")
    scan_statements(io.StringIO(text), path, search_paths, scan, (*including, os.path.realpath(path)))


def _first_line(e: BaseException) -> str:
    text = str(e).strip()
    return f"{type(e).__name__}: {text.splitlines()[0][:300].rstrip('.')}" if text else type(e).__name__


def quoted(binding: str) -> str:
    """Quotes a bare word or path given as a value on the command line: MODEL_DIR = runs/a -> 'runs/a'.

    Not true, false and none, in any case: they are what they are in Python.
    """
    key, separator, value = binding.partition("=")
    value = _CONSTANTS.get(value.strip().lower(), value.strip())
    if not separator:
        raise ConfigError(
            f"gin binding {binding!r} has no value: write --gin.NAME=VALUE, for instance --gin.TRAIN_STEPS=100."
        )
    try:
        config_parser.ConfigParser(f"x = {value}", BindingNames()).parse_statement()
    except Exception:  # not only SyntaxError: Python's parser also refuses what is too deep or too long
        if not _PLAIN_STRING.fullmatch(value):
            raise ConfigError(
                f"gin binding {binding!r}: {value!r} is not a value gin can read. Numbers, True, None, tuples and "
                f"quoted strings are; from a shell a string is given as --gin.{key.strip()}=\"'text'\"."
            ) from None
        value = repr(value)
    return f"{key.strip()} = {value}"


def check_macro_bindings(bindings: Iterable[str], scan: Scan) -> None:
    """A macro given on the command line must be one that the files define or use."""
    known = (set(scan.defined) | set(scan.used)) - {_REQUIRED}
    for name in (b.partition("=")[0].strip() for b in bindings):
        if "." not in name and name not in known:
            raise ConfigError(
                f"--gin.{name}: no gin file defines or uses a macro of this name.{did_you_mean(name, known)} "
                f"Known macros: {', '.join(sorted(known)) or 'none'}."
            )


class MissingMacroError(ConfigError):
    """Macros that are required and not given; `names` are theirs."""

    def __init__(self, names: Sequence[str]):
        super().__init__(
            f"required but not given: {', '.join(names)}. Set in a gin file or on the command line: "
            + " ".join(f"--gin.{name}=..." for name in names)
        )
        self.names = tuple(names)


def check_macros(scan: Scan) -> None:
    """Every macro that is used is defined, and no required one is left open."""
    for name, place in scan.used.items():
        if "." not in name and name not in scan.defined:
            raise ConfigError(
                f"{place}: the macro %{name} is used but nowhere defined.{did_you_mean(name, scan.defined)} "
                f"Define it in a gin file or with --gin.{name}=VALUE."
            )
    missing = [name for name, value in scan.defined.items() if value == f"%{_REQUIRED}"]
    if missing:
        raise MissingMacroError(missing)
