"""Models as files: they are read back as written, and hold no code."""

import json
from pathlib import Path

import numpy as np
import optax
import pytest
from safetensors.numpy import load_file
from sklearn.exceptions import NotFittedError

import eigenstream as es
from data import latent_views
from eigenstream.estimators.model_files import saved_status

LATENT, X, Y = latent_views(300, 5, 4)
NAMES = np.where(LATENT[:, 0] > 0, "up", "down")
GRAPH = np.kron(np.eye(2), np.ones((5, 5))) + 0.1

MODELS = {
    "PCA": lambda: es.PCA(n_components=2, whiten=True).fit(X),
    "CCA": lambda: es.CCA(ridge=0.1).fit(X, Y),
    "CCA of a target": lambda: es.CCA().fit(X, Y[:, 0]),
    "PLS": lambda: es.PLS().fit(X, Y),
    "LDA": lambda: es.LDA().fit(X, NAMES),
    "ICA": lambda: es.ICA().fit(X),
    "MultiviewCCA": lambda: es.MultiviewCCA(n_components=2).fit([X, Y, X]),
    "SpectralEmbedding": lambda: es.SpectralEmbedding(2, affinity="precomputed").fit(GRAPH),
    "SpectralClustering": lambda: es.SpectralClustering(2, affinity="precomputed").fit(GRAPH),
    "paper": lambda: es.PCA(n_components=1, solver=es.solvers.Paper(learning_rate=0.1, optimizer=optax.adam)).fit(X),
    "after partial_fit": lambda: es.PCA().partial_fit(X[:100]).partial_fit(X[100:]),
}


def answers(model):
    """All outputs of the model for its training rows."""
    rows = [X, Y, X] if isinstance(model, es.MultiviewCCA) else X
    found = [getattr(model, name)(rows) for name in ("transform", "predict", "predict_proba") if hasattr(model, name)]
    return [np.asarray(part) for item in found for part in (item if isinstance(item, list) else [item])]


@pytest.mark.parametrize("case", MODELS)
def test_a_loaded_model_equals_the_saved_one(case, tmp_path):
    model = MODELS[case]()
    wanted = answers(model)
    model.save(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    again = es.load(tmp_path)
    assert type(again) is type(model)
    assert again.get_params() == model.get_params()
    assert again.solver_ == model.solver_
    for a, b in zip(wanted, answers(again), strict=True):
        np.testing.assert_array_equal(a, b)
    kept = {name for name in vars(model) if name.endswith("_") and name not in ("history_", "affinity_matrix_")}
    for name in kept - {"solver_"}:
        np.testing.assert_equal(getattr(again, name), getattr(model, name), err_msg=name)


def test_a_path_is_not_rows():
    with pytest.raises(ValueError, match=r"X is a path: .* np\.load\('x\.npy', mmap_mode='r'\)"):
        es.PCA(n_components=1).fit(X).transform("x.npy")


def test_a_schedule_is_kept_by_name_only(tmp_path):
    rate = es.solvers.warmup_harmonic(base=0.1, final=0.01, warmup=2, total=10)
    es.PCA(n_components=1, solver=es.solvers.Paper(learning_rate=rate)).fit(X).save(tmp_path)
    assert es.load(tmp_path).solver == es.solvers.Paper()


def test_files_of_another_kind_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no finished model"):
        es.load(tmp_path)
    es.PCA().fit(X).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for change in ({"estimator": "os.system"}, {"format": 99}):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ValueError, match="not a model of this version"):
            es.load(tmp_path)


def test_an_unfitted_model_is_not_saved(tmp_path):
    with pytest.raises(NotFittedError):
        es.PCA().save(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("case", [case for case in MODELS if not case.startswith("Spectral")])
def test_a_loaded_model_does_not_learn_on(case, tmp_path):
    model = MODELS[case]()
    model.save(tmp_path)
    second = Y[:, 0] if case == "CCA of a target" else Y
    more = {es.CCA: (X, second), es.PLS: (X, Y), es.LDA: (X, NAMES, ["down", "up"]), es.MultiviewCCA: ([X, Y, X],)}.get(
        type(model), (X,)
    )
    with pytest.raises(ValueError, match="was loaded, without the sums"):
        es.load(tmp_path).partial_fit(*more)


def test_sums_are_kept_beside_the_model(tmp_path):
    model = es.PCA().partial_fit(X[:100])
    model.save(tmp_path, statistics=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors", "statistics.safetensors"]
    again = es.load(tmp_path)
    for each in (model, again):
        each.partial_fit(X[100:])
    np.testing.assert_allclose(again.components_, model.components_, rtol=0, atol=1e-13)
    assert again.n_samples_seen_ == len(X)
    sums = load_file(tmp_path / "statistics.safetensors")
    assert {x.dtype for x in sums.values()} == {np.dtype(np.float64)}
    # A model that is saved without its sums does not keep those of the model before.
    model.save(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_sums_of_rows_of_any_shape_are_kept(tmp_path):
    rows = {"a": X[:, :4].reshape(-1, 2, 2), "b": X[:, 4:]}
    model = es.CCA(n_components=1).fit_stream([(rows, Y)])
    model.save(tmp_path, statistics=True)
    merged = es.load(tmp_path).merge(model)
    np.testing.assert_allclose(merged.correlations_, model.correlations_, rtol=1e-12)
    assert merged.n_samples_seen_ == 2 * len(X)


@pytest.mark.parametrize("name", ["pca", "cca", "lda"])
def test_models_of_version_0_1_are_read(name):
    folder = Path(__file__).parent / "models_0_1"
    rows = np.load(folder / "rows.npz")
    model = es.load(folder / name)
    np.testing.assert_allclose(model.transform(rows["X"]), rows[name], rtol=1e-12)
    assert model.status_ in ("solved", "converged")


@pytest.mark.parametrize(
    ("message", "status"),
    [
        ("solved exactly from 10 rows in 1 pass", "solved"),
        ("interrupted after 10 rows: this is what was learned from them", "interrupted"),
        ("a step near number 3 was not finite; this is the last finite state", "failed"),
        ("read 10 rows in 1 batches; 1 moves were not finite and not taken", "not converged"),
    ],
)
def test_messages_of_version_0_1_tell_the_status(message, status):
    assert saved_status({"message_": message, "converged_": False}) == status


def test_a_model_of_version_0_1_predicts_and_can_be_fitted_again():
    model = es.load(Path(__file__).parent / "models_0_1" / "cca")
    rows = np.random.default_rng(0).normal(size=(50, model.n_features_in_))
    expected = (rows - model.x_mean_) @ model.coef_.T + model.y_mean_
    np.testing.assert_allclose(model.predict(rows).reshape(expected.shape), expected, atol=1e-6)
    again = model.fit(rows, rows[:, :3] + 1)
    assert again.coef_.shape == (3, rows.shape[1])
