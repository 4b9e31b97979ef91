"""Links and file names in README, CONTRIBUTING, CHANGELOG and docs/ are true."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def _anchors(page: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.strip().lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links(page):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"https?://|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in _anchors(file)):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_that_are_named_exist(page):
    text = page.read_text()
    named = re.findall(r"`((?:perex_t5x|gin|launch|tests|docs)/[\w./-]+)`", text)
    named += re.findall(r"(?<![\w/.])(?:tests|launch)/[\w/]+\.py\b", text)  # also within commands
    assert [name for name in named if "NAME" not in name and not (ROOT / name).exists()] == []


def test_modules_of_the_architecture_exist():
    """docs/architecture.md names files below perex_t5x/ without that folder."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py)`", text))
    package = ROOT / "perex_t5x"
    known = {p.name for p in package.rglob("*.py")} | {p.name for p in (ROOT / "launch").glob("*.py")}
    roots = (package, package / "per_example", ROOT)
    missing = [n for n in sorted(named) if not (any((r / n).exists() for r in roots) or ("/" not in n and n in known))]
    assert not missing


def test_modules_that_commands_run_exist():
    """Every `python -m perex_t5x...` in the docs, the Gin files and the scripts."""
    pages = [page for page in PAGES if page.name != "CHANGELOG.md"]  # which also names what is gone
    files = [*pages, *(ROOT / "gin").rglob("*.gin"), *(f for f in (ROOT / "launch").iterdir() if f.is_file())]
    texts = [file.read_text() for file in files]
    named = set(re.findall(r"python3? -m (perex_t5x[\w.]*\w)", "\n".join(texts)))
    modules = {name: ROOT / Path(*name.split(".")) for name in named}
    missing = [n for n, f in modules.items() if not (f.with_suffix(".py").exists() or (f / "__main__.py").exists())]
    assert named and not missing


def test_messages_on_the_page_of_failures_are_ours():
    """Each message in docs/pod_failures.md is in the source; `...` stands for what varies. Google's are in italics."""
    text = (ROOT / "docs" / "pod_failures.md").read_text(encoding="utf-8")
    tables = re.findall(r"^\| printed \|.*\n\|[-|]*\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    rows = [row for table in tables for row in table.splitlines() if not row.startswith("| *")]
    messages = [re.match(r"\| `([^`]+)`", row)[1] for row in rows]
    said = _strings_of_the_package()
    fragments = [(m, f.strip(" .:")) for m in messages for f in m.split("...") if len(f.strip(" .:")) > 8]
    assert len(messages) > 25 and {m for m, _ in fragments} == set(messages)
    assert [(message, fragment) for message, fragment in fragments if fragment not in said] == []


def _strings_of_the_package() -> str:
    """Every string in the package, those of f-strings with `...` for their fields, joined as Python joins them."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "perex_t5x").rglob("*.sh")]
    for path in (ROOT / "perex_t5x").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "..." for part in node.values]
                texts.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)
