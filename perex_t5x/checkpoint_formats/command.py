"""`python -m perex_t5x.checkpoints inspect|convert`: what is in a checkpoint, and the same in another format."""

from __future__ import annotations

import ast
import json
import math
import os
import re
from typing import Any

from perex_t5x import buckets, checkpoint_files
from perex_t5x.checkpoint_formats import layers, open_checkpoint
from perex_t5x.checkpoint_formats.convert import check_target, convert
from perex_t5x.checkpoint_formats.leaves import Contents, Leaf
from perex_t5x.checkpoint_formats.plan import Options, Plan, make_plan
from perex_t5x.checkpoint_formats.settings import settings_of
from perex_t5x.errors import ConfigError, did_you_mean

_FORMATS = {
    "legacy": "T5X's legacy format (msgpack and zarr), version {}",
    "orbax": "Orbax ({})",
    "safetensors": "safetensors",
}


def inspect_command(args: Any, paths: list[str]) -> int:
    """Prints what is in checkpoints."""
    for path in paths:
        for checkpoint in checkpoint_files.checkpoints_at(path):
            contents = open_checkpoint(checkpoint)
            print(json.dumps(_as_json(contents)) if args.json else _as_text(contents))
    return 0


def _as_json(contents: Contents) -> dict[str, Any]:
    return {
        "path": contents.path,
        "format": contents.format,
        "version": contents.version,
        "step": _step(contents),
        "layers": _layout(contents),
        "bytes": contents.nbytes,
        "leaves": {
            name: {"shape": list(leaf.shape), "dtype": leaf.dtype.name, "bytes": leaf.nbytes, "stored": leaf.stored}
            for name, leaf in contents.leaves.items()
        },
        "empty": sorted(contents.empty),
    }


def _as_text(contents: Contents) -> str:
    parameters = [leaf for name, leaf in contents.leaves.items() if _is_parameter(name)]
    count = sum(math.prod(leaf.shape) for leaf in parameters)
    step, layout = _step(contents), _layout(contents)
    head = [
        contents.path,
        f"  {_FORMATS[contents.format].format(contents.version)}",
        f"  {len(contents.leaves)} leaves, {_bytes(contents.nbytes)}; {len(parameters)} of parameters, {count:,} numbers"
        + (f"; step {step}" if step is not None else "")
        + (f"; layers {layout}" if layout else ""),
    ]
    width = max(len(name) for name in contents.leaves)
    rows = [
        f"  {name:<{width}}  {_described(leaf):<24} {_bytes(leaf.nbytes):>10}  {leaf.stored}"
        for name, leaf in contents.leaves.items()
    ]
    return "\n".join([*head, *rows, *(f"  {name:<{width}}  empty" for name in sorted(contents.empty))])


def _is_parameter(name: str) -> bool:
    return name.split("/")[0] not in ("state", "rng", "flax_mutables")


def _described(leaf: Leaf) -> str:
    return f"{leaf.dtype.name} {list(leaf.shape)}"


