"""Corners of estimators and streams where a wrong answer would go unnoticed."""

import itertools

import numpy as np
import optax
import pyarrow
import pyarrow.parquet
import pytest

import eigenstream as es

rng = np.random.default_rng(0)
LATENT = rng.normal(size=(600, 2))
X = np.c_[LATENT, rng.normal(size=(600, 3))]
Y = np.c_[LATENT + rng.normal(size=(600, 2)), rng.normal(size=(600, 1))]
LABELS = (LATENT[:, 0] > 0).astype(int) + (LATENT[:, 1] > 0.5)
SPOILT = np.where(np.arange(600)[:, None] == 7, np.nan, X)
GAME = es.solvers.Paper(learning_rate=0.02, optimizer=optax.adam)


@pytest.mark.parametrize("solver", ["exact", GAME], ids=["exact", "game"])
def test_a_refused_batch_leaves_no_trace(solver):
    model = es.CCA(n_components=1, solver=solver).partial_fit(X[:300], Y[:300])
    with pytest.raises(ValueError, match="NaN"):
        model.partial_fit(SPOILT, Y)
    model.partial_fit(X[300:], Y[300:])
    assert model.n_samples_seen_ == 600
    assert np.isfinite(model.correlations_).all()
    if solver == "exact":
        np.testing.assert_allclose(model.correlations_, es.CCA(n_components=1).fit(X, Y).correlations_)


def test_classes_are_counted_once_however_small_the_batches():
    model = es.LDA(n_components=1, solver=GAME)
    for i in range(101):
        model.partial_fit(X[i : i + 1], LABELS[i : i + 1], classes=[0, 1, 2])
    np.testing.assert_allclose(101 * model.priors_, np.bincount(LABELS[:101]))
    np.testing.assert_allclose(model.means_, [X[:101][LABELS[:101] == c].mean(0) for c in range(3)], atol=1e-6)
    short = es.LDA(n_components=1, solver=GAME, batch_size=100).fit(X[:101], LABELS[:101])
    np.testing.assert_allclose(101 * short.priors_, np.bincount(LABELS[:101]))


def test_an_exact_solver_classifies_alike_by_name_and_as_an_object():
    by_name, as_object = (es.LDA(n_components=1, solver=s).fit(X, LABELS) for s in ("exact", es.solvers.Exact()))
    np.testing.assert_array_equal(by_name.predict(X), as_object.predict(X))
    assert by_name.residuals_.shape == by_name.eigenvalues_.shape == (1,)
    with pytest.raises(ValueError, match="n_components=5: there are 2 discriminants"):
        es.LDA(n_components=5).fit_stream([(X, LABELS)])


def test_a_class_that_never_came_has_no_chance():
    for model in (
        es.LDA().partial_fit(X, (LABELS > 0) + 1, classes=[0, 1, 2]),
        es.LDA(priors=[0.0, 1.0]).fit(X, LABELS > 0),
    ):
        chances = model.predict_proba(X)
        np.testing.assert_allclose(chances.sum(1), 1)
        np.testing.assert_allclose(chances[:, 0], 0)


NOTHING = {
    "LDA of two rows": lambda: es.LDA().fit(X[:2], [0, 1]),
    "LDA of constants": lambda: es.LDA().fit(np.ones((10, 3)), np.arange(10) % 2),
    "CCA with a constant": lambda: es.CCA().fit(X, np.ones((600, 1))),
    "CCA of constants": lambda: es.CCA(n_components=1).fit(np.ones((9, 2)), np.ones((9, 2))),
}


@pytest.mark.parametrize("case", NOTHING)
def test_no_variation_is_said_to_be_none(case):
    with pytest.raises(ValueError, match="no components"):
        NOTHING[case]()


def test_too_few_rows_are_too_few_however_often_they_are_read():
    with pytest.raises(ValueError, match="too few rows"):
        es.CCA(n_components=1, solver=GAME, max_epochs=5).fit(X[:3], Y[:3])
    with pytest.raises(ValueError, match="no rows"):
        es.streams.batches(np.empty((0, 3)))
    with pytest.raises(ValueError, match="ahead=0"):
        es.streams.prefetch([], ahead=0)


def test_half_precision_rows_are_projected_in_full():
    rows = (3000 * X).astype(np.float16)
    model = es.PCA(n_components=2).fit(rows)
    np.testing.assert_allclose(model.transform(rows), model.transform(rows.astype(np.float64)))
    assert np.isfinite(model.score_samples(rows)).all()
    assert np.isfinite(es.PCA().fit(rng.normal(size=(4, 9))).score(rng.normal(size=(3, 9))))


