"""Linear algebra on players.

The players ``V`` are a pytree with leaves ``(k, ...)``, one leaf per view or network layer. Rows ``i`` of all leaves
form the vector ``v_i``; the leaves are never concatenated. Most functions use operators only, so they serve JAX arrays
on a device and NumPy float64 on the host.
"""

from __future__ import annotations

import itertools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eigenstream.core.precision import matmul
from eigenstream.core.types import Tree


def _flat(leaf: Any) -> Any:
    return leaf.reshape(leaf.shape[0], -1)


def flat(V: Tree) -> jax.Array:
    """The players as rows of one ``(k, d)`` array; a copy if there are several leaves."""
    return jnp.concatenate([_flat(leaf) for leaf in jax.tree.leaves(V)], axis=1)


def add(U: Tree, V: Tree) -> Tree:
    return jax.tree.map(lambda u, v: u + v, U, V)


def subtract(U: Tree, V: Tree) -> Tree:
    return jax.tree.map(lambda u, v: u - v, U, V)


def scale(s: Any, V: Tree) -> Tree:
    """``s_i v_i``; a plain number multiplies all players."""
    if np.ndim(s) == 0:
        return jax.tree.map(lambda v: s * v, V)
    return jax.tree.map(lambda v: s.reshape((-1,) + (1,) * (v.ndim - 1)) * v, V)


def ridged(V: Tree, BV: Tree, ridge: float, mean_eigenvalue: Any) -> Tree:
    """``(B + ridge · mean eigenvalue of B · I) V``."""
    return add(BV, scale(ridge * mean_eigenvalue, V)) if ridge else BV


def dot(U: Tree, V: Tree) -> Any:
    """The inner products of matching players, ``⟨u_i, v_i⟩``, shape (k,)."""
    return jax.tree.reduce(operator.add, jax.tree.map(lambda u, v: (_flat(u) * _flat(v)).sum(1), U, V))


def norms(V: Tree) -> Any:
    """Euclidean norms of the players, shape (k,)."""
    return dot(V, V) ** 0.5


def gram(U: Tree, V: Tree) -> Any:
    """All inner products, ``G[i, j] = ⟨u_i, v_j⟩``."""
    return jax.tree.reduce(operator.add, jax.tree.map(lambda u, v: matmul(_flat(u), _flat(v).T), U, V))


def combine(W: Any, V: Tree) -> Tree:
    """Linear combinations of the players: ``(W V)_i = Σ_j W[i, j] v_j``."""
    return jax.tree.map(lambda v: matmul(W, _flat(v)).reshape((W.shape[0], *v.shape[1:])), V)


def take(V: Tree, start: int, stop: int) -> Tree:
    """Players ``start`` to ``stop``."""
    return jax.tree.map(lambda v: v[start:stop], V)


def stack(*parts: Tree) -> Tree:
    """The players of several trees in one tree."""
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)


def blank(k: int, template: Tree) -> Tree:
    """``k`` players of zeros."""
    return jax.tree.map(lambda s: jnp.zeros((k, *s.shape), s.dtype), template)


def zeros_in_place(V: Tree, count: jax.Array) -> Tree:
    """Zeros shaped like ``V``, each computed from the array it replaces; ``count`` must be at least 0.

    XLA merges constant zeros of one shape. With donated arguments, several outputs then shared one buffer (JAX 0.11 on
    a GPU).
    """
    return jax.tree.map(lambda v: jnp.where(count < 0, v, 0), V)


def identity(template: Tree) -> Tree:
    """The ``d`` unit vectors as players, in float64 on the host."""
    return from_matrix(np.eye(size(template)), template)


def units(template: Tree) -> Tree:
    """The ``d`` unit vectors as players on the device, in the dtype of ``template``."""
    return jax.tree.map(lambda v, s: jnp.asarray(v, s.dtype), identity(template), template)


def orthonormal(V: Tree) -> Tree:
    """Remove rounding errors from nearly orthonormal players: one Newton step to the nearest orthonormal ones."""
    G = gram(V, V)
    return combine(1.5 * jnp.eye(len(G), dtype=G.dtype) - 0.5 * G, V)


def mean(items: list[Tree]) -> Tree:
    """The mean of trees of one structure."""
    if len(items) == 1:
        return items[0]
    return jax.tree.map(lambda *leaves: sum(leaves[1:], start=leaves[0]) / len(leaves), *items)


def normal(key: jax.Array, k: int, template: Tree) -> Tree:
    """Draw ``k`` players uniformly from the unit sphere (line 2 of the paper's algorithms)."""
    leaves, structure = jax.tree.flatten(template)
    keys = jax.random.split(key, len(leaves))
    drawn = [jax.random.normal(q, (k, *leaf.shape), leaf.dtype) for q, leaf in zip(keys, leaves, strict=True)]
    V = jax.tree.unflatten(structure, drawn)
    return scale(1 / jnp.sqrt(dot(V, V)), V)


def to_matrix(V: Tree) -> np.ndarray:
    """The players as the columns of one ``(d, k)`` host array."""
    return np.concatenate([np.asarray(_flat(leaf)) for leaf in jax.tree.leaves(V)], axis=1).T


def from_matrix(matrix: Any, template: Tree) -> Tree:
    """The inverse of `to_matrix`: a ``(d, k)`` array as players shaped like ``template``."""
    leaves, structure = jax.tree.flatten(template)
    ends = np.cumsum([0] + [math.prod(leaf.shape) for leaf in leaves]).tolist()
    pieces = zip(itertools.pairwise(ends), leaves, strict=True)
    return jax.tree.unflatten(structure, [matrix[a:b].T.reshape((-1, *leaf.shape)) for (a, b), leaf in pieces])


def size(template: Tree) -> int:
    """The dimension ``d`` of one player."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(template))


def template(V: Tree) -> Tree:
    """Shape and dtype of one player."""
    return jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape[1:], v.dtype), V)


def count(V: Tree) -> int:
    """The number of players."""
    return int(jax.tree.leaves(V)[0].shape[0])
