"""Sweep and run folders made up from formulas, with known answers."""

import csv
import json
import math
import os

import numpy as np

LAYERS = ("all", "attention", "embedding", "mlp", "norm")


def write_run(folder, *, optimizer="adamw", batch_size=16, rate=0.004, seed=0, steps=100, length=64, warmup=10, shift=0.0,
              noise=0.01, points=20, monitor=False, evaluate=True, diverge_at=None, extra=""):  # fmt: skip
    """What `perex_t5x.train` leaves behind: config.gin and metrics.jsonl. Returns the final validation loss."""
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "config.gin"), "w", encoding="utf-8") as f:
        f.write(
            f"import optax\n\n# Macros:\n# ====\nBASE_LEARNING_RATE = {rate}\nBATCH_SIZE = {batch_size}\n"
            f"MODEL_DIR = '{os.path.basename(folder)}'\nOPTIMIZER = @optax.{optimizer}\nRANDOM_SEED = {seed}\n"
            f"TASK_FEATURE_LENGTHS = {{'targets': {length}}}\nTRAIN_STEPS = {steps}\nWARMUP_STEPS = {warmup}\n\n"
            f"# Parameters for optax.{optimizer}:\n# ====\noptax.{optimizer}.b1 = \\\n    0.9\n"
            f"train/utils.DatasetConfig.batch_size = %BATCH_SIZE\n{extra}"
        )
    rng = np.random.default_rng([seed, batch_size, int(1e6 * rate)])
    offset = noise * rng.standard_normal()
    final = math.nan
    with open(os.path.join(folder, "metrics.jsonl"), "w", encoding="utf-8") as f:
        for step in np.unique(np.linspace(1, steps, points).round().astype(int)):
            broken = diverge_at is not None and step >= diverge_at
            loss = 2.0 + 3.5 * math.exp(-5 * step / steps) + shift + offset + 0.1 * noise * rng.standard_normal()
            train = loss + 0.05 * rng.standard_normal()
            row = {"step": int(step), "name": "train", "loss_per_nonpadding_target_token": "nan" if broken else train}
            if monitor:
                for i, layer in enumerate(LAYERS):
                    scale = 20 * (1 + 4 * step / steps) * (1 + 0.3 * i) * math.exp(0.2 * rng.standard_normal())
                    row[f"per_example/noise_scale_smoothed/{layer}"] = "inf" if step == 1 else scale
                    row[f"per_example/snr/{layer}"] = 0.0 if rng.random() < 0.05 else scale**-0.5
            f.write(json.dumps(row) + "\n")
            if evaluate:
                final = math.nan if broken else loss
                row = {
                    "step": int(step),
                    "name": "training_eval/t",
                    "loss_per_nonpadding_target_token": "nan" if broken else loss,
                }
                f.write(json.dumps(row) + "\n")
            if broken:
                break
    return final


def write_sweep(folder, runs, *, name="made_up", rule=None, axes=None, findings=None, **more):
    """A sweep's folder. `runs`: dictionaries with `values` and the arguments of `write_run`, or `status` 'waiting'."""
    described, results = [], []
    for i, run in enumerate(runs):
        run = dict(run)
        values, status = run.pop("values"), run.pop("status", "done")
        run_name = run.pop("name", None) or "-".join(str(v) for v in values.values()) or f"run{i}"
        batch, rate, seed = run.get("batch_size", 16), run.get("rate", 0.004), run.get("seed", 0)
        described.append({"name": run_name, "values": values, "bindings": [f"BATCH_SIZE = {batch}"], "batch_size": batch,
                          "learning_rate": rate, "train_steps": run.get("steps", 100), "seed": seed})  # fmt: skip
        final = math.nan if status == "waiting" else write_run(os.path.join(folder, "runs", run_name), **run)
        failed = run.get("diverge_at") is not None
        results.append({
            "name": run_name, "status": "failed" if failed else status, "batch_size": batch, "learning_rate": rate,
            "seed": seed, "eval_loss": "" if math.isnan(final) else final, "seconds": 1.5 + i,
            "error": f"diverged at step {run['diverge_at']}" if failed else "",
        })  # fmt: skip
    os.makedirs(folder, exist_ok=True)
    description = {"name": name, "title": more.get("title", name), "question": more.get("question", ""), "rule": rule,
                   "base_batch_size": 16, "base_learning_rate": 0.004, "axes": axes or {}, "runs": described}  # fmt: skip
    with open(os.path.join(folder, "sweep.json"), "w", encoding="utf-8") as f:
        json.dump(description, f)
    with open(os.path.join(folder, "results.csv"), "w", encoding="utf-8", newline="") as f:
        writer = csv.DictWriter(f, list(results[0]))
        writer.writeheader()
        writer.writerows(results)
    if findings:
        with open(os.path.join(folder, "findings.json"), "w", encoding="utf-8") as f:
            json.dump(findings, f)
    return folder


def scaling_runs(spread, rule, *, sizes=(8, 16, 32, 64, 128), seeds=(0, 1, 2), power=0.5, monitor=False):
    """Batch sizes whose curves lie `spread` apart from one to the next."""
    return [
        {"values": {"batch_size": size, "seed": seed}, "batch_size": size, "seed": seed, "steps": 12800 // size,
         "warmup": 1280 // size, "rate": 0.004 * (size / 16) ** power, "shift": spread * i, "monitor": monitor,
         "name": f"{rule}-b{size}-s{seed}"}
        for i, size in enumerate(sizes) for seed in seeds
    ]  # fmt: skip


def basin_runs(best_rates, *, rates=(0.001, 0.002, 0.004, 0.008, 0.016), seeds=(0, 1, 2), diverge=None):
    """Optimizers with parabolas around their best rates; `diverge` is a rate at which every run fails."""
    return [
        {"values": {"optimizer": f"optimizers/{name}.gin", "learning_rate": rate, "seed": seed}, "optimizer": name,
         "rate": rate, "seed": seed, "shift": 0.1 * i + 0.05 * math.log2(rate / best) ** 2,
         "diverge_at": 40 if rate == diverge else None, "monitor": True}
        for i, (name, best) in enumerate(best_rates.items()) for rate in rates for seed in seeds
    ]  # fmt: skip
