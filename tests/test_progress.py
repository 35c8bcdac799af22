"""Ctrl-C and the progress bar."""

import contextlib
import itertools
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import optax
import pytest

import eigenstream as es
from data import latent_views, scaled
from eigenstream.solvers import Paper

_, X, Y = latent_views(1010, 6, 5, np.float32)
ADAM = Paper(learning_rate=0.01, optimizer=optax.adam)


def test_an_interrupted_run_resumes(tmp_path):
    options = {"k": 2, "solver": ADAM, "max_epochs": 3}
    with pytest.warns(UserWarning, match="interrupted"):
        es.solve(
            *(es.problems.pca(), es.streams.batches(X)),
            **options,
            folder=tmp_path,
            callbacks=[lambda r: r["step"] == 4 and os.kill(os.getpid(), signal.SIGINT)],
        )
    resumed = es.solve(es.problems.pca(), es.streams.batches(X), **options, folder=tmp_path, resume=True)
    whole = es.solve(es.problems.pca(), es.streams.batches(X), **options)
    np.testing.assert_array_equal(resumed.V, whole.V)
    assert (resumed.n_iter, resumed.status, resumed.message) == (whole.n_iter, whole.status, whole.message)


def test_ctrl_c_in_the_first_of_two_passes_is_an_error(monkeypatch):
    def stop(record):
        os.kill(os.getpid(), signal.SIGINT)

    wide = np.random.default_rng(0).normal(size=(1000, 20))
    with pytest.warns(UserWarning, match="interrupted"), pytest.raises(ValueError, match="first of two passes"):
        es.solve(es.problems.ica(), [wide[:500], wide[500:]], 2, callbacks=[stop])


def interrupt_after(seconds):
    threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGINT)).start()


@pytest.mark.parametrize("solver", [ADAM, "exact"], ids=["paper", "exact"])
def test_ctrl_c_leaves_a_usable_model_and_says_so(solver):
    def endless():
        yield from ((X, Y) for _ in range(10))
        interrupt_after(0.2)
        for _ in itertools.count():
            time.sleep(0.001)
            yield X, Y

    before = signal.getsignal(signal.SIGINT)
    with pytest.warns(UserWarning, match=r"interrupted after \d+ rows"):
        model = es.CCA(n_components=1, solver=solver).fit_stream(endless())
    assert model.message_.startswith("interrupted after")
    assert "converged:" not in model.message_
    assert not model.converged_
    assert model.score(X, Y) > 0.3
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_while_a_batch_is_awaited():
    def stuck():
        yield X
        interrupt_after(0.2)
        time.sleep(60)

    began = time.monotonic()
    with pytest.warns(UserWarning, match="interrupted after 1010 rows"):
        result = es.solve(es.problems.pca(), stuck(), 1)
    assert time.monotonic() - began < 30
    assert result.eigenvalues[0] > 0.5


def test_a_second_ctrl_c_acts_at_once():
    def impatient(record):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt):
        es.solve(es.problems.pca(), es.streams.batches(X), 1, ADAM, callbacks=[impatient])


def test_verbose_shows_a_bar_on_a_terminal_and_nothing_elsewhere(capfd):
    code = (
        "import numpy as np, eigenstream as es; X = np.random.default_rng(0).normal(size=(1000, 5));"
        "es.solve(es.problems.pca(), np.split(X, 10), 2, solver='paper', verbose=True)"
    )
    terminal, end = pty.openpty()
    subprocess.run([sys.executable, "-c", code], check=True, stderr=end, env={**os.environ, "COLUMNS": "200"})
    os.close(end)
    shown = b""
    with contextlib.suppress(OSError):
        while piece := os.read(terminal, 65536):
            shown += piece
    assert re.search(rb"1,000 rows .* rows/s .*residual .*eigenvalues \S+", shown), shown
    es.solve(es.problems.pca(), np.split(scaled(), 10), 2, solver="paper", verbose=True)
    assert capfd.readouterr() == ("", "")
