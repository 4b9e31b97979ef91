"""Tables of rows: looked up, shared, multiplied, cut and hashed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from perex_t5x.zoo.case import Draw, Parts, case, cross_entropy


def _table(draw: Draw, d: int) -> tuple[int, jax.Array]:
    vocabulary = draw.size(12, 4096)
    return vocabulary, draw.normal(vocabulary, d, scale=d**-0.5)


def _tokens(draw: Draw, vocabulary: int) -> jax.Array:
    """Few different ids, so that they repeat within an example."""
    return draw.ids(max(4, vocabulary // 3), draw.size(4, 16), draw.size(5, 64))


def _width(draw: Draw) -> int:
    return draw.size(4, 128)


@case()
def embedding_gather(draw: Draw) -> Parts:
    d = _width(draw)
    vocabulary, table = _table(draw, d)

    def loss(params: Any, ids_BxT: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(params["table"][ids_BxT] @ params["w"]) ** 2)

    return loss, {"table": table, "w": draw.weight(d, d)}, _tokens(draw, vocabulary)


@case()
def embedding_vmapped(draw: Draw) -> Parts:
    """One row at a time, mapped over positions and examples, as an Equinox module is."""
    d = _width(draw)
    vocabulary, table = _table(draw, d)

    def loss(params: Any, ids_BxT: jax.Array) -> jax.Array:
        x_BxTxD = jax.vmap(jax.vmap(lambda i: params["table"][i]))(ids_BxT)
        return jnp.mean(jnp.tanh(x_BxTxD @ params["w"]) ** 2)

    return loss, {"table": table, "w": draw.weight(d, d)}, _tokens(draw, vocabulary)


@case()
def embedding_shared(draw: Draw) -> Parts:
    """One table for two sequences, as an encoder's and a decoder's."""
    d = _width(draw)
    vocabulary, table = _table(draw, d)

    def loss(params: Any, batch: Any) -> jax.Array:
        source = jnp.mean(jnp.tanh(params["table"][batch["source"]] @ params["w"]), axis=1, keepdims=True)
        target = params["table"][batch["target"]]
        return jnp.mean((target - source) ** 2)

    batch = {"source": _tokens(draw, vocabulary), "target": _tokens(draw, vocabulary)}
    return loss, {"table": table, "w": draw.weight(d, d)}, batch


@case()
def embedding_one_hot(draw: Draw) -> Parts:
    """The table is multiplied with one-hot rows."""
    d = _width(draw)
    vocabulary, table = draw.size(12, 1024), draw.normal(draw.size(12, 1024), d, scale=d**-0.5)

    def loss(params: Any, ids_BxT: jax.Array) -> jax.Array:
        x_BxTxD = jax.nn.one_hot(ids_BxT, vocabulary) @ params["table"]
        return jnp.mean(jnp.tanh(x_BxTxD @ params["w"]) ** 2)

    return loss, {"table": table, "w": draw.weight(d, d)}, _tokens(draw, vocabulary)


@case()
def embedding_tied(draw: Draw) -> Parts:
    """The table is looked up, and multiplied with for the logits."""
    d = _width(draw)
    vocabulary, table = draw.size(12, 2048), draw.normal(draw.size(12, 2048), d, scale=d**-0.5)

    def loss(params: Any, ids_BxT: jax.Array) -> jax.Array:
        x_BxTxD = jnp.tanh(params["table"][ids_BxT[:, :-1]] @ params["w"])
        return cross_entropy(x_BxTxD @ params["table"].T, ids_BxT[:, 1:])

    return loss, {"table": table, "w": draw.weight(d, d)}, _tokens(draw, vocabulary)


@case()
def embedding_sampled_softmax(draw: Draw) -> Parts:
    """Logits of the true class and of a few sampled ones only; their rows come from another table."""
    d = _width(draw)
    vocabulary, table = _table(draw, d)

    def loss(params: Any, batch: Any) -> jax.Array:
        x_BxTxD = params["table"][batch["ids"]]
        true_BxT = jnp.sum(x_BxTxD * params["classes"][batch["label"]], axis=-1)
        sampled_BxTxS = jnp.einsum("btd,bsd->bts", x_BxTxD, params["classes"][batch["sampled"]])
        logits = jnp.concatenate([true_BxT[:, :, None], sampled_BxTxS], axis=-1)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - true_BxT)

    ids = _tokens(draw, vocabulary)
    batch = {"ids": ids, "label": _tokens(draw, vocabulary), "sampled": draw.ids(vocabulary, ids.shape[0], 7)}
    return loss, {"table": table, "classes": draw.weight(vocabulary, d)}, batch


@case()
def embedding_positional(draw: Draw) -> Parts:
    """Tokens, learned positions and segments: the positions' table is cut, the segments' has two rows."""
    d = _width(draw)
    vocabulary, table = _table(draw, d)
    ids = _tokens(draw, vocabulary)
    length = ids.shape[1]

    def loss(params: Any, batch: Any) -> jax.Array:
        x_BxTxD = params["table"][batch["ids"]] + params["positions"][None, :length]
        x_BxTxD = x_BxTxD + params["segments"][batch["segment"]]
        return jnp.mean(jnp.tanh(x_BxTxD @ params["w"]) ** 2)

    params = {
        "table": table,
        "positions": draw.normal(length + 3, d),
        "segments": draw.normal(2, d),
        "w": draw.weight(d, d),
    }
    return loss, params, {"ids": ids, "segment": draw.ids(2, *ids.shape)}


@case()
def embedding_hashed(draw: Draw) -> Parts:
    """Two hashes of each id choose rows of one small table, which are weighted and added."""
    d, buckets = _width(draw), draw.size(5, 1000)

    def loss(params: Any, ids_BxT: jax.Array) -> jax.Array:
        first, second = ids_BxT * 7919 % buckets, (ids_BxT * 104729 + 13) % buckets
        x_BxTxD = params["table"][first] + params["mix"] * params["table"][second]
        return jnp.mean(jnp.tanh(x_BxTxD) ** 2)

    params = {"table": draw.normal(buckets, d), "mix": jnp.float32(0.4)}
    return loss, params, _tokens(draw, draw.size(12, 4096))


@case()
def embedding_sliced(draw: Draw) -> Parts:
    """A padded table, cut before it is looked up."""
    d = _width(draw)
    vocabulary, table = _table(draw, d)

    def loss(params: Any, ids_BxT: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(params["table"][: vocabulary - 8][ids_BxT] @ params["w"]) ** 2)

    return loss, {"table": table, "w": draw.weight(d, d)}, _tokens(draw, vocabulary - 8)


@case()
def embedding_scaled(draw: Draw) -> Parts:
    """The table is normalised row by row before it is looked up."""
    d = _width(draw)
    vocabulary, table = _table(draw, d)

    def loss(params: Any, ids_BxT: jax.Array) -> jax.Array:
        unit = params["table"] / jnp.linalg.norm(params["table"], axis=-1, keepdims=True)
        return jnp.mean(jnp.tanh(unit[ids_BxT] @ params["w"]) ** 2)

    return loss, {"table": table, "w": draw.weight(d, d)}, _tokens(draw, vocabulary)


@case()
def embedding_bag(draw: Draw) -> Parts:
    """Features of several fields, each with a table: the sums of their rows and of pairwise products (a factorisation
    machine)."""
    d, fields, vocabulary = _width(draw), draw.size(3, 8), draw.size(6, 1024)

    def loss(params: Any, batch: Any) -> jax.Array:
        rows_BxFxD = jnp.stack([params["tables"][f][batch["ids"][:, f]] for f in range(fields)], axis=1)
        pairs_B = 0.5 * jnp.sum(jnp.sum(rows_BxFxD, axis=1) ** 2 - jnp.sum(rows_BxFxD**2, axis=1), axis=-1)
        linear_B = sum(params["linear"][f][batch["ids"][:, f]] for f in range(fields))
        return jnp.mean(jax.nn.softplus(-(pairs_B + linear_B) * batch["y"]))

    params = {
        "tables": [draw.normal(vocabulary, d, scale=0.3) for _ in range(fields)],
        "linear": [draw.normal(vocabulary) for _ in range(fields)],
    }
    n = draw.size(4, 64)
    return loss, params, {"ids": draw.ids(vocabulary, n, fields), "y": 2.0 * draw.ids(2, n) - 1.0}
