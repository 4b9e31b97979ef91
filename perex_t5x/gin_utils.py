"""Gin files and bindings: found from anywhere, parsed in the files' own names, refused with a reason.

Files are searched in the working directory, in `--gin_search_paths`, beside the given files, and in the `gin/` folder
that ships with the package, so `--gin_file=runs/quickstart.gin` works from any directory.

A first pass (`perex_t5x.gin_scan`) reads the files as text and reports errors with file and line. Then gin itself parses.

An included file never changes what the including file itself sets, wherever in it the `include` stands. Else later wins.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gin
import gin.config
from absl import logging
from etils import epath

from perex_t5x import files as files_lib
from perex_t5x import gin_scan
from perex_t5x.cli.flags import rewrite_gin_args
from perex_t5x.errors import ConfigError, did_you_mean, writing_failed
from perex_t5x.gin_scan import BindingNames, MissingMacroError, find_file, shipped_gin_dir

__all__ = [
    "BindingNames",
    "MissingMacroError",
    "bool_fn",
    "building",
    "call",
    "configured",
    "find_file",
    "parse_gin_flags",
    "rewrite_gin_args",
    "shipped_gin_dir",
    "string_split_fn",
    "sum_fn",
    "summarize_gin_config",
]


def _parameters(configurable: Any) -> list[str]:
    """Argument names of what a configurable wraps; Gin makes a subclass of a class, with a wrapped constructor."""
    target = configurable.__mro__[1] if inspect.isclass(configurable) else inspect.unwrap(configurable)
    return [name for name in inspect.signature(target).parameters if name != "self"]


def _explain(e: Exception, scan: gin_scan.Scan) -> ConfigError:
    """Turns gin's error into one that names the nearest known name. Gin's text already carries file and line."""
    text = re.sub(r"\n\s*In bindings string line \d+\n\s*", "\n  In --gin.", str(e))
    if not isinstance(e, ValueError | NameError | AttributeError | ImportError | TypeError | SyntaxError):
        text = f"{type(e).__name__}: {text}"  # of a module that a file imports: the text alone may say nothing
    hint = ""
    parameter = re.search(r"Configurable '([\w.]+)' doesn't have a parameter named '(\w+)'", text)
    attribute = re.search(r"Couldn't resolve selector ([\w.]+); <module '([\w.]+)'.*has no attribute (\w+)", text)
    unimported = re.search(r"'(\w+)' was not provided by an import statement", text)
    unmatched = re.search(r"No configurable matching '([\w.]+)'", text)
    twice = re.search(r"A different configurable matching '([\w.]+)' already exists", text)
    if twice:
        module, _, name = twice[1].rpartition(".")
        place = text[text.find("  In ") :]
        text = f"two imports give the name {module}, and both have {name}.\n{place}"
        hint = "Import one of them under another name: `from ... import ... as another_name`."
    elif parameter:
        known = _parameters(gin.get_configurable(parameter[1].rsplit(".", 1)[-1]))
        hint = f"{did_you_mean(parameter[2], known)} It has: {', '.join(known)}."
    elif attribute:
        module = __import__(attribute[2], fromlist=[""])
        hint = did_you_mean(attribute[3], [n for n in dir(module) if not n.startswith("_")])
    elif unimported:
        hint = f"{did_you_mean(unimported[1], scan.modules)} Imported names: {', '.join(sorted(scan.modules))}."
    elif unmatched:
        known = [selector for selector, _ in gin.config._REGISTRY.items()]  # pylint: disable=protected-access
        last = {k.rsplit(".", 1)[-1] for k in known}
        hint = did_you_mean(unmatched[1].rsplit(".", 1)[-1], last)
    return ConfigError(f"gin configuration: {text}\n {hint}".rstrip())


def _parse_binding(binding: str, scan: gin_scan.Scan) -> None:
    """Parses one command-line binding in the names that the files' imports give.

    `Trainer.x` stands for `trainer.Trainer.x` if `trainer` is the first imported module with such a name; a name that no
    module has is left to Gin's own registry.
    """
    key, _, value = (part.strip() for part in binding.partition("="))
    scope, slash, selector = key.rpartition("/")
    root = selector.split(".")[0]
    if "." in selector and root not in scan.modules:
        owners = [name for name, module in scan.modules.items() if hasattr(sys.modules.get(module), root)]
        if not owners:
            gin.parse_config(binding)
            return
        binding = f"{scope}{slash}{owners[0]}.{selector} = {value}"
    gin.parse_config(["from __gin__ import dynamic_registration", *scan.imports, binding])


def _leave_optimizers_to_the_schedule() -> None:
    """OPTIMIZER = @optax.adafactor(), T5X's way to write it, becomes @optax.adafactor; so in lists of optimizers.

    The trainer's schedule is meant to give such an optimizer its rate, so the trainer makes it; with the parentheses Gin
    would, without any rate. One whose `learning_rate` is bound keeps it, and is left as it is.
    """
    for bound in list(gin.config._CONFIG.values()):
        for name in bound:
            if name in _OPTIMIZER_ARGUMENTS:
                _leave_to_the_schedule(bound, name)


_OPTIMIZER_ARGUMENTS = ("optimizer_def", "transformations", "traversals_and_optimizers")


def _leave_to_the_schedule(bound: dict[str, Any], name: str) -> None:
    """In one binding, and in the macro that it may refer to."""
    config, value, seen = gin.config._CONFIG, bound[name], 0
    while isinstance(value, gin.config.ConfigurableReference) and _is_macro(value):
        name, bound = "value", config.get(value.config_key, {})
        value, seen = bound.get(name), seen + 1
        if seen > len(config):
            return  # a circle, which is refused elsewhere
    if name in bound:
        bound[name] = _left_to_the_schedule(value)


def _is_macro(reference: Any) -> bool:
    return reference.configurable.wrapped is gin.config.macro


def _left_to_the_schedule(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_left_to_the_schedule(item) for item in value)
    if isinstance(value, gin.config.ConfigurableReference):
        if _is_macro(value):
            bound = gin.config._CONFIG.get(value.config_key, {})
            if "value" in bound:
                _leave_to_the_schedule(bound, "value")
        elif value.evaluate and _has_no_rate(value):
            logging.info(
                "%r: the trainer makes it, as without parentheses; what has no learning rate gets its schedule's", value
            )
            return _not_called(value)
    return value


def _has_no_rate(reference: Any) -> bool:
    """Whether it refers to something that takes a `learning_rate` and is bound to none."""
    if "learning_rate" not in _parameters(reference.configurable.wrapper):
        return False
    with gin.config_scope("/".join(reference.scopes) or None):
        bound = gin.get_bindings(reference.configurable.selector, resolve_references=False)
    return bound.get("learning_rate") is None


def _not_called(reference: Any) -> Any:
    changed = copy.copy(reference)
    changed._evaluate = False
    return changed


def _parse_file(path: str, scan: gin_scan.Scan) -> None:
    """Parses a file; then once more, from the innermost included files outwards, what each sets by itself."""
    with _plain_files_only(functools.partial(_with_found_includes, scan=scan)):
        gin.parse_config_file(path)
    if scan.includes[path]:
        with _plain_files_only(functools.partial(_own_settings, scan=scan)):
            for file in _innermost_first(path, scan):
                gin.parse_config_file(file)


def _innermost_first(path: str, scan: gin_scan.Scan) -> Iterator[str]:
    for included in scan.includes[path].values():
        yield from _innermost_first(included, scan)
    yield path


class _NamedText(io.StringIO):
    """Gin's errors have the name."""

    name = ""


