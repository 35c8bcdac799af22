"""The paper's experiments, small: the direction of every claim that their pages report."""

import re

import numpy as np
import pytest

import eigenstream as es
from experiments import (
    batch_size,
    common,
    ica_unmixing,
    networks,
    neural_cca,
    proto_values,
    sequential,
    signals,
    sinusoid,
    streaming_cca,
)


def page(path):
    """The text of a page in one line; its pictures and data must exist."""
    text = path.read_text()
    for name in re.findall(r"\]\((\w+\.\w+)\)", text):
        assert (path.parent / name).exists() or name.endswith(".md")
    return " ".join(text.split())


def test_three_forms_of_the_utility_are_one_curve():
    found = sinusoid.run(181)
    assert found.disagreement < 1e-4
    assert found.apart == pytest.approx(71, abs=0.5)
    # The utility is 0 at the parent and at most the second eigenvalue.
    assert found.utility.min() < 0.01 * found.eigenvalues[1]
    assert found.utility.max() == pytest.approx(found.eigenvalues[1], rel=1e-3)


@pytest.mark.slow
def test_algorithm_2_unmixes_better_early_and_ends_at_eigh(tmp_path):
    found = ica_unmixing.run(seeds=4, longer=3, overfit_steps=30_000)
    worst = {name: values.min(1) for name, values in found.correlations.items()}
    assert (worst[ica_unmixing.GAME] - worst[ica_unmixing.EXACT]).mean() > 0.01
    for name in (ica_unmixing.OVERFIT, ica_unmixing.LONGER):
        assert np.abs(worst[name] - worst[ica_unmixing.EXACT]).max() < 0.02
    assert worst[ica_unmixing.FAST].min() > 0.99
    np.testing.assert_allclose(found.grid[0, 0], found.correlations[ica_unmixing.EXACT])
    ica_unmixing.report(found, tmp_path)
    text = page(tmp_path / "ica_unmixing.md")
    assert f"{worst[ica_unmixing.GAME].mean():.4f} against {worst[ica_unmixing.EXACT].mean():.4f}" in text
    # With the correlations swapped, the page says that the claim is not shown.
    turned = found.correlations | {ica_unmixing.GAME: found.correlations[ica_unmixing.EXACT] - 0.1}
    ica_unmixing.report(found._replace(correlations=turned), tmp_path)
    assert "**Here.** Not shown that Algorithm 2 as run" in page(tmp_path / "ica_unmixing.md")


