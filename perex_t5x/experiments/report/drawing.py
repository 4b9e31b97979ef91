"""The plotting library: Vega-Lite, through vl-convert, which carries its scripts and draws without a browser.

One description serves the page, where the library's scripts are put inside so that it works offline, and figures for papers.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from perex_t5x.errors import ConfigError
from perex_t5x.experiments.report.plot import Plot, still

_FIGURE = {
    "background": "white",
    "font": "sans-serif",
    "view": {"stroke": None},
    "axis": {"gridColor": "#e4e4e4", "domainColor": "#666666", "tickColor": "#666666"},
}


@functools.cache
def converter() -> ModuleType:
    try:
        import vl_convert
    except ImportError:
        raise ConfigError(
            "reports need the package vl-convert-python, which is not installed: pip install 'perex_t5x[reports]'"
        ) from None
    return vl_convert


@functools.cache
def library() -> str:
    """The scripts that draw, for a <script> element."""
    # In the scripts' strings an end tag would end the element.
    return re.sub(r"</(?=script)", r"<\\/", converter().javascript_bundle(), flags=re.IGNORECASE)


def write_figures(folder: str, plots: Sequence[Plot], groups: Sequence[Mapping[str, str]]) -> list[str]:
    """Writes each plot as it stands at first, light, as SVG and PNG (at three times the size); returns the files."""
    written = []
    try:
        os.makedirs(folder, exist_ok=True)
        for plot in plots:
            spec: dict[str, Any] = {**still(plot, groups), "config": _FIGURE}
            svg = converter().vegalite_to_svg(spec)
            for name, content in (
                (f"{plot.id}.svg", svg.encode()),
                (f"{plot.id}.png", converter().svg_to_png(svg, scale=3)),
            ):
                with open(os.path.join(folder, name), "wb") as f:
                    f.write(content)
                written.append(os.path.join(folder, name))
    except OSError as e:
        raise ConfigError(f"--figures={folder}: cannot be written: {e.strerror or e}.") from e
    return written
