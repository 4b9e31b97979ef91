"""Other libraries as oracles, on the same weights: Opacus, BackPACK (PyTorch) and jax_privacy. Each is skipped where it is
not installed; none is among the dependencies:

    pip install torch opacus backpack-for-pytorch jax_privacy
    pytest -m slow tests/per_example/test_peers.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perex_t5x import per_example, zoo

pytestmark = pytest.mark.slow
EXAMPLES, CLASSES = 6, 3


def rows(vector, like):
    return vector.reshape((1,) * (like.ndim - vector.ndim) + vector.shape)


def linear(p, name, x):
    y = x @ p[f"{name}.weight"].T
    return y + rows(p[f"{name}.bias"], y)


def mlp(torch):
    net = torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 7), torch.nn.Sigmoid(), torch.nn.Linear(7, CLASSES)
    )
    inputs = np.random.default_rng(0).normal(size=(EXAMPLES, 5)).astype(np.float32)
    return net, inputs, lambda p, x: linear(p, "4", jax.nn.sigmoid(linear(p, "2", jnp.tanh(linear(p, "0", x)))))


def embedding(torch):
    """Ids repeat within an example."""
    net = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Flatten(), torch.nn.Linear(20, CLASSES))
    inputs = np.random.default_rng(0).integers(0, 4, (EXAMPLES, 5))
    return net, inputs, lambda p, x: linear(p, "2", p["0.weight"][x].reshape(x.shape[0], -1))


def convolution(torch):
    net = torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3, padding=1), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(100, CLASSES)
    )
    inputs = np.random.default_rng(0).normal(size=(EXAMPLES, 2, 5, 5)).astype(np.float32)

    def forward(p, x):
        names = ("NCHW", "OIHW", "NCHW")
        y = jax.lax.conv_general_dilated(x, p["0.weight"], (1, 1), "SAME", dimension_numbers=names)
        y = jax.nn.relu(y + p["0.bias"].reshape(1, -1, 1, 1))
        return linear(p, "3", y.reshape(x.shape[0], -1))

    return net, inputs, forward


def layer_norm(torch):
    """A linear layer on a sequence, normalised."""
    net = torch.nn.Sequential(
        torch.nn.Linear(4, 6), torch.nn.LayerNorm(6), torch.nn.Tanh(), torch.nn.Flatten(), torch.nn.Linear(18, CLASSES)
    )
    inputs = np.random.default_rng(0).normal(size=(EXAMPLES, 3, 4)).astype(np.float32)

    def forward(p, x):
        y = linear(p, "0", x)
        y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y**2, axis=-1, keepdims=True) + 1e-5)
        y = jnp.tanh(y * rows(p["1.weight"], y) + rows(p["1.bias"], y))
        return linear(p, "4", y.reshape(x.shape[0], -1))

    return net, inputs, forward


def problem(make):
    """The PyTorch network and batch, and the same for us: one dictionary of parameters under PyTorch's names."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    torch.manual_seed(0)
    net, inputs, forward = make(torch)
    labels = np.random.default_rng(1).integers(0, CLASSES, EXAMPLES)
    params = {name: jnp.asarray(value.detach().numpy()) for name, value in net.named_parameters()}
    batch = {"x": jnp.asarray(inputs), "label": jnp.asarray(labels)}

    def loss(params, batch):
        logp = jax.nn.log_softmax(forward(params, batch["x"]))
        return -jnp.mean(jnp.take_along_axis(logp, batch["label"][:, None], axis=1))

    return net, torch.from_numpy(inputs), torch.from_numpy(labels), loss, params, batch


def ours(loss, params, batch, **options):
    return jax.jit(per_example.grad_statistics(loss, norms=True, **options))(params, batch)


def assert_close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("make", [mlp, embedding, convolution, layer_norm])
def test_opacus(make):
    """Its `grad_sample` are the single gradients; its optimizer's clipping is compared as it writes `summed_grad`."""
    pytest.importorskip("opacus", reason="Opacus is not installed")
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    net, inputs, labels, loss, params, batch = problem(make)
    import torch

    module = GradSampleModule(net)
    torch.nn.functional.cross_entropy(module(inputs), labels).backward()  # scales single gradients back from the mean
    single = {name.removeprefix("_module."): p.grad_sample.numpy() for name, p in module.named_parameters()}
    norms = np.sqrt(sum(np.sum(g.reshape(EXAMPLES, -1) ** 2, axis=1) for g in single.values()))
    limit = float(np.median(norms))
    plain = torch.optim.SGD(module.parameters(), lr=1.0)
    DPOptimizer(plain, noise_multiplier=0.0, max_grad_norm=limit, expected_batch_size=EXAMPLES).clip_and_accumulate()
    clipped = {name.removeprefix("_module."): p.summed_grad.numpy() for name, p in module.named_parameters()}

    stats, aux = ours(loss, params, batch)
    assert_close(aux.norms, norms)
    for name in params:
        assert_close(stats.mean[name], single[name].mean(axis=0))
        assert_close(stats.mean_square[name], np.square(single[name]).mean(axis=0))
    stats, _ = ours(loss, params, batch, clip_norm=limit)
    for name in params:
        assert_close(stats.mean[name], clipped[name] / EXAMPLES)


@pytest.mark.parametrize("make", [mlp, embedding, convolution])
def test_backpack(make):
    """SumGradSquared is Σ g_i², BatchL2Grad the squared norm of each example's gradient, parameter by parameter."""
    backpack = pytest.importorskip("backpack", reason="BackPACK is not installed")
    from backpack.extensions import BatchL2Grad, SumGradSquared

    net, inputs, labels, loss, params, batch = problem(make)
    import torch

    net, criterion = backpack.extend(net), backpack.extend(torch.nn.CrossEntropyLoss(reduction="sum"))
    with backpack.backpack(SumGradSquared(), BatchL2Grad()):
        criterion(net(inputs), labels).backward()
    stats, aux = ours(loss, params, batch)
    squared_norms = np.zeros(EXAMPLES)
    for name, p in net.named_parameters():
        assert_close(stats.mean[name], p.grad.numpy() / EXAMPLES)
        assert_close(stats.mean_square[name], p.sum_grad_squared.numpy() / EXAMPLES)
        squared_norms += p.batch_l2.numpy()
        _, alone = ours(loss, params, batch, parameters=lambda other, name=name: other == name)
        assert_close(alone.norms, np.sqrt(p.batch_l2.numpy()))
    assert_close(aux.norms, np.sqrt(squared_norms))


@pytest.mark.parametrize("microbatch_size", [None, 2])
@pytest.mark.parametrize("name", ["dense_net", "decoder_tied", "conv_2d", "lstm", "weight_merged_lora"])
def test_jax_privacy(name, microbatch_size):
    jax_privacy = pytest.importorskip("jax_privacy", reason="jax_privacy is not installed")
    case = zoo.make(name)
    _, aux = ours(case.loss, case.params, case.batch)
    limit = float(np.median(aux.norms))
    theirs = jax_privacy.clipped_grad(
        case.loss,
        l2_clip_norm=limit,
        normalize_by=case.examples,
        return_grad_norms=True,
        microbatch_size=microbatch_size,
    )
    expected, their_aux = jax.jit(theirs)(case.params, case.batch)
    stats, aux = ours(case.loss, case.params, case.batch, clip_norm=limit, microbatch_size=microbatch_size)
    assert_close(aux.norms, their_aux.grad_norms)
    jax.tree.map(assert_close, stats.mean, expected)
