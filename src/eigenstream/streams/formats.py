"""Open files as sources: objects with a ``shape``, a ``dtype`` and row slices that read only those rows."""

from __future__ import annotations

import importlib
import io
import mmap
import tempfile
import threading
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse

#: The byte offset of every STRIDE-th line of a text file is stored.
STRIDE = 4096

READERS = ".npy, .npz, .zarr, .h5, .hdf5, .parquet, .arrow, .feather, .csv, .tsv, .txt or .edges"


def open_source(path: str | Path) -> Any:
    """Open a file for reading by row slices, without loading it.

    Parameters
    ----------
    path : str or Path
        A ``.npy`` file, an ``.npz`` archive (from `numpy.savez` or `scipy.sparse.save_npz`), a ``.zarr`` folder, an
        HDF5 file, a Parquet, Arrow or Feather table of numbers, or text with one row per line. ``"file.h5::name"``
        selects one of several arrays, ``"file.parquet::a,b"`` selects columns.

    Returns
    -------
    source
        An object with ``shape``, ``dtype`` and row slices.

    Examples
    --------
    >>> import tempfile, pathlib, numpy as np, eigenstream as es
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "x.npy"
    >>> np.save(file, np.arange(12.0).reshape(6, 2))
    >>> source = es.streams.open_source(file)
    >>> source.shape, source[1:3].tolist()
    ((6, 2), [[2.0, 3.0], [4.0, 5.0]])
    """
    name, _, inner = str(path).partition("::")
    file = Path(name)
    if not file.exists():
        raise FileNotFoundError(f"{name} does not exist: give the path of a {READERS} file")
    suffix = file.suffix.lower()
    if inner and suffix in (".npy", ".csv", ".tsv", ".txt", ".edges"):
        raise ValueError(f"{path}: a {suffix} file holds one array; :: selects from .npz, .zarr, .h5 or .parquet")
    if suffix == ".npy":
        return _open_npy(file)
    if suffix == ".npz":
        return _open_npz(file, inner)
    if suffix == ".zarr":
        return _open_zarr(file, inner)
    if suffix in (".h5", ".hdf5"):
        return _open_hdf5(file, inner)
    if suffix in (".parquet", ".arrow", ".feather"):
        return Table(file, inner)
    if suffix in (".csv", ".tsv", ".txt", ".edges"):
        return Text(file)
    raise ValueError(f"{name}: no reader for {suffix or 'a file without an ending'}; give {READERS}")


def _check_real(source: Any, name: str) -> Any:
    if np.dtype(source.dtype).kind not in "biufU":
        raise ValueError(f"{name} has dtype {source.dtype}: give an array of real numbers")
    return source


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ValueError(f'reading this file needs {package}: pip install "eigenstream[data]"') from error


def _open_npy(file: Path) -> np.ndarray:
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise ValueError(f"{file} is not an array of numbers that can be mapped ({error})") from error
    return _check_real(array, str(file))


def _open_npz(file: Path, inner: str) -> Any:
    with zipfile.ZipFile(file) as archive:
        members = {m.filename.removesuffix(".npy"): m for m in archive.infolist()}
        names = ("format", "shape", "data", "indices", "indptr")
        if members.keys() >= set(names) and not inner:
            kind, shape, *parts = (_map_member(file, archive, members[name]) for name in names)
            if (layout := kind.item().decode()) != "csr":
                raise ValueError(f"{file} holds a {layout} matrix: save it by rows, save_npz(file, X.tocsr())")
            return scipy.sparse.csr_matrix(tuple(parts), shape=tuple(shape.tolist()), copy=False)
        chosen = _choose(file, sorted(members), inner)
        return _check_real(_map_member(file, archive, members[chosen]), f"{file}::{chosen}")


def _choose(file: Path, names: list[str], inner: str) -> str:
    """The array named ``inner``; if no name is given, the only array."""
    found = [name for name in names if name == inner or not inner]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(names) or "no array"
    raise ValueError(f"{file} holds {listed}: name one, {file}::{names[0] if names else 'name'}")


