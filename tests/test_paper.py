"""The paper's utilities, directions and algorithms, each against what the paper says of it."""

import inspect
import io
import itertools
import re
import textwrap
import tokenize
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import eigenstream as es
import oracles
from conftest import check_refused
from eigenstream.core import players
from eigenstream.problems import Products
from eigenstream.solvers import Paper, Smooth, gradient, utilities
from eigenstream.solvers import paper as module

pytestmark = pytest.mark.usefixtures("x64")


def direction(V, AV, BV, BV_aux, norms):
    both = Products(AV, BV)
    return es.solvers.direction(V, [(both, both)], BV_aux, norms)


def random_pencil(d, seed, positive=True):
    rng = np.random.default_rng(seed)
    lam = np.sort(rng.uniform(0.1 if positive else -1, 1, d))[::-1]
    return oracles.pencil(lam, 10.0, seed)


def random_players(k, d, seed):
    V = np.random.default_rng(seed).normal(size=(k, d))
    return jnp.asarray(V / np.linalg.norm(V, axis=1, keepdims=True))


def utility_of(i, v, V, A, B):
    """Equation 3, term by term."""
    quotient = v @ A @ v / (v @ B @ v)
    for j in range(i):
        w = V[j]
        quotient -= (w @ A @ w) * (v @ B @ w) ** 2 / ((w @ B @ w) ** 2 * (v @ B @ v))
    return quotient


@pytest.mark.parametrize("seed", range(3))
def test_utilities_and_gradient_are_equation_3_and_its_autodiff(seed):
    A, B = random_pencil(7, seed, positive=False)
    V = random_players(4, 7, seed)
    u, g = utilities(V, V @ A, V @ B), gradient(V, V @ A, V @ B)
    for i in range(4):
        value, slope = jax.value_and_grad(lambda v, i=i: utility_of(i, v, V, A, B))(V[i])
        np.testing.assert_allclose(u[i], value, rtol=1e-10)
        np.testing.assert_allclose(g[i], slope, atol=1e-10)


@pytest.mark.parametrize("seed", range(3))
def test_direction_is_the_gradient_up_to_a_positive_factor_given_exact_parents(seed):
    """The factor that the paper removes is ⟨v, Bv⟩² / 2."""
    d = 6
    A, B = random_pencil(d, seed)
    _, true = oracles.leading(A, B, d)
    true = jnp.asarray(true.T / np.linalg.norm(true.T, axis=1, keepdims=True))
    for i in range(d):
        v = random_players(1, d, 100 * seed + i)[0]
        V = jnp.concatenate([true[:i], v[None]])
        AV, BV = V @ A, V @ B
        found = direction(V, AV, BV, BV, players.dot(V, BV))[i]
        slope = jax.grad(lambda v, i=i, V=V: utility_of(i, v, V, A, B))(v)
        np.testing.assert_allclose(found, slope * (v @ B @ v) ** 2 / 2, atol=1e-10)


@pytest.mark.parametrize("seed", range(3))
def test_direction_is_eigengame_unloaded_when_b_is_the_identity(seed):
    """(I - v v') [A v - Σ_{j<i} (v' A v_j) v_j], for any parents."""
    A, _ = random_pencil(8, seed)
    V = random_players(5, 8, seed)
    found = direction(V, V @ A, V, V, jnp.ones(5))
    for i in range(5):
        unloaded = A @ V[i] - sum(((V[i] @ A @ V[j]) * V[j] for j in range(i)), start=0)
        np.testing.assert_allclose(found[i], unloaded - V[i] * (V[i] @ unloaded), atol=1e-12)


def machine_pairs(X, Y, machines, independent):
    """The A and B of every machine: from the two halves of its rows, each half in both parts, or from all of them."""
    pairs = []
    for x, y in zip(np.array_split(X, machines), np.array_split(Y, machines), strict=True):
        h = len(x) // 2
        halves = ((x[:h], y[:h]), (x[h:], y[h:]))
        for for_a, for_b in (halves, halves[::-1]) if independent else (((x, y), (x, y)),):
            A = oracles.views(list(for_a), center=False)[0]
            B = oracles.views(list(for_b), center=False)[1]
            pairs.append((A, B))
    return pairs


