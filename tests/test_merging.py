"""Merged models equal one fit to all rows, and parts that do not fit one another are refused."""

import pickle
from dataclasses import replace
from functools import reduce

import jax
import numpy as np
import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import eigenstream as es
from conftest import check_refused
from data import block_graph
from eigenstream.core.moments import Moments
from parts import CASES, CLASSES, EDGES, MIXED, NAMES, RNG, WEIGHTS, N, X, Y, Z, added, assert_same, fitted, streamed


def split(count, n, seed):
    """Row numbers in random order, in parts of unequal sizes, one of them a single row."""
    rng = np.random.default_rng(seed)
    ends = np.sort(rng.choice(np.arange(2, n), count - 2, replace=False)) if count > 2 else []
    return np.split(rng.permutation(n), [1, *ends])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("count", range(2, 8))
def test_merged_parts_equal_one_fit(case, count):
    make, rows = CASES[case]
    parts = [[x[part] for x in rows] for part in split(count, N, count)]
    models = [added(make(), part) for part in parts]
    order = np.random.default_rng(count).permutation(count)
    assert_same(es.merge([models[i] for i in order]), fitted(make(), rows))
    assert_same(models[0].merge(*models[1:]), fitted(make(), rows))


@pytest.mark.parametrize("case", CASES)
def test_models_of_every_kind_of_fit_are_merged_and_do_not_change(case, tmp_path):
    make, rows = CASES[case]
    parts = [[x[i : i + 100] for x in rows] for i in range(0, N, 100)]
    fitted(make(), parts[3]).save(tmp_path, statistics=True)
    models = [fitted(make(), parts[0]), streamed(make(), parts[1]), added(make(), parts[2]), es.load(tmp_path)]
    before = [pickle.dumps(model) for model in models]
    merged = es.merge(models)
    assert_same(merged, fitted(make(), rows))
    # The sums of a single model are shared until rows are added.
    added(es.merge(models[:1]), parts[1])
    assert [pickle.dumps(model) for model in models] == before
    assert_same(reduce(lambda a, b: a.merge(b), map(pickle.loads, before)), merged)
    assert merged.get_params() == models[0].get_params()


def test_a_merged_model_is_saved_loaded_and_continued(tmp_path):
    for case, (make, rows) in CASES.items():
        parts = [[x[i:j] for x in rows] for i, j in ((0, 100), (100, 101), (101, 250), (250, 400))]
        merged = es.merge([fitted(make(), parts[0]), added(make(), parts[1]), added(make(), parts[2])])
        folder = tmp_path / case
        merged.save(folder, statistics=True)
        assert_same(added(es.load(folder), parts[3]), fitted(make(), rows))


def test_edges_are_merged(tmp_path):
    i, j = EDGES.T
    for make in (lambda: es.SpectralEmbedding(2, ridge=0.01), lambda: es.SpectralClustering(2, ridge=0.01)):
        whole = make().fit_stream([(i, j, WEIGHTS)])
        for count in (2, 5):
            parts = split(count, len(EDGES), count)
            models = [make().fit_stream([(i[p], j[p], WEIGHTS[p])], n_nodes=45) for p in parts]
            models[0].save(tmp_path, statistics=True)
            models[0] = es.load(tmp_path)
            merged = es.merge(models)
            assert_same(merged, whole)
            assert merged.n_samples_seen_ == len(EDGES)
            if hasattr(whole, "labels_"):
                np.testing.assert_array_equal(merged.labels_, whole.labels_)


@pytest.mark.parametrize("case", ["PCA", "CCA", "LDA", "ICA"])
def test_a_thousand_merges_lose_nothing(case):
    make, rows = CASES[case]
    # A thousand parts of one to three rows.
    numbers = np.random.default_rng(1).integers(0, N, 2000)
    ends = np.sort(np.random.default_rng(2).choice(np.arange(1, 2000), 999, replace=False))
    models = (added(make(), [x[part] for x in rows]) for part in np.split(numbers, ends))
    assert_same(es.merge(models), fitted(make(), [x[numbers] for x in rows]))


