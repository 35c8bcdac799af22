"""Exact and stepping engines: batches of any size, none lost, few programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eigenstream as es
from conftest import quick
from data import scaled
from eigenstream.run.stepping_engine import _step

RNG = np.random.default_rng(0)
SIZES = [60, 31, 60, 7, 83, 31, 60, 21]


def stream(*dims, dtype="f8"):
    z = RNG.normal(size=(sum(SIZES), 3))
    views = [(z @ RNG.normal(size=(3, d)) + RNG.normal(size=(len(z), d)) + 1).astype(dtype) for d in dims]
    cuts = np.cumsum(SIZES)[:-1]
    parts = list(zip(*(np.split(v, cuts) for v in views), strict=True))
    return parts if len(dims) > 1 else [p for (p,) in parts]


STREAMS = {"pca": stream(11), "cca": stream(11, 7), "pls": stream(11, 7), "multiview": stream(11, 7, 5)}


@pytest.mark.parametrize(
    ("kind", "center", "independent", "shards"),
    quick(
        [
            ("pca", True, True, 1),
            ("cca", True, True, 2),
            ("cca", "running", True, 1),
            ("cca", True, False, 1),
            ("pls", False, False, 2),
            ("multiview", "running", False, 1),
        ],
        ("pca", True, True, 1),
    ),
)
def test_padded_batches_give_what_plain_ones_give(kind, center, independent, shards):
    problem = getattr(es.problems, kind)(center=center, ridge=0.1)
    solver = es.solvers.Paper(learning_rate=0.01, independent=independent, shards=shards)
    with jax.enable_x64(True):
        padded = es.solve(problem, STREAMS[kind], 2, solver)
        # Batches on a device are not padded.
        plain = es.solve(problem, [jax.tree.map(jnp.asarray, batch) for batch in STREAMS[kind]], 2, solver)
    np.testing.assert_allclose(padded.V, plain.V, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(padded.eigenvalues, plain.eigenvalues, rtol=1e-9)
    np.testing.assert_allclose(padded.residuals, plain.residuals, rtol=1e-8)


def test_two_programs_serve_all_batches_up_to_the_first():
    sizes = [64, 11, 63, 2, 30, 47, 5, 64, 17]
    batches = [RNG.normal(size=(b, 6)).astype("f4") for b in sizes]
    solver = es.solvers.Paper(learning_rate=0.01, independent=False)
    before = _step._cache_size()
    es.solve(es.problems.pca(center=False), batches, 2, solver)
    assert _step._cache_size() - before == 2


def test_the_last_short_batch_is_used_even_if_it_is_a_single_row():
    X = scaled(1001)
    batches = [X[i : i + 100] for i in range(0, 1001, 100)]
    assert len(batches[-1]) == 1
    result = es.solve(es.problems.cca(), [(x[:, :3], x[:, 3:]) for x in batches], 1, solver="paper")
    assert result.n_samples_seen == 1001
    small_first = [X[:1], X[1:3], X[3:]]
    result = es.solve(es.problems.cca(), [(x[:, :3], x[:, 3:]) for x in small_first], 1, solver="paper")
    assert result.n_samples_seen == 1001