def _map_member(file: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    """Map one array of an archive: in the archive if it is uncompressed, else in a decompressed temporary file."""
    with archive.open(member) as stream:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(stream)
        if dtype.hasobject:
            raise ValueError(f"{file}::{member.filename} holds Python objects: give an array of real numbers")
        start = stream.tell()
        order: Any = "F" if fortran else "C"
        if 0 in shape or shape == ():
            return np.frombuffer(stream.read(), dtype).reshape(shape, order=order)
        if member.compress_type == zipfile.ZIP_STORED:
            return np.memmap(file, dtype, "r", _data_offset(file, member) + start, shape, order)
        with tempfile.TemporaryFile() as unpacked:
            while piece := stream.read(1 << 24):
                unpacked.write(piece)
            unpacked.flush()
            return np.memmap(unpacked, dtype, "r", 0, shape, order)


def _data_offset(file: Path, member: zipfile.ZipInfo) -> int:
    with file.open("rb") as raw:
        raw.seek(member.header_offset + 26)
        lengths = raw.read(4)
    return member.header_offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")


def _open_zarr(file: Path, inner: str) -> Any:
    node = _import("zarr").open(str(file), mode="r", path=inner or None)
    if hasattr(node, "dtype"):
        return _check_real(node, str(file))
    name = _choose(file, sorted(key for key, _ in node.arrays()), inner)
    return _check_real(node[name], f"{file}::{name}")


def _open_hdf5(file: Path, inner: str) -> Any:
    h5py = _import("h5py")
    archive = h5py.File(file, "r")
    names: list[str] = []
    archive.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
    name = _choose(file, sorted(names), inner.strip("/"))
    return _check_real(archive[name], f"{file}::{name}")


class Table:
    """Numeric columns of a Parquet, Arrow or Feather file. One decoded row group is cached."""

    def __init__(self, file: Path, columns: str = ""):
        self.columns: list[str] = []
        if file.suffix.lower() == ".parquet":
            self._file = _import("pyarrow.parquet").ParquetFile(file, memory_map=True)
            schema, metadata = self._file.schema_arrow, self._file.metadata
            sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
            self._group = lambda i: self._file.read_row_group(i, columns=self.columns)
        else:
            self._file = _import("pyarrow.ipc").open_file(_import("pyarrow").memory_map(str(file)))
            schema = self._file.schema
            sizes = [self._file.get_batch(i).num_rows for i in range(self._file.num_record_batches)]
            self._group = lambda i: self._file.get_batch(i).select(self.columns)
        self.columns = columns.split(",") if columns else list(schema.names)
        missing = [name for name in self.columns if name not in schema.names]
        if missing:
            raise ValueError(f"{file} has no column {missing[0]!r}: it has {', '.join(schema.names)}")
        types, width = [schema.field(name).type for name in self.columns], len(self.columns)
        self._is_list = width == 1 and getattr(types[0], "list_size", 0) > 0
        if self._is_list:
            types, width = [types[0].value_type], types[0].list_size
        for name, kind in zip(self.columns, types, strict=True):
            if not _is_number(kind):
                raise ValueError(f"{file}: column {name!r} does not hold numbers; select columns, {file}::a,b")
        self.shape, self.dtype = (sum(sizes), width), np.result_type(*(kind.to_pandas_dtype() for kind in types))
        self._bounds = np.cumsum([0, *sizes])
        self._cached: tuple[int, np.ndarray] | None = None
        # Arrow's readers are not thread-safe.
        self._lock = threading.Lock()

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop, _ = rows.indices(self.shape[0])
        groups = range(np.searchsorted(self._bounds, start, "right") - 1, np.searchsorted(self._bounds, stop, "left"))
        with self._lock:
            pieces = [self._decoded(i)[max(start - self._bounds[i], 0) : stop - self._bounds[i]] for i in groups]
        return np.concatenate(pieces) if len(pieces) != 1 else pieces[0]

    def _decoded(self, i: int) -> np.ndarray:
        if self._cached is None or self._cached[0] != i:
            # Freed before the next group is decoded.
            self._cached = None
            columns = list(map(self._group(i).column, self.columns))
            columns = [column.combine_chunks() if hasattr(column, "chunks") else column for column in columns]
            if self._is_list:
                if columns[0].null_count:
                    raise ValueError(f"column {self.columns[0]!r} has rows without a list: drop or fill them")
                matrix = columns[0].flatten().to_numpy(zero_copy_only=False).reshape(-1, self.shape[1])
            else:
                matrix = np.column_stack([column.to_numpy(zero_copy_only=False) for column in columns])
            # Arrow returns an integer column with nulls as floats with NaN. Keep them, so that the check for NaN fails.
            self._cached = (i, matrix.astype(np.result_type(self.dtype, matrix.dtype), copy=False))
        return self._cached[1]


def _is_number(kind: Any) -> bool:
    types = _import("pyarrow.types")
    return types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)


def _is_float(item: str) -> bool:
    try:
        float(item)
    except ValueError:
        return False
    return True


class Text:
    """Lines of numbers separated by spaces, tabs, commas or semicolons, after an optional header or comments."""

    def __init__(self, file: Path):
        self.file = file
        with file.open("rb") as raw:
            data = mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ) if file.stat().st_size else b""
            start = self._first_row(raw)
        self._offsets, n, position = [start], 0, start
        # One pass counts the lines and stores the offset of every STRIDE-th.
        while position < len(data):
            end = data.find(b"\n", position)
            position = len(data) if end < 0 else end + 1
            n += 1
            if n % STRIDE == 0:
                self._offsets.append(position)
        self._offsets.append(len(data))
        self.dtype = np.dtype(np.float64)
        self.shape = (n, self._parsed(0).shape[1])

    def _first_row(self, raw: Any) -> int:
        header = False
        while line := raw.readline():
            text = line.decode(errors="replace").strip()
            self.delimiter = next((mark for mark in ",;\t" if mark in text), None)
            if not text or text[0] in "#%":
                continue
            numbers = [_is_float(item) for item in text.split(self.delimiter)]
            if all(numbers):
                return raw.tell() - len(line)
            if header or any(numbers):
                raise ValueError(f"{self.file}: {text[:60]!r} is neither a header nor a row of numbers; fill its gaps")
            header = True
        raise ValueError(f"{self.file} holds no row of numbers: give lines such as '0.5 1.25', after a header if any")

    def _parsed(self, i: int) -> np.ndarray:
        with self.file.open("rb") as raw:
            raw.seek(self._offsets[i])
            piece = raw.read(self._offsets[i + 1] - self._offsets[i])
        try:
            return np.loadtxt(io.BytesIO(piece), delimiter=self.delimiter, ndmin=2)
        except ValueError as error:
            raise ValueError(f"{self.file}: lines after number {i * STRIDE + 1}: {error}") from error

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop, _ = rows.indices(self.shape[0])
        if stop <= start:
            return np.zeros((0, self.shape[1]))
        first = start // STRIDE
        lines = np.concatenate([self._parsed(i) for i in range(first, -(-stop // STRIDE))])
        if len(lines) != min(-(-stop // STRIDE) * STRIDE, self.shape[0]) - first * STRIDE:
            raise ValueError(f"{self.file} has empty or commented lines among its rows: remove them")
        return lines[start - first * STRIDE : stop - first * STRIDE]