@pytest.mark.parametrize("ridge", [0.0, 0.5])
def test_predict_is_the_regression_on_the_scores(ridge):
    model = es.CCA(n_components=2, ridge=ridge).fit(X, Y)
    T = np.c_[model.transform(X), np.ones(600)]
    np.testing.assert_allclose(model.predict(X), T @ np.linalg.lstsq(T, Y, rcond=None)[0], atol=1e-9)
    np.testing.assert_allclose(model.transform(X).var(0, ddof=1), 1)
    np.testing.assert_allclose(model.correlations_.mean(), model.score(X, Y))


def test_an_early_stop_does_not_read_everything_again():
    read = []

    class Counting:
        def __iter__(self):
            for i in itertools.count():
                read.append(i)
                yield X, Y

    model = es.CCA(n_components=1, solver=GAME)
    model.fit_stream(Counting(), callbacks=[lambda record: record["step"] == 100])
    assert len(read) < 200
    np.testing.assert_allclose(model.transform(X).var(), 1, rtol=1e-3)


def test_a_loader_without_a_length():
    class Loader:
        def __iter__(self):
            return iter([X[:300], X[300:]])

        def __len__(self):
            raise TypeError("no length")

    assert es.PCA().fit_stream(Loader()).n_samples_seen_ == 600


def test_going_on_forgets_why_the_last_run_stopped():
    model = es.PCA(n_components=1, solver=GAME, tol=10.0).fit(X)
    assert model.converged_
    model.partial_fit(X)
    assert not model.converged_
    assert model.message_.startswith("stopped after")
    with pytest.raises(ValueError, match="RSGPlus has no residual"):
        es.CCA(n_components=1, solver="rsg+", tol=0.1).fit(X, Y)


def test_another_schedule_is_another_run(tmp_path):
    def fit(base, **options):
        rate = es.solvers.warmup_harmonic(base=base, final=1e-4, warmup=2, total=100)
        solver = es.solvers.Paper(learning_rate=rate)
        return es.solve(es.problems.pca(), es.streams.batches(X), 1, solver, folder=tmp_path, **options)

    fit(1e-2, checkpoint_every=0)
    with pytest.raises(ValueError, match="other settings"):
        fit(1e-3, resume=True)
    with pytest.raises(ValueError, match="holds a run"):
        fit(1e-2)


def test_rows_with_gaps_in_files_are_not_lost(tmp_path):
    for text in ("1,,3\n4,5,6\n", "NA,2,3\n1,2,3\n", "a,b,c\nNA,NA,NA\n1,2,3\n"):
        (tmp_path / "x.csv").write_text(text)
        with pytest.raises(ValueError, match="neither a header nor a row of numbers"):
            es.streams.open_source(tmp_path / "x.csv")
    lists = pyarrow.array([[1.0, 2.0], None, [5.0, 6.0]], pyarrow.list_(pyarrow.float64(), 2))
    pyarrow.parquet.write_table(pyarrow.table({"row": lists}), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match=r"rows without a list|Expected all lists"):
        es.streams.open_source(tmp_path / "x.parquet")[:3]


def test_mistakes_that_would_go_unnoticed_are_named():
    with pytest.raises(ValueError, match="2 arrays, and this estimator takes one"):
        es.PCA().fit_stream([(X, Y)])
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        es.CCA().fit(X, Y).score(X, Y[:-1])
    with pytest.raises(ValueError, match=r"fit_stream\(es.streams.batches"):
        es.PCA().fit("x.parquet")
    with pytest.raises(ValueError, match="first in its row 7"):
        es.PCA().fit(SPOILT)
    with pytest.warns(UserWarning, match="precomputed"):
        es.SpectralEmbedding(1, affinity="rbf").fit(np.kron(np.eye(2), np.ones((3, 3))))
    model = es.CCA(n_components=2).fit(X, Y)
    np.testing.assert_array_equal(model.transform(None, Y), model.transform(X, Y)[1])


def test_a_dense_graph_is_not_part_of_a_model(tmp_path):
    es.SpectralClustering(2).fit(X[:40]).save(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size < 40 * 40 * 8
    with pytest.raises(ValueError, match="memory_budget"):
        es.SpectralEmbedding(memory_budget=1e3).fit_stream([(np.arange(9), np.arange(1, 10))])