@pytest.mark.slow
def test_independent_rows_have_no_bias_and_shared_rows_do(tmp_path):
    b = signals.N // 50
    found = batch_size.run((signals.N, signals.N // 4, b), seeds=2, passes=2000)
    independent, same = (np.abs(found.bias((b, kind)).mean(0)).max() for kind in (True, False))
    assert independent < 0.005
    assert same > 3 * independent
    batch_size.report(found, tmp_path)
    text = page(tmp_path / "batch_size.md")
    assert "**Here.** Holds with independent rows" in text
    assert f"{100 * same:.1f}% at n/50" in text


@pytest.mark.slow
def test_players_trained_one_by_one_end_further_away(tmp_path):
    b = signals.N // 4
    found = sequential.run((b,), seeds=6, passes=2000)
    apart = [np.median(found.errors(curves[b])[:, 2]) for curves in (found.sequential, found.parallel)]
    assert apart[0] > 2 * apart[1]
    sequential.report(found, tmp_path)
    assert "**Here.** Holds that learning one after another is worse" in page(tmp_path / "sequential.md")
    sequential.report(found._replace(parallel=found.sequential, sequential=found.parallel), tmp_path)
    assert "**Here.** Does not hold that learning one after another" in page(tmp_path / "sequential.md")


@pytest.mark.slow
def test_the_accelerated_game_captures_more_than_any_chosen_step_size(tmp_path):
    name = "Mediamill-like"
    found = streaming_cca.run({name: es.datasets.mediamill_like(3000)}, seeds=1, grid=(0.1,))
    captured = {method: runs.tcc[:, -1].mean() for method, runs in found.curves[name].items()}
    assert captured[streaming_cca.EXACT] == pytest.approx(1, abs=1e-6)
    assert captured[streaming_cca.GAME] > max(captured[m] for m in streaming_cca.STEPPED)
    # 3,000 rows of 221 columns; all 25,800 give 0.999.
    assert captured[streaming_cca.GAME] > 0.9
    assert found.curves[name][streaming_cca.RSG].warm.min() > 0
    streaming_cca.report(found, tmp_path)
    text = page(tmp_path / "streaming_cca.md")
    assert "on 1 of 1 data sets. Not among the runs below: MNIST, CIFAR-10." in text


@pytest.mark.slow
def test_later_networks_are_nearer_to_the_last(tmp_path):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, 2560)
    patterns = rng.integers(0, 256, (10, 32, 32, 3))
    images = ((3 * patterns[labels] + rng.integers(0, 256, (2560, 32, 32, 3))) // 4).astype(np.uint8)
    data = {"x_train": images[:2048], "y_train": labels[:2048], "x_test": images[2048:], "y_test": labels[2048:]}
    net = networks.Architecture((6, 4), (2, 1), 12, ("conv2", "dense"), 150, (0, 60))
    plan = neural_cca.Plan(net, 20, 1, batch=256, steps=30, rate=1e-3)
    found = neural_cca.run(plan, data, tmp_path / "neural_cca_quick.json", k=20)
    assert found["d"] == 2 * (4 * 16 + 12)
    assert found["accuracy"] > 0.3
    first, later = neural_cca.means(found)
    assert later > first
    assert max(step["subspace error"] for step in found["steps"].values()) < 0.002
    neural_cca.write(tmp_path)
    text = page(tmp_path / "neural_cca.md")
    assert "**Here.** Holds that later networks correlate more" in text
    assert "Not among the runs below: d = 2,048, 116,736, 1,000,448." in text
    assert f"{found['Algorithm 2']['subspace error']:.2f}" in text
    # In reverse order the claim does not hold; one state, or a rise within the shortfall, leaves it open.
    turned = dict(zip(found["steps"], reversed(found["steps"].values()), strict=True))
    assert all(0 <= step["shortfall"] < 1 for step in found["steps"].values())
    said = {"on test images": [0.9], "shortfall": 0.02}
    close = {"0": said, "60": said | {"on test images": [0.91]}}
    verdicts = ((turned, "Does not hold that"), ({"0": turned["0"]}, "It stays open whether"))
    for steps, verdict in (*verdicts, (close, "It stays open whether")):
        other = {key: value for key, value in found.items() if key != "Algorithm 2"} | {"steps": steps}
        common.write_json(tmp_path / "neural_cca_quick.json", other)
        neural_cca.write(tmp_path)
        assert f"**Here.** {verdict} later networks" in page(tmp_path / "neural_cca.md")


def test_the_paper_s_networks_have_as_many_activations_as_it_says():
    for d, net in networks.NETWORKS.items():
        sizes, side = [], 32
        for channels, stride in zip(net.channels, net.strides, strict=True):
            side //= 2 * stride
            sizes.append(side**2 * channels)
        taken = [sizes[int(name[4:]) - 1] if name.startswith("conv") else net.dense for name in net.harvested]
        assert 2 * sum(taken) == d


@pytest.mark.slow
def test_proto_values_come_out_of_a_random_walk(tmp_path):
    found = proto_values.run(steps=60_000, seeds=1, k=4)
    assert found.errors[proto_values.EXACT][0] < 0.01
    assert found.errors[proto_values.GAME][0] < 0.05
    assert found.successor_errors[proto_values.GAME][0] < found.best_successor_error + 0.03
    proto_values.report(found, tmp_path)
    assert "**Here.** Holds: from" in page(tmp_path / "proto_values.md")


def test_pages_say_what_was_found_and_how(tmp_path):
    sinusoid.report(sinusoid.run(), tmp_path)
    text = (tmp_path / "sinusoid.md").read_text()
    assert "`python -m experiments.sinusoid`" in text
    assert "Holds: the eigenvectors are 70.7° apart" in text
    assert max(map(len, text.splitlines())) <= 120
    assert {p.suffix for p in tmp_path.iterdir()} == {".md", ".csv", ".png", ".svg"}
    before = {p: p.read_bytes() for p in tmp_path.iterdir()}
    sinusoid.report(sinusoid.run(), tmp_path)
    assert {p: p.read_bytes() for p in tmp_path.iterdir()} == before
    assert common.table(["a", "b"], [["x", 0.123456]]).splitlines()[-1] == "| x | 0.1235 |"
