"""Rows, graphs and batches that several test files use."""

import numpy as np
import scipy.sparse

import eigenstream as es
from planted import planted

rng = np.random.default_rng(0)
LATENT = rng.normal(size=(600, 3))
#: Three views of 600 rows with three latent variables, and the rows' classes by number and by name.
X = np.c_[LATENT * [3, 2, 1], rng.normal(size=(600, 4))] + 2.0
Y = np.c_[LATENT + rng.normal(size=(600, 3)) * [0.3, 0.6, 1.0], rng.normal(size=(600, 2))] - 1.0
Z = LATENT @ rng.normal(size=(3, 4)) + rng.normal(size=(600, 4))
CODES = (LATENT[:, 0] > 0).astype(int) + (LATENT[:, 1] > 0.5)
LABELS = np.array(["ash", "elm", "oak"])[CODES]
#: For calls that are refused.
FEW = X[:50, :4]


def scaled(n=1000, d=5, seed=0):
    """Independent features whose standard deviations fall from 3 to 0.5."""
    return np.random.default_rng(seed).normal(size=(n, d)) * np.geomspace(3, 0.5, d)


def spoilt(rows, value=np.nan):
    """The same rows with this value in row 7."""
    bad = rows.copy()
    bad[7, 2] = value
    return bad


def latent_views(n, dx, dy, dtype=np.float64):
    """Two latent variables, and two views that begin with them."""
    rng = np.random.default_rng(0)
    latent = rng.normal(size=(n, 2))
    x = np.c_[latent, rng.normal(size=(n, dx - 2))]
    y = np.c_[latent + rng.normal(size=(n, 2)), rng.normal(size=(n, dy - 2))]
    return latent, x.astype(dtype), y.astype(dtype)


def two_views(n=20_000, agree=True):
    """Two views with two correlations, whose leading principal directions are the canonical ones, or are not."""
    rng = np.random.default_rng(0)
    shared = rng.normal(size=(n, 2))
    blocks = []
    for d in (8, 6):
        rho = np.sqrt([0.9, 0.6])
        signal = rho * shared + np.sqrt(1 - rho**2) * rng.normal(size=(n, 2))
        noise = rng.normal(size=(n, d - 2)) * (1.0 if agree else 6.0)
        Q = np.linalg.qr(rng.normal(size=(d, d)))[0]
        blocks.append(np.c_[[4.0, 3.0] * signal, noise] @ Q)
    return blocks


def power_law(d):
    """Standard deviations of variances 1, 1/2, 1/3 and so on."""
    return np.sqrt(np.arange(1, d + 1) ** -1.0)


#: 6,000 rows in two views, eight correlations from 0.95 to 0.5, variances that fall as 1/i.
POWER = planted(6000, (120, 100), power_law, np.linspace(0.95, 0.5, 8))


#: The game in a stream: where rows or sums fit, they would be kept or summed.
GAME = {"solver": es.solvers.Game(rank=100), "memory_budget": 1}


def batched(views, size=100):
    return [tuple(v[i : i + size] for v in views) for i in range(0, len(views[0]), size)]


def captured(views, V, k):
    """Total canonical correlation of the projected views over the exact top-k sum."""

    def correlations(views):
        whitened = [np.linalg.qr(v - v.mean(0))[0] for v in views]
        return np.linalg.svd(whitened[0].T @ whitened[1], compute_uv=False)

    cut = views[0].shape[1]
    views = [v.astype("f8") for v in views]
    scores = views[0] @ V[:cut], views[1] @ V[cut:]
    return correlations(scores)[:k].sum() / correlations(views)[:k].sum()


def block_graph(sizes, inside, outside, seed=0):
    """A random graph of dense blocks with few edges between them: its matrix, and the block of every node."""
    generator = np.random.default_rng(seed)
    labels = np.repeat(np.arange(len(sizes)), sizes)
    chance = np.where(labels[:, None] == labels, inside, outside)
    upper = np.triu(generator.random(chance.shape) < chance, 1)
    return (upper + upper.T).astype(float), labels


def block_edges(n, blocks, within, between):
    """The edges of a random graph of equal blocks in batches of 200, and the degrees of its nodes."""
    rng = np.random.default_rng(0)
    block = np.arange(n) % blocks
    chance = np.where(block[:, None] == block[None], within, between)
    i, j = np.nonzero(np.triu(rng.uniform(size=(n, n)) < chance, 1))
    order = rng.permutation(len(i))
    edges = [(i[part], j[part]) for part in np.array_split(order, len(i) // 200)]
    return edges, np.bincount(np.r_[i, j], minlength=n).astype(float)


def ring(n):
    """The adjacency matrix of a ring of n nodes."""
    W = scipy.sparse.diags_array([1.0] * (n - 1), offsets=1, shape=(n, n)).tolil()
    W[0, n - 1] = 1
    W = W.tocsr()
    return W + W.T


def sparse_rows(n, d, seed=0):
    return scipy.sparse.random(n, d, 0.3, format="csr", random_state=np.random.default_rng(seed))


class Once:
    """An iterable that looks repeatable and is not."""

    def __init__(self, items):
        self.items = iter(items)

    def __iter__(self):
        yield from self.items


class Counted(list):
    """A list that counts how often it is read."""

    opened = 0

    def __iter__(self):
        self.opened += 1
        return super().__iter__()