def _with_found_includes(path: str, scan: gin_scan.Scan) -> _NamedText:
    """A file whose includes name the files that `find_file` found, whatever Gin would find."""
    return _changed(path, {line: f"include {included!r}\n" for line, included in scan.includes[path].items()})


def _own_settings(path: str, scan: gin_scan.Scan) -> _NamedText:
    """A file without its includes and without what it requires, each line where it was."""
    return _changed(path, dict.fromkeys(scan.skipped[path], "\n"))


def _changed(path: str, lines: dict[int, str]) -> _NamedText:
    with open(path, encoding="utf-8") as f:
        text = _NamedText("".join(lines.get(i, line) for i, line in enumerate(f, 1)))
    text.name = path
    return text


@contextlib.contextmanager
def _plain_files_only(reader: Callable[[str], Any]) -> Iterator[None]:
    """Gin also looks for an included file inside Python packages of its folder's name: a folder `runs` in the working
    directory would do for one, and break it. Files are found by `find_file`'s rules alone."""
    readers = gin.config._FILE_READERS
    gin.config._FILE_READERS = [(reader, os.path.isfile)]
    try:
        yield
    finally:
        gin.config._FILE_READERS = readers


def parse_gin_flags(
    gin_search_paths: Sequence[str], gin_files: Sequence[str], gin_bindings: Sequence[str], finalize_config: bool = True
) -> None:
    """Parses Gin files (later wins), then bindings, in the names that the files' imports give.

    What a file sets itself holds against the files that it includes, wherever the `include` stands.
    `train_script.train.total_steps=5`, `utils.DatasetConfig.pack=True` and plain `DatasetConfig.pack=True` all work as
    bindings. Raises `ConfigError`, with file and line, for a file that is not found, a name that is not known (with
    the nearest one), a required macro that is missing, a value that its argument cannot take.
    """
    from perex_t5x import gin_values  # it needs JAX, which the other names of this module do not

    first = ["", *gin_search_paths, shipped_gin_dir()]
    files = [find_file(f, first, "--gin_file") for f in gin_files]
    beside = [os.path.dirname(os.path.abspath(f)) for f in files]
    search_paths = list(dict.fromkeys(["", *gin_search_paths, *beside, shipped_gin_dir()]))
    bindings = [gin_scan.quoted(b) for b in gin_bindings]

    scan = gin_scan.Scan()
    for path in files:
        gin_scan.scan_file(path, search_paths, scan)
    gin_scan.check_macro_bindings(bindings, scan)
    for binding in bindings:
        gin_scan.scan_statements(binding, f"--gin.{binding.partition('=')[0].strip()}", search_paths, scan)
    gin_scan.check_macros(scan)

    for path in search_paths[1:]:
        gin.add_config_file_search_path(path)
    try:
        for path in files:
            _parse_file(path, scan)
        for binding in bindings:
            _parse_binding(binding, scan)
        _leave_optimizers_to_the_schedule()
        gin_values.check(scan.places)
        if finalize_config:
            gin.finalize()
    except ConfigError:
        raise
    except Exception as e:  # of Gin, or of a module that a file imports
        raise _explain(e, scan) from e