@pytest.mark.parametrize("machines", [1, 3])
@pytest.mark.parametrize("independent", [True, False])
def test_paper_steps_are_algorithm_2_line_by_line(machines, independent):
    rng = np.random.default_rng(0)
    solver = Paper(learning_rate=0.1, averaging=0.3, floor=0.4, independent=independent, shards=machines)
    problem = es.problems.cca(center=False)
    state = None
    for _ in range(4):
        X, Y = rng.normal(size=(2, 24, 4))
        if state is None:
            state = solver.init(problem, (X, Y), 3, jax.random.key(0))
            V = players.to_matrix(state.V).T.copy()
            Bv = V.copy()
        state, _ = solver.step(problem, state, (X, Y))
        V, Bv = oracles.algorithm_2(V, Bv, machine_pairs(X, Y, machines, independent), 0.1, 0.3, 0.4)
        np.testing.assert_allclose(players.to_matrix(state.V).T, V, atol=1e-12)
        np.testing.assert_allclose(players.to_matrix(state.aux.BV).T, Bv, atol=1e-12)


def test_smooth_steps_are_algorithm_3_line_by_line():
    rng = np.random.default_rng(0)
    solver = Smooth(learning_rate=0.1, averaging=0.3, floor=0.05, ceiling=20.0, independent=True, shards=2)
    problem = es.problems.cca(center=False)
    X, Y = rng.normal(size=(2, 24, 4))
    state = solver.init(problem, (X, Y), 3, jax.random.key(0))
    V = players.to_matrix(state.V).T.copy()
    Bv, z = V.copy(), np.zeros(3)
    for _ in range(5):
        X, Y = rng.normal(size=(2, 24, 4))
        state, _ = solver.step(problem, state, (X, Y))
        V, Bv, z = oracles.algorithm_3(V, Bv, z, machine_pairs(X, Y, 2, True), 0.1, 0.3, 0.05, 20.0)
        np.testing.assert_allclose(players.to_matrix(state.V).T, V, atol=1e-12)
        np.testing.assert_allclose(state.aux.z, z, atol=1e-12)


def test_clipping_at_the_floor_acts():
    problem, X = es.problems.cca(center=False), np.random.default_rng(0).normal(size=(2, 12, 4))
    steps = []
    for floor in (1e-10, 5.0):
        solver = Paper(floor=floor)
        state = solver.init(problem, tuple(X), 3, jax.random.key(0))
        steps.append(players.to_matrix(solver.step(problem, state, tuple(X))[0].V))
    assert np.abs(steps[0] - steps[1])[:, 1:].max() > 1e-3
    np.testing.assert_array_equal(steps[0][:, 0], steps[1][:, 0])


def test_algorithm_1_takes_the_parents_exact_products():
    A, B = random_pencil(6, 0)
    problem, solver = es.problems.matrices(A, B), Paper(learning_rate=0.1, averaging=None, floor=0.0)
    state = solver.init(problem, None, 3, jax.random.key(0))
    for _ in range(3):
        V = np.asarray(state.V)
        state, _ = solver.step(problem, state, None)
        wanted, _ = oracles.algorithm_2(V, V @ B, [(A, B)], 0.1, 1.0, 0.0)
        np.testing.assert_allclose(state.V, wanted, atol=1e-12)


def table():
    """The rows of the table in the module's docstring: five cells each."""
    rulers = list(re.finditer(r"^=[= ]+$", module.__doc__, re.M))
    assert len(rulers) == 3
    starts = [m.start() for m in re.finditer(r"=+", rulers[0][0])]
    rows = module.__doc__[rulers[1].end() : rulers[2].start()].strip("\n").splitlines()
    return [[row[a:b].strip() for a, b in itertools.pairwise([*starts, None])] for row in rows]


def resolved(name):
    """The class, function, method or field of this name."""
    owner, _, attribute = name.rpartition(".")
    if owner:
        return getattr(getattr(module, owner), attribute)
    return next(getattr(place, name) for place in (module, players, es.problems.Problem) if hasattr(place, name))


def test_the_table_of_the_algorithms_names_code_that_exists():
    code = [row[4] for row in table()]
    names = re.findall(r"(?<!`)`([\w.]+)`(?!`)", " ".join(code))
    assert {"Stochastic.move", "Paper.squared_norms", "direction", "running_mean", "Auxiliary.start"} <= {*names}
    for name in names:
        assert resolved(name) is not None
    places = re.findall(r"``(\w+)`` in `([\w.]+)`", " ".join(code))
    assert len(places) >= 5
    for word, name in places:
        # A word in a comment would not do.
        tokens = tokenize.generate_tokens(io.StringIO(textwrap.dedent(inspect.getsource(resolved(name)))).readline)
        assert (tokenize.NAME, word) in [(token.type, token.string) for token in tokens], (word, name)


