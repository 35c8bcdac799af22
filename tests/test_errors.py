"""Bad input gets a `ValueError` that names the argument and the cure."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.sparse

import eigenstream as es
from eigenstream.solvers import SGHA, EckartYoung, Oja, Paper, RSGPlus, Smooth

X = np.random.default_rng(0).normal(size=(50, 4))
Y = X[:, :3]
pca, cca = es.problems.pca(), es.problems.cca()


def spoilt(value):
    bad = X.copy()
    bad[7, 2] = value
    return bad


CASES = {
    "NaN": (lambda: es.solve(pca, [spoilt(np.nan)], 2), r"batch holds NaN.*impute"),
    "infinity": (lambda: es.solve(cca, [(Y, spoilt(np.inf))], 2), r"batch\[1\] holds NaN or infinity"),
    "NaN in a sparse view": (lambda: es.solve(pca, [scipy.sparse.csr_matrix(spoilt(np.nan))], 2), "batch holds NaN"),
    "NaN later": (lambda: es.solve(pca, [X, spoilt(np.nan)], 2, solver="paper"), "batch holds NaN"),
    "NaN in the game": (lambda: es.solve(cca, [(Y, spoilt(np.nan))], 2, solver="game"), r"holds NaN or infinity"),
    "LDA without labels": (lambda: es.LDA().fit_stream(es.streams.batches(X)), "takes two, rows and their labels"),
    "complex": (lambda: es.solve(pca, [X + 1j], 2), r"complex128.*real"),
    "objects": (lambda: es.solve(pca, [X.astype(object)], 2), r"object.*real"),
    "one dimension": (lambda: es.solve(pca, [X[:, 0]], 1), r"shape \(50,\).*two dimensions"),
    "unequal rows": (lambda: es.solve(cca, [(X, Y[:-1])], 2), r"unequal numbers of rows.*same sample"),
    "no rows": (lambda: es.solve(pca, [X[:0]], 2), "no rows"),
    "no rows in views": (lambda: es.solve(cca, [(X[:0], Y[:0])], 2), "no rows"),
    "one view": (lambda: es.solve(cca, [X], 2), "tuple of 2 views"),
    "three views for two": (lambda: es.solve(cca, [(X, Y, Y)], 2), "3 views: give a tuple of 2"),
    "one view for many": (lambda: es.solve(es.problems.multiview(), [(X,)], 2), "two or more"),
    "no array": (lambda: es.solve(pca, [{}], 2), "no array"),
    "empty stream": (lambda: es.solve(pca, [], 2), "batches is empty"),
    "no stream": (lambda: es.solve(pca, None, 2), "needs data"),
    "an array for a stream": (lambda: es.solve(pca, X, 2), r"\[X\] for a single one"),
    "data for matrices": (lambda: es.solve(es.problems.matrices(np.eye(3)), [X], 2), "batches=None"),
    "width changes": (lambda: es.solve(pca, [X, Y], 2), "changed shape"),
    "width changes in a game": (lambda: es.solve(pca, [X, Y], 2, solver="paper"), "changed shape"),
    "k too large": (lambda: es.solve(pca, [X], 5), "k=5 is too large.*at most 4"),
    "k too large for views": (lambda: es.solve(cca, [(X, Y)], 4), "at most 3"),
    "k too large for classes": (
        lambda: es.solve(es.problems.lda(3), [(X, np.arange(50) % 3)], 3),
        "at most 2",
    ),
    "k of zero": (lambda: es.solve(pca, [X], 0), "k=0.*at least 1"),
    "k a fraction": (lambda: es.solve(pca, [X], 1.5), "k=1.5.*whole number"),
    "fewer rows than asked": (lambda: es.solve(pca, [X[:3]], 4, solver="exact"), "3 rows.*k=4"),
    "a single row": (lambda: es.solve(pca, [X[:1]], 1), "too few rows: at least 2"),
    "a single row in a game": (lambda: es.solve(cca, [(X[:1], Y[:1])], 1, solver="paper"), "too few rows: at least 4"),
    "which": (lambda: es.solve(pca, [X], 2, which="middle"), "which='middle'"),
    "magnitude in a game": (lambda: es.solve(pca, [X], 2, which="magnitude", solver="paper"), 'solver="exact"'),
    "solver": (lambda: es.solve(pca, [X], 2, solver="nope"), r"solver='nope'.*'exact'"),
    "epochs": (lambda: es.solve(pca, [X], 2, max_epochs=0), "max_epochs=0"),
    "epochs of an iterator": (lambda: es.solve(pca, iter([X]), 2, solver="paper", max_epochs=2), "read once only"),
    "ridge": (lambda: es.problems.pca(ridge=-1), "ridge=-1"),
    "center": (lambda: es.problems.cca(center="maybe"), "center='maybe'"),
    "labels too large": (lambda: es.solve(es.problems.lda(2), [(X, np.arange(50) % 3)], 1), "n_classes - 1 = 1"),
    "labels not whole": (lambda: es.solve(es.problems.lda(2), [(X, np.full(50, 0.5))], 1), "whole numbers"),
    "labels too few": (lambda: es.solve(es.problems.lda(2), [(X, np.zeros(3, int))], 1), "one label a row"),
    "no labels": (lambda: es.solve(es.problems.lda(2), [X], 1), r"pair \(X, labels\)"),
    "a bare pair": (lambda: es.solve(es.problems.lda(2), (X, np.zeros(50, int)), 1), r"\[\(X, labels\)\]"),
    "labels in words": (lambda: es.solve(es.problems.lda(2), [(X, np.array(["a"] * 50))], 1), "np.unique"),
    "a problem not called": (lambda: es.solve(es.problems.pca, [X], 1), r"es.problems.pca\(\)"),
    "a solver's class": (lambda: es.solve(pca, [X], 1, solver=Paper), r"Paper\(\.\.\.\)"),
    "one class": (lambda: es.problems.lda(1), "n_classes=1"),
    "edges out of range": (
        lambda: es.solve(es.problems.laplacian(n_nodes=3), [([0, 1], [1, 3])], 1),
        r"targets.*n_nodes - 1 = 2",
    ),
    "edges of unequal length": (
        lambda: es.solve(es.problems.laplacian(n_nodes=3), [([0, 1], [1])], 1),
        "equal lengths",
    ),
    "negative weights": (
        lambda: es.solve(es.problems.laplacian(n_nodes=3), [([0], [1], [-1.0])], 1),
        "not negative",
    ),
    "edges as one array": (lambda: es.solve(es.problems.laplacian(n_nodes=3), [np.zeros((2, 2))], 1), "sources"),
    "plain laplacian of a stream": (lambda: es.problems.laplacian(n_nodes=3, normalized=False), "n_edges is needed"),
    "no graph": (lambda: es.problems.laplacian(), "give graph"),
    "lonely node": (lambda: es.problems.laplacian(np.diag([1.0, 0], 1) + np.diag([1.0, 0], -1)), r"\[2\].*no edges"),
    "negative graph": (lambda: es.problems.laplacian(-np.ones((3, 3))), "negative weights"),
    "not square": (lambda: es.eigh(np.ones((3, 2))), r"A has shape \(3, 2\)"),
    "sizes differ": (lambda: es.eigh(np.eye(3), np.eye(2)), "one size"),
    "not symmetric": (lambda: es.eigh(np.triu(np.ones((3, 3)))), "A is not symmetric"),
    "indefinite": (lambda: es.eigh(np.eye(3), np.diag([1.0, 1, -1])), "not positive definite.*ridge"),
    "indefinite and sparse": (
        lambda: es.eigh(scipy.sparse.eye_array(9, format="csr"), scipy.sparse.diags_array([1.0] * 8 + [-1]), k=2),
        "not positive definite.*ridge",
    ),
    "singular and sparse": (
        lambda: es.eigh(scipy.sparse.eye_array(9, format="csr"), scipy.sparse.diags_array([1.0] * 8 + [0]), k=2),
        "singular|not positive definite",
    ),
    "indefinite and dense beside sparse": (
        lambda: es.eigh(scipy.sparse.eye_array(9, format="csr"), np.diag([1.0] * 8 + [-1]), k=2),
        "not positive definite.*ridge",
    ),
    "indefinite in JAX": (lambda: es.eigh(jnp.eye(9), jnp.diag(jnp.array([1.0] * 8 + [-1])), k=2), "not positive"),
    "NaN in a matrix": (lambda: es.eigh(np.diag([1.0, np.nan])), "A holds NaN"),
    "complex matrix": (lambda: es.eigh(np.eye(2) * 1j), "real numbers"),
    "function without size": (lambda: es.eigh(lambda v: v), "size is needed"),
    "eigh k": (lambda: es.eigh(np.eye(3), k=4), "k=4.*from 1 to the dimension, 3"),
    "eigh which": (lambda: es.eigh(np.eye(3), which="top"), "which='top'"),
    "ridge on an operator": (
        lambda: es.problems.matrices(scipy.sparse.linalg.aslinearoperator(np.eye(3)), ridge=0.1),
        "hides",
    ),
    "learning rate": (lambda: Paper(learning_rate=-1.0), "learning_rate=-1.0"),
    "averaging above 2": (lambda: Paper(averaging=5), r"averaging=5.*\(0, 2\]"),
    "floor": (lambda: Paper(floor=-1.0), "floor=-1.0"),
    "shards": (lambda: Paper(shards=0), "shards=0"),
    "epsilon": (lambda: Paper(epsilon=-1.0), "epsilon=-1.0"),
    "ceiling": (lambda: Smooth(floor=2.0, ceiling=1.0), "0 < floor < ceiling"),
    "schedule": (lambda: es.solvers.warmup_harmonic(1e-3, 1e-2, 10, 100), "final < base"),
    "signs for a baseline": (
        lambda: es.solve(es.problems.matrices(np.eye(3)), None, 1, solver=SGHA()),
        "positive leading eigenvalues.*shift",
    ),
    "smallest for a baseline": (
        lambda: es.solve(pca, [X], 1, solver=EckartYoung(), which="smallest"),
        "positive leading eigenvalues.*shift",
    ),
    "Oja with a metric": (lambda: es.solve(cca, [(X, Y)], 1, solver=Oja()), "B = I"),
    "RSG+ elsewhere": (lambda: es.solve(pca, [X], 1, solver=RSGPlus()), "two-view CCA"),
    "RSG+ with leaves": (lambda: es.solve(cca, [({"a": X}, X.reshape(50, 2, 2))], 1, solver=RSGPlus()), "flat"),
    "RSG+ and sparse": (
        lambda: es.solve(cca, [(scipy.sparse.csr_matrix(X), Y)], 1, solver=RSGPlus()),
        "dense views",
    ),
    "max_steps of 0": (lambda: es.solve(es.problems.pca(), [X], 1, "paper", max_steps=0), "max_steps=0"),
    "max_steps a fraction": (lambda: es.solve(es.problems.pca(), [X], 1, "paper", max_steps=2.5), "max_steps=2.5"),
    "no seed": (lambda: es.solve(es.problems.pca(), [X], 1, "paper", random_state=None), "random_state=None"),
    "a sparse matrix for a stream": (lambda: es.solve(es.problems.pca(), scipy.sparse.csr_matrix(X), 1), "one array"),
    "a made optimizer": (lambda: Paper(optimizer=optax.adam(1e-3)), "optax.adam and not"),
    "a negative ridge on a graph": (lambda: es.problems.laplacian(np.eye(3), ridge=-1), "ridge=-1"),
    "a negative ridge on matrices": (lambda: es.problems.matrices(np.eye(2), ridge=-2), "ridge=-2"),
    "an infinite ridge": (lambda: es.problems.pca(ridge=np.inf), "ridge=inf"),
    "k a fraction in eigh": (lambda: es.eigh(np.eye(3), k=1.5), "k=1.5"),
    "NaN on a device": (lambda: es.solve(es.problems.pca(), [jnp.full((9, 2), jnp.nan)], 1), "batch holds NaN"),
    "residuals of unequal length": (lambda: es.metrics.residuals(np.eye(3), [1.0], np.eye(3)), "k values"),
    "tol for RSG+": (lambda: es.solve(es.problems.cca(), [(X, X)], 1, RSGPlus(), tol=0.1), "tol"),
    "shapes of metrics": (lambda: es.metrics.subspace_error(np.eye(3), np.eye(2)), r"\(d, k\)"),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_named(name):
    call, words = CASES[name]
    with pytest.raises(ValueError, match=f"(?s){words}"):
        call()


def test_integers_and_booleans_are_taken_as_numbers():
    whole = np.random.default_rng(0).integers(0, 255, (60, 4)).astype(np.uint8)
    for rows in (whole, scipy.sparse.csr_matrix(whole)):
        found = es.solve(pca, [rows], 2).eigenvalues
        np.testing.assert_allclose(found, np.linalg.eigvalsh(np.cov(whole.T))[::-1][:2], rtol=1e-5)
    assert es.solve(pca, [whole > 99], 2, solver="paper").V.shape == (4, 2)


@pytest.mark.parametrize("solver", ["exact", "paper"])
def test_constant_and_duplicate_columns_and_a_batch_of_two(solver):
    wide = np.c_[X, X[:, :1], np.ones(50)]
    result = es.solve(es.problems.cca(), [(wide[i : i + 4], Y[i : i + 4]) for i in range(0, 48, 4)], 2, solver=solver)
    assert np.isfinite(result.V).all()
    assert np.isfinite(result.eigenvalues).all()
    pairs = [X[i : i + 2] for i in range(0, 50, 2)]
    assert np.isfinite(es.solve(pca, pairs, 4, solver=solver).V).all()
