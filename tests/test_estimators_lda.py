"""LDA against scikit-learn's."""

import numpy as np
import optax
import pytest
from sklearn import discriminant_analysis
from sklearn.datasets import load_digits, load_iris
from sklearn.model_selection import train_test_split

import eigenstream as es
import oracles
from data import CODES, LABELS, X

ADAM = es.solvers.Paper(learning_rate=0.02, optimizer=optax.adam)


def test_lda_is_as_accurate_as_scikit_learns_on_digits():
    digits, labels = load_digits(return_X_y=True)
    train, test, y_train, y_test = train_test_split(digits, labels, test_size=0.5, random_state=0)
    theirs = discriminant_analysis.LinearDiscriminantAnalysis().fit(train, y_train)
    ours = es.LDA().fit(train, y_train)
    assert abs(ours.score(test, y_test) - theirs.score(test, y_test)) <= 0.005
    np.testing.assert_allclose(ours.predict_proba(test), theirs.predict_proba(test), atol=1e-6)
    np.testing.assert_allclose(ours.explained_variance_ratio_, theirs.explained_variance_ratio_, atol=1e-6)
    oracles.assert_same_up_to_sign(ours.transform(test)[:, :3], theirs.transform(test)[:, :3], 1e-6)


def test_lda_of_names_of_two_classes_and_with_priors():
    lda = es.LDA().fit(X, LABELS)
    theirs = discriminant_analysis.LinearDiscriminantAnalysis().fit(X, LABELS)
    np.testing.assert_array_equal(lda.predict(X), theirs.predict(X))
    assert lda.transform(X).shape == (600, 2)
    np.testing.assert_allclose(lda.means_, theirs.means_)
    np.testing.assert_allclose(lda.decision_function(X), X @ lda.coef_.T + lda.intercept_, atol=1e-8)
    two = LABELS[LABELS != "elm"], X[LABELS != "elm"]
    pair, other = es.LDA().fit(two[1], two[0]), discriminant_analysis.LinearDiscriminantAnalysis().fit(two[1], two[0])
    np.testing.assert_allclose(pair.predict_proba(X), other.predict_proba(X), atol=1e-6)
    np.testing.assert_allclose(pair.coef_, other.coef_, atol=1e-6)
    priors = [0.8, 0.1, 0.1]
    np.testing.assert_allclose(
        es.LDA(priors=priors).fit(X, LABELS).predict_proba(X),
        discriminant_analysis.LinearDiscriminantAnalysis(priors=priors).fit(X, LABELS).predict_proba(X),
        atol=1e-6,
    )
    one = es.LDA(n_components=1).fit(X, LABELS)
    assert one.transform(X).shape == (600, 1)
    np.testing.assert_array_equal(one.predict(X), lda.predict(X))


def test_a_class_may_first_occur_in_a_late_batch():
    order = np.argsort(LABELS, kind="stable")
    model = es.LDA()
    for part in np.array_split(order, 20):
        model.partial_fit(X[part], LABELS[part], classes=["oak", "elm", "ash"])
    np.testing.assert_allclose(model.predict_proba(X), es.LDA().fit(X, LABELS).predict_proba(X), atol=1e-8)
    half = es.LDA().partial_fit(X[order[:300]], LABELS[order[:300]], classes=["ash", "elm", "oak"])
    assert "oak" not in set(half.predict(X))


LDA_MISTAKES = {
    "a stream without labels": (lambda: es.LDA().fit_stream(es.streams.batches(X)), "takes two, rows and their labels"),
    "no classes": (lambda: es.LDA().partial_fit(X, LABELS), "classes must be given"),
    "other classes": (
        lambda: es.LDA().partial_fit(X, LABELS, classes=np.unique(LABELS)).partial_fit(X, LABELS, classes=["a", "b"]),
        "not the same",
    ),
    "unknown class": (lambda: es.LDA().partial_fit(X, LABELS, classes=["ash", "elm"]), "'oak'"),
    "too many": (lambda: es.LDA(n_components=3).fit(X, LABELS), "n_components=3"),
    "priors": (lambda: es.LDA(priors=[1.0]).fit(X, LABELS), "priors"),
    "a stream without classes": (lambda: es.LDA().fit_stream(iter([(X, LABELS)])), "read once only"),
}


@pytest.mark.parametrize("case", LDA_MISTAKES)
def test_mistakes_are_named(case):
    act, words = LDA_MISTAKES[case]
    with pytest.raises(ValueError, match=words):
        act()


def test_classes_are_counted_once_however_small_the_batches():
    model = es.LDA(n_components=1, solver=ADAM)
    for i in range(101):
        model.partial_fit(X[i : i + 1], CODES[i : i + 1], classes=[0, 1, 2])
    np.testing.assert_allclose(101 * model.priors_, np.bincount(CODES[:101]))
    np.testing.assert_allclose(model.means_, [X[:101][CODES[:101] == c].mean(0) for c in range(3)], atol=1e-6)
    short = es.LDA(n_components=1, solver=ADAM, batch_size=100).fit(X[:101], CODES[:101])
    np.testing.assert_allclose(101 * short.priors_, np.bincount(CODES[:101]))


def test_exact_by_name_and_as_an_object_classify_alike():
    by_name, as_object = (es.LDA(n_components=1, solver=s).fit(X, CODES) for s in ("exact", es.solvers.Exact()))
    np.testing.assert_array_equal(by_name.predict(X), as_object.predict(X))
    assert by_name.residuals_.shape == by_name.eigenvalues_.shape == (1,)
    with pytest.raises(ValueError, match="n_components=5: there are 2 discriminants"):
        es.LDA(n_components=5).fit_stream([(X, CODES)])


def test_a_class_without_rows_has_probability_0():
    for model in (
        es.LDA().partial_fit(X, (CODES > 0) + 1, classes=[0, 1, 2]),
        es.LDA(priors=[0.0, 1.0]).fit(X, CODES > 0),
    ):
        chances = model.predict_proba(X)
        np.testing.assert_allclose(chances.sum(1), 1)
        np.testing.assert_allclose(chances[:, 0], 0)


def test_the_game_gives_as_many_components_as_were_asked_for():
    """A tiny budget makes `auto` take the game."""
    X, y = load_iris(return_X_y=True)
    model = es.LDA(n_components=1, memory_budget=1).fit(X, y)
    assert isinstance(model.solver_, es.solvers.Game)
    assert model.transform(X).shape == (150, 1)
    assert model.scalings_.shape[1] == len(model.eigenvalues_) == 1


CONSTANT = {
    "two rows": lambda: es.LDA().fit(X[:2], [0, 1]),
    "constants": lambda: es.LDA().fit(np.ones((10, 3)), np.arange(10) % 2),
}


@pytest.mark.parametrize("case", CONSTANT)
def test_rows_without_variance_have_no_components(case):
    with pytest.raises(ValueError, match="no components"):
        CONSTANT[case]()


@pytest.mark.parametrize("solver", ["game", "paper"])
def test_a_named_streaming_solver_finds_n_components(solver):
    X, y = load_iris(return_X_y=True)
    model = es.LDA(n_components=1, solver=solver).fit(X, y)
    assert model.coef_.shape == (3, 4)
    assert np.linalg.matrix_rank(model.coef_) == 1