def _bytes(size: float) -> str:
    """
    >>> _bytes(12), _bytes(4_146_548)
    ('12 B', '4.1 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _layout(contents: Contents) -> str | None:
    try:
        return layers.layout_of(contents.leaves) or contents.metadata.get("layers")
    except ConfigError:
        return "mixed"


def _step(contents: Contents) -> int | None:
    step = checkpoint_files.step_of(contents.path)
    if step is None and "state/step" in contents.leaves:
        step = int(contents.leaves["state/step"].read())
    return step


# --- convert ----------------------------------------------------------------------------------------------------------


def convert_command(args: Any, words: list[str]) -> int:
    """Converts a checkpoint; with --dry_run says what would happen to each leaf."""
    if len(words) != 2:
        raise ConfigError("convert takes two paths: python -m perex_t5x.checkpoints convert PATH TARGET --to=FORMAT")
    source = _source(words[0])
    contents = open_checkpoint(source)
    to = args.to or ("safetensors" if words[1].endswith(".safetensors") else None)
    if to is None:
        raise ConfigError("convert needs a format: --to=orbax, --to=legacy or --to=safetensors.")
    if to != "safetensors" and words[1].endswith(".safetensors"):
        raise ConfigError(f"--to={to} writes a folder, and {words[1]} is named as a safetensors file.")
    options = Options(
        to=to,
        names=args.names,
        layers=args.layers,
        heads=args.heads,
        optimizer_state=args.optimizer_state,
        params_only=args.params_only,
        ignore=tuple(args.ignore),
        settings=settings_of(contents, args.config_gin, _given(args.set)),
    )
    plan = make_plan(contents, options)
    target = _target(words[1], contents, options)
    check_target(target, plan)
    if args.dry_run or args.json:
        as_text = _plan_as_json if args.json else _plan_as_text
        print(as_text(plan, source, target))
    if args.dry_run:
        return 0
    convert(plan, target, max_shard_bytes=_size(args.max_shard_size))
    if not args.json:
        print(f"{source} -> {target}: {_summary(plan)}")
        for note in plan.notes:
            print(f"note: {note}")
    return 0


def _source(path: str) -> str:
    found = list(checkpoint_files.checkpoints_at(path))
    if len(found) > 1:
        names = ", ".join(os.path.basename(p) for p in found)
        raise ConfigError(f"{path} holds {len(found)} checkpoints ({names}): name one of them.")
    return found[0]


def _target(path: str, contents: Contents, options: Options) -> str:
    """Where the result goes: a checkpoint gets the name of its step in a folder that has another name."""
    buckets.check(path, "TARGET")
    path = checkpoint_files.absolute(os.path.expanduser(path))
    if options.to == "safetensors" or checkpoint_files.step_of(path) is not None:
        return path
    step = _step(contents)
    return f"{path}/{checkpoint_files.PREFIX}_{0 if step is None else step}"


def _given(settings: list[str]) -> dict[str, Any]:
    """
    >>> _given(["head_dim=64", "mlp_activations=('silu', 'linear')", "dropout_rate=0.1"])
    {'head_dim': 64, 'mlp_activations': ('silu', 'linear'), 'dropout_rate': 0.1}
    """
    known = ("head_dim", "mlp_activations", "rotary_max_wavelength", "dropout_rate", "max_length")
    found = {}
    for setting in settings:
        name, separator, text = setting.partition("=")
        if not separator or name not in known:
            hint = did_you_mean(name, known)
            raise ConfigError(f"--set={setting}: NAME=VALUE is wanted, of {', '.join(known)}.{hint}")
        try:
            found[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError) as e:
            raise ConfigError(f"--set={setting}: {text!r} is no Python value.") from e
    return found


def _size(text: str) -> int:
    """
    >>> _size("5GB"), _size("200 kB"), _size("1000")
    (5000000000, 200000, 1000)
    """
    units = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(|B|KB|MB|GB|TB)\s*", text, re.IGNORECASE)
    size = int(float(match[1]) * units[match[2].upper()]) if match else 0
    if size < 1:
        raise ConfigError(f"--max_shard_size={text}: a size such as 5GB or 200MB is wanted.")
    return size


def _summary(plan: Plan) -> str:
    dropped = sum(not step.target for step in plan.steps)
    written = plan.leaves
    text = f"{len(written)} leaves, {_bytes(sum(leaf.nbytes for leaf in written))}"
    return text + (f"; {dropped} dropped" if dropped else "")


def _plan_as_text(plan: Plan, source: str, target: str) -> str:
    width = max(len(_sources(step.sources)) for step in plan.steps)
    lines = [f"{source} -> {target} ({plan.options.to}); dry run: nothing is written"]
    for step in plan.steps:
        leaf = f"  {_described(step.leaf)}" if step.leaf is not None else ""
        arrow = f" -> {step.target}" if step.target else ""
        lines.append(f"  {_sources(step.sources):<{width}}{arrow}{leaf}  [{step.what}]")
    lines += [f"  {name}  [empty, kept]" for name in sorted(plan.empty)]
    if plan.config is not None and not target.endswith(".safetensors"):
        lines.append(f"  config.json: {plan.config['architectures'][0]}")
    lines += [f"note: {note}" for note in plan.notes]
    return "\n".join([*lines, _summary(plan)])


def _sources(names: tuple[str, ...]) -> str:
    if not names:
        return "(new)"
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _plan_as_json(plan: Plan, source: str, target: str) -> str:
    steps = [
        {
            "sources": list(step.sources),
            "target": step.target or None,
            "what": step.what,
            "shape": None if step.leaf is None else list(step.leaf.shape),
            "dtype": None if step.leaf is None else step.leaf.dtype.name,
        }
        for step in plan.steps
    ]
    content = {"source": source, "target": target, "to": plan.options.to, "leaves": steps}
    return json.dumps(content | {"config": plan.config, "notes": list(plan.notes)})
