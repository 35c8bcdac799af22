"""Estimators keep scikit-learn's contract, whatever the solver and the stream."""

import itertools
import pickle

import joblib
import numpy as np
import optax
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import eigenstream as es
import oracles
from data import LABELS, X, Y, Z, spoilt
from eigenstream.estimators import base

ALL = [es.PCA(), es.CCA(), es.PLS(), es.LDA(), es.ICA(), es.SpectralEmbedding(), es.SpectralClustering()]
PAPER = es.solvers.Paper(learning_rate=0.05)
ADAM = es.solvers.Paper(learning_rate=0.02, optimizer=optax.adam)


@pytest.mark.filterwarnings("ignore")
@parametrize_with_checks(ALL)
def test_scikit_learns_checks(estimator, check):
    """No check is marked as expected to fail."""
    check(estimator)


def fitted(name, **settings):
    """A fitted estimator, and rows to transform."""
    model = getattr(es, name)(**settings)
    if name == "MultiviewCCA":
        return model.fit([X, Y, Z]), [X, Y, Z]
    if name in ("CCA", "PLS"):
        return model.fit(X, Y), X
    return model.fit(X, LABELS) if name == "LDA" else model.fit(X), X


TRANSFORMERS = ["PCA", "CCA", "PLS", "LDA", "ICA", "MultiviewCCA"]


def flat(scores):
    return np.hstack(scores) if isinstance(scores, list) else scores


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_clone_pickle_and_joblib(name, tmp_path):
    model, rows = fitted(name)
    wanted = flat(model.transform(rows))
    assert not hasattr(clone(model), "solver_")
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(flat(again.transform(rows)), wanted)
    joblib.dump(model, tmp_path / "model")
    np.testing.assert_array_equal(flat(joblib.load(tmp_path / "model").transform(rows)), wanted)


def pieces(name, size, order=None):
    index = np.arange(600) if order is None else order
    for lo in range(0, 600, size):
        part = index[lo : lo + size]
        if name == "MultiviewCCA":
            yield ([X[part], Y[part], Z[part]],)
        elif name in ("CCA", "PLS"):
            yield X[part], Y[part]
        elif name == "LDA":
            yield X[part], LABELS[part], np.unique(LABELS)
        else:
            yield (X[part],)


@pytest.mark.parametrize("size", [1, 7, 600])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_partial_fit_of_any_pieces_in_any_order_is_fit(name, size):
    model, rows = fitted(name)
    for order in (None, np.random.default_rng(1).permutation(600)):
        other = getattr(es, name)()
        for arguments in pieces(name, size, order):
            other.partial_fit(*arguments)
        np.testing.assert_allclose(flat(other.transform(rows)), flat(model.transform(rows)), rtol=1e-7, atol=1e-8)
        assert other.n_samples_seen_ == 600


def test_partial_fit_continues_after_fit_and_pickling():
    model = pickle.loads(pickle.dumps(es.PCA().fit(X[:300])))
    model = pickle.loads(pickle.dumps(model.partial_fit(X[300:310]))).partial_fit(X[310:])
    np.testing.assert_allclose(model.components_, es.PCA().fit(X).components_, atol=1e-8)


def test_partial_fit_after_fit_measures_on_the_new_rows():
    solver = es.solvers.Paper(learning_rate=0.02, optimizer=optax.adam, averaging=0.1)
    model = es.CCA(n_components=1, solver=solver, max_epochs=50).fit(X, Y)
    before = model.correlations_
    model.partial_fit(X, Y)
    np.testing.assert_allclose(model.correlations_, before, atol=0.02)
    np.testing.assert_allclose(model.transform(X).var(ddof=1), 1, rtol=0.02)
    halves = es.ICA().fit(X[:300]).partial_fit(X[300:])
    np.testing.assert_allclose(halves.eigenvalues_, es.ICA().fit(X).eigenvalues_, atol=1e-8)
    np.testing.assert_allclose(halves.mean_, X.mean(0))
    wide = np.random.default_rng(0).normal(size=(200, 20))
    with pytest.raises(ValueError, match="on a new ICA"):
        es.ICA().fit(wide).partial_fit(wide)
    with pytest.raises(ValueError, match="max_epochs=0"):
        es.PCA(max_epochs=0).fit(X)


def test_partial_fit_solves_only_when_an_attribute_is_read():
    solved = []

    class Counted(es.solvers.Exact):
        def solve(self, *more):
            solved.append(1)
            return super().solve(*more)

    model = es.PCA(solver=Counted())
    for arguments in pieces("PCA", 50):
        model.partial_fit(*arguments)
    assert not solved
    model.transform(X)
    model.transform(X)
    assert model.explained_variance_[0] > model.explained_variance_[1]
    assert len(solved) == 1


