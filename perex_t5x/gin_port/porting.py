"""One file of T5X's as one of ours: line by line, with a list of what was done, and of what could not be.

Names are looked up in the modules that the rewritten imports give. What is not there would end the dry run with an error, so
it is commented out, with the reason above it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from perex_t5x.errors import ConfigError, did_you_mean
from perex_t5x.gin_port import rules
from perex_t5x.gin_port.statements import Name, Statement, statements_of

_CHECKED = ("perex_t5x", "optax", "seqio")  # packages whose names are looked up


@dataclass(frozen=True)
class Note:
    """What happened to a line, or has to be known about it."""

    file: str
    line: int
    what: Literal["rewritten", "left out", "note"]
    text: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.what}: {self.text}" + (f" ({self.reason})" if self.reason else "")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Port:
    """Ports a file.

    Args:
      text: of the file.
      file: its name, for messages.
      find: path of an included file -> the file, or None.
      include: (path as written, file) -> the name under which it is ported, too; None: included files are left alone.
    """

    def __init__(
        self,
        text: str,
        file: str,
        find: Callable[[str], str | None],
        include: Callable[[str, str], str] | None = None,
    ):
        self._lines = text.split("\n")
        self._file, self._find, self._include = file, find, include
        self.notes: list[Note] = []
        self._statements = statements_of(text, file)
        self._edits: list[tuple[Name, str]] = []
        self._replaced: dict[int, list[str]] = {}  # first row of a statement -> lines instead of its own
        self._lost: dict[str, str] = {}  # name that an import would give -> why it does not
        self._modules: dict[str, str] = {}  # name -> module
        self._new_imports: list[str] = []

    def run(self) -> str:
        """The ported text."""
        for statement in self._statements:
            if statement.kind == "import":
                self._port_import(statement)
            elif statement.kind == "include":
                self._port_include(statement)
        blocks: dict[int, list[bool]] = {}
        for statement in self._statements:
            if statement.kind in ("block", "binding"):
                blocks.setdefault(id(statement.block), []).append(self._port_binding(statement))
        for statement in self._statements:
            kept = blocks.get(id(statement), [])
            if statement.kind == "block" and kept and not any(kept) and statement.first not in self._replaced:
                self._leave_out(statement, "all of it is left out")
        return self._assembled()

    # --- imports and includes -----------------------------------------------------------------------------------------

    def _port_import(self, statement: Statement) -> None:
        module, bound = statement.module, statement.bound
        if module.startswith("__gin__"):
            return
        if statement.text == "import t5x" and (modules := self._rename_all_of_t5x()):
            self._replace(statement, [f"import {module}" for module in modules])
            self._lost[bound] = "this module of T5X's has no counterpart"
            return
        if module == "__main__":
            module, why = self._main_of(bound)
        else:
            why = next((why for name, why in rules.NO_MODULE.items() if f"{module}.".startswith(f"{name}.")), "")
            if module in rules.MODULES:
                module, why = rules.MODULES[module], ""
            elif module == "t5x" or (module.startswith("t5x.") and not why):
                why = f"{module} has no counterpart"
        if why:
            self._lost[bound] = why
            self._leave_out(statement, why)
        elif module != statement.module:
            plain = (
                statement.text.startswith("import ") and " as " not in statement.text and statement.module != "__main__"
            )
            if plain:  # import t5x.utils: its names begin with t5x
                self._modules[bound] = bound
                self._replace(statement, [f"import {module}"])
                self._rename_roots(statement.module, module)
            else:
                self._modules[bound] = module
                self._replace(statement, [_import_line(module, bound)])
        else:
            self._modules[bound] = module if " as " in statement.text or statement.text.startswith("from") else bound
            top = module.split(".")[0]
            if importlib.util.find_spec(top) is None:
                self._note(statement, "note", f"the package {top} is not installed here")

    def _main_of(self, bound: str) -> tuple[str, str]:
        used = {
            name.text.split(".")[1]
            for statement in self._statements
            for name in [statement.key, *statement.references]
            if name is not None and name.text.startswith(f"{bound}.")
        } | {s.argument for s in self._statements if s.key is not None and s.key.text == bound}
        for name in used:
            if name in rules.NO_MAIN:
                return "", rules.NO_MAIN[name]
        for name in used:
            if name in rules.MAIN:
                return rules.MAIN[name], ""
        for name, module in rules.MAIN.items():
            if name[:4] in bound:
                return module, ""
        return "", "nothing of it is used"

    def _rename_all_of_t5x(self) -> list[str]:
        """Renames what begins with `t5x.`, where `import t5x` gives all of its modules; returns the modules of ours."""
        names = [name for s in self._statements for name in (s.key, *s.references) if name is not None]
        used = [m for m in rules.MODULES if any(f"{name.text}.".startswith(f"{m}.") for name in names)]
        for module in used:
            self._rename_roots(module, rules.MODULES[module])
        return sorted({rules.MODULES[module] for module in used})

    def _rename_roots(self, module: str, ours: str) -> None:
        for statement in self._statements:
            for name in [statement.key, *statement.references]:
                done = any(old is name for old, _ in self._edits)  # by another import
                if name is not None and not done and f"{name.text}.".startswith(f"{module}."):
                    self._edits.append((name, ours + name.text.removeprefix(module)))

    def _port_include(self, statement: Statement) -> None:
        path = statement.path
        name = os.path.basename(path).removesuffix(".gin")
        if shipped := rules.shipped_includes(path):
            self._replace(statement, [f"include '{file}'" for file in shipped])
        elif "t5x/configs/runs/" in path and name in rules.NO_FILE:
            self._leave_out(statement, rules.NO_FILE[name])
        elif (file := self._find(path)) is not None:
            if self._include is not None:
                own = self._include(path, file)
                if own != path:
                    self._replace(statement, [f"include '{own}'"])
            elif "t5x/" in path:
                self._note(statement, "note", "port this file, too (--output_dir ports what is included)")
        elif path.startswith("t5x/") or "/t5x/" in path:
            self._leave_out(
                statement, "no shipped file stands for it; with --search_path=FOLDER_OF_T5X it is ported, too"
            )
        else:
            self._note(statement, "note", "this file is not in --search_path")

    # --- bindings and blocks ------------------------------------------------------------------------------------------

    def _port_binding(self, statement: Statement) -> bool:
        """Whether the statement stays."""
        block = statement.block
        if block is not None and block.first in self._replaced:
            self._leave_out(statement, "")
            return False
        why = ""
        key = statement.key if block is None else block.key
        if key is not None:
            is_block = statement.kind == "block"
            why = self._problem(key, "" if is_block else statement.argument, edits=block is None)
        why = why or next(filter(None, (self._problem(name, "") for name in statement.references)), "")
        if why:
            self._leave_out(statement, why)
        return not why

    def _problem(self, name: Name, argument: str, edits: bool = True) -> str:
        """Why a name, or an argument of it, is not there; renames it where it is called otherwise."""
        text = next((new for old, new in self._edits if old is name), name.text)
        root = text.split(".")[0]
        if root in self._lost:
            return self._lost[root]
        if root not in self._modules and root in rules.USUAL and "." in text:
            self._import_usual(root)
        module = self._modules.get(root, root)
        path = ".".join([module, *text.split(".")[1:]])
        if path in rules.RENAMED:
            new = rules.RENAMED[path]
            if edits:
                self._edits.append((name, new))
                self._note_row(name.row, "rewritten", f"{name.text} -> {new}", "")
            self._import_usual(new.split(".")[0])
            path = new
        for known in (path, f"{path}.{argument}"):
            if known in rules.LEFT_OUT:
                return rules.LEFT_OUT[known]
        return _lookup_problem(path, argument)

    def _import_usual(self, root: str) -> None:
        if root in self._modules:
            return
        module = rules.USUAL[root]
        if root == "network" and "scalable_t5" in self._file + "".join(s.path for s in self._statements):
            module = "perex_t5x.models.scalable_network"
        self._modules[root] = module
        self._new_imports.append(_import_line(module, root))

    # --- lines --------------------------------------------------------------------------------------------------------

    def _note(self, statement: Statement, what: Any, reason: str) -> None:
        self._note_row(statement.first, what, self._lines[statement.first].strip(), reason)

    def _note_row(self, row: int, what: Any, text: str, reason: str) -> None:
        self.notes.append(Note(self._file, row + 1, what, text, reason))

    def _replace(self, statement: Statement, lines: list[str]) -> None:
        original = self._lines[statement.first : statement.last + 1]
        _, hash_mark, comment = original[-1].partition("#") if len(original) == 1 else ("", "", "")
        indent = " " * statement.indent
        lines = [indent + line for line in lines]
        if hash_mark:
            lines[0] += f"  #{comment}"
        self._replaced[statement.first] = lines
        self._note(statement, "rewritten", "; ".join(line.strip() for line in lines))

    def _leave_out(self, statement: Statement, reason: str) -> None:
        original = self._lines[statement.first : statement.last + 1]
        indent = " " * statement.indent
        lines = [f"{indent}# gin_port: {reason}{'' if reason.endswith('?') else '.'}"] if reason else []
        self._replaced[statement.first] = lines + [f"{indent}# {line[statement.indent :]}" for line in original]
        self._note(statement, "left out", reason or "its block is left out")

    def _assembled(self) -> str:
        lines = list(self._lines)
        for name, new in sorted(self._edits, key=lambda edit: (edit[0].row, -edit[0].start)):
            if all(not s.first <= name.row <= s.last for s in self._statements if s.first in self._replaced):
                line = lines[name.row]
                lines[name.row] = line[: name.start] + new + line[name.end :]
        out: list[str] = []
        rows = {s.first: s for s in self._statements}
        row, has_imports = 0, not self._new_imports
        while row < len(lines):
            statement = rows.get(row)
            if statement is not None and not has_imports and "__gin__" not in statement.text:
                dynamic = any("__gin__" in s.text for s in self._statements)
                out += ([] if dynamic else ["from __gin__ import dynamic_registration", ""]) + [*self._new_imports, ""]
                has_imports = True
            if statement is not None and row in self._replaced:
                out += self._replaced[row]
                row = statement.last + 1
            else:
                out.append(lines[row])
                row += 1
        for line in self._new_imports:
            self.notes.append(Note(self._file, 1, "rewritten", line, "added: the file uses it without importing it"))
        return "\n".join(out)


def _import_line(module: str, bound: str) -> str:
    parent, _, name = module.rpartition(".")
    line = f"from {parent} import {name}" if parent else f"import {name}"
    return line if name == bound else f"{line} as {bound}"


def _lookup_problem(path: str, argument: str) -> str:
    """Why an object, or an argument of it, cannot be bound; '' where nothing is known against it."""
    if path.split(".")[0] not in _CHECKED:
        return ""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        name = ".".join(parts[:end])
        try:
            target = importlib.import_module(name)
        except ModuleNotFoundError as e:
            if e.name is not None and not f"{name}.".startswith(f"{e.name}."):
                return f"{name} cannot be imported: {e}"
            continue
        break
    else:
        return f"there is no module {parts[0]}"
    for i, attribute in enumerate(parts[end:], end):
        if not hasattr(target, attribute):
            names = [n for n in dir(target) if not n.startswith("_")]
            return f"{'.'.join(parts[:i])} has no {attribute}.{did_you_mean(attribute, names)}".rstrip(".")
        target = getattr(target, attribute)
    if not argument or inspect.ismodule(target):
        return ""
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return ""
    if argument in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return ""
    return f"{path} has no argument {argument}.{did_you_mean(argument, parameters)}".rstrip(".")


def port_files(
    files: Sequence[str], search_paths: Sequence[str], with_includes: bool
) -> tuple[dict[str, str], list[Note]]:
    """{name: ported text}, and all notes. With what is included, where that is found, if asked.

    Names are those of the files given, and `rules.own_name` of included ones.
    """
    ported: dict[str, str] = {}
    notes: list[Note] = []
    waiting: list[tuple[str, str, str]] = [(file, file, file) for file in files]  # (name, as written, file)
    names: dict[str, str] = {}  # file -> name

    def find(path: str, beside: str) -> str | None:
        for folder in ("", *search_paths, os.path.dirname(beside)):
            if os.path.isfile(candidate := os.path.join(folder, path)):
                return candidate
        return None

    def include(path: str, file: str) -> str:
        real = os.path.realpath(file)
        if real not in names:
            names[real] = rules.own_name(path)
            waiting.append((names[real], path, file))
        return names[real]

    for file in files:
        names[os.path.realpath(file)] = os.path.basename(file)
        if shipped := rules.shipped_includes(os.path.abspath(file)):
            flags = " ".join(f"--gin_file={name}" for name in shipped)
            notes.append(Note(file, 1, "note", flags, "stands for this file of T5X's; it need not be ported"))
    while waiting:
        name, written, file = waiting.pop(0)
        port = Port(_read(file), written, lambda path, file=file: find(path, file), include if with_includes else None)
        ported[name] = port.run()
        notes += port.notes
    return ported, notes


def _read(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"{file}: cannot be read: {e.strerror or e}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: is not text in UTF-8.") from None
