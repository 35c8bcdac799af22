"""The game on rows that are examined on the device, as on an accelerator: the same answers as on the host."""

import pickle

import numpy as np
import pytest

import eigenstream as es
from conftest import check_refused
from eigenstream.run import game_engine, intake, stepping_engine
from eigenstream.run.outliers import Outliers
from eigenstream.solvers import choice
from test_checkpoint import assert_same, runs

rng = np.random.default_rng(0)
X = (rng.normal(size=(5003, 300)) / np.arange(1, 301) ** 0.5).astype(np.float32)
GAME = es.solvers.Game(rank=100)


@pytest.fixture
def both(monkeypatch):
    """Call a function as on a processor, and as on an accelerator."""

    def call(f):
        out = []
        for answer in (False, True):
            monkeypatch.setattr(stepping_engine, "on_accelerator", lambda state, answer=answer: answer)
            monkeypatch.setattr(game_engine, "DEVICE_BLOCK", game_engine.BLOCK)
            monkeypatch.setattr(game_engine, "DEVICE_NUMBERS", game_engine.NUMBERS)
            # No memory for rows.
            monkeypatch.setattr(choice, "free_bytes", lambda: 0.0)
            monkeypatch.setattr(game_engine, "free_bytes", lambda: 0.0)
            out.append(f())
        return out

    return call


def parts(rows):
    return iter(np.array_split(rows, 50))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shift", [0, 1000])
@pytest.mark.parametrize("batches", [es.streams.batches, parts], ids=["array", "generator"])
def test_the_same_fit(both, dtype, shift, batches):
    rows = (X + shift).astype(dtype)
    host, device = both(lambda: es.PCA(3, solver=GAME).fit_stream(batches(rows)))
    assert host._run.engine.intake is None
    assert device._run.engine.intake is not None
    np.testing.assert_array_equal(device.components_, host.components_)
    np.testing.assert_array_equal(device.explained_variance_, host.explained_variance_)
    assert (device.n_iter_, device.message_, len(device.history_)) == (host.n_iter_, host.message_, len(host.history_))
    # Means of float64 rows less their pilot are summed in float32 on the device.
    np.testing.assert_allclose(device.mean_, host.mean_, atol=3e-7)
    np.testing.assert_allclose(device.explained_variance_ratio_, host.explained_variance_ratio_, rtol=2e-6)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("labels", [None, (X[:, 0] > 0).astype(int) + (X[:, 1] > 0)])
def test_rows_that_fit_an_accelerator_are_kept_there_and_solved(monkeypatch, labels):
    """As many moves as it takes; a stream that does not fit is read once, and both go on later."""
    monkeypatch.setattr(stepping_engine, "on_accelerator", lambda state: True)
    make = es.PCA if labels is None else es.LDA
    options = {"solver": GAME, "max_epochs": 1}
    whole, streamed = (make(2, memory_budget=budget, **options).fit(X, labels) for budget in (1e9, 1.0))
    exact = make(2).fit(X, labels)
    assert whole._run.engine.state.exact
    assert not streamed._run.engine.state.exact
    np.testing.assert_allclose(whole.eigenvalues_, exact.eigenvalues_, rtol=1e-4)
    for model in (whole, streamed):
        assert model._run.engine._kept is None
        more = () if labels is None else (labels[:500],)
        assert model.partial_fit(X[:500], *more).n_samples_seen_ == 5503
        assert not model._run.engine.state.exact
        assert model.eigenvalues_[0] > 0


def test_partial_fit_keeps_no_rows(monkeypatch):
    """The end of such a stream is not known, so rows kept until then would never be freed."""
    monkeypatch.setattr(stepping_engine, "on_accelerator", lambda state: True)
    model = es.PCA(3, solver=GAME, memory_budget=1e9)
    for rows in parts(X):
        model.partial_fit(rows)
    assert model._run.engine._kept is None
    assert not model._run.engine.state.exact


@pytest.mark.parametrize("size", [100, 1000])
@pytest.mark.parametrize("shift", [0, 1000])
def test_the_same_steps(both, size, shift):
    """Batches of one size, but for the last, which is too small to centre."""
    solver, rows = es.solvers.Paper(learning_rate=0.01), X[:5001] + np.float32(shift)
    host, device = both(lambda: es.PCA(3, solver=solver, batch_size=size, max_epochs=2).fit(rows))
    assert device._run.engine.examines_on_device
    np.testing.assert_array_equal(device.components_, host.components_)
    np.testing.assert_allclose(device.mean_, host.mean_, atol=3e-7)
    assert (device.n_iter_, device.message_) == (host.n_iter_, host.message_)
    pickle.loads(pickle.dumps(device)).partial_fit(rows[:100])


