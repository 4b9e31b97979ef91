"""The values that Gin has bound, each compared with the annotation of the argument it is bound to, before anything is made.

References are not followed into what they make: `@DatasetConfig()` is an instance of its class, and what a function will
return is not known. Macros are: an error names the macro that was written, and where.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import gin
import gin.config

from perex_t5x import arguments
from perex_t5x.errors import ConfigError
from perex_t5x.optimizers.checks import OPTAX_ARGUMENTS

Places = Mapping[
    tuple[str, str], str
]  # (configurable or macro with its scope, argument or "") -> where it was bound last


def check(places: Places) -> None:
    """Raises `ConfigError` for all values that do not suit their arguments.

    Args:
      places: file and line, or flag, of bindings.
    """
    problems: dict[tuple[str, str], str] = {}  # one for each macro, though several arguments may get its value
    for (scope, selector), bound in gin.config._CONFIG.items():
        configurable = gin.config._REGISTRY[selector]
        annotations = _annotations(configurable.wrapped)
        name = f"{scope}/{configurable.name}" if scope else configurable.name
        for argument, value in bound.items():
            macros: list[str] = []
            try:
                plain = _resolved(value, macros)
            except _CircleError as e:
                shown = " -> ".join(f"%{macro}" for macro in e.path)
                where = ", ".join(dict.fromkeys(filter(None, (places.get((macro, "")) for macro in e.path))))
                raise ConfigError(f"macros that refer to each other in a circle: {shown} ({where}).") from None
            except TypeError as e:
                raise ConfigError(f"{name}.{argument}: cannot be read: {e}.") from None
            if argument not in annotations or not (text := arguments.problem(plain, annotations[argument])):
                continue
            macro = f"the macro {macros[-1]}" if macros else ""
            place = places.get((macros[-1], "") if macros else (name, argument), "")
            origin = ", ".join(filter(None, [macro, place]))
            shown = plain if macros else value
            message = f"{name}.{argument} = {_shown(shown)}{f' ({origin})' if origin else ''}: {arguments.ended(text)}"
            problems.setdefault((macro or f"{name}.{argument}", text), message)
    if problems:
        raise ConfigError("\n".join(problems.values()))


def _annotations(wrapped: Any) -> Mapping[str, Any]:
    if wrapped is gin.config.macro:
        return {}
    package, annotations = (getattr(wrapped, "__module__", None) or "").split(".")[0], arguments.hints(wrapped)
    if package == "perex_t5x":
        return annotations
    # Elsewhere annotations are documentation, and classes in them often stand for whatever can be turned into one.
    annotations = {name: annotation for name, annotation in annotations.items() if arguments.is_plain(annotation)}
    if package != "optax":
        return annotations
    known = {}  # optax's own annotations say 'anything like an array'
    for name, parameter in inspect.signature(wrapped).parameters.items():
        if name in OPTAX_ARGUMENTS:
            expected: Any = OPTAX_ARGUMENTS[name]
            known[name] = expected | None if parameter.default is None else expected
            if parameter.default is not parameter.empty and arguments.problem(parameter.default, known[name]):
                del known[name]  # the name means something else there: scale_by_sm3.b2 = 1.0
    return {**annotations, **known}


class _CircleError(Exception):
    """Macros that need each other's values: `path` begins and ends with the same."""

    def __init__(self, path: tuple[str, ...]):
        self.path = path


def _resolved(value: Any, macros: list[str], path: tuple[str, ...] = ()) -> Any:
    """A value without macros, whose names are added to `macros`, and with stand-ins for what is not made yet.

    `path`: the macros in whose values this one is.
    """
    if isinstance(value, gin.config.ConfigurableReference):
        return _referred(value, macros, path)
    if isinstance(value, dict):
        return {_resolved(k, macros, path): _resolved(v, macros, path) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_resolved(item, macros, path) for item in value)
    return value


def _referred(reference: Any, macros: list[str], path: tuple[str, ...]) -> Any:
    wrapped, name = reference.configurable.wrapped, "/".join(reference.scopes)
    if wrapped is gin.config.macro:
        bound = gin.config._CONFIG.get((name, reference.configurable.selector), {})
        if name in path:
            raise _CircleError((*path[path.index(name) :], name))
        if "value" not in bound:
            return arguments.UNKNOWN
        macros.append(name)
        return _resolved(bound["value"], macros, (*path, name))
    if wrapped is gin.config._retrieve_constant:
        return arguments.UNKNOWN
    if not reference.evaluate:
        return wrapped
    return arguments.Made(wrapped) if isinstance(wrapped, type) else arguments.UNKNOWN


def _shown(value: Any) -> str:
    if isinstance(value, arguments.Made):
        return f"@{value.cls.__name__}()"
    return f"@{value.__name__}" if hasattr(value, "__name__") else repr(value)
