"""What an argument may be, read from its annotation: types, and with `Annotated` also ranges and names.

    def adam(b1: Annotated[float, Interval("[0, 1)")] = 0.9, nesterov: bool = False): ...

`problem` compares a value with an annotation. What it does not understand it leaves alone: an annotation that is missing or
cannot be evaluated refuses nothing. Needs Python alone, so that every room can use it.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import functools
import inspect
import math
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Protocol, Union, cast

from perex_t5x.errors import ConfigError, did_you_mean


class Constraint(Protocol):
    """What `Annotated` may add to a type."""

    def allows(self, value: Any) -> bool: ...
    def describe(self, noun: str) -> str:
        """`noun` and what is asked of it: 'a whole number, at least 1'."""
        ...


_LARGE = 2**31 - 1  # an end that is there for the machine's sake, and not worth a word


class Interval:
    """Numbers between two ends, written as in mathematics; of other values (None, a schedule) it asks nothing.

    >>> Interval("[0, 1)").allows(0.5), Interval("[0, 1)").allows(1)
    (True, False)
    >>> Interval("[1, ∞)").describe("a whole number"), Interval("(0, ∞)").describe("a number")
    ('a whole number, at least 1', 'a number above 0')
    """

    def __init__(self, text: str):
        match = re.fullmatch(r"([\[(])\s*(-?[\d.e]+|-∞)\s*,\s*(-?[\d.e]+|∞)\s*([\])])", text)
        if match is None:
            raise ValueError(f"{text!r}: write an interval as '[0, 1)' or '(0, ∞)'.")
        self._text = text
        self._low, self._high = (float(match[i].replace("∞", "inf")) for i in (2, 3))
        self._with_low, self._with_high = match[1] == "[", match[4] == "]"

    def allows(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return True
        above = value >= self._low if self._with_low else value > self._low
        return above and (value <= self._high if self._with_high else value < self._high)

    def describe(self, noun: str) -> str:
        if self._high >= _LARGE:
            return f"{noun}, at least {self._low:g}" if self._with_low else f"{noun} above {self._low:g}"
        return f"{noun} in {self._text}"


# Steps and sizes are int32 on devices; bytes may be more.
PositiveInt = Annotated[int, Interval("[1, 2147483647]")]
Count = Annotated[int, Interval("[0, 9223372036854775807]")]
Seed = Annotated[int, Interval("[0, 4294967295]")]


@dataclasses.dataclass(frozen=True)
class Made:
    """Stands for a value that is not there yet: the instance of a class."""

    cls: type


class _Unknown:
    """Stands for a value of which nothing is known, such as what a function will return."""


UNKNOWN = _Unknown()


def problem(value: Any, annotation: Any) -> str:
    """What is wrong with a value, as the end of a sentence; "" if nothing is.

    >>> problem("false", bool)
    'must be True or False, not a text'
    >>> problem(1e5, PositiveInt | None)
    'must be a whole number, at least 1, or None: write 100000'
    >>> problem("cachd", Literal["auto", "cached"])
    "must be 'auto' or 'cached'. Did you mean 'cached'?"
    >>> problem(2.5, Annotated[float, Interval("[0, 1)")]), problem({"targets": 16}, Mapping[str, int]), problem(3, "what?")
    ('must be a number in [0, 1)', '', '')
    """
    if value is UNKNOWN or _fits(value, annotation):
        return ""
    return f"must be {expected(annotation)}{_remedy(value, annotation)}"


def _remedy(value: Any, annotation: Any) -> str:
    kinds = [_bare(kind) for kind in _members(annotation)]
    if isinstance(value, float) and value.is_integer() and _fits(int(value), annotation):
        return f": write {int(value)}"
    if isinstance(value, int) and float in kinds and _fits(float(min(value, 10**300)), annotation):
        return f": write {float(value):g}"
    if isinstance(value, int) and value > _LARGE:
        return ": this is too large"
    if isinstance(value, str):
        choices = [choice for kind in kinds for choice in _choices(kind) if isinstance(choice, str)]
        near = did_you_mean(value, choices)
        return f".{near}" if near else ("" if choices or str in kinds or Any in kinds else ", not a text")
    if inspect.isclass(value) and any(inspect.isclass(kind) and issubclass(value, kind) for kind in kinds):
        return ": the parentheses are missing"
    if isinstance(value, types.NoneType | bool | int | float) and str in kinds:
        return f"; a text is quoted: \"'{str(value).lower()}'\""
    return ""


def _fits(value: Any, annotation: Any) -> bool:
    return any(_fits_one(value, kind) for kind in _members(annotation))


def _fits_one(value: Any, kind: Any) -> bool:
    if isinstance(value, _Unknown):
        return True
    bare, constraints = _bare(kind), _constraints(kind)
    return _has_type(value, bare) and all(constraint.allows(value) for constraint in constraints)


def _has_type(value: Any, kind: Any) -> bool:
    origin, parts = typing.get_origin(kind) or kind, typing.get_args(kind)
    if kind is None or kind is types.NoneType:
        return value is None
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in parts)
    if kind is bool:
        return isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind is float:
        if isinstance(value, int):  # a larger one would not fit where JAX takes it for an int32
            return not isinstance(value, bool) and abs(value) <= _LARGE
        return isinstance(value, float) and math.isfinite(value)
    if kind is str:
        return isinstance(value, str)
    if isinstance(value, Made) or not inspect.isclass(origin):
        return _is_made(value, origin)
    if origin in (collections.abc.Callable, type):  # what makes instances serves as a class
        return callable(value)
    if origin in (dict, collections.abc.Mapping):
        return isinstance(value, Mapping) and (
            not parts or all(_fits(k, parts[0]) and _fits(v, parts[1]) for k, v in value.items())
        )
    if origin is tuple and parts and parts[-1] is not ...:
        return _is_list(value) and len(value) == len(parts) and all(map(_fits, value, parts))
    if origin in (tuple, list, set, frozenset) or origin in _ITERABLES:
        return _is_list(value) and (not parts or all(_fits(item, parts[0]) for item in value))
    return _is_made(value, origin)


_ITERABLES = (collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection, collections.abc.Set)


def _is_list(value: Any) -> bool:
    """Gin has brackets for lists and parentheses for tuples, and people take either."""
    return isinstance(value, list | tuple | set | frozenset)


_LITERALS = types.NoneType | bool | int | float | complex | str | bytes | list | tuple | dict | set


def _is_made(value: Any, kind: Any) -> bool:
    """Whether a value may be an instance of a class."""
    if not inspect.isclass(kind) or kind in (Any, object, type):
        return True
    if getattr(kind, "_is_protocol", False):  # only who uses it knows what it asks for, but no literal has methods
        return not (isinstance(value, _LITERALS) or inspect.isclass(value) or inspect.isroutine(value))
    return issubclass(value.cls, kind) if isinstance(value, Made) else isinstance(value, kind)


# --- annotations ------------------------------------------------------------------------------------------------------


def expected(annotation: Any) -> str:
    """What an annotation asks for, in words.

    >>> expected(Mapping[str, int] | None), expected(tuple[int, int]), expected(int | float | Callable[..., Any])
    ('a dictionary (text: whole number) or None', '2 values in parentheses', 'a number or a function (@...)')
    """
    words = list(dict.fromkeys(_words(kind) for kind in _members(annotation)))
    # Whole numbers are numbers, too.
    words = [w for w in words if not (w.startswith("a whole ") and w.replace("whole ", "", 1) in words)]
    comma = "," if len(words) > 1 and "," in words[-2] else ""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])}{comma} or {words[-1]}"


_NOUNS = {bool: "True or False", int: "a whole number", float: "a number", str: "a text"}


def _words(kind: Any) -> str:
    bare = _bare(kind)
    origin, parts = typing.get_origin(bare) or bare, typing.get_args(bare)
    noun = _NOUNS.get(bare, "")
    if bare is None or bare is types.NoneType:
        noun = "None"
    elif origin is Literal:
        noun = " or ".join(filter(None, [", ".join(map(repr, parts[:-1])), repr(parts[-1])]))
    elif origin in (collections.abc.Callable, type):
        noun = "a function (@...)" if origin is collections.abc.Callable else "a class (@...)"
    elif origin in (dict, collections.abc.Mapping):
        inside = ": ".join(expected(part).removeprefix("a ") for part in parts)
        noun = f"a dictionary ({inside})" if parts else "a dictionary"
    elif origin is tuple and parts and parts[-1] is not ...:
        noun = f"{len(parts)} values in parentheses"
    elif inspect.isclass(origin) and (origin in (tuple, list, set, frozenset) or origin in _ITERABLES):
        noun = f"a list (each {expected(parts[0])})" if parts and parts[0] is not Any else "a list"
    elif inspect.isclass(origin) and issubclass(origin, enum.Enum):
        noun = " or ".join(f"{origin.__name__}.{member.name}" for member in origin)
    elif bare is Any:
        noun = "anything"
    elif inspect.isclass(origin) and not noun:
        article = "an" if origin.__name__[0] in "AEIOU" else "a"
        noun = f"{article} {origin.__name__}, in Gin @...{origin.__name__}()"
    for constraint in _constraints(kind):
        noun = constraint.describe(noun or "a value")
    return noun or str(bare)


def _members(annotation: Any) -> list[Any]:
    """The types of a union, or the one type."""
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return [member for part in typing.get_args(annotation) for member in _members(part)]
    if typing.get_origin(annotation) is Annotated and typing.get_origin(_bare(annotation)) in (Union, types.UnionType):
        return [Annotated[(part, *_constraints(annotation))] for part in _members(_bare(annotation))]
    return [annotation]


def _bare(kind: Any) -> Any:
    return typing.get_args(kind)[0] if typing.get_origin(kind) is Annotated else kind


def _constraints(kind: Any) -> list[Constraint]:
    extras = typing.get_args(kind)[1:] if typing.get_origin(kind) is Annotated else ()
    return [extra for extra in extras if hasattr(extra, "allows")]


def _choices(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()


def is_plain(annotation: Any) -> bool:
    """Whether an annotation is of Python's own types alone, which mean the same wherever they are written.

    >>> is_plain(Mapping[str, int] | None), is_plain(float | Made)
    (True, False)
    """
    for kind in _members(annotation):
        bare = _bare(kind)
        origin, parts = typing.get_origin(bare), typing.get_args(bare)
        if origin not in (None, Literal, collections.abc.Callable, type) and not all(map(is_plain, parts)):
            return False
        if origin is None and bare not in (bool, int, float, str, None, types.NoneType, ..., dict, list, tuple):
            return False
    return True


@functools.lru_cache(maxsize=1000)
def hints(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Argument -> annotation, evaluated, of a function's or a class's constructor; those that cannot be are left out.

    >>> def f(a: int, b: str | None = None, c: NoSuchName = 1, d=2, e: int = None): ...
    >>> dict(hints(f))
    {'a': <class 'int'>, 'b': str | None, 'e': int | None}
    """
    owners = function.__mro__ if inspect.isclass(function) else ()
    if dataclasses.is_dataclass(function):
        found = {}
        for owner in reversed(owners):  # an annotation is evaluated where it is written
            names = vars(sys.modules.get(owner.__module__, types))
            found |= {k: _evaluated(v, names) for k, v in vars(owner).get("__annotations__", {}).items()}
    else:
        called = inspect.unwrap(function.__init__ if owners else function)
        annotations, names = getattr(called, "__annotations__", {}), getattr(called, "__globals__", {})
        found = {k: _evaluated(v, names) for k, v in annotations.items() if k != "return"}
    try:
        parameters = inspect.signature(cast(Callable[..., Any], function)).parameters
    except (TypeError, ValueError):
        return {}
    known = {name: found[name] for name in parameters if found.get(name) is not None}
    for name, annotation in known.items():
        if parameters[name].default is None:
            known[name] = _or_none(annotation)
        if parameters[name].kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            known[name] = Any
    return known


def _evaluated(annotation: Any, names: Mapping[str, Any]) -> Any:
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, dict(names))
    except Exception:  # a name that only type checkers see
        return None


def _or_none(annotation: Any) -> Any:
    try:
        return annotation | None
    except TypeError:
        return Union[annotation, None]  # noqa: UP007 (what has no `|`)


def check(owner: str, annotations: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for the first value that its annotation does not allow.

    >>> check("Monitor", {"period": PositiveInt}, {"period": 0})
    Traceback (most recent call last):
    perex_t5x.errors.ConfigError: Monitor.period = 0: must be a whole number, at least 1.
    """
    for name, value in values.items():
        if name in annotations and (text := problem(value, annotations[name])):
            raise ConfigError(f"{owner}.{name} = {value!r}: {ended(text)}")


def check_fields(instance: Any) -> None:
    """`check` of all fields of a dataclass, for its `__post_init__`."""
    names = [field.name for field in dataclasses.fields(instance)]
    check(type(instance).__name__, hints(type(instance)), {name: getattr(instance, name) for name in names})


def ended(sentence: str) -> str:
    """With its full stop."""
    return sentence if sentence.endswith((".", "?")) else f"{sentence}."
