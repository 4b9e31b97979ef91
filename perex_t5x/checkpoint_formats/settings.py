"""What a model's shapes do not tell of it: read from the Gin file that its run has stored beside its checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from perex_t5x import files
from perex_t5x.checkpoint_formats.leaves import Contents
from perex_t5x.errors import ConfigError

_FIELDS = ("head_dim", "mlp_activations", "rotary_max_wavelength", "dropout_rate")


def settings_of(contents: Contents, config_gin: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `T5Config`: those given; else of a run's config.gin; else of a config.json.

    Args:
      config_gin: the file; None: `config.gin` beside the checkpoint, if it is there.
    """
    found: dict[str, Any] = {}
    if "config" in contents.metadata and "model_type" in contents.metadata["config"]:
        from perex_t5x.checkpoint_formats import hugging_face

        fields = hugging_face.t5_config(contents)
        found |= {name: fields[name] for name in _FIELDS if name in fields}
    file = config_gin or os.path.join(os.path.dirname(contents.path.rstrip("/")), "config.gin")
    try:
        text = files.read_bytes(file).decode()
    except (OSError, UnicodeDecodeError) as e:
        if config_gin is not None:
            raise ConfigError(f"--config_gin={config_gin} cannot be read: {e}") from e
        text = ""
    fields = fields_in(text, file)
    return found | {name: fields[name] for name in _FIELDS if name in fields} | dict(given)


def fields_in(text: str, file: str = "") -> dict[str, Any]:
    """What a Gin file binds of `T5Config`, through macros; nothing of it is run.

    >>> fields_in("RATE = 0.1\\nmodels.T5Config.head_dim = 64\\nmodels.T5Config:\\n    dropout_rate = %RATE\\n")
    {'head_dim': 64, 'dropout_rate': 0.1}
    """
    from gin import config_parser

    class Macro(str):
        """The name of one."""

    class Delegate(config_parser.ParserDelegate):
        def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> None:
            return None

        def macro(self, macro_name: str) -> Macro:
            return Macro(macro_name)

    bound: dict[str, Any] = {}
    macros: dict[str, Any] = {}
    try:
        for statement in config_parser.ConfigParser(text, Delegate()):
            if not isinstance(statement, config_parser.BindingStatement):
                continue
            if not statement.arg_name:
                macros[statement.selector] = statement.value
            elif statement.selector.split(".")[-1] == "T5Config":
                bound[statement.arg_name] = statement.value
    except (SyntaxError, ValueError) as e:
        raise ConfigError(f"{file} cannot be read as a Gin file: {e}") from e
    resolved = {}
    for name, value in bound.items():
        for _ in range(10):
            value = macros.get(str(value), value) if isinstance(value, Macro) else value
        if not isinstance(value, Macro):
            resolved[name] = value
    return resolved
