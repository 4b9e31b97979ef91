"""PyTorch's side of the benchmark: plain gradients, Opacus and BackPACK, run by `perex_t5x.bench.children`.

    python torch_child.py MODEL FOLDER THREADS

FOLDER has the parameters and the batch that JAX uses, as .npy files. It imports PyTorch, NumPy and what is measured, and
nothing of this package, so that any environment with these will do.
"""

# PyTorch and its libraries are in an environment of their own.
# pyright: reportMissingImports=false

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

PLAIN, MOMENTS, NORMS, CLIPPED = "plain gradient", "mean and mean square", "norms", "clipped mean"
CLIP_NORM = 1.0


class Mlp(nn.Module):
    """Square layers with ReLUs."""

    def __init__(self, weights: dict[str, torch.Tensor]):
        super().__init__()
        self.layers = nn.Sequential(*(m for w in weights.values() for m in (_linear(w), nn.ReLU())))

    def forward(self, x_BxD: torch.Tensor) -> torch.Tensor:
        return self.layers(x_BxD)

    def losses(self, y_BxD: torch.Tensor, x_BxD: torch.Tensor) -> torch.Tensor:
        return (y_BxD**2).sum(-1)


class Layer(nn.Module):
    """Attention and MLP, each after an RMS norm."""

    def __init__(self, w: dict[str, torch.Tensor]):
        super().__init__()
        self.norm, self.mlp_norm = _norm(w["norm"]), _norm(w["mlp_norm"])
        self.qkv, self.out, self.up, self.down = (_linear(w[name]) for name in ("qkv", "out", "up", "down"))

    def forward(self, x_BxTxD: torch.Tensor) -> torch.Tensor:
        b, t, d = x_BxTxD.shape
        q, k, v = self.qkv(self.norm(x_BxTxD)).reshape(b, t, 3, d // 64, 64).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x_BxTxD = x_BxTxD + self.out(attended)
        return x_BxTxD + self.down(functional.gelu(self.up(self.mlp_norm(x_BxTxD)), approximate="tanh"))


class Decoder(nn.Module):
    """The pre-norm decoder of `perex_t5x.bench.engine`."""

    def __init__(self, weights: dict[str, torch.Tensor]):
        super().__init__()
        self.embedding = nn.Embedding.from_pretrained(weights["embedding"], freeze=False)
        of_layers = {name.removeprefix("layers."): w for name, w in weights.items() if name.startswith("layers.")}
        depth = len(of_layers["norm"])
        self.layers = nn.Sequential(*(Layer({k: w[i] for k, w in of_layers.items()}) for i in range(depth)))
        self.norm, self.logits = _norm(weights["norm"]), _linear(weights["logits"])

    def forward(self, ids_BxT: torch.Tensor) -> torch.Tensor:
        return self.logits(self.norm(self.layers(self.embedding(ids_BxT))))

    def losses(self, logits_BxTxV: torch.Tensor, ids_BxT: torch.Tensor) -> torch.Tensor:
        of_tokens = functional.cross_entropy(logits_BxTxV[:, :-1].transpose(1, 2), ids_BxT[:, 1:], reduction="none")
        return of_tokens.mean(-1)


def _linear(w_IxO: torch.Tensor) -> nn.Linear:
    linear = nn.Linear(*w_IxO.shape, bias=False)
    linear.weight.data.copy_(w_IxO.T)
    return linear


def _norm(scale_D: torch.Tensor) -> nn.RMSNorm:
    norm = nn.RMSNorm(len(scale_D), eps=1e-6)
    norm.weight.data.copy_(scale_D)
    return norm


def of_plain(model: nn.Module, batch: torch.Tensor) -> Callable[[], Any]:
    def run() -> Any:
        model.losses(model(batch), batch).mean().backward()
        return [p.grad for p in model.parameters()]

    return run


def of_opacus(model: nn.Module, batch: torch.Tensor, ghost: bool) -> dict[str, Callable[[], Any]]:
    """Statistic -> program. `ghost`: ghost clipping, which forms norms without gradients where it can."""
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

    options = {"noise_multiplier": 0.0, "max_grad_norm": CLIP_NORM, "expected_batch_size": len(batch)}
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    if ghost:
        wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=CLIP_NORM)
        optimizer = DPOptimizerFastGradientClipping(sgd, **options)

        def norms() -> Any:
            model.losses(wrapped(batch), batch).mean().backward()
            return wrapped.get_norm_sample()

        def clipped() -> Any:
            wrapped.enable_hooks()
            losses = model.losses(wrapped(batch), batch)
            DPTensorFastGradientClipping(wrapped, optimizer, losses).backward()
            return [p.grad / len(batch) for p in model.parameters()]

        return {NORMS: norms, CLIPPED: clipped}

    wrapped = GradSampleModule(model)
    optimizer = DPOptimizer(sgd, **options)

    def backward() -> None:
        model.losses(wrapped(batch), batch).mean().backward()

    def moments() -> Any:
        backward()
        means = [p.grad for p in model.parameters()]
        return means, [(p.grad_sample**2).mean(0) for p in model.parameters()]

    def sample_norms() -> Any:
        backward()
        return torch.stack([p.grad_sample.flatten(1).norm(dim=1) for p in model.parameters()]).norm(dim=0)

    def clipped_samples() -> Any:
        backward()
        optimizer.clip_and_accumulate()
        return [p.summed_grad / len(batch) for p in model.parameters()]

    return {MOMENTS: moments, NORMS: sample_norms, CLIPPED: clipped_samples}