def test_partial_fit_copies_rows_whose_memory_is_reused():
    buffer, model = np.empty((10, 7)), es.PCA()
    for lo in range(0, 600, 10):
        buffer[:] = X[lo : lo + 10]
        model.partial_fit(buffer)
    np.testing.assert_allclose(model.components_, es.PCA().fit(X).components_, atol=1e-8)


def test_one_row_is_too_few_to_transform():
    model = es.PCA().partial_fit(X[:1])
    with pytest.raises(ValueError, match="too few rows"):
        model.transform(X)
    with pytest.raises(NotFittedError):
        es.PCA().transform(X)


@pytest.mark.parametrize("name", ["PCA", "CCA", "PLS", "LDA", "ICA"])
def test_pandas_output_and_names(name):
    frame = pd.DataFrame(X, columns=[f"f{i}" for i in range(7)])
    model = getattr(es, name)().set_output(transform="pandas")
    model.fit(frame, {"CCA": Y, "PLS": Y, "LDA": LABELS}.get(name))
    out = model.transform(frame)
    assert list(out.columns) == [f"{name.lower()}{i}" for i in range(out.shape[1])]
    assert list(model.feature_names_in_) == list(frame.columns)
    with pytest.raises(ValueError, match="feature names"):
        model.transform(frame.rename(columns={"f0": "other"}))


def test_pipelines_and_searches():
    digits, labels = load_digits(return_X_y=True)
    pipe = make_pipeline(StandardScaler(), es.PCA(), LogisticRegression(max_iter=200))
    search = GridSearchCV(pipe, {"pca__n_components": [2, 20]}, cv=3).fit(digits[:600], labels[:600])
    assert search.best_params_ == {"pca__n_components": 20}
    assert search.best_score_ > 0.8
    cca = GridSearchCV(es.CCA(), {"n_components": [1, 3], "ridge": [0.0, 0.1]}, cv=3).fit(X, Y)
    assert cca.best_params_["n_components"] == 1
    supervised = make_pipeline(es.PLS(n_components=1), LogisticRegression()).fit(X, (LABELS == "oak").astype(int))
    assert supervised.score(X, (LABELS == "oak").astype(int)) > 0.8
    assert make_pipeline(StandardScaler(), es.LDA()).fit(X, LABELS).score(X, LABELS) > 0.7


@pytest.mark.parametrize("name", ["PCA", "CCA", "PLS", "MultiviewCCA", "LDA"])
def test_a_streaming_solver_gives_the_same_attributes(name):
    """A streaming solver does not sum variances of scores or loadings; they are measured on the rows."""
    solver = es.solvers.Paper(learning_rate=0.02 if name == "CCA" else 0.005, optimizer=optax.adam, averaging=0.1)
    exact, rows = fitted(name, n_components=1)
    model, _ = fitted(name, n_components=1, solver=solver, max_epochs=100)
    assert set(vars(exact)) == set(vars(model))
    oracles.assert_same_up_to_sign(flat(model.transform(rows)), flat(exact.transform(rows)), 0.15)
    for attribute in ("correlations_", "covariances_", "explained_variance_ratio_", "mean_", "x_mean_"):
        if hasattr(exact, attribute) and name != "LDA":
            np.testing.assert_allclose(getattr(model, attribute), getattr(exact, attribute), rtol=0.02, atol=1e-4)
    if name in ("CCA", "PLS"):
        np.testing.assert_allclose(model.predict(X), exact.predict(X), atol=0.3)
        np.testing.assert_allclose(model.x_loadings_, exact.x_loadings_, atol=0.1)
        assert model.history_
        # A stream that is read once is measured on its last rows.
        once = getattr(es, name)(n_components=1, solver=solver)
        once.fit_stream((x, y) for x, y in 100 * list(es.streams.batches(X, Y)))
        np.testing.assert_allclose(once.correlations_, exact.correlations_, rtol=0.05)
        if name == "CCA":
            np.testing.assert_allclose(once.transform(X).var(), 1, rtol=0.1)


def test_a_failed_step_gives_a_warning():
    with pytest.warns(UserWarning, match="not finite"):
        model = es.CCA(n_components=1, solver=es.solvers.SGHA(learning_rate=1e6)).fit(1e3 * X, 1e3 * Y)
    assert np.isfinite(model.x_weights_).all()


def test_streams_of_every_kind():
    wanted = es.CCA(n_components=2).fit(X, Y)
    lists = [(X[i : i + 90], Y[i : i + 90]) for i in range(0, 600, 90)]
    for stream in (lists, iter(lists), es.streams.batches(X, Y), [list(pair) for pair in lists]):
        model = es.CCA(n_components=2).fit_stream(stream)
        np.testing.assert_allclose(model.correlations_, wanted.correlations_, atol=1e-9)
        assert model.n_features_in_ == 7
    for stream in ([(X[:300], LABELS[:300]), (X[300:], LABELS[300:])], es.streams.batches(X, LABELS)):
        np.testing.assert_array_equal(es.LDA().fit_stream(stream).predict(X), es.LDA().fit(X, LABELS).predict(X))
    once = es.LDA().fit_stream(iter([(X, LABELS)]), classes=np.unique(LABELS))
    np.testing.assert_array_equal(once.predict(X), es.LDA().fit(X, LABELS).predict(X))


