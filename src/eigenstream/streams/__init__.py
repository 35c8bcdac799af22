"""From arrays and files to batches.

A source is anything with a ``shape`` whose rows can be sliced: a NumPy array or memory map, a SciPy sparse matrix, a
Zarr array, an HDF5 dataset, or what `open_source` makes of a file. `batches` cuts sources into batches.
"""

from eigenstream.streams.batching import Batches, batches, edges, prefetch
from eigenstream.streams.formats import open_source

__all__ = ["Batches", "batches", "edges", "open_source", "prefetch"]
