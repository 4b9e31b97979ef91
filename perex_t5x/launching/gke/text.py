"""Manifests as YAML that Kubernetes reads as it was meant."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import yaml

_SURELY_TEXT = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")


class _Dumper(yaml.SafeDumper):
    """Quotes whatever could be taken for a number: PyYAML writes 1234e567 plainly, Kubernetes would read a float."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represented(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = None if _SURELY_TEXT.fullmatch(text) else '"'
    style = "|" if "\n" in text else plain
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represented)


def as_yaml(objects: Iterable[dict[str, Any]]) -> str:
    """Several objects as one file.

    >>> print(as_yaml([{"kind": "JobSet", "run": "1234e567", "replicas": 2, "on": "true"}]), end="")
    kind: JobSet
    run: "1234e567"
    replicas: 2
    'on': 'true'
    """
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True)