def test_a_torch_data_loader():
    torch = pytest.importorskip("torch", reason="PyTorch is an extra")
    from torch.utils.data import DataLoader, TensorDataset

    views = TensorDataset(torch.tensor(X), torch.tensor(Y))
    model = es.CCA(n_components=2).fit_stream(DataLoader(views, batch_size=64, shuffle=True))
    np.testing.assert_allclose(model.correlations_, es.CCA(n_components=2).fit(X, Y).correlations_, atol=1e-9)
    alone = es.PCA(n_components=2).fit_stream(DataLoader(TensorDataset(torch.tensor(X)), batch_size=64))
    np.testing.assert_allclose(alone.explained_variance_, es.PCA(n_components=2).fit(X).explained_variance_)
    tracked = [torch.tensor(X, requires_grad=True), torch.tensor(X, dtype=torch.bfloat16)]
    assert es.PCA(n_components=2).fit_stream(tracked).n_samples_seen_ == 1200


def test_random_state_may_be_none_or_a_generator():
    for state in (None, np.random.RandomState(0)):
        model = es.PCA(n_components=1, solver=PAPER, random_state=state, max_epochs=5).fit(X / 3)
        assert np.isfinite(model.components_).all()


@pytest.mark.parametrize("solver", ["exact", ADAM], ids=["exact", "paper"])
def test_a_refused_batch_leaves_no_trace(solver):
    model = es.CCA(n_components=1, solver=solver).partial_fit(X[:300], Y[:300])
    with pytest.raises(ValueError, match="NaN"):
        model.partial_fit(spoilt(X), Y)
    model.partial_fit(X[300:], Y[300:])
    assert model.n_samples_seen_ == 600
    assert np.isfinite(model.correlations_).all()
    if solver == "exact":
        np.testing.assert_allclose(model.correlations_, es.CCA(n_components=1).fit(X, Y).correlations_)


def test_rows_are_not_counted_again_in_later_epochs():
    with pytest.raises(ValueError, match="too few rows"):
        es.CCA(n_components=1, solver=ADAM, max_epochs=5).fit(X[:3], Y[:3])
    with pytest.raises(ValueError, match="no rows"):
        es.streams.batches(np.empty((0, 3)))
    with pytest.raises(ValueError, match="ahead=0"):
        es.streams.prefetch([], ahead=0)


def test_an_early_stop_does_not_read_the_stream_again():
    read = []

    class Counting:
        def __iter__(self):
            for i in itertools.count():
                read.append(i)
                yield X, Y

    model = es.CCA(n_components=1, solver=ADAM)
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


def test_partial_fit_resets_the_status():
    model = es.PCA(n_components=1, solver=ADAM, tol=10.0).fit(X)
    assert model.converged_
    model.partial_fit(X)
    assert not model.converged_
    assert model.message_.startswith("stopped after")
    with pytest.raises(ValueError, match="RSGPlus has no residual"):
        es.CCA(n_components=1, solver="rsg+", tol=0.1).fit(X, Y)


def test_silent_mistakes_are_named():
    with pytest.raises(ValueError, match="2 arrays, and this estimator takes one"):
        es.PCA().fit_stream([(X, Y)])
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        es.CCA().fit(X, Y).score(X, Y[:-1])
    with pytest.raises(ValueError, match=r"fit_stream\(es.streams.batches"):
        es.PCA().fit("x.parquet")
    with pytest.raises(ValueError, match="first in its row 7"):
        es.PCA().fit(spoilt(X))
    with pytest.warns(UserWarning, match="precomputed"):
        es.SpectralEmbedding(1, affinity="rbf").fit(np.kron(np.eye(2), np.ones((3, 3))))
    model = es.CCA(n_components=2).fit(X, Y)
    np.testing.assert_array_equal(model.transform(None, Y), model.transform(X, Y)[1])


@pytest.mark.parametrize("offset", [0.0, 0.1, 1e3])
def test_many_numbers_are_projected_like_few(offset):
    rows = (np.random.default_rng(0).normal(size=(2**13, 2050)) + offset).astype("f4")
    W, mean = np.random.default_rng(1).normal(size=(2050, 2)), rows.mean(0, dtype=float)
    assert rows.size > base.MANY
    few = np.concatenate([base.projected(part, W, mean) for part in np.split(rows, 8)])
    np.testing.assert_allclose(base.projected(rows, W, mean), few, atol=3e-5 * few.std())
