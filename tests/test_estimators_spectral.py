"""Spectral embedding and clustering."""

import warnings

import numpy as np
import pytest
import scipy.sparse

import eigenstream as es
import oracles
from data import X, block_graph


def wrong(found, truth):
    """The number of nodes outside the majority class of their cluster."""
    return sum((truth[found == c] != np.bincount(truth[found == c]).argmax()).sum() for c in np.unique(found))


def test_spectral_clustering_finds_planted_blocks():
    graph, truth = block_graph([60, 80, 100], 0.3, 0.02)
    i, j = np.nonzero(np.triu(graph))
    for model in (
        es.SpectralClustering(3, affinity="precomputed").fit(graph),
        es.SpectralClustering(3, affinity="precomputed").fit(scipy.sparse.csr_array(graph)),
        es.SpectralClustering(3).fit_stream([(i, j)], n_nodes=240),
        es.SpectralClustering(3).fit_stream(es.streams.edges(np.c_[i, j], batch_size=100)),
    ):
        assert wrong(model.labels_, truth) == 0
        assert len(model.labels_) == 240
    weighted = es.SpectralClustering(3).fit_stream(iter([(i, j, np.ones(len(i)))]), n_nodes=240)
    assert wrong(weighted.labels_, truth) == 0


@pytest.mark.slow
def test_a_streaming_solver_finds_planted_blocks():
    graph, truth = block_graph([30, 30], 0.5, 0.02)
    i, j = np.nonzero(np.triu(graph))
    stream = es.streams.edges(np.c_[i, j], batch_size=100)
    solver = es.solvers.Paper(learning_rate=50.0, averaging=0.1)
    for make in (
        es.SpectralClustering(2, solver=solver, max_epochs=60),
        es.SpectralEmbedding(1, solver=solver, max_epochs=60),
    ):
        model = make.fit_stream(stream)
        sides = getattr(model, "labels_", (model.embedding_[:, -1] > 0).astype(int))
        assert wrong(sides, truth) <= 2


#: Zachary's karate club (1977): the friendships, members numbered from 0, and the members who left with the officer.
KARATE = (
    "0-1 0-2 0-3 0-4 0-5 0-6 0-7 0-8 0-10 0-11 0-12 0-13 0-17 0-19 0-21 0-31 1-2 1-3 1-7 1-13 1-17 1-19 1-21 1-30 2-3 "
    "2-7 2-8 2-9 2-13 2-27 2-28 2-32 3-7 3-12 3-13 4-6 4-10 5-6 5-10 5-16 6-16 8-30 8-32 8-33 9-33 13-33 14-32 14-33 "
    "15-32 15-33 18-32 18-33 19-33 20-32 20-33 22-32 22-33 23-25 23-27 23-29 23-32 23-33 24-25 24-27 24-31 25-31 26-29 "
    "26-33 27-33 28-31 28-33 29-32 29-33 30-32 30-33 31-32 31-33 32-33"
)


OFFICERS = [9, 14, 15, 18, 20, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33]


def test_spectral_clustering_finds_the_factions_of_the_karate_club():
    i, j = np.array([edge.split("-") for edge in KARATE.split()]).astype(int).T
    assert len(i) == 78
    truth = np.isin(np.arange(34), OFFICERS).astype(int)
    model = es.SpectralClustering(2).fit_stream([(i, j)])
    assert wrong(model.labels_, truth) <= 2


def test_spectral_embedding_is_scikit_learns():
    from sklearn.manifold import SpectralEmbedding

    points = np.random.default_rng(0).normal(size=(80, 3))
    for affinity in ("rbf", "nearest_neighbors"):
        ours = es.SpectralEmbedding(n_components=3, affinity=affinity, n_neighbors=12).fit(points)
        theirs = SpectralEmbedding(3, affinity=affinity, n_neighbors=12, eigen_solver="arpack").fit(points)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = theirs.affinity_matrix_
        graph = graph.toarray() if scipy.sparse.issparse(graph) else graph
        np.fill_diagonal(graph, 0)
        again = es.SpectralEmbedding(n_components=3, affinity="precomputed").fit(graph)
        oracles.assert_same_up_to_sign(ours.embedding_, again.embedding_, 1e-8)
        assert es.metrics.subspace_error(ours.embedding_, theirs.embedding_) < 1e-6
    assert es.SpectralEmbedding().fit_transform(points).shape == (80, 79)
    with pytest.raises(ValueError, match="memory_budget"):
        es.SpectralEmbedding(memory_budget=1e4).fit(points)
    with pytest.raises(ValueError, match="read once only"):
        es.SpectralEmbedding(2).fit_stream(iter([]))
    with pytest.raises(ValueError, match="square"):
        es.SpectralEmbedding(2, affinity="precomputed").fit(points)
    with pytest.raises(ValueError, match="affinity=3"):
        es.SpectralEmbedding(2, affinity=3).fit(points)


def test_a_dense_graph_is_not_part_of_a_model(tmp_path):
    es.SpectralClustering(2).fit(X[:40]).save(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size < 40 * 40 * 8
    with pytest.raises(ValueError, match="memory_budget"):
        es.SpectralEmbedding(memory_budget=1e3).fit_stream([(np.arange(9), np.arange(1, 10))])
