"""What a stranger meets first: the command line, the README's code and the data sets."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import optax
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


def run(*arguments, **options):
    """The command line in a process of its own."""
    command = [sys.executable, "-c", "from eigenstream.cli import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **options)


def call(*arguments):
    """The command line in this process, which is quicker; an error is raised rather than printed."""
    return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    rng = np.random.default_rng(0)
    latent = rng.normal(size=(500, 2))
    views = {name: np.c_[latent + 0.5 * rng.normal(size=(500, 2)), rng.normal(size=(500, 3))] for name in "xyz"}
    for name, rows in views.items():
        np.save(folder / f"{name}.npy", rows)
    np.save(folder / "labels.npy", np.where(latent[:, 0] > 0, "up", "down"))
    np.save(folder / "narrow.npy", views["x"][:, :3])
    graph = np.kron(np.eye(2), np.ones((6, 6)))
    graph[0, 6] = 1
    np.savetxt(folder / "graph.edges", np.argwhere(np.triu(graph, 1)), fmt="%d")
    return folder


FITS = {
    "pca": (("x.npy",), es.PCA),
    "cca": (("x.npy", "y.npy"), es.CCA),
    "multiview": (("x.npy", "y.npy", "z.npy"), es.MultiviewCCA),
    "pls": (("x.npy", "y.npy"), es.PLS),
    "lda": (("x.npy", "labels.npy"), es.LDA),
    "ica": (("x.npy",), es.ICA),
    "laplacian": (("graph.edges",), es.SpectralEmbedding),
    "clustering": (("graph.edges",), es.SpectralClustering),
}


@pytest.mark.parametrize("problem", FITS)
def test_every_problem_is_fitted_transformed_and_reported(problem, files, tmp_path):
    names, kind = FITS[problem]
    sources = [files / name for name in names]
    k = {"lda": 1, "clustering": 2}.get(problem, 2)
    found = call("fit", problem, *sources, "-k", k, "--out", tmp_path, "--json")
    assert found.exit_code == 0, found.output
    values = json.loads(found.output)
    assert values["problem"] == problem
    assert values["converged"]
    assert len(values["eigenvalues"]) == k
    model = es.load(tmp_path)
    assert isinstance(model, kind)
    more = {"laplacian": ["embedding.npy"], "clustering": ["embedding.npy", "labels.npy"]}.get(problem, [])
    assert sorted(p.name for p in tmp_path.iterdir() if p.name not in more) == [
        "checkpoints",
        "config.json",
        "metrics.jsonl",
        "model.safetensors",
    ]
    reported = call("report", tmp_path)
    assert reported.exit_code == 0
    assert "| component | eigenvalue |" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    out = tmp_path / "scores.npy"
    rows = sources[:1] if problem == "lda" else sources
    if problem in ("laplacian", "clustering"):
        with pytest.raises(ValueError, match="no transform"):
            call("transform", tmp_path, *rows, "-o", out)
        labels = getattr(model, "labels_", model.embedding_[:, 0] > 0)
        assert len(set(labels[:6])) == len(set(labels[6:])) == 1
        assert labels[0] != labels[6]
        return
    assert call("transform", tmp_path, *rows, "-o", out, "--batch-size", 64).exit_code == 0
    arrays = [np.load(path) for path in rows]
    wanted = model.transform(arrays) if problem == "multiview" else model.transform(*arrays)
    wanted = np.hstack(wanted) if isinstance(wanted, list | tuple) else wanted
    np.testing.assert_allclose(np.load(out), wanted, atol=1e-12)
    if problem in ("cca", "pls"):
        call("transform", tmp_path, rows[0], "-o", out)
        np.testing.assert_allclose(np.load(out), wanted[:, :k], atol=1e-12)
        call("transform", tmp_path, rows[1], "-o", out, "--view", 2)
        np.testing.assert_allclose(np.load(out), wanted[:, k:], atol=1e-12)


def test_fit_gives_what_the_library_gives(files, tmp_path):
    call("fit", "cca", files / "x.npy", files / "y.npy", "-k", 2, "--out", tmp_path / "a")
    X, Y = np.load(files / "x.npy"), np.load(files / "y.npy")
    np.testing.assert_array_equal(es.load(tmp_path / "a").x_weights_, es.CCA(n_components=2).fit(X, Y).x_weights_)
    options = ("--solver", "paper", "--option", "learning_rate=0.05", "--option", "optimizer=adam", "--epochs", 3)
    call("fit", "cca", files / "x.npy", files / "y.npy", "-k", 2, "--out", tmp_path / "b", *options)
    solver = es.solvers.Paper(learning_rate=0.05, optimizer=optax.adam)
    wanted = es.CCA(n_components=2, solver=solver, max_epochs=3).fit(X, Y)
    found = es.load(tmp_path / "b")
    np.testing.assert_array_equal(found.x_weights_, wanted.x_weights_)
    assert found.solver == solver == found.solver_
    page = call("report", tmp_path / "b")
    assert "report.png" in page.output


MISTAKES = {
    "missing file": (("fit", "pca", "nope.npy"), "nope.npy does not exist"),
    "too few sources": (("fit", "cca", "x.npy"), "cca takes 2 sources, not 1"),
    "too many components": (("fit", "pca", "x.npy", "-k", "9"), "too large"),
    "unknown solver": (("fit", "pca", "x.npy", "--solver", "magic"), "--solver magic"),
    "an option of auto": (("fit", "pca", "x.npy", "--option", "a=1"), "named --solver"),
    "unknown option": (("fit", "pca", "x.npy", "--solver", "paper", "--option", "speed=1"), "has the settings"),
    "an option that is no number": (
        ("fit", "pca", "x.npy", "--solver", "paper", "--option", "learning_rate=fast"),
        "give a number",
    ),
    "unknown optimizer": (
        ("fit", "pca", "x.npy", "--solver", "paper", "--option", "optimizer=lion"),
        "sgd or adam",
    ),
    "ridge of pca": (("fit", "pca", "x.npy", "--ridge", "1"), "--ridge does not apply to pca"),
    "no model": (("transform", "nowhere", "x.npy", "-o", "z.npy"), "holds no finished model"),
    "another output": (("transform", "run", "x.npy", "-o", "z.csv"), "give a .npy file"),
    "another width": (("transform", "run", "narrow.npy", "-o", "z.npy"), "X has 3 features"),
    "two sources of pca": (("transform", "run", "x.npy", "y.npy", "-o", "z.npy"), "transforms one source"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_named(case, files, tmp_path, monkeypatch):
    monkeypatch.chdir(files)
    arguments, words = MISTAKES[case]
    if "run" in arguments and not (files / "run").exists():
        call("fit", "pca", "x.npy", "--out", "run")
    if arguments[0] == "fit":
        arguments = (*arguments, "--out", tmp_path / "out")
    with pytest.raises((ValueError, OSError), match=re.escape(words)):
        call(*arguments)


def test_an_error_is_one_line_with_an_exit_code(files):
    found = run("fit", "pca", "nope.npy", cwd=files)
    assert found.returncode == 2
    assert found.stdout == ""
    assert found.stderr.count("\n") == 1
    assert found.stderr.startswith("eigenstream: error: nope.npy does not exist")
    assert "Traceback" in run("fit", "pca", "nope.npy", "--debug", cwd=files).stderr
    assert run("fit", "magic", "x.npy", cwd=files).returncode == 2


def test_a_folder_is_not_taken_by_mistake(files, tmp_path):
    fit = ("fit", "pca", files / "x.npy", "-k", 2, "--out", tmp_path)
    assert call(*fit).exit_code == 0
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="--resume"):
        call(*fit)
    with pytest.raises(ValueError, match="run with other settings"):
        call("fit", "pca", files / "x.npy", "-k", 3, "--out", tmp_path, "--resume")
    with pytest.raises(ValueError, match="other sources"):
        call("fit", "pca", files / "y.npy", "-k", 2, "--out", tmp_path, "--resume")
    again = call(*fit, "--resume")
    assert "solved exactly from 500 rows" in again.output
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert call("fit", "pca", files / "y.npy", "-k", 2, "--out", tmp_path, "--overwrite").exit_code == 0
    assert (tmp_path / "model.safetensors").read_bytes() != before


def test_a_mistake_can_be_mended_and_tried_again(files, tmp_path):
    with pytest.raises(ValueError, match="too large"):
        call("fit", "pca", files / "x.npy", "-k", 99, "--out", tmp_path)
    assert call("fit", "pca", files / "x.npy", "-k", 2, "--out", tmp_path).exit_code == 0


def test_a_run_that_goes_wrong_says_so_with_its_exit_code(files, tmp_path):
    np.save(tmp_path / "x.npy", 1e3 * np.load(files / "x.npy"))
    sources = (tmp_path / "x.npy", tmp_path / "x.npy")
    options = ("--solver", "sgha", "--option", "learning_rate=1e6", "--option", "shift=0.0")
    found = call("fit", "cca", *sources, "-k", 2, "--out", tmp_path / "run", *options, "--batch-size", 10)
    assert found.exit_code == 1
    assert "was not finite" in found.output


def test_ctrl_c_saves_what_was_learned_and_resume_goes_on(files, tmp_path):
    """A run long enough to be interrupted, ended by hand, gone on with."""
    rows = np.random.default_rng(0).normal(size=(20_000, 5)) * [3, 2, 1, 1, 1]
    np.save(tmp_path / "x.npy", rows)

    def command(out, epochs):
        settings = ["--solver", "paper", "--option", "learning_rate=0.01", "--epochs", str(epochs), "--resume"]
        start = [sys.executable, "-c", "from eigenstream.cli import main; main()", "fit", "pca"]
        return [*start, str(tmp_path / "x.npy"), "-k", "2", "--out", str(tmp_path / out), *settings, "--json"]

    process = subprocess.Popen(command("run", 400), stdout=subprocess.PIPE, text=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > 6) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert json.loads(out)["message"].startswith("interrupted after")
    assert es.load(tmp_path / "run").components_.shape == (2, 5)


@pytest.mark.parametrize("arguments", [(), ("fit",), ("transform",), ("report",), ("demo",)])
def test_help_is_there_for_every_command(arguments):
    result = call(*arguments, "--help")
    assert result.exit_code == 0
    assert len(result.output.splitlines()) > 6
    if not arguments:
        assert all(name in result.output for name in ("fit", "transform", "report", "demo"))


@pytest.mark.slow
def test_the_code_in_the_readme_runs_and_prints_what_it_says(capsys, tmp_path, monkeypatch):
    """Every print in the README has a comment with its output; one or two say more of it after a colon."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len(blocks) == 6
    names: dict = {}
    for block in blocks:
        exec(block, names)
    printed = capsys.readouterr().out.splitlines()
    promised = [line.split("  # ")[1] for block in blocks for line in block.splitlines() if line.startswith("print(")]
    assert len(printed) == len(promised)
    for line, promise in zip(printed, promised, strict=True):
        if promise.startswith("below "):
            assert float(line) < float(promise.split()[1].rstrip(";"))
        else:
            assert line == promise.split(": ")[0]
    assert names["x_scores"].shape == names["y_scores"].shape == (10_000, 2)


@pytest.mark.slow
def test_the_commands_in_the_readme_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "xy":
        np.save(f"{name}.npy", np.random.default_rng(0).normal(size=(200, 4)))
    text = (ROOT / "README.md").read_text()
    commands = [line.split("#")[0].split() for line in re.findall(r"^eigenstream .*$", text, re.M)]
    assert len(commands) == 4
    for command in commands:
        assert call(*command[1:]).exit_code == 0
    assert np.load("scores.npy").shape == (200, 2)


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
