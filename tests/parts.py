"""Rows that are split into parts, and the estimators whose models of the parts are merged."""

import numpy as np

import eigenstream as es
from data import block_graph

RNG = np.random.default_rng(0)
N = 400
LATENT = RNG.normal(size=(N, 3))
X = LATENT @ RNG.normal(size=(3, 5)) * 2 + RNG.normal(size=(N, 5)) * [2, 1.5, 1, 0.7, 0.5] + 5
Y = LATENT @ RNG.normal(size=(3, 4)) + RNG.normal(size=(N, 4)) * [1, 0.7, 0.5, 0.4] - 2
Z = LATENT @ RNG.normal(size=(3, 3)) + RNG.normal(size=(N, 3))
NAMES = np.array(["ash", "elm", "oak"])[(X[:, 0] > 5).astype(int) + (X[:, 1] > 6)]
CLASSES = np.unique(NAMES)
#: Sources of four kurtoses, mixed by a rotation.
SOURCES = np.c_[
    RNG.laplace(size=N), RNG.choice([-1, 1], N) + 0.3 * RNG.normal(size=N), RNG.uniform(-1, 1, N), LATENT[:, 0]
]
MIXED = SOURCES / SOURCES.std(0) @ np.linalg.qr(RNG.normal(size=(4, 4)))[0]
EDGES = np.argwhere(np.triu(block_graph([20, 25], 0.9, 0.3)[0]))
WEIGHTS = RNG.uniform(0.5, 2, len(EDGES))

#: Of each estimator: how to make it, and the arrays whose rows are split.
CASES = {
    "PCA": (lambda: es.PCA(n_components=3), (X,)),
    "PCA, not centred": (lambda: es.PCA(n_components=3, center=False), (X,)),
    "CCA": (lambda: es.CCA(ridge=0.01), (X, Y)),
    "PLS": (lambda: es.PLS(n_components=2), (X, Y)),
    "MultiviewCCA": (lambda: es.MultiviewCCA(n_components=2), (X, Y, Z)),
    "LDA": (lambda: es.LDA(), (X, NAMES)),
    "ICA": (lambda: es.ICA(), (MIXED + 3,)),
    "ICA, not centred": (lambda: es.ICA(center=False), (MIXED - MIXED.mean(0),)),
}
#: Learned attributes to compare.
LEARNED = [
    *("eigenvalues_", "components_", "mean_", "explained_variance_ratio_", "noise_variance_", "mixing_", "embedding_"),
    *("x_weights_", "y_weights_", "correlations_", "covariances_", "coef_", "intercept_", "weights_", "loadings_"),
    *("means_", "scalings_", "priors_", "xbar_", "n_samples_seen_"),
]


def fitted(model, rows):
    return model.fit(list(rows)) if isinstance(model, es.MultiviewCCA) else model.fit(*rows)


def added(model, rows):
    if isinstance(model, es.LDA):
        return model.partial_fit(*rows, classes=CLASSES)
    return model.partial_fit(list(rows)) if isinstance(model, es.MultiviewCCA) else model.partial_fit(*rows)


def streamed(model, rows):
    batches = [rows[0] if len(rows) == 1 else tuple(rows)]
    return model.fit_stream(iter(batches), **({"classes": CLASSES} if isinstance(model, es.LDA) else {}))


def assert_same(found, wanted, tolerance=1e-12):
    """All learned attributes agree, relative to the largest entry of each."""
    compared = 0
    for name in LEARNED:
        if not hasattr(wanted, name):
            continue
        a, b = getattr(found, name), getattr(wanted, name)
        for x, y in zip(a, b, strict=True) if isinstance(b, list) else [(a, b)]:
            np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * np.abs(y).max(), err_msg=name)
        compared += 1
    assert compared > 2
