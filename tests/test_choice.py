"""Which solver a problem gets."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse

import eigenstream as es
from conftest import check_refused, quick
from data import FEW, POWER, batched, scaled
from eigenstream.core.memory import free_bytes
from eigenstream.run.placement import Placement
from eigenstream.solvers import Paper
from eigenstream.solvers.choice import chosen


def test_auto_is_exact_within_its_budget_and_the_game_beyond():
    X = scaled()
    assert isinstance(es.solve(es.problems.pca(), [X], 2, solver="auto").solver, es.solvers.Exact)
    assert isinstance(es.solve(es.problems.pca(), [X], 2, memory_budget=100).solver, es.solvers.Game)
    with pytest.raises(ValueError, match=r"magnitude.*memory_budget"):
        es.solve(es.problems.pca(), [X], 2, which="magnitude", memory_budget=100)


def test_auto_takes_the_game_where_sums_do_not_fit(caplog):
    caplog.set_level("INFO", "eigenstream")
    batches = batched([v[:300] for v in POWER])
    result = es.solve(es.problems.cca(), batches, k=2, memory_budget=1e5)
    assert isinstance(result.solver, es.solvers.Game)
    assert "over memory_budget" in caplog.text
    assert isinstance(es.solve(es.problems.cca(), batches, k=2).solver, es.solvers.Exact)


def test_the_game_is_exact_sums_where_these_fit_and_else_has_the_rank_that_fits():
    X = np.random.default_rng(0).normal(size=(200, 60)).astype("f4")
    views = [(X[:, :30], X[:, 30:])]
    assert isinstance(es.solve(es.problems.cca(), views, 2, "game").solver, es.solvers.Exact)
    assert es.solve(es.problems.cca(), views, 2, "game", memory_budget=1).solver.rank == 1
    asked = es.solve(es.problems.cca(), views, 2, es.solvers.Game(rank=7)).solver
    assert asked.rank == 7
    game = es.solvers.Game()
    for budget, d, k in ((1e6, 10_000, 8), (2e7, 10_000, 8), (1e9, 10_000, 8), (60e6, 1536, 160)):
        rank = game.rank_within(budget, 2 * d, k)
        state = jax.eval_shape(
            lambda rank=rank, d=d, k=k: es.solvers.Game(rank=rank).init(
                es.problems.cca(), tuple(jnp.zeros((1, d)) for _ in range(2)), k, jax.random.key(0)
            )
        )
        size = sum(leaf.size * 4 for leaf in jax.tree.leaves(state))
        assert rank == 1 or size < 1.1 * budget
    assert game.rank_within(1e9, 10_000, 9) == 1024


def test_auto_says_why():
    model = es.PCA(2).fit(scaled())
    assert "the sums of 5 features take 3e-07 GB, within half of the free memory" in model.reason_
    assert 0 < free_bytes() < 1e13
    assert "over memory_budget, 1e-07 GB" in es.PCA(2, memory_budget=100).fit(scaled()).reason_
    assert es.PCA(2, solver="exact").fit(scaled()).reason_ == "as given"


def test_devices_share_the_sums_of_dense_rows_only(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    placement, rows = Placement(SimpleNamespace(shape={"data": 1, "feature": 8})), np.ones((4, 3))
    assert placement.feature_shards(rows) == 8
    assert placement.feature_shards((rows, scipy.sparse.csr_matrix(rows))) == 1

    def auto(problem, shards):
        return chosen("auto", problem, [60_000], 2, "largest", 1e10, None, shards)

    assert isinstance(auto(es.problems.pca(), 1)[0], es.solvers.Game)
    solver, reason = auto(es.problems.pca(), 8)
    assert isinstance(solver, es.solvers.Exact)
    assert "take 5.4 GB on each device, within memory_budget" in reason
    # Fourth moments are summed on the host.
    assert isinstance(auto(es.problems.ica(), 8)[0], es.solvers.Game)


def test_auto_takes_the_game_with_a_budget_of_0():
    model = es.CCA(2, memory_budget=0).fit(FEW, FEW[:, :3])
    assert isinstance(model.solver_, es.solvers.Game)
    assert "over memory_budget, 0 GB" in model.reason_


@pytest.mark.parametrize("name", quick(["paper", "smooth", "eckart_young", "sgha", "oja", "exact"], "paper", "exact"))
def test_solvers_by_name(name):
    X = scaled() / 3
    result = es.solve(es.problems.pca(), np.split(X, 20), 1, solver=name, max_epochs=10)
    assert es.metrics.angles(result.V, np.eye(5)[:, :1])[0] < 0.3


@pytest.mark.slow
def test_a_sparse_graph_is_solved_exactly_by_default():
    """The budget holds the edges, and would not hold a dense matrix."""
    n = 2000
    nodes, problem = np.arange(n), es.problems.laplacian(n_nodes=n)
    result = es.solve(problem, [(nodes, (nodes + s) % n) for s in (1, 5, 77)], 1, memory_budget=1e7)
    assert isinstance(result.solver, es.solvers.Exact)
    assert 1 < result.eigenvalues[0] <= 2 + 1e-9


MISTAKES = {
    "magnitude in Paper": (
        lambda: es.solve(es.problems.pca(), [FEW], 2, which="magnitude", solver="paper"),
        'solver="exact"',
    ),
    "solver": (lambda: es.solve(es.problems.pca(), [FEW], 2, solver="nope"), r"solver='nope'.*'exact'"),
    "a solver's class": (lambda: es.solve(es.problems.pca(), [FEW], 1, solver=Paper), r"Paper\(\.\.\.\)"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name):
    check_refused(*MISTAKES[name])


def _collinear(d):
    """Neighbouring columns correlate by .99 and more."""
    return np.cumsum(np.random.default_rng(d).normal(size=(2000, d)), axis=1) / np.arange(1, d + 1) ** 0.5


FAMILIES = {
    "flat": lambda d, rng: rng.normal(size=(2000, d)),
    "collinear": lambda d, rng: _collinear(d) + 0.05 * rng.normal(size=(2000, d)),
    "one column a thousand times larger": lambda d, rng: rng.normal(size=(2000, d)) * np.r_[1e3, np.ones(d - 1)],
    "power law": lambda d, rng: rng.normal(size=(2000, d)) / np.arange(1, d + 1),
    "heavy tails and a far mean": lambda d, rng: rng.standard_t(3, size=(2000, d)) + 1e4,
}


@pytest.mark.parametrize("d", [100, 400])
@pytest.mark.parametrize("family", FAMILIES)
def test_auto_is_exact_on_every_family(family, d):
    """The correlations that the weights capture on the rows, against those of the whole space."""
    rng = np.random.default_rng(0)
    X = FAMILIES[family](d, rng).astype(np.float32)
    Y = (X @ rng.normal(size=(d, d // 2)) / np.abs(X).std(0).max() + rng.normal(size=(2000, d // 2))).astype(np.float32)
    model = es.CCA(32).fit(X, Y)
    assert isinstance(model.solver_, es.solvers.Exact)
    bases = [np.linalg.svd(v.astype(np.float64) - v.astype(np.float64).mean(0), full_matrices=False)[0] for v in (X, Y)]
    exact = np.linalg.svd(bases[0].T @ bases[1], compute_uv=False)[:32]
    scores = [np.linalg.qr(z.astype(np.float64) - z.astype(np.float64).mean(0))[0] for z in model.transform(X, Y)]
    captured = np.linalg.svd(scores[0].T @ scores[1], compute_uv=False)
    assert captured.sum() > 0.9999 * exact.sum()
    np.testing.assert_allclose(model.correlations_, exact, atol=1e-5)
    assert model.status_ == "solved"