def of_backpack(model: nn.Module, batch: torch.Tensor) -> dict[str, Callable[[], Any]]:
    from backpack import backpack, extend, extensions
    from backpack.extensions.firstorder.base import FirstOrderModuleExtension

    class OfNorm(FirstOrderModuleExtension):
        """A rule for RMS norms, which BackPACK has none for: their examples' gradients are small."""

        def __init__(self, reduce: Callable[[torch.Tensor], torch.Tensor]):
            super().__init__(params=["weight"])
            self._reduce = reduce

        def weight(self, ext: Any, module: Any, g_inp: Any, g_out: Any, quantities: Any) -> torch.Tensor:
            x = module.input0.detach()
            normalized = functional.rms_norm(x, x.shape[-1:], eps=module.eps)
            return self._reduce((g_out[0] * normalized).flatten(1, -2).sum(1))

    extend(model)
    squares, norms_of = extensions.SumGradSquared(), extensions.BatchL2Grad()
    squares.set_module_extension(nn.RMSNorm, OfNorm(lambda g_NxD: (g_NxD**2).sum(0)))
    norms_of.set_module_extension(nn.RMSNorm, OfNorm(lambda g_NxD: (g_NxD**2).sum(1)))
    n = len(batch)

    def losses() -> torch.Tensor:
        return model.losses(model(batch), batch)

    def example_norms() -> torch.Tensor:
        return n * torch.stack([p.batch_l2 for p in model.parameters()]).sum(0).sqrt()  # of g_i / n

    def moments() -> Any:
        with backpack(squares):
            losses().mean().backward()
        return [p.grad for p in model.parameters()], [n * p.sum_grad_squared for p in model.parameters()]

    def norms() -> Any:
        with backpack(norms_of):
            losses().mean().backward()
        return example_norms()

    def clipped() -> Any:
        with backpack(norms_of, retain_graph=True):
            losses_N = losses()
            losses_N.mean().backward(retain_graph=True)
        factors_N = (CLIP_NORM / example_norms()).clamp(max=1.0)
        for p in model.parameters():
            p.grad = None
        with backpack():
            (losses_N * factors_N).mean().backward()
        return [p.grad for p in model.parameters()]

    return {MOMENTS: moments, NORMS: norms, CLIPPED: clipped}


def digest(statistic: str, result: Any) -> float:
    """As `perex_t5x.bench.programs.digest`."""
    if statistic == NORMS:
        return float(result.sum())
    if statistic == MOMENTS:
        return float(sum(x.sum() for x in result[1]) ** 0.5)
    return float(sum((x**2).sum() for x in result) ** 0.5)


def clear(model: nn.Module) -> None:
    """What a call has left on the parameters would be memory of the next."""
    for p in model.parameters():
        for name in ("grad", "grad_sample", "summed_grad", "_norm_sample", "sum_grad_squared", "batch_l2"):
            if getattr(p, name, None) is not None:
                setattr(p, name, None) if name in ("grad", "grad_sample", "summed_grad") else delattr(p, name)
    for module in model.modules():
        if getattr(module, "activations", None):
            module.activations.clear()
    gc.collect()


def peak_bytes(run: Callable[[], Any]) -> int:
    """The most that the allocator holds during a call, above what it held before; from the profiler's trace."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        marker = torch.empty(1024)  # so that there is a first event, with what was there before
        del marker
        result = run()
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    del result
    memory = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"])
    held = [e["args"]["Total Allocated"] for e in memory]
    return max(held) - (held[0] - memory[0]["args"]["Bytes"])


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    warnings.simplefilter("ignore")
    kind, folder, threads = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(threads)
    names = json.loads((folder / "names.json").read_text())
    weights = {name: torch.from_numpy(np.load(folder / f"{i}.npy")) for i, name in enumerate(names)}
    batch = torch.from_numpy(np.load(folder / "batch.npy"))
    batch = batch.long() if kind == "decoder" else batch
    programs: dict[str, tuple[nn.Module, str, Callable[[], Any]]] = {}
    problems: dict[str, str] = {}
    versions = {"torch": torch.__version__}

    def add(peer: str, package: str, module: str, make: Callable[[nn.Module], dict[str, Callable[[], Any]]]) -> None:
        try:
            importlib.import_module(module)
        except ImportError:
            problems[peer] = "not installed"
            return
        versions[package] = importlib.metadata.version(package)
        model = {"mlp": Mlp, "decoder": Decoder}[kind](weights)
        for statistic, run in make(model).items():
            programs[f"{peer}/{statistic}"] = (model, statistic, run)

    add("PyTorch", "torch", "torch", lambda model: {PLAIN: of_plain(model, batch)})
    add("Opacus", "opacus", "opacus", lambda model: of_opacus(model, batch, ghost=False))
    add("Opacus, ghost clipping", "opacus", "opacus", lambda model: of_opacus(model, batch, ghost=True))
    add("BackPACK", "backpack-for-pytorch", "backpack", lambda model: of_backpack(model, batch))

    def answer(**words: Any) -> None:
        print(json.dumps(words), file=answers, flush=True)

    answer(programs=list(programs), problems=problems, versions=versions, threads=torch.get_num_threads())
    for line in sys.stdin:
        question = json.loads(line)
        model, statistic, run = programs[question["program"]]
        try:
            clear(model)
            if question["what"] == "check":
                value = digest(statistic, run())
                clear(model)
                answer(digest=value, bytes=peak_bytes(run))
            else:
                begun = time.perf_counter()
                run()
                answer(seconds=time.perf_counter() - begun)
        except (RuntimeError, NotImplementedError, AttributeError, MemoryError) as e:
            answer(error=str(e).strip().splitlines()[0][:200])
        clear(model)


if __name__ == "__main__":
    main()
