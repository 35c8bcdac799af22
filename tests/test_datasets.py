"""Data sets in a folder of files, and generated ones."""

import numpy as np
import pytest

import eigenstream as es


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


def test_data_sets_are_fetched_from_openml_once(tmp_path, monkeypatch):
    """The fetch itself is scikit-learn's; tested here are the layout and the copy in the folder."""
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


def test_mediamill_is_read_and_its_imitation_resembles_it(tmp_path, monkeypatch):
    X, Y = es.datasets.mediamill_like(3000)
    assert 0 <= X.min() < X.max() <= 1
    assert set(np.unique(Y)) == {0, 1}
    assert Y.mean(0).max() == pytest.approx(1 / 3, abs=0.01)
    assert Y.mean(0).min() < 0.01
    monkeypatch.setenv("EIGENSTREAM_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="mediamill_like"):
        es.datasets.mediamill()
    (tmp_path / "mediamill").mkdir()
    for part in ("train", "test"):
        (tmp_path / "mediamill" / f"{part}-exp1.svm").write_text("0,100 1:0.5 120:1\n3 2:0.25\n")
    X, Y = es.datasets.mediamill()
    assert X.shape == (4, 120)
    assert Y.sum(1).tolist() == [2, 1, 2, 1]
    assert X[0, 119] == 1
