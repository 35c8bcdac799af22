"""Sources and batches: every format gives the rows of the array it was written from, in the order the seed says."""

import gc
import subprocess
import sys
import threading
import time

import h5py
import numpy as np
import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest
import scipy.sparse
import zarr

import eigenstream as es
from eigenstream.streams import batching, open_source

rng = np.random.default_rng(0)
X = (rng.normal(size=(1003, 6)) * [3, 2, 1, 1, 1, 0.5]).astype(np.float32)
S = scipy.sparse.random_array((1003, 30), density=0.1, random_state=0, format="csr", dtype=np.float32)


def write_npy(path, x):
    np.save(path, x)


def write_fortran(path, x):
    np.save(path, np.asfortranarray(x))


def write_npz(path, x):
    np.savez(path, other=np.zeros(3), rows=x)
    return f"{path}::rows"


def write_compressed(path, x):
    np.savez_compressed(path, rows=x)


def write_zarr(path, x):
    zarr.create_array(str(path), data=x, chunks=(100, 6))


def write_group(path, x):
    zarr.open_group(str(path), mode="w").create_array("rows", data=x, chunks=(64, 6))


def write_hdf5(path, x):
    with h5py.File(path, "w") as file:
        file.create_dataset("deep/rows", data=x, chunks=(50, 6))


def table(x):
    return pyarrow.table({f"c{i}": column for i, column in enumerate(x.T)})


def write_parquet(path, x):
    pyarrow.parquet.write_table(table(x), path, row_group_size=130)


def write_lists(path, x):
    rows = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(x.ravel()), x.shape[1])
    pyarrow.parquet.write_table(pyarrow.table({"row": rows}), path, row_group_size=130)


def write_columns(path, x):
    more = table(x).append_column("name", pyarrow.array(["a"] * len(x)))
    pyarrow.parquet.write_table(more, path)
    return f"{path}::" + ",".join(f"c{i}" for i in range(x.shape[1]))


def write_arrow(path, x):
    with pyarrow.OSFile(str(path), "wb") as out, pyarrow.ipc.new_file(out, table(x).schema) as writer:
        writer.write_table(table(x), max_chunksize=200)


def write_feather(path, x):
    pyarrow.feather.write_feather(table(x), str(path), compression="uncompressed")


def write_csv(path, x):
    np.savetxt(path, x, delimiter=",", header="a,b,c,d,e,f", comments="", fmt="%.17g")


def write_text(path, x):
    np.savetxt(path, x, fmt="%.17g", header="a comment")


FORMATS = {
    "npy": (".npy", write_npy),
    "npy, by columns": (".npy", write_fortran),
    "npz": (".npz", write_npz),
    "npz, compressed": (".npz", write_compressed),
    "zarr": (".zarr", write_zarr),
    "zarr, a group": (".zarr", write_group),
    "hdf5": (".h5", write_hdf5),
    "parquet": (".parquet", write_parquet),
    "parquet, lists": (".parquet", write_lists),
    "parquet, some columns": (".parquet", write_columns),
    "arrow": (".arrow", write_arrow),
    "feather": (".feather", write_feather),
    "csv": (".csv", write_csv),
    "text": (".txt", write_text),
}


def written(name, folder, x=X):
    suffix, write = FORMATS[name]
    path = folder / f"rows{suffix}"
    return write(path, x) or str(path)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_round_trips_through_fit_and_transform(name, tmp_path):
    path = written(name, tmp_path)
    source = open_source(path)
    assert source.shape == X.shape
    np.testing.assert_array_equal(source[97:203], X[97:203])
    np.testing.assert_array_equal(source[1000:1003], X[1000:])
    rows = X if source.dtype == np.float32 else X.astype(np.float64)
    for solver in ("exact", es.solvers.Paper(learning_rate=0.01)):
        from_memory = es.PCA(n_components=2, solver=solver).fit_stream(es.streams.batches(rows, batch_size=64))
        from_file = es.PCA(n_components=2, solver=solver).fit_stream(es.streams.batches(path, batch_size=64))
        np.testing.assert_array_equal(from_file.components_, from_memory.components_)
    scores = np.concatenate([from_file.transform(b) for b in es.streams.batches(path, shuffle=False)])
    np.testing.assert_allclose(scores, from_memory.transform(rows), atol=1e-5)


