"""What mkdocs.yml adds: pages from outside of docs/, notebooks, formulas as MathML, and the table of all commands."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from latex2mathml import converter
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINKS = {
    "README.md#commands": "reference/commands.md",
    "README.md#installing": "index.md#install",
    "README.md": "index.md",
    **OUTSIDE,
}
COMMANDS_HERE = "<!-- the flags of all commands -->"
# The commands' own lists of flags, in a process of its own: they run as the main module.
LIST_FLAGS = """
import dataclasses, json
from perex_t5x.cli import completion, dispatch
flags = {name: completion.flags_of(command) for name, command in dispatch.COMMANDS.items() if name != "completion"}
print(json.dumps({name: [dataclasses.asdict(flag) for flag in own] for name, own in flags.items()}))
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, target in OUTSIDE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, target, content=re.sub(r"\]\(docs/", "](", text)))
    for notebook in sorted(Path(config.docs_dir).rglob("*.ipynb")):
        target = notebook.relative_to(config.docs_dir)
        files.append(File.generated(config, str(target.with_suffix(".md")), content=notebook_as_markdown(notebook)))
    return Files([f for f in files if not f.src_uri.endswith(".ipynb")])


def notebook_as_markdown(path: Path) -> str:
    """Cells and their outputs, one after another."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        language = "sh" if source.startswith("%%sh") else "python"
        parts.append(f"```{language}\n{source.removeprefix('%%sh').lstrip()}\n```")
        parts += [part for output in cell["outputs"] if (part := _output(output))]
    where = path.name
    parts.insert(1, f"*A notebook, executed by a test: `docs/tutorials/{where}` in the repository.*")
    return "\n\n".join(parts) + "\n"


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        return f'<img alt="what the cell draws" src="data:image/png;base64,{"".join(data["image/png"]).strip()}">'
    text = "".join(output.get("text", data.get("text/plain", ""))).rstrip()
    return f"```text\n{text}\n```" if text else ""


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    markdown = re.sub(r"\]\(([\w./]+)\.ipynb", r"](\1.md", markdown)
    up = "../" * page.file.src_uri.count("/")
    for target, here in LINKS.items():
        markdown = markdown.replace(f"](../{up}{target}", f"]({up}{here}")
        if page.file.src_uri in OUTSIDE.values():
            markdown = markdown.replace(f"]({target}", f"]({here}")
    return markdown.replace(COMMANDS_HERE, flags_of_all_commands()) if COMMANDS_HERE in markdown else markdown


def flags_of_all_commands() -> str:
    done = subprocess.run([sys.executable, "-c", LIST_FLAGS], cwd=ROOT, check=True, capture_output=True, text=True)
    from perex_t5x.cli import dispatch

    parts = []
    for name, flags in json.loads(done.stdout).items():
        parts += [
            f"## perex {name}",
            dispatch.COMMANDS[name].summary[:1].upper() + dispatch.COMMANDS[name].summary[1:] + ".",
        ]
        if flags:
            rows = [f"| `--{f['name']}` | {html.escape(f['summary']).replace('|', '&#124;')} |" for f in flags]
            parts.append("\n".join(['<div class="flags" markdown>\n', "| flag | |", "|---|---|", *rows, "\n</div>"]))
    return "\n\n".join(parts)


def on_page_content(content: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Formulas, as `pymdownx.arithmatex` marks them, become MathML, which browsers draw by themselves."""

    def inline(match: re.Match[str]) -> str:
        return converter.convert(html.unescape(match[1]))

    def block(match: re.Match[str]) -> str:
        return converter.convert(html.unescape(match[1].strip()), display="block")

    content = re.sub(r'<span class="arithmatex">\\\((.*?)\\\)</span>', inline, content, flags=re.DOTALL)
    return re.sub(r'<div class="arithmatex">\\\[(.*?)\\\]</div>', block, content, flags=re.DOTALL)
