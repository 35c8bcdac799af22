"""Networks compared by their activations: what identical, independent and partly shared ones give."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

import eigenstream as es
from eigenstream.neural import compare

N, B = 2000, 100


@pytest.fixture(scope="module")
def inputs():
    return np.random.default_rng(0).normal(size=(N // B, B, 12)).astype(np.float32)


def network(seed, width=16):
    """Two layers, the first with a unit that never fires and one that is a copy of another."""
    rng = np.random.default_rng(seed)
    W, U = rng.normal(size=(12, width)), rng.normal(size=(width, 7))

    def run(x):
        hidden = np.maximum(x @ W, 0)
        hidden[:, 0], hidden[:, 1] = 0, 2 * hidden[:, 2]
        return {"hidden": hidden, "out": np.tanh(hidden @ U)}

    return run


def whole(model, inputs):
    outs = [model(x) for x in inputs]
    return {name: np.concatenate([out[name] for out in outs]).reshape(N, -1) for name in outs[0]}


@pytest.mark.parametrize("k", [None, 3, 50])
def test_identical_networks_give_one_for_every_component(inputs, k):
    found = compare(network(0), network(0), inputs, n_components=k)
    # 16 units, one of them dead and one a copy, and 7 outputs.
    assert len(found.correlations) == min(k or 50, 14 + 7)
    np.testing.assert_allclose(found.correlations, 1, atol=1e-6)
    np.testing.assert_allclose([found.mean_cca, found.svcca, found.pwcca], 1, atol=1e-6)


def test_correlations_with_noise_follow_pillais_law(inputs):
    rng = np.random.default_rng(1)
    found = compare(network(0), lambda x: rng.normal(size=(len(x), 9)), list(inputs), variance=None)
    # Whatever the activations are, the sum of squared correlations with Gaussian noise follows Pillai's law.
    p, q, n = 21, 9, N - 1
    assert len(found.correlations) == q
    mean, variance = p * q / n, 2 * p * q * (n - p) * (n - q) / (n**2 * (n - 1) * (n + 2))
    assert abs((found.correlations**2).sum() - mean) < 4 * variance**0.5
    # The largest lies within the range of a hundred samples of independent data.
    largest = [
        scipy.linalg.svdvals(np.linalg.qr(rng.normal(size=(N, p)))[0].T @ np.linalg.qr(rng.normal(size=(N, q)))[0])[0]
        for _ in range(100)
    ]
    assert min(largest) * 0.9 < found.correlations[0] < max(largest) * 1.1


def test_summaries_are_those_of_their_papers(inputs):
    a, b = network(0), network(1, 11)
    found = compare(a, b, inputs, n_components=5, variance=0.9)
    X, Y = (np.hstack(list(whole(model, inputs).values())).astype(np.float64) for model in (a, b))
    X, Y = X - X.mean(0), Y - Y.mean(0)

    def span(Z):
        U, s, _ = np.linalg.svd(Z, full_matrices=False)
        return U[:, s > 1e-6 * s[0]], s

    (Ux, sx), (Uy, sy) = span(X), span(Y)
    L, rho, _ = np.linalg.svd(Ux.T @ Uy)
    np.testing.assert_allclose(found.correlations, rho[:5], atol=1e-6)
    # Projection weighting: orthonormal canonical variates against the neurons.
    weights = np.abs((Ux @ L[:, :5]).T @ X).sum(1)
    assert found.pwcca == pytest.approx(weights @ rho[:5] / weights.sum(), abs=1e-5)
    # Singular vectors up to the share of variance, then CCA of those.
    counts = [int(np.searchsorted(np.cumsum(s**2) / (s**2).sum(), 0.9)) + 1 for s in (sx, sy)]
    assert found.svcca_components == tuple(counts)
    kept = Ux[:, : counts[0]].T @ Uy[:, : counts[1]]
    assert found.svcca == pytest.approx(scipy.linalg.svdvals(kept).mean(), abs=1e-5)


def test_a_constant_added_to_activations_changes_nothing(inputs):
    a, b = network(0), network(1)

    def lifted(x):
        return {name: h + 1e4 for name, h in a(x).items()}

    plain, far = compare(a, b, inputs, n_components=5), compare(lifted, b, inputs, n_components=5)
    np.testing.assert_allclose([far.pwcca, far.svcca], [plain.pwcca, plain.svcca], atol=1e-3)


def test_per_layer_equals_each_layer_alone(inputs):
    a, b = network(0), network(1)
    found = compare(a, b, inputs, per_layer=True)
    assert list(found) == ["hidden", "out"]
    for name, one in found.items():
        alone = compare(a, b, inputs, [name])
        np.testing.assert_allclose(one.correlations, alone.correlations, atol=1e-10)
        np.testing.assert_allclose([one.svcca, one.pwcca], [alone.svcca, alone.pwcca])
    crossed = compare(a, b, inputs, (["hidden"], ["out"]), per_layer=True)
    assert list(crossed) == ["hidden ~ out"]
    with pytest.raises(ValueError, match="as many"):
        compare(a, b, inputs, (["hidden"], ["hidden", "out"]), per_layer=True)


@pytest.mark.slow
def test_the_game_agrees_with_exact_sums(inputs):
    """Passes after the first have the products of all rows."""
    exact, game = (
        compare(network(0), network(1), inputs, None, 4, solver=s, max_epochs=6)
        for s in ("exact", es.solvers.Game(rank=64))
    )
    assert isinstance(game.result.solver, es.solvers.Game)
    np.testing.assert_allclose(game.correlations, exact.correlations, atol=1e-4)
    np.testing.assert_allclose([game.pwcca, game.mean_cca], [exact.pwcca, exact.mean_cca], atol=1e-4)


@pytest.mark.parametrize(
    ("change", "cure"),
    [
        ({"loader": iter([np.ones((4, 12))])}, "starts anew"),
        ({"loader": []}, "empty"),
        ({"layers": ["hiden"]}, "there is no hiden; there are hidden, out"),
        ({"variance": 2}, "between 0 and 1"),
        ({"n_components": 0}, "at least 1"),
        ({"max_epochs": 0}, "at least 1"),
        ({"memory_budget": 1}, "n_components is needed for Game"),
        ({"model_a": "resnet"}, r"torch\.nn\.Module"),
    ],
)
def test_mistakes_are_named(inputs, change, cure):
    with pytest.raises(ValueError, match=cure):
        compare(**{"model_a": network(0), "model_b": network(1), "loader": inputs} | change)


class TestTorch:
    @pytest.fixture
    def torch(self):
        return pytest.importorskip("torch")

    def net(self, torch, seed=0):
        torch.manual_seed(seed)
        nn = torch.nn
        return nn.Sequential(
            nn.Unflatten(1, (3, 2, 2)),
            nn.Conv2d(3, 4, 1),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.Flatten(),
            nn.Linear(16, 5),
        )

    def loader(self, torch, inputs):
        data = torch.utils.data.TensorDataset(torch.tensor(inputs.reshape(N, 12)), torch.zeros(N))
        return torch.utils.data.DataLoader(data, batch_size=64)

    def test_identical_modules_give_one_and_stay_as_they_were(self, torch, inputs):
        model = self.net(torch)
        model[2].eval()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        found = compare(model, model, self.loader(torch, inputs), ["1", "5"], per_layer=True)
        assert list(found) == ["1", "5"]
        for one in found.values():
            np.testing.assert_allclose(one.correlations, 1, atol=1e-5)
        assert model.training
        assert not model[2].training
        assert all((value == before[name]).all() for name, value in model.state_dict().items())
        assert not any(module._forward_hooks for module in model.modules())

    def test_a_layer_before_one_that_works_in_place_is_as_it_was(self, torch, inputs):
        with es.neural.activations(self.net(torch)) as run:
            out = run(inputs[0])
        assert list(out) == ["0", "1", "2", "3", "4", "5"]
        assert float(out["2"].min()) < 0

    def test_the_same_weights_in_jax_are_the_same_network(self, torch, inputs):
        model = self.net(torch).eval()
        W, b = (p.detach().numpy() for p in model[1].parameters())

        def function(x):
            x = np.asarray(x).reshape(-1, 3, 4)
            return {"conv": np.einsum("oi,bix->box", W[:, :, 0, 0], x) + b[:, None]}

        found = compare(model, function, self.loader(torch, inputs), (["1"], ["conv"]))
        np.testing.assert_allclose(found.correlations, 1, atol=1e-5)

    def test_layers_that_are_not_there_or_do_not_run_are_named(self, torch, inputs):
        model = self.net(torch)
        with pytest.raises(ValueError, match="there is no conv; there are 0, 1"):
            compare(model, model, self.loader(torch, inputs), ["conv"])
        model.extra = torch.nn.Linear(2, 2)
        model.forward = lambda x: torch.nn.Sequential(*list(model)[:-1])(x)
        with pytest.raises(ValueError, match="extra took no part"):
            compare(model, model, self.loader(torch, inputs), ["extra"])
        with es.neural.activations(model) as run:
            assert "extra" not in run(inputs[0])
        with pytest.raises(ValueError, match="loader gives a dict"):
            compare(model, model, [{"x": inputs[0]}])

    def test_a_module_that_is_called_twice_is_two_layers(self, torch, inputs):
        class Twice(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.relu, self.line = torch.nn.ReLU(), torch.nn.Linear(12, 12)

            def forward(self, x):
                return {"out": self.relu(self.line(self.relu(x)))}

        with es.neural.activations(Twice()) as run:
            out = run(inputs[0])
        assert list(out) == ["relu", "relu#2", "line"]
        np.testing.assert_allclose(out["relu"].numpy(), np.maximum(inputs[0], 0))
        with pytest.raises(ValueError, match="gives a dict"), es.neural.activations(Twice(), [""]) as run:
            run(inputs[0])


def test_a_tuple_is_a_layer_for_each_of_its_arrays(inputs):
    W = np.random.default_rng(0).normal(size=(12, 6))
    found = compare(lambda x: (x @ W, np.tanh(x @ W)), lambda x: [x, x @ W], inputs, per_layer=True, variance=None)
    assert list(found) == ["output 1", "output 2"]
    np.testing.assert_allclose(found["output 1"].correlations, 1, atol=1e-4)


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
def test_one_array_of_inputs_is_refused_as_a_loader(kind):
    W = np.random.default_rng(0).normal(size=(12, 6))
    with pytest.raises(ValueError, match=r"shape \(6,\), and no units beside it: give batches"):
        compare(lambda x: x @ W, lambda x: x @ W, kind(np.ones((40, 12))))
    # Inputs may be numbers.
    found = compare(
        lambda x: np.outer(x, [1, 2]), lambda x: np.outer(x, [3]), np.random.default_rng(1).normal(size=(9, 50))
    )
    np.testing.assert_allclose(found.correlations, 1, atol=1e-4)
