"""The command line."""

import json
import re
import signal
import subprocess
import sys
import time

import numpy as np
import optax
import pytest
from typer.testing import CliRunner

import eigenstream as es
from eigenstream.cli import app


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
    """The command line in this process, which is faster; errors are raised."""
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


@pytest.mark.parametrize("problem", FITS)
def test_parts_are_merged(problem, files, tmp_path):
    """Parts of the rows, merged in two steps, give the model of all rows."""
    names, kind = FITS[problem]
    options = {"laplacian": ("--nodes", 12, "--ridge", 0.1), "clustering": ("--nodes", 12, "--ridge", 0.1)}
    fit = (
        "fit",
        problem,
        *options.get(problem, ()),
        "-k",
        1 + (problem == "clustering"),
        "--keep-statistics",
        "--json",
    )
    whole = [files / name for name in names]
    for number, rows in enumerate((slice(0, 9), slice(9, 20), slice(20, None))):
        sources = []
        for path in whole:
            sources.append(tmp_path / f"{number}{path.name}")
            if path.suffix == ".npy":
                np.save(sources[-1], np.load(path)[rows])
            else:
                np.savetxt(sources[-1], np.loadtxt(path, int)[rows], fmt="%d")
        assert call(*fit, *sources, "--out", tmp_path / f"part{number}").exit_code == 0
    call("merge", tmp_path / "part2", tmp_path / "part0", "--out", tmp_path / "two")
    found = call("merge", tmp_path / "two", tmp_path / "part1", "--out", tmp_path / "all", "--json")
    call(*fit, *whole, "--out", tmp_path / "whole")
    wanted, merged = es.load(tmp_path / "whole"), es.load(tmp_path / "all")
    assert isinstance(merged, kind)
    values = json.loads(found.output)
    assert (values["problem"], values["rows"]) == (problem, wanted.n_samples_seen_)
    np.testing.assert_allclose(values["eigenvalues"], wanted.eigenvalues_, rtol=1e-12, atol=1e-13)
    if problem == "clustering":
        np.testing.assert_array_equal(np.load(tmp_path / "all" / "labels.npy"), wanted.labels_)
    assert call("report", tmp_path / "all").exit_code == 0


def test_wide_rows_of_ica_are_summed_in_one_pass_to_be_merged(tmp_path):
    rows = np.random.default_rng(0).laplace(size=(5000, 20))
    np.save(tmp_path / "x.npy", rows)
    call("fit", "ica", tmp_path / "x.npy", "-k", 2, "--out", tmp_path / "a", "--keep-statistics")
    found = es.load(tmp_path / "a").partial_fit(rows)
    np.testing.assert_allclose(found.eigenvalues_, es.ICA(2).fit(np.r_[rows, rows]).eigenvalues_, rtol=1e-12)


def test_merging_refuses_by_the_names_of_folders(files, tmp_path):
    fit = ("fit", "pca", files / "x.npy", "-k", 2)
    call(*fit, "--out", tmp_path / "a", "--keep-statistics")
    call(*fit, "--out", tmp_path / "b")
    with pytest.raises(ValueError, match=r"b was loaded, without its sums.*--keep-statistics"):
        call("merge", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "c")
    assert not (tmp_path / "c").exists()
    with pytest.raises(ValueError, match="a holds a run: give --overwrite"):
        call("merge", tmp_path / "a", tmp_path / "a", "--out", tmp_path / "a")
    assert call("merge", tmp_path / "a", tmp_path / "a", "--out", tmp_path / "a", "--overwrite").exit_code == 0
    assert es.load(tmp_path / "a").n_samples_seen_ == 1000
    with pytest.raises(ValueError, match="other settings, keep_statistics"):
        call(*fit, "--out", tmp_path / "b", "--resume", "--keep-statistics")
    with pytest.raises(ValueError, match="--solver game keeps no sums"):
        call(*fit, "--out", tmp_path / "d", "--solver", "game", "--keep-statistics")


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


def test_a_corrected_command_needs_no_overwrite(files, tmp_path):
    with pytest.raises(ValueError, match="too large"):
        call("fit", "pca", files / "x.npy", "-k", 99, "--out", tmp_path)
    assert call("fit", "pca", files / "x.npy", "-k", 2, "--out", tmp_path).exit_code == 0


def test_a_failed_run_exits_with_1(files, tmp_path):
    np.save(tmp_path / "x.npy", 1e3 * np.load(files / "x.npy"))
    sources = (tmp_path / "x.npy", tmp_path / "x.npy")
    options = ("--solver", "sgha", "--option", "learning_rate=1e6", "--option", "shift=0.0")
    found = call("fit", "cca", *sources, "-k", 2, "--out", tmp_path / "run", *options, "--batch-size", 10)
    assert found.exit_code == 1
    assert "was not finite" in found.output
    assert es.load(tmp_path / "run").status_ == "failed"


@pytest.mark.parametrize(("status", "code"), [("solved", 0), ("not converged", 0), ("stopped", 0), ("failed", 1)])
def test_the_exit_code_follows_the_status_of_a_finished_run(status, code, files, tmp_path):
    fit = ("fit", "pca", files / "x.npy", "-k", 2, "--out", tmp_path)
    assert call(*fit).exit_code == 0
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["learned"]["status_"] == "solved"
    config["learned"]["status_"] = status
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert call(*fit, "--resume").exit_code == code


def test_ctrl_c_saves_the_model_and_exits_with_130(files, tmp_path):
    """A run that would take minutes is interrupted once it has written six records."""
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
    model = es.load(tmp_path / "run")
    assert model.components_.shape == (2, 5)
    assert (model.status_, model.converged_) == ("interrupted", False)


@pytest.mark.parametrize("arguments", [(), ("fit",), ("merge",), ("transform",), ("report",), ("demo",)])
def test_help_is_there_for_every_command(arguments):
    result = call(*arguments, "--help")
    assert result.exit_code == 0
    assert len(result.output.splitlines()) > 6
    if not arguments:
        assert all(name in result.output for name in ("fit", "merge", "transform", "report", "demo"))
