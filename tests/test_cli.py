"""What a stranger meets first: the command line, the README's code and the data sets."""

import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import eigenstream as es
from eigenstream.cli import app

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_demo_ends_with_a_table_and_a_picture(tmp_path):
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path), "--epochs", "40"])
    assert result.exit_code == 0, result.output
    assert "γ-EigenGame" in result.output
    captured = float(re.search(r"captured: (0\.\d+)", result.output).group(1))
    assert captured > 0.97
    png = (tmp_path / "digits_cca.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert len(png) > 10_000


def test_help_names_the_commands():
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "demo" in result.output


@pytest.mark.slow
def test_the_code_in_the_readme_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len(blocks) == 3
    names: dict = {}
    for block in blocks:
        exec(block, names)
    printed = capsys.readouterr().out
    assert "solved exactly from 10000 rows in 1 pass" in printed
    assert "(8,) (500, 8) scipy.linalg.eigh" in printed
    assert printed.count("[0.89 0.7 ]") == 2
    assert es.metrics.subspace_error(names["streamed"].V, names["result"].V) < 0.001
    assert names["scores"].shape == (10_000, 2)


def test_public_names_have_docstrings_with_examples():
    for module in (es, es.metrics, es.problems, es.solvers):
        for name in module.__all__:
            thing = getattr(module, name)
            if callable(thing) and name not in ("Problem", "Products", "State", "Info", "Result"):
                assert thing.__doc__, name
            if callable(thing) and name[0].islower() and name not in ("direction", "gradient"):
                assert ">>>" in thing.__doc__, name


def test_data_sets_are_found_where_the_variable_points(tmp_path, monkeypatch):
    monkeypatch.setenv("EIGENSTREAM_DATA", str(tmp_path))
    fake = {
        "x_train": np.arange(60_000 * 784, dtype=np.uint8).reshape(60_000, 28, 28) % 251,
        "y_train": np.zeros(60_000, np.uint8),
        "x_test": np.zeros((1, 28, 28), np.uint8),
        "y_test": np.zeros(1, np.uint8),
    }
    np.savez(tmp_path / "mnist.npz", **fake)
    X, Y = es.datasets.mnist_halves()
    assert X.shape == Y.shape == (60_000, 392)
    assert X.dtype == np.float32
    np.testing.assert_array_equal(X[3], fake["x_train"][3].reshape(-1)[:392].astype(np.float32) / 255)
    np.savez(tmp_path / "cifar10.npz", x_train=np.zeros((2, 32, 32, 3), np.uint8))
    assert es.datasets.cifar10()["x_train"].shape == (2, 32, 32, 3)


def test_data_sets_come_from_openml_otherwise(tmp_path, monkeypatch):
    """The fetch itself is scikit-learn's; what is ours is the layout and the copy kept."""
    import sklearn.datasets

    flat = np.random.default_rng(0).integers(0, 255, (4, 3 * 32 * 32))

    def fetch(name, version, return_X_y, as_frame):
        assert (name, version, return_X_y, as_frame) == ("CIFAR_10", 1, True, False)
        return flat, np.array(["3", "1", "4", "1"])

    monkeypatch.setenv("EIGENSTREAM_DATA", str(tmp_path))
    monkeypatch.setattr(sklearn.datasets, "fetch_openml", fetch)
    data = es.datasets.cifar10()
    # OpenML stores the colour planes one after another.
    np.testing.assert_array_equal(data["x_train"][0, :, :, 1].ravel(), flat[0, 1024:2048])
    assert data["y_train"].tolist() == [3, 1, 4, 1]
    assert (tmp_path / "cifar10.npz").exists()


@pytest.mark.parametrize("name", ["LICENSE", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "docs/decisions.md"])
def test_links_of_the_readme_lead_somewhere(name):
    assert (ROOT / name).exists()
