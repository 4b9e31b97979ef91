"""A sweep's folder: sweep.json, results.csv, runs/<name>/result.json, and a lock.

A run's result.json is written last and in whole: where it is, the run is finished.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from perex_t5x import buckets, lease
from perex_t5x.errors import ConfigError
from perex_t5x.experiments.report import load
from perex_t5x.experiments.sweep.runs import DONE, FAILED, Result, Run
from perex_t5x.files import as_path, clear_way, is_remote, read_bytes, write_atomically

if TYPE_CHECKING:
    from perex_t5x.experiments.sweep.plan import Plan

COLUMNS = ("steps", "examples_seen", "train_loss", "eval_loss", "best_eval_loss", "seconds", "error")


class InUseError(ConfigError):
    """Another process has locked the folder."""

    def __init__(self, message: str, process: str):
        super().__init__(message)
        self.process = process


class Folder:
    """Reads and writes what a sweep keeps."""

    def __init__(self, root: str):
        self.root = root

    def path(self, *parts: str) -> str:
        return os.path.join(self.root, *parts)

    @contextlib.contextmanager
    def locked(self, on_lost: Callable[[], Any] | None = None) -> Iterator[None]:
        """Locks the folder against other sweeps, on this machine and on others: see `perex_t5x.lease`.

        `on_lost` is called if another process has taken it over, since this one was silent for long.
        """
        lock = lease.Lease(self.path(".lock"), on_lost)
        try:
            if not is_remote(self.root):
                os.makedirs(self.root, exist_ok=True)
            lock.acquire()
        except lease.HeldError as e:
            raise self._in_use(str(e.holder if is_remote(self.root) else e.holder.process)) from None
        except OSError as e:
            raise ConfigError(f"--dir={self.root} cannot be written: {e.strerror or e}. Choose another folder.") from e
        try:
            yield
        finally:
            lock.release()

    def _in_use(self, process: str) -> InUseError:
        return InUseError(
            f"--dir={self.root}: a sweep is running in this folder (process {process}). Wait for it, stop it with "
            "Ctrl-C, or choose another folder.",
            process,
        )

    # --- the description ----------------------------------------------------------------------------------------------

    def check(self, plan: Plan) -> list[str]:
        """Why this sweep cannot be run in the folder: how it differs from the sweep that the folder already holds."""
        buckets.check(self.root, "--dir")
        former = self.description()
        if former is None:
            runs = as_path(self.path("runs"))
            if runs.is_dir() and next(iter(runs.iterdir()), None) is not None:
                return [f"--dir={self.root} has a folder runs/, but no sweep.json. Choose another folder."]
            return []
        current = json.loads(json.dumps(plan.described()))  # as the former one comes back
        another = f"--dir={self.root} holds another sweep"
        if former.get("name") != current["name"]:
            return [f"{another}, {former.get('name')!r}. Choose another folder."]
        if set(former.get("axes", {})) != set(current["axes"]):
            return [f"{another}, over {', '.join(former.get('axes', {}))}, not {', '.join(current['axes'])}."]
        problems = []
        for key, flag in (("gin_files", "--gin_file"), ("gin_bindings", "--gin.NAME")):
            if former.get(key) != current[key]:
                problems.append(
                    f"{another}: {flag} was {former.get(key)}, and is now {current[key]}. Choose another folder."
                )
        known = {run["name"]: run for run in former.get("runs", [])}
        for run in current["runs"]:
            old = known.get(run["name"])
            if old is not None and any(old.get(key) != run[key] for key in ("values", "files", "bindings")):
                problems.append(
                    f"{another}: its run {run['name']} is {'; '.join(old.get('bindings', []))}, and would now be "
                    f"{'; '.join(run['bindings'])}. Choose another folder."
                )
                break  # the others would say the same
        return problems

    def description(self) -> dict[str, Any] | None:
        try:
            content = json.loads(read_bytes(self.path("sweep.json")).decode("utf-8"))
            runs = content["runs"]
            if not all(isinstance(run["name"], str) and isinstance(run["values"], dict) for run in runs):
                raise ValueError("its runs have no names or values")
            return content
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
            raise ConfigError(
                f"{self.path('sweep.json')} cannot be read: {e}. Remove it, or choose another --dir."
            ) from e

    def write_description(self, plan: Plan) -> list[dict[str, Any]]:
        """Writes sweep.json and returns its runs: the plan's, and those that the folder already held."""
        current = plan.described()
        names = {run["name"] for run in current["runs"]}
        kept = [run for run in (self.description() or {}).get("runs", []) if run["name"] not in names]
        current["runs"] += kept
        for run in kept:
            for axis, value in run["values"].items():
                if value not in current["axes"].setdefault(axis, []):
                    current["axes"][axis].append(value)
        write_atomically(self.path("sweep.json"), json.dumps(current, indent=1, ensure_ascii=False) + "\n")
        return current["runs"]

    # --- results ------------------------------------------------------------------------------------------------------

    def result(self, run: Run | str) -> Result | None:
        """The result of a finished run; None for others."""
        name = run if isinstance(run, str) else run.name
        try:
            content = json.loads(read_bytes(self.path("runs", name, "result.json")).decode("utf-8"))
            return Result(**{key: content[key] for key in Result.__dataclass_fields__ if key in content})
        except (FileNotFoundError, ValueError, TypeError, KeyError, RecursionError):
            return None
        except OSError:  # of a store that cannot be reached, which may be another time
            if is_remote(self.root):
                raise
            return None

    def results(self, names: Sequence[str]) -> dict[str, Result]:
        """Those of finished runs; read at once, since in a bucket each takes a while."""
        with ThreadPoolExecutor(16 if is_remote(self.root) else 1) as pool:
            return {name: result for name, result in zip(names, pool.map(self.result, names), strict=True) if result}

    def write_result(self, run: Run, result: Result) -> None:
        everything = {**dataclasses.asdict(result), "batch_size": run.batch_size, "learning_rate": run.learning_rate}
        text = json.dumps({**everything, "seed": run.seed}, indent=1, ensure_ascii=False)
        clear_way(self.path("runs", run.name, "result.json"))
        write_atomically(self.path("runs", run.name, "result.json"), text + "\n")

    def write_results(self, described: Sequence[Mapping[str, Any]], results: Mapping[str, Result]) -> str:
        """Writes results.csv, a row for every run of the folder; returns its path."""
        axes = list(dict.fromkeys(axis for run in described for axis in run["values"]))
        own = [axis for axis in axes if axis not in ("batch_size", "learning_rate", "seed")]
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(["name", "status", *own, "batch_size", "learning_rate", "seed", *COLUMNS])
        former = self.results([run["name"] for run in described if run["name"] not in results])
        for run in described:
            result = results.get(run["name"]) or former.get(run["name"]) or Result(run["name"])
            cells = [run["values"].get(axis, "") for axis in own]
            cells += [run["batch_size"], run["learning_rate"], run["seed"]]
            cells += [getattr(result, column) for column in COLUMNS]
            writer.writerow([run["name"], result.status, *("" if cell is None else cell for cell in cells)])
        write_atomically(self.path("results.csv"), text.getvalue())
        return self.path("results.csv")


def result_of_metrics(run: Run, folder: str, seconds: float, status: str = DONE, error: str = "") -> Result:
    """The result of a run, read from its metrics.jsonl.

    One whose validation is not of its last step is none: such a run has failed, and is run again with the sweep.
    """
    read = load.read_run(folder, run.name)
    if status == DONE and (missing := read.missing_evaluation):
        return Result(run.name, FAILED, steps=read.steps, seconds=round(seconds, 3), error=missing, values=run.values)
    train_loss = float(read.training[1][-1]) if len(read.training[1]) else math.nan
    failed = status == FAILED
    return Result(
        name=run.name,
        status=status,
        final=True,
        steps=read.steps,
        examples_seen=read.steps * run.batch_size,
        train_loss=train_loss if math.isfinite(train_loss) and not failed else None,
        eval_loss=None if failed else read.final_loss,
        best_eval_loss=read.best_loss,
        seconds=round(seconds, 3),
        error=error,
        values=dict(run.values),
    )
