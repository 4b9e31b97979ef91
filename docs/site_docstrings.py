"""For mkdocstrings: examples in docstrings (`>>> `), which stand in the text here, become blocks of code."""

from __future__ import annotations

from typing import Any

import griffe


def fenced(text: str) -> str:
    """Doctests, from `>>> ` to the next empty line, between fences."""
    lines, fence = [], None
    for line in [*text.splitlines(), ""]:
        indent = line[: len(line) - len(line.lstrip())]
        if fence is None and line.lstrip().startswith(">>>"):
            fence = indent
            lines.append(f"{fence}```pycon")
        elif fence is not None and not line.strip():
            lines.append(f"{fence}```")
            fence = None
        lines.append(line)
    return "\n".join(lines[:-1])


class Doctests(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)