@pytest.mark.parametrize(
    ("algorithm", "lines", "ends"), [(1, 13, {11, 12}), (2, 22, {14, 20, 21}), (3, 27, {17, 25, 26})]
)
def test_the_table_has_every_line_of_the_algorithms_once(algorithm, lines, ends):
    found = [int(n) for row in table() for n in re.findall(r"\d+", row[algorithm])]
    assert sorted(found) == [n for n in range(1, lines + 1) if n not in ends]


ALGORITHMS = {
    "algorithm 1": Paper(averaging=None, floor=0.0),
    "algorithm 2": Paper(averaging=0.5),
    # Adam divides a direction of rounding size by its own size plus eps, so eps is made to matter.
    "algorithm 2 with Adam": Paper(averaging=0.5, optimizer=partial(optax.adam, eps=1e-2), learning_rate=1e-3),
    "algorithm 3": Smooth(averaging=0.5, floor=1e-2, ceiling=1e2),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_true_eigenvectors_are_a_fixed_point(name):
    solver = ALGORITHMS[name]
    A, B = random_pencil(9, 1)
    _, V = oracles.leading(A, B, 4)
    V = jnp.asarray((V / np.linalg.norm(V, axis=0)).T)
    problem = es.problems.matrices(A, B)
    state = solver.init(problem, None, 4, jax.random.key(0))
    aux = state.aux._replace(BV=V @ B)
    if isinstance(solver, Smooth):
        share = np.log(np.asarray(players.dot(V, V @ B)) / solver.floor) / np.log(solver.ceiling / solver.floor)
        aux = aux._replace(z=jnp.asarray(np.log(share / (1 - share))))
    state = state._replace(V=V, aux=aux)
    after, info = solver.step(problem, state, None)
    np.testing.assert_allclose(after.V, V, atol=1e-12)
    np.testing.assert_allclose(after.aux.BV, aux.BV, atol=1e-12)
    np.testing.assert_allclose(after.aux.z, aux.z, atol=1e-12)
    assert info.residuals.max() < 1e-10


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if "Adam" not in name])
def test_the_fixed_point_is_stable_and_others_are_not(name):
    """From near the eigenvectors the players return; from a wrong order they leave."""
    solver = ALGORITHMS[name]
    A, B = oracles.pencil(np.array([1.0, 0.8, 0.6, 0.3, 0.1]), 2.0)
    _, V = oracles.leading(A, B, 3)
    V = jnp.asarray((V / np.linalg.norm(V, axis=0)).T)
    problem = es.problems.matrices(A, B)

    def error_after(start, steps):
        state = solver.init(problem, None, 3, jax.random.key(0))
        nudge = 1e-3 * random_players(3, 5, 0)
        start = start + nudge
        state = state._replace(V=start, aux=state.aux._replace(BV=start @ B))
        state, _ = jax.lax.scan(lambda s, _: (solver.step(problem, s, None)[0], None), state, None, length=steps)
        return es.metrics.angles(state.V.T, V.T, B).max()

    assert error_after(V, 2000) < 1e-6
    assert error_after(V[::-1], 0) > 1
    assert error_after(V[::-1], 4000) < 1e-3


def test_the_papers_two_by_two_example():
    """The utility of player 2 is 0 at the first eigenvector and largest, λ₂, at the second, 71 degrees away."""
    A = np.array([[0.77759061, 0.26842584], [0.26842584, 0.87788983]])
    B = np.array([[0.2325605, 0.06042127], [0.06042127, 0.03241424]])
    lam, V = oracles.leading(A, B, 2)
    V = V / np.linalg.norm(V, axis=0)
    angle = np.linspace(0, np.pi, 20001)
    circle = np.stack([np.cos(angle), np.sin(angle)], axis=1)

    def second_player(v):
        players = jnp.stack([jnp.asarray(V[:, 0]), v])
        return utilities(players, players @ A, players @ B)[1]

    u = np.asarray(jax.vmap(second_player)(jnp.asarray(circle)))
    assert abs(second_player(jnp.asarray(V[:, 0]))) < 1e-10 * lam[1]
    np.testing.assert_allclose(second_player(jnp.asarray(V[:, 1])), lam[1], rtol=1e-10)
    np.testing.assert_allclose(u.max(), lam[1], rtol=1e-5)
    assert abs(circle[u.argmax()] @ V[:, 1]) > 1 - 1e-6
    inner_maxima = np.sum((u[1:-1] > u[:-2]) & (u[1:-1] > u[2:]))
    assert inner_maxima == 1
    assert np.degrees(np.arccos(abs(V[:, 0] @ V[:, 1]))) == pytest.approx(71, abs=0.5)


