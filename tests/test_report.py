"""The page and the picture of a run."""

import numpy as np

import eigenstream as es
from data import X, Y
from eigenstream.app import report


def test_a_page_lists_the_components_and_the_message(tmp_path):
    model = es.CCA(2).fit(X, Y)
    page, picture = report.write(model, [], tmp_path)
    text = page.read_text()
    assert text.startswith("# CCA, 2 components")
    assert f"Exact: {model.message_}." in text
    assert "| component | eigenvalue | residual | correlation |" in text
    assert f"| 2 | {model.eigenvalues_[1]:.6g} |" in text
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_picture_shows_the_history_of_a_streaming_solver(tmp_path):
    model = es.PCA(2, solver="paper").fit(X)
    assert "eigenvalues" in model.history_[0]
    _, alone = report.write(model, [], tmp_path)
    width = int.from_bytes(alone.read_bytes()[16:20])
    _, both = report.write(model, model.history_, tmp_path)
    assert int.from_bytes(both.read_bytes()[16:20]) == 2 * width


def test_a_page_lists_at_most_fifty_components(tmp_path):
    model = es.PCA().fit(np.random.default_rng(0).normal(size=(80, 53)))
    text = report.write(model, [], tmp_path)[0].read_text()
    assert "| 50 |" in text
    assert "| 51 |" not in text
    assert "3 more are in `model.safetensors`" in text