def test_steps_on_rows_that_are_not_finite(both):
    spoilt = X.copy()
    spoilt[2017, 5] = np.nan
    both(lambda: check_refused(lambda: es.PCA(3, solver=es.solvers.Paper()).fit(spoilt), "holds NaN .* row"))


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_two_views(both):
    host, device = both(lambda: es.CCA(2, solver=GAME).fit(X[:, :150], X[:, 150:] + X[:, :150]))
    np.testing.assert_array_equal(device.eigenvalues_, host.eigenvalues_)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_rows_that_are_not_finite_are_named_as_on_the_host(both, value):
    spoilt = X.copy()
    spoilt[2017, 5] = value
    streams = {
        es.problems.pca(): (lambda: es.streams.batches(spoilt), lambda: parts(spoilt)),
        es.problems.cca(): (lambda: [(x, x) for x in parts(spoilt)],),
    }
    for problem, make in ((problem, make) for problem, all_of_it in streams.items() for make in all_of_it):

        def refusal(problem=problem, make=make):
            with pytest.raises(ValueError, match="holds NaN or infinity, first in its row") as error:
                es.solve(problem, make(), 2, GAME)
            return str(error.value)

        host, device = both(refusal)
        assert device == host


def test_outliers_are_scaled_down_as_on_the_host(both):
    dirty = X.copy()
    # The square of the last is no float32.
    dirty[[5, 700, 4000]] *= np.float32([[100], [1000], [1e25]])

    def found():
        with pytest.warns(UserWarning, match="3 of 5003 rows have over 50 times"):
            return es.solve(es.problems.pca(), es.streams.batches(dirty), 3, es.solvers.Game(outlier=50.0))

    host, device = both(found)
    assert device.message.split(";")[-1] == host.message.split(";")[-1]
    # The limit follows the mean from block to block, on the host from batch to batch.
    np.testing.assert_allclose(device.eigenvalues, host.eigenvalues, rtol=0.01)


def test_energies_follow_the_host():
    """Several views, block after block."""
    host, device = Outliers(20.0), Outliers(20.0)
    taken = intake.Intake(device, summed=False)
    for lo in range(0, 1000, 100):
        views = X[lo : lo + 100, :100].copy(), X[lo : lo + 100, 100:].copy()
        views[1][lo // 100] *= 30
        wanted = host.tame(views)
        found = taken.add(views, None, [100])
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
    assert list(taken.settled()) == []
    assert (device.seen, device.count, device.named) == (host.seen, host.count, host.named)
    np.testing.assert_allclose(device.energies, host.energies, rtol=1e-6)


@pytest.mark.parametrize(
    "solver", [es.solvers.Game(rank=50), es.solvers.Game(rank=50, outlier=3.0), es.solvers.Paper()]
)
def test_a_killed_run_resumes_to_the_same_bits(both, tmp_path, solver):
    options = {"k": 2, "solver": solver, "max_epochs": 2}

    folders = iter("ab")

    def killed():
        return runs(es.problems.pca(), lambda: es.streams.batches(X), tmp_path / next(folders), 30, **options)

    if getattr(solver, "outlier", None) is None:
        host, device = both(killed)
        assert host[0].V.tobytes() == device[0].V.tobytes()
    else:
        with pytest.warns(UserWarning, match="times the mean squared norm"):
            _, device = both(killed)
    assert_same(*device)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_rows_left_in_the_queue_count_once(both):
    """A fit ends with the rows in the queue, and a later `partial_fit` continues from there."""

    def fitted():
        model = es.PCA(3, solver=GAME, max_epochs=1).fit(X)
        model = pickle.loads(pickle.dumps(model))
        return model.partial_fit(X[:150] + 1)

    host, device = both(fitted)
    assert device.n_samples_seen_ == 5153
    np.testing.assert_allclose(device.mean_, np.r_[X, X[:150] + 1].mean(0, dtype=np.float64), atol=1e-7)
    np.testing.assert_allclose(device.explained_variance_ratio_, host.explained_variance_ratio_, rtol=1e-5)


def test_sparse_rows_and_labels_stay_with_the_host(both):
    labels = (X[:, 0] > 0).astype(int) + (X[:, 1] > 0)
    host, device = both(lambda: es.LDA(2, solver=GAME).fit(X, labels))
    np.testing.assert_array_equal(device.eigenvalues_, host.eigenvalues_)
    both(lambda: check_refused(lambda: es.LDA(2, solver=GAME).fit(np.where(X > 3, np.nan, X), labels), "holds NaN"))
