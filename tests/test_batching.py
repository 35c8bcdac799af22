"""Batches: every row once in an epoch, in the order of the seed, in little memory."""

import gc
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse

import eigenstream as es

rng = np.random.default_rng(0)
X = (rng.normal(size=(1003, 6)) * [3, 2, 1, 1, 1, 0.5]).astype(np.float32)
S = scipy.sparse.random_array((1003, 30), density=0.1, random_state=0, format="csr", dtype=np.float32)


@pytest.mark.parametrize("size", [1, 7, 50, 100, 400, 2000])
def test_an_epoch_is_every_row_once_in_a_new_order(size, tmp_path):
    numbers = np.arange(1003.0)[:, None] * np.ones((1, 6))
    np.save(tmp_path / "x.npy", numbers)
    # As if memory were short: 96 rows of 6 numbers fit a window.
    stream, mapped = (
        replace(es.streams.batches(source, batch_size=size), window_numbers=96 * 6)
        for source in (numbers, tmp_path / "x.npy")
    )
    orders = []
    for epoch in range(3):
        found = list(stream.epoch(epoch))
        assert [len(b) for b in found] == [min(size, 1003 - lo) for lo in range(0, 1003, size)]
        assert len(found) == len(stream)
        orders.append(np.concatenate(found)[:, 0])
        assert sorted(orders[-1]) == list(range(1003))
        np.testing.assert_array_equal(np.concatenate(list(mapped.epoch(epoch)))[:, 0], orders[-1])
        for start in (1, len(stream) // 2, len(stream) - 1):
            rest = list(stream.epoch(epoch, start))
            assert len(rest) == len(found) - start
            for a, b in zip(rest, found[start:], strict=True):
                np.testing.assert_array_equal(a, b)
    assert not np.array_equal(orders[0], orders[1])
    # Rows that are neighbours in the stream are far apart in the file: a third of it on average if all were mixed.
    assert np.abs(np.diff(orders[0])).mean() > 150
    np.testing.assert_array_equal(np.concatenate(list(stream)), np.concatenate(list(stream)))
    other = replace(stream, random_state=1)
    assert not np.array_equal(np.concatenate(list(other))[:, 0], orders[0])


def test_order_is_kept_without_shuffling_and_views_go_together():
    stream = es.streams.batches(X, np.arange(1003), batch_size=100)
    for rows, numbers in stream:
        np.testing.assert_array_equal(rows, X[numbers])
    plain = es.streams.batches(X, np.arange(1003), batch_size=100, shuffle=False)
    np.testing.assert_array_equal(np.concatenate([n for _, n in plain]), np.arange(1003))
    assert len(list(plain.epoch(0, 10))) == 1
    sparse = es.streams.batches(S, batch_size=100)
    assert sum(b.shape[0] for b in sparse) == 1003


def test_bad_streams_are_named():
    with pytest.raises(ValueError, match=r"\[1003, 5\] rows"):
        es.streams.batches(X, X[:5])
    with pytest.raises(ValueError, match="batch_size=0"):
        es.streams.batches(X, batch_size=0)
    with pytest.raises(ValueError, match="two columns"):
        es.streams.edges(X)
    with pytest.raises(ValueError, match="whole numbers"):
        next(iter(es.streams.edges(np.array([[0.5, 1.0]]))))


def test_lists_of_edges(tmp_path):
    edges = np.array([[0, 1], [1, 2], [2, 0], [2, 3]])
    np.savetxt(tmp_path / "graph.edges", edges, fmt="%d")
    wanted = es.SpectralEmbedding(2).fit_stream([tuple(edges.T)])
    for source in (edges, edges.astype(float), tmp_path / "graph.edges", np.c_[edges, np.ones(4)]):
        model = es.SpectralEmbedding(2).fit_stream(es.streams.edges(source, batch_size=3))
        np.testing.assert_allclose(model.eigenvalues_, wanted.eigenvalues_, atol=1e-9)


def test_prefetch_keeps_order_raises_errors_and_ends_its_thread():
    assert list(es.streams.prefetch(range(100), ahead=3)) == list(range(100))

    def breaks():
        yield 1
        raise KeyError("gone")

    reader = es.streams.prefetch(breaks())
    assert next(reader) == 1
    with pytest.raises(KeyError, match="gone"):
        next(reader)
    with pytest.raises(StopIteration):
        next(reader)
    taken = []
    reader = es.streams.prefetch((taken.append(i) or i for i in range(1000)), ahead=2)
    next(reader)
    time.sleep(0.3)
    assert len(taken) <= 4
    del reader
    gc.collect()
    deadline = time.monotonic() + 5
    while any(t.name == "eigenstream-prefetch" for t in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(t.name == "eigenstream-prefetch" for t in threading.enumerate())


MEMORY = """
import re, sys, threading, time
import numpy as np, eigenstream as es

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read()).group(1)) * 1024

warm = np.random.default_rng(0).normal(size=(500, 40)).astype(np.float32)
solver = "exact" if sys.argv[3] == "exact" else es.solvers.Paper(learning_rate=1e-3)
es.CCA(2, solver=solver).fit_stream(es.streams.batches(warm, warm))
before, peak, done = anonymous(), 0, False

def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.01)

watcher = threading.Thread(target=watch)
watcher.start()
stream = es.streams.batches(sys.argv[1], sys.argv[2], batch_size=1000)
model = es.CCA(2, solver=solver).fit_stream(stream)
done = True
watcher.join()
print(model.n_samples_seen_, before, peak)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("solver", ["exact", "paper"])
def test_memory_stays_at_a_few_batches(solver, tmp_path):
    """Two files of 200 MB; `benchmarks/memory.py` has two of 4 GB."""
    for name in ("x", "y"):
        rows = np.lib.format.open_memmap(tmp_path / f"{name}.npy", "w+", np.float32, (1_250_000, 40))
        rows[::1000] = rng.normal(size=(1250, 40))
        rows.flush()
        del rows
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "x.npy"), str(tmp_path / "y.npy"), solver]
    n, before, peak = map(int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    assert n == 1_250_000
    assert peak - before < 250e6
