"""A Gin file as statements, each with the lines it stands on, so that lines can be changed and all others be kept."""

from __future__ import annotations

import io
import keyword
import re
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from perex_t5x.errors import ConfigError

Token = tokenize.TokenInfo


class Name(NamedTuple):
    """A dotted name of a configurable, where it stands: row from 0, columns. The scope is not part of it."""

    text: str
    row: int
    start: int
    end: int


@dataclass
class Statement:
    """One statement.

    Attributes:
      kind: 'block' is the line 'utils.DatasetConfig:' before indented bindings.
      first, last: rows, from 0; a statement may go over several.
      text: in one line, without comments.
      block: that it is in.
      key: of a binding or a block: what is bound, `argument` not included.
      argument: that is bound; '' for a macro or a block.
      references: in a binding's value: @names.
      module, bound: of an import: what is imported, and the name it gets.
      path: of an include.
    """

    kind: Literal["import", "include", "block", "binding"]
    first: int
    last: int
    indent: int
    text: str
    block: Statement | None = None
    key: Name | None = None
    argument: str = ""
    references: list[Name] = field(default_factory=list)
    module: str = ""
    bound: str = ""
    path: str = ""


def statements_of(text: str, where: str) -> list[Statement]:
    """All statements. Raises `ConfigError` for what is no Gin.

    >>> block, binding = statements_of("train/utils.DatasetConfig:\\n  seed = 1  # any\\n", "a.gin")
    >>> block.key.text, binding.argument, binding.block is block
    ('utils.DatasetConfig', 'seed', True)
    """
    found: list[Statement] = []
    block: Statement | None = None
    try:
        for tokens in _logical_lines(text):
            statement = _statement(tokens, where)
            if statement.indent == 0:
                block = None
            elif block is None:
                raise ConfigError(f"{where}, line {statement.first + 1}: an indented line without a block before it.")
            statement.block = block
            if statement.kind == "block":
                block = statement
            found.append(statement)
    except (tokenize.TokenError, SyntaxError) as e:
        args = list(e.args)
        line = getattr(e, "lineno", None) or (args[1][0] if len(args) > 1 else 0)
        raise ConfigError(f"{where}, line {line}: cannot be read as Gin: {args[0]}.") from None
    return found


def _logical_lines(text: str) -> Iterator[list[Token]]:
    left_out = (tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    line: list[Token] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NEWLINE:
            if line:
                yield line
            line = []
        elif token.type not in left_out:
            line.append(token)
    if line:
        yield line


def _statement(tokens: Sequence[Token], where: str) -> Statement:
    first, last, indent = tokens[0].start[0] - 1, tokens[-1].end[0] - 1, tokens[0].start[1]
    text = " ".join(token.string for token in tokens)
    words = [token.string for token in tokens]
    if words[0] in ("import", "from") and "=" not in words:
        flat = " ".join(words).replace(" . ", ".")
        if found := re.fullmatch(r"from ([\w.]+) import (\w+)(?: as (\w+))?", flat):
            return Statement(
                "import", first, last, indent, text, module=f"{found[1]}.{found[2]}", bound=found[3] or found[2]
            )
        if found := re.fullmatch(r"import ([\w.]+)(?: as (\w+))?", flat):
            return Statement(
                "import", first, last, indent, text, module=found[1], bound=found[2] or found[1].split(".")[0]
            )
    if words[0] == "include" and len(tokens) == 2 and tokens[1].type == tokenize.STRING:
        return Statement("include", first, last, indent, text, path=words[1].strip("'\""))
    if words[-1] == ":" and "=" not in words:
        return Statement("block", first, last, indent, text, key=_name(tokens[:-1]))
    if "=" in words:
        at = words.index("=")
        key, references = _name(tokens[:at]), list(_references(tokens[at + 1 :]))
        statement = Statement("binding", first, last, indent, text, references=references)
        if indent:
            statement.argument = key.text
        elif "." in key.text:
            owner, _, statement.argument = key.text.rpartition(".")
            statement.key = Name(owner, key.row, key.start, key.end - len(statement.argument) - 1)
        return statement
    raise ConfigError(f"{where}, line {first + 1}: cannot be read as Gin: {text[:200]}")


def _name(tokens: Sequence[Token]) -> Name:
    """The dotted name at the end of these tokens, behind the scopes."""
    start = max((i + 1 for i, token in enumerate(tokens) if token.string == "/"), default=0)
    own = tokens[start:]
    return Name("".join(t.string for t in own), own[0].start[0] - 1, own[0].start[1], own[-1].end[1])


def _references(tokens: Sequence[Token]) -> Iterator[Name]:
    for i, token in enumerate(tokens):
        if token.string != "@":
            continue
        end = i + 1
        while end < len(tokens) and (
            tokens[end].string in (".", "/")
            or (
                tokens[end].type == tokenize.NAME
                and not keyword.iskeyword(tokens[end].string)
                and tokens[end - 1].string in "@./"
            )
        ):
            end += 1
        if end > i + 1:
            yield _name(tokens[i + 1 : end])