@contextlib.contextmanager
def building() -> Iterator[None]:
    """Turns what a value of the wrong kind does inside an optimizer, a model or a library into a `ConfigError`.

    For what is done before anything is computed. Errors that have another cause (storage, devices) are left as they are.
    """
    try:
        yield
    except ConfigError:
        raise
    except (
        TypeError,
        ValueError,
        AttributeError,
        LookupError,
        ArithmeticError,
        AssertionError,
        NotImplementedError,
        RecursionError,  # of configurables that need each other
    ) as e:
        logging.info("building the configuration failed", exc_info=True)
        names = re.findall(r"In call to configurable '([\w.]+)'", str(e))
        text = re.sub(r"\n\s*In call to configurable .*", "", str(e)).strip().partition("\n")[0]
        inside = f" (in {', in '.join(dict.fromkeys(names))})" if names else ""
        why = "A value is not of the kind that is needed there"
        if names and re.search(r"missing \d+ required positional argument", text):
            why = f"Bind them; or, if {names[0]} itself is needed there, leave the parentheses of @...{names[0]}() out"
        raise ConfigError(
            f"the configuration cannot be built: {type(e).__name__}: {text}{inside}. {why}; --alsologtostderr shows where."
        ) from e


def call(function: Callable[..., Any], **given: Any) -> Any:
    """Calls a function with the arguments that Gin has for it, besides those that are given.

    What is bound is made first; a `ConfigError` says what cannot be.
    """
    with building():
        bound = {**gin.get_bindings(function), **given}
        parameters = inspect.signature(function).parameters.values()
        missing = [
            p.name for p in parameters if p.default is p.empty and p.kind is p.KEYWORD_ONLY and p.name not in bound
        ]
        if missing:
            bindings = ", ".join(f"{function.__name__}.{name}" for name in missing)
            raise ConfigError(f"Nothing is bound to {bindings}. The Gin files in runs/ bind all that is needed.")
        inspect.signature(function).bind(**bound)
    return function(**bound)


def configured(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function with what Gin binds to it, if it does: for a default that no Gin file names.

    >>> configured(len) is len
    True
    """
    try:
        return gin.get_configurable(function)
    except (KeyError, ValueError):  # not registered
        return function


def bound_names(function: Callable[..., Any]) -> set[str]:
    """The names of the arguments of a function that Gin has values for, in the scope in which this is called.

    >>> bound_names(len)
    set()
    """
    try:
        return set(gin.get_bindings(inspect.unwrap(function), resolve_references=False))
    except ValueError:  # not registered
        return set()


def summarize_gin_config(model_dir: str, summary_writer: Any = None, step: int = 0) -> None:
    """Writes the whole configuration to `config.gin` in `model_dir`, and as text to TensorBoard.

    An existing file that differs is kept under `config.<n>.gin`: what a run was started with is never lost.
    """
    text = gin.config_str(max_line_length=120)
    path = epath.Path(model_dir) / "config.gin"
    path.parent.mkdir(parents=True, exist_ok=True)
    files_lib.clear_way(path)
    try:
        _keep_former(path, text)
        path.write_text(text)
    except OSError as e:
        raise writing_failed(
            f"{path} cannot be written: {e.strerror or e}. Remove it, or choose another MODEL_DIR.", e
        ) from e
    if summary_writer is not None:
        summary_writer.write_texts(step, {"config": gin.markdown(text)})


def _keep_former(path: Any, text: str) -> None:
    """Renames a configuration that differs."""
    if path.exists() and path.read_bytes() != text.encode():
        n = 1
        while (older := path.parent / f"config.{n}.gin").exists():
            n += 1
        path.rename(older)
        logging.info("configuration changed: the former one is kept as %s", older)


# --- T5X's functions for values in Gin files, such as TRAIN_STEPS = @gin_utils.sum_fn() -----------------------------------


def sum_fn(var1: Any, var2: Any) -> Any:
    """var1 + var2.

    >>> sum_fn(1_000_000, 20_000)
    1020000
    """
    return var1 + var2


def bool_fn(var1: Any) -> bool:
    """Whether a value is true in Python's sense: not 0, not None, not empty."""
    return bool(var1)


def string_split_fn(text: str, separator: str, maxsplit: int = -1, index: int | None = None) -> Any:
    """The parts of a text, or the one of this index.

    >>> string_split_fn("a/b/c", "/", index=-1)
    'c'
    """
    parts = text.split(separator, maxsplit)
    return parts if index is None else parts[index]