@pytest.mark.parametrize("case", [case for case in CASES if "not centred" not in case])
def test_rows_far_from_zero_lose_nothing(case):
    """Rows 10^8 deviations from zero, which are whole numbers of 2^-20, so that the offset does not round them."""
    make, rows = CASES[case]
    rows = [x if x.dtype.kind == "U" else np.round(x * 2**20) / 2**20 for x in rows]
    near = fitted(make(), rows)
    far = [x if x.dtype.kind == "U" else x + 1e8 * 2 ** np.arange(x.shape[1]) for x in rows]
    parts = split(5, N, 0)
    merged = es.merge([added(make(), [x[part] for x in far]) for part in parts])
    for name in ("eigenvalues_", "components_", "x_weights_", "scalings_"):
        if hasattr(near, name):
            wanted = getattr(near, name)
            np.testing.assert_allclose(getattr(merged, name), wanted, rtol=0, atol=1e-12 * np.abs(wanted).max())


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 30), min_size=3, max_size=3), st.floats(-1e6, 1e6), st.integers(0, 10**6))
def test_merging_moments_is_associative_and_empty_sums_change_nothing(sizes, offset, seed):
    rng = np.random.default_rng(seed)
    rows = [(rng.normal(size=(n, 3)) + offset, rng.integers(0, 2, n)) for n in sizes]
    a, b, c = (Moments.empty(3, 2).add(*part) if len(part[0]) else Moments.empty(3, 2) for part in rows)
    left, right = a.merged(b).merged(c), a.merged(b.merged(c))
    np.testing.assert_allclose(left.scatter, right.scatter, rtol=0, atol=1e-12 * max(1, np.abs(left.scatter).max()))
    np.testing.assert_allclose(left.group_means(), right.group_means(), rtol=1e-13, atol=1e-13)
    np.testing.assert_array_equal(left.counts, right.counts)
    empty = Moments.empty(3, 2)
    for same in (a.merged(empty), empty.merged(a)):
        assert all(np.array_equal(x, y) for x, y in zip(same, a, strict=True))


@pytest.mark.parametrize(
    ("problem", "batch"),
    [
        (es.problems.pca(), X),
        (es.problems.lda(3), (X, np.searchsorted(CLASSES, NAMES))),
        (es.problems.ica(), MIXED),
        (es.problems.ica(center=False), MIXED),
        (es.problems.laplacian(n_nodes=45), (*EDGES.T, WEIGHTS)),
    ],
)
def test_empty_sums_are_neutral(problem, batch):
    batch = problem.accept(batch)
    empty = problem.statistics(batch, False)
    some = empty.add(batch)
    for same in (some.merged(empty), empty.merged(some)):
        assert all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(same), jax.tree.leaves(some), strict=True))


def test_fourth_moments_about_different_means_are_not_added():
    about = es.problems.ica(center=False).statistics(MIXED, False)
    check_refused(lambda: about.merged(replace(about, mean=about.mean + 1)), "about different means")


def loaded(model, folder, **options):
    model.save(folder, **options)
    return es.load(folder)


