"""Read arrays and files in batches.

A source is any object with a ``shape`` and row slices: a NumPy array or memory map, a SciPy sparse matrix, a Zarr
array, an HDF5 dataset, or a file opened by `open_source`. `batches` cuts sources into batches.
"""

from eigenstream.streams.batching import Batches, batches, edges
from eigenstream.streams.formats import open_source
from eigenstream.streams.reading_ahead import prefetch

__all__ = ["Batches", "batches", "edges", "open_source", "prefetch"]