def test_sparse_files_stay_sparse(tmp_path):
    scipy.sparse.save_npz(tmp_path / "s.npz", scipy.sparse.csr_matrix(S))
    source = open_source(tmp_path / "s.npz")
    assert all(scipy.sparse.issparse(batch) for batch in es.streams.batches(source))
    for solver in ("exact", es.solvers.Paper(learning_rate=0.1)):
        models = [
            es.PCA(n_components=2, solver=solver, max_epochs=2).fit_stream(es.streams.batches(rows))
            for rows in (S, tmp_path / "s.npz")
        ]
        np.testing.assert_array_equal(models[0].components_, models[1].components_)
    dense = es.PCA(n_components=2).fit(S.toarray())
    assert es.metrics.subspace_error(es.PCA(n_components=2).fit(S).components_.T, dense.components_.T) < 1e-6
    scipy.sparse.save_npz(tmp_path / "c.npz", scipy.sparse.csc_matrix(S))
    with pytest.raises(ValueError, match=r"tocsr\(\)"):
        open_source(tmp_path / "c.npz")


def write_raw(path, text):
    path.write_text(text)
    return path


MISTAKES = {
    "missing": (lambda p: p / "no.npy", "does not exist"),
    "unknown ending": (lambda p: write_raw(p / "x.xyz", "1"), "no reader for .xyz"),
    "no ending": (lambda p: write_raw(p / "x", "1"), "without an ending"),
    "pickled objects": (lambda p: np.save(p / "o.npy", np.array([{}]), allow_pickle=True) or p / "o.npy", "numbers"),
    "several arrays": (lambda p: np.savez(p / "x.npz", a=X, b=X) or p / "x.npz", r"a, b: name one, .*::a"),
    "no such array": (lambda p: np.savez(p / "x.npz", a=X) or f"{p}/x.npz::c", "name one"),
    "objects in an archive": (lambda p: np.savez(p / "x.npz", a=np.array([{}])) or p / "x.npz", "Python objects"),
    "complex": (lambda p: np.save(p / "x.npy", X + 1j) or p / "x.npy", "real numbers"),
    "text in a table": (
        lambda p: (
            pyarrow.parquet.write_table(pyarrow.table({"n": [1.0], "t": ["a"]}), p / "x.parquet") or p / "x.parquet"
        ),
        "column 't'",
    ),
    "no such column": (
        lambda p: pyarrow.parquet.write_table(pyarrow.table({"n": [1.0]}), p / "x.parquet") or f"{p}/x.parquet::m",
        "no column 'm'",
    ),
    "no numbers": (lambda p: write_raw(p / "x.csv", "a,b\nc,d\n"), "neither a header"),
    "empty text": (lambda p: write_raw(p / "x.csv", ""), "no row of numbers"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_bad_files_are_named(case, tmp_path):
    make, words = MISTAKES[case]
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        open_source(make(tmp_path))


def test_text_with_gaps_or_ragged_lines_is_refused(tmp_path):
    with pytest.raises(ValueError, match="empty or commented lines"):
        open_source(write_raw(tmp_path / "x.txt", "1 2\n\n3 4\n"))[:2]
    with pytest.raises(ValueError, match="lines after number 1"):
        open_source(write_raw(tmp_path / "x.txt", "1 2\n3\n"))


def test_gaps_in_a_table_are_seen(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"a": [1, None, 3], "b": [1, 2, 3]}), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match="NaN"):
        es.PCA().fit_stream(es.streams.batches(tmp_path / "x.parquet"))


def test_a_missing_reader_names_the_extra(tmp_path, monkeypatch):
    path = written("hdf5", tmp_path)
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ValueError, match=r"needs h5py: pip install .eigenstream\[data\]"):
        open_source(path)


@pytest.fixture
def small_windows(monkeypatch):
    """Files that look larger than memory: 96 rows of 6 numbers fit a window."""
    monkeypatch.setattr(batching, "WINDOW_NUMBERS", 96 * 6)


@pytest.mark.parametrize("size", [1, 7, 50, 100, 400, 2000])
def test_an_epoch_is_every_row_once_in_a_new_order(size, small_windows, tmp_path):
    numbers = np.arange(1003.0)[:, None] * np.ones((1, 6))
    np.save(tmp_path / "x.npy", numbers)
    stream, mapped = (
        es.streams.batches(numbers, batch_size=size),
        es.streams.batches(tmp_path / "x.npy", batch_size=size),
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
    # Neighbours in the stream come from far apart: a third of the file on average if all were mixed.
    assert np.abs(np.diff(orders[0])).mean() > 150
    np.testing.assert_array_equal(np.concatenate(list(stream)), np.concatenate(list(stream)))
    other = es.streams.batches(numbers, batch_size=size, random_state=1)
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


def test_reading_ahead_keeps_order_passes_errors_on_and_ends_with_its_reader():
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
    """Two files of 320 MB; `benchmarks/memory.py` has two of 4 GB."""
    for name in ("x", "y"):
        rows = np.lib.format.open_memmap(tmp_path / f"{name}.npy", "w+", np.float32, (2_000_000, 40))
        rows[::1000] = rng.normal(size=(2000, 40))
        rows.flush()
        del rows
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "x.npy"), str(tmp_path / "y.npy"), solver]
    n, before, peak = map(int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    assert n == 2_000_000
    assert peak - before < 250e6