wide = RNG.normal(size=(60, 20))
named = pandas.DataFrame(X, columns=list("abcde"))
square = block_graph([5, 6], 0.9, 0.5)[0] + 0.01
REFUSED = {
    "none": (list, "models is empty: give at least one"),
    "two classes": (lambda: [es.CCA().fit(X, Y), es.PLS().fit(X, Y)], r"models\[1\] is of the class PLS.*one class"),
    "columns": (lambda: [es.PCA().fit(X), es.PCA().fit(Y)], r"columns of models\[1\] is \[4\], .* \[5\]"),
    "columns of a view": (lambda: [es.CCA().fit(X, Y), es.CCA().fit(X, Z)], r"columns .* \[\[5\], \[3\]\]"),
    "views": (
        lambda: [es.MultiviewCCA().fit([X, Y, Z]), es.MultiviewCCA().fit([X, Y])],
        r"columns of models\[1\] is \[\[5\], \[4\]\]",
    ),
    "classes": (
        lambda: [es.LDA().fit(X, NAMES), es.LDA().fit(X, NAMES == "ash")],
        r"classes_ of models\[1\] is \[False, True\], .*'oak'",
    ),
    "priors": (lambda: [es.LDA().fit(X, NAMES), es.LDA(priors=[0.2, 0.2, 0.6]).fit(X, NAMES)], "priors of"),
    "center": (lambda: [es.PCA().fit(X), es.PCA(center=False).fit(X)], r"center of models\[1\] is False"),
    "ridge": (lambda: [es.CCA().fit(X, Y), es.CCA(ridge=0.1).fit(X, Y)], r"ridge of models\[1\] is 0.1"),
    "which": (lambda: [es.PCA().fit(X), es.PCA(which="smallest").fit(X)], "which of"),
    "names": (lambda: [es.PCA().fit(named), es.PCA().fit(named[list("bacde")])], "feature_names_in_ of"),
    "half_life": (lambda: [es.PCA(half_life=100).fit(X)], r"half_life=100.*order of all rows.*half_life=None"),
    "nodes": (
        lambda: [es.SpectralEmbedding(1, ridge=0.1).fit_stream([tuple(EDGES.T)], n_nodes=n) for n in (45, 46)],
        r"n_nodes of models\[1\] is \[46\], .* \[45\]",
    ),
    "a matrix": (lambda: [es.SpectralEmbedding(1, affinity="precomputed").fit(square)], "edges to fit_stream"),
    "the game": (
        lambda: [es.PCA(1).fit(X), es.PCA(1, solver=es.solvers.Game(rank=4)).fit(X)],
        r'models\[1\] .* streaming solver Game.*solver="exact"',
    ),
    "the paper": (lambda: [es.PCA(1, solver="paper").fit(X)], 'streaming solver Paper.*solver="exact"'),
    "a graph by the paper": (
        lambda: [es.SpectralEmbedding(1, solver="paper").fit_stream([tuple(EDGES.T)])],
        "streaming solver Paper",
    ),
    "two passes": (lambda: [es.ICA().fit(wide)], "read its rows twice.*center=False"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_parts_that_do_not_fit_are_refused_by_name(case):
    make, words = REFUSED[case]
    models = make()
    check_refused(lambda: es.merge(models), words)


@pytest.mark.parametrize("case", ["half_life", "a matrix", "the game", "two passes"])
def test_sums_that_do_not_exist_are_not_saved(case, tmp_path):
    model = REFUSED[case][0]()[-1]
    if case == "half_life":
        # Sums that fade cannot be merged, but more rows can be added to them.
        again = loaded(model, tmp_path, statistics=True).partial_fit(X)
        np.testing.assert_array_equal(again.components_, model.partial_fit(X).components_)
        return
    check_refused(lambda: model.save(tmp_path, statistics=True), "the model ")
    assert not list(tmp_path.iterdir())


def test_a_model_loaded_without_its_sums_is_refused(tmp_path):
    model = loaded(es.PCA().fit(X), tmp_path)
    check_refused(lambda: es.merge([es.PCA().fit(X), model]), r"models\[1\] was loaded.*statistics=True.*--keep-stat")


def test_an_interrupted_model_is_refused(tmp_path):
    def interrupted():
        yield X
        raise KeyboardInterrupt

    with pytest.warns(UserWarning, match="interrupted"):
        model = es.PCA().fit_stream(interrupted())
    for same in (model, loaded(model, tmp_path, statistics=True)):
        check_refused(lambda model=same: es.merge([model]), "was interrupted before the end")


def test_unlike_settings_that_keep_the_problem_come_from_the_first_model():
    first, second = es.PCA(2, whiten=True).fit(X[:200]), es.PCA(1, solver="exact", batch_size=7).fit(X[200:])
    merged = es.merge([first, second])
    assert_same(merged, es.PCA(2, whiten=True).fit(X))
    assert merged.transform(X).shape == (N, 2)
    assert merged.get_params() == first.get_params()


def test_a_merge_of_one_model_has_sums_of_its_own():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(500, 4)) * [4, 3, 2, 1]
    model = es.PCA().fit(X)
    es.merge([model]).partial_fit(100 * X).eigenvalues_  # noqa: B018 - solved when it is read
    wanted = es.PCA().fit(np.r_[X, X[:1]]).eigenvalues_
    np.testing.assert_allclose(model.partial_fit(X[:1]).eigenvalues_, wanted, rtol=1e-12)
