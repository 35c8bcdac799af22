"""Every file format gives the rows of the array it was written from."""

import sys

import h5py
import numpy as np
import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest
import scipy.sparse
import zarr

import eigenstream as es
from eigenstream.streams import open_source

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


def test_files_with_missing_values_are_refused(tmp_path):
    for text in ("1,,3\n4,5,6\n", "NA,2,3\n1,2,3\n", "a,b,c\nNA,NA,NA\n1,2,3\n"):
        (tmp_path / "x.csv").write_text(text)
        with pytest.raises(ValueError, match="neither a header nor a row of numbers"):
            es.streams.open_source(tmp_path / "x.csv")
    lists = pyarrow.array([[1.0, 2.0], None, [5.0, 6.0]], pyarrow.list_(pyarrow.float64(), 2))
    pyarrow.parquet.write_table(pyarrow.table({"row": lists}), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match=r"rows without a list|Expected all lists"):
        es.streams.open_source(tmp_path / "x.parquet")[:3]


@pytest.mark.parametrize("name", ["x.npy", "x.csv"])
def test_a_selection_from_a_file_of_one_array_is_refused(tmp_path, name):
    np.save(tmp_path / "x.npy", np.ones((3, 2)))
    (tmp_path / "x.csv").write_text("a,b\n1,2\n3,4\n")
    with pytest.raises(ValueError, match="holds one array"):
        open_source(f"{tmp_path / name}::a")
