"""What a conversion does with each leaf, decided before anything is read or written."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from perex_t5x import files
from perex_t5x.checkpoint_formats import heads, hugging_face, layers, optimizer_states
from perex_t5x.checkpoint_formats import leaves as leaves_lib
from perex_t5x.checkpoint_formats.leaves import Contents, Leaf
from perex_t5x.errors import ConfigError

Format = Literal["legacy", "orbax", "safetensors"]


@dataclasses.dataclass(frozen=True)
class Options:
    """How to convert.

    Attributes:
      to: the format.
      names: of parameters in safetensors files, 'hugging_face' or 't5x'; the other formats have T5X's.
      layers: 'keep' (as they are, or were before they came into a safetensors file), or one of `layers.LAYOUTS`.
      heads: 'keep', 'joined' (heads and their widths are one axis of kernels) or 'split'.
      optimizer_state: 'keep', 't5x' (renamed to what T5X's Adafactor and adamw have), or 'drop'.
      params_only: leave out everything but parameters, and the step where T5X wants it.
      ignore: settings of a config.json that may differ from what our networks compute.
      settings: fields of `T5Config` that shapes do not tell.
    """

    to: Format
    names: Literal["hugging_face", "t5x"] = "hugging_face"
    layers: Literal["keep", "unrolled", "axis0", "axis1"] = "keep"
    heads: Literal["keep", "joined", "split"] = "keep"
    optimizer_state: Literal["keep", "t5x", "drop"] = "keep"
    params_only: bool = False
    ignore: tuple[str, ...] = ()
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Step:
    """What becomes of a leaf.

    Attributes:
      sources: its names in the checkpoint; several where layers are stacked.
      target: its name in the result; '' if it is dropped.
      what: for people: 'kept', 'renamed, transposed', 'dropped: why'.
      leaf: as it is written.
    """

    sources: tuple[str, ...]
    target: str
    what: str
    leaf: Leaf | None = None

    @property
    def is_model(self) -> bool:
        """Whether it is a parameter, under whatever name."""
        return bool(self.target) and self.target.split("/")[0] not in hugging_face.TRAIN_STATE


@dataclasses.dataclass(frozen=True)
class Plan:
    """A conversion.

    Attributes:
      steps: one for each leaf that is written, and each that is dropped.
      empty: nodes that hold nothing.
      metadata: what a safetensors file has to remember.
      config: the content of config.json, or None.
      notes: for people, a line each.
    """

    options: Options
    steps: tuple[Step, ...]
    empty: Mapping[str, Any]
    metadata: Mapping[str, Any]
    config: Mapping[str, Any] | None
    notes: tuple[str, ...]

    @property
    def leaves(self) -> list[Leaf]:
        return [step.leaf for step in self.steps if step.leaf is not None]


@dataclasses.dataclass(frozen=True)
class _Item:
    leaf: Leaf
    sources: tuple[str, ...]
    done: tuple[str, ...] = ()


def make_plan(contents: Contents, options: Options) -> Plan:
    """Raises `ConfigError` for what cannot be converted; reads no arrays."""
    items, dropped, notes = _under_t5x_names(contents, options)
    if contents.format == "orbax" and (files.as_path(contents.path) / "run").exists():
        notes.append("the run's position in its data is left out: another run can start from this, and none resume")
    items, empty = _without_unwanted(items, dict(contents.empty), dropped, options)
    into_hf = options.to == "safetensors" and options.names == "hugging_face"
    items, metadata = _rearranged(items, contents, options, into_hf)
    items = _optimizer_for_t5x(items, notes) if options.optimizer_state == "t5x" else items
    config = None
    if into_hf:
        items, config = _under_their_names(items, options)
    steps = [Step(item.sources, name, _words(item, name), item.leaf) for name, item in items.items()]
    metadata |= {"empty": empty} if empty else {}
    return Plan(options, tuple(steps + dropped), empty, metadata, config, tuple(notes))


def _words(item: _Item, name: str) -> str:
    done = [word for word in item.done if item.done.count(word) % 2 or word != "transposed"]
    if item.sources not in ((), (name,)) and not any(word.startswith(("stacked", "split")) for word in done):
        done.insert(0, "renamed")
    return ", ".join(dict.fromkeys(done)) or "kept"


def _under_t5x_names(contents: Contents, options: Options) -> tuple[dict[str, _Item], list[Step], list[str]]:
    translated = hugging_face.names_here(contents, options.ignore)
    leaves = hugging_face.in_t5x_names(contents, options.ignore).leaves
    items, dropped, notes = {}, [], []
    for name, found in translated.items():
        if found is None:
            dropped.append(Step((name,), "", "dropped: a copy of another leaf, or computed"))
        else:
            items[found[0]] = _Item(leaves[found[0]], (name,), ("transposed",) if found[1] else ())
    for name in leaves.keys() - items.keys():
        items[name] = _Item(leaves[name], (), ("made: a copy of the embedding",))
    if "model_type" in contents.metadata.get("config", {}) and options.to != "safetensors":
        fields = ", ".join(f"{key}={value!r}" for key, value in hugging_face.t5_config(contents).items())
        notes.append(f"the model is T5Config({fields})")
    return items, dropped, notes


def _without_unwanted(
    items: dict[str, _Item], empty: dict[str, Any], dropped: list[Step], options: Options
) -> tuple[dict[str, _Item], dict[str, Any]]:
    def reason(name: str) -> str:
        if options.params_only and not name.startswith("target/"):
            needs_step = name == "state/step" and options.to != "safetensors"
            return "" if needs_step else "--params_only"
        if options.optimizer_state == "drop" and name.startswith(optimizer_states.STATES):
            return "--optimizer_state=drop"
        return ""

    for name, item in items.items():
        if why := reason(name):
            dropped.append(Step(item.sources, "", f"dropped: {why}"))
    kept = {name: item for name, item in items.items() if not reason(name)}
    return kept, {name: value for name, value in empty.items() if not reason(name)}


def _rearranged(
    items: dict[str, _Item], contents: Contents, options: Options, into_hf: bool
) -> tuple[dict[str, _Item], dict[str, Any]]:
    """Layers and heads as wanted; and how they were, for the way back."""
    leaves = {name: item.leaf for name, item in items.items()}
    present, head_dim = layers.layout_of(leaves), heads.head_dim_of(leaves)
    if present is None:
        return items, {}
    origin: dict[str, Any] = {"layers": present} | ({"head_dim": head_dim} if head_dim else {})
    origin |= {key: contents.metadata[key] for key in ("layers", "head_dim") if key in contents.metadata}
    layout = origin["layers"] if options.layers == "keep" else options.layers
    joins = options.heads == "joined"
    wanted_head_dim = origin.get("head_dim")
    if options.heads == "split":
        wanted_head_dim = head_dim or wanted_head_dim or options.settings.get("head_dim")
        if wanted_head_dim is None:
            raise ConfigError("--heads=split needs the width of a head: --set=head_dim=...")
    if into_hf:
        layout, joins = "unrolled", True
    if wanted_head_dim and not joins and not head_dim:
        items = _with_heads(items, wanted_head_dim)
    items = _with_layers(items, layout)
    if joins and head_dim:
        items = _with_heads(items, None)
    return items, origin


def _with_layers(items: dict[str, _Item], layout: layers.Layout) -> dict[str, _Item]:
    result = {}
    for name, moved in layers.rearranged({name: item.leaf for name, item in items.items()}, layout).items():
        parts = [items[source] for source in moved.sources]
        words = {"stacked": f"stacked from {len(parts)} layers", "split": "split into layers", "kept": ""}
        word = words.get(moved.how, moved.how)
        done = parts[0].done + ((word,) if word else ())
        result[name] = _Item(moved.leaf, tuple(s for part in parts for s in part.sources), done)
    return result


def _with_heads(items: dict[str, _Item], head_dim: int | None) -> dict[str, _Item]:
    changed = heads.changed({name: item.leaf for name, item in items.items()}, head_dim)
    word = "heads joined" if head_dim is None else "heads split"
    result = {}
    for name, item in items.items():
        new, leaf = changed.get(name, (name, item.leaf))
        done = item.done + ((word,) if name in changed else ())
        result[new] = dataclasses.replace(item, leaf=leaf, done=done)
    return result


def _optimizer_for_t5x(items: dict[str, _Item], notes: list[str]) -> dict[str, _Item]:
    renamed, without_m = optimizer_states.in_t5x(items)
    result = {}
    for name, item in items.items():
        new = renamed.get(name, name)
        result[new] = dataclasses.replace(item, leaf=leaves_lib.renamed(item.leaf, new))
    for parameter in without_m:  # T5X has a number there where there is no momentum
        name = f"{optimizer_states.STATES}{parameter}/m"
        result[name] = _Item(
            leaves_lib.of_array(name, np.zeros((1,), np.float32)), (), ("made: T5X's Adafactor has one",)
        )
    count = f"{optimizer_states.STATES}0/count"
    if without_m and count in result:
        del result[count]
        notes.append(f"{count} is left out: T5X's Adafactor goes by state/step")
    return result


def _under_their_names(items: dict[str, _Item], options: Options) -> tuple[dict[str, _Item], dict[str, Any]]:
    parameters = {name.removeprefix("target/"): i.leaf for name, i in items.items() if name.startswith("target/")}
    architecture = hugging_face.architecture_of(parameters)
    result = {}
    for name, item in items.items():
        found = hugging_face.translate(name.removeprefix("target/"), hugging_face.PAIRS[architecture])
        if found is None or not name.startswith("target/"):
            result[name] = item
            continue
        new, is_transposed = found
        leaf = leaves_lib.transposed(item.leaf, (1, 0), new) if is_transposed else leaves_lib.renamed(item.leaf, new)
        result[new] = _Item(leaf, item.sources, item.done + (("transposed",) if is_transposed else ()))
    return result, hugging_face.config_of(architecture, parameters, options.settings)