def test_children_do_not_move_their_parents():
    A, B = random_pencil(6, 0)
    V = random_players(4, 6, 0)
    full = direction(V, V @ A, V @ B, V @ B, players.dot(V, V @ B))
    for k in (1, 2, 3):
        part = direction(V[:k], V[:k] @ A, V[:k] @ B, V[:k] @ B, players.dot(V[:k], V[:k] @ B))
        np.testing.assert_allclose(full[:k], part, atol=1e-14)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6), d=st.integers(2, 8), data=st.data())
def test_direction_turns_with_the_coordinates_and_keeps_the_sphere(seed, d, data):
    """It rotates with the coordinates, scales as A·B does and changes sign with v."""
    k = data.draw(st.integers(1, d))
    with jax.enable_x64(True):
        A, B = random_pencil(d, seed, positive=False)
        V = random_players(k, d, seed + 1)
        R = jnp.asarray(np.linalg.qr(np.random.default_rng(seed).normal(size=(d, d)))[0])

        def of(V, A, B):
            return direction(V, V @ A, V @ B, V @ B, players.dot(V, V @ B))

        base = of(V, A, B)
        np.testing.assert_allclose(of(V @ R, R.T @ A @ R, R.T @ B @ R), base @ R, atol=1e-10)
        np.testing.assert_allclose(of(V, 3 * A, 5 * B), 15 * base, atol=1e-10)
        signs = jnp.asarray(np.random.default_rng(seed).choice([-1.0, 1.0], (k, 1)))
        np.testing.assert_allclose(of(signs * V, A, B), signs * base, atol=1e-10)
        # ⟨v, ∇⟩ = 0: to first order a step keeps the unit norm.
        np.testing.assert_allclose(players.dot(V, base), 0, atol=1e-10)


@pytest.mark.parametrize("which", ["largest", "smallest"])
@pytest.mark.parametrize(
    ("d", "k", "low"),
    [
        (3, 3, -4.0),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((12, 12, -4.0), (10, 5, -3.0), (30, 6, 0.5), (6, 6, -9.0))
        ),
    ],
)
def test_any_mix_of_signs_from_either_end(d, k, low, which):
    A, B = oracles.pencil(np.linspace(3, low, d), 2.0, d)
    lam, V = oracles.leading(A, B, k, which)
    for seed in range(3):
        solver = Paper(learning_rate=0.03 if d < 30 else 0.1, averaging=None)
        result = es.solve(
            es.problems.matrices(A, B), None, k, solver=solver, which=which, max_steps=10_000, random_state=seed
        )
        np.testing.assert_allclose(result.eigenvalues, lam, atol=1e-3)
        assert es.metrics.angles(result.V, V, B).max() < 0.05


def test_a_given_shift_does_not_change_the_eigenvalues():
    A, B = oracles.pencil(np.array([2.0, 1.0, -0.5]), 2.0)
    for solver in (Paper(averaging=None, shift=3.0), Smooth(averaging=1.0, shift=3.0, floor=0.1, ceiling=10.0)):
        result = es.solve(es.problems.matrices(A, B), None, 2, solver=solver, max_steps=2000)
        np.testing.assert_allclose(result.eigenvalues, [2, 1], atol=1e-6)


def test_a_shift_does_not_make_a_residual_small():
    problem = es.problems.matrices(np.diag([3.0, 2.0, 1.0, 0.5]))
    solver = Paper(shift=1e4, learning_rate=1e-8)
    result = es.solve(problem, None, 2, solver=solver, tol=1e-3, max_steps=50)
    assert not result.converged
    assert result.residuals.max() > 0.05


MISTAKES = {
    "averaging above 2": (lambda: Paper(averaging=5), r"averaging=5.*\(0, 2\]"),
    "floor": (lambda: Paper(floor=-1.0), "floor=-1.0"),
    "ceiling": (lambda: Smooth(floor=2.0, ceiling=1.0), "0 < floor < ceiling"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name):
    check_refused(*MISTAKES[name])
