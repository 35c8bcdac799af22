"""The leading eigenvectors of ``A v = λ B v`` from a stream of minibatches."""

from eigenstream import datasets, distributed, metrics, neural, problems, solvers, streams
from eigenstream.estimators import (
    CCA,
    ICA,
    LDA,
    PCA,
    PLS,
    MultiviewCCA,
    PermutationTest,
    SpectralClustering,
    SpectralEmbedding,
    load,
    merge,
    permutation_test,
)
from eigenstream.problems.quotients import rayleigh_quotients
from eigenstream.run import solve
from eigenstream.run.result import Result
from eigenstream.solvers.eigh import eigh

__all__ = [
    "CCA",
    "ICA",
    "LDA",
    "PCA",
    "PLS",
    "MultiviewCCA",
    "PermutationTest",
    "Result",
    "SpectralClustering",
    "SpectralEmbedding",
    "datasets",
    "distributed",
    "eigh",
    "load",
    "merge",
    "metrics",
    "neural",
    "permutation_test",
    "problems",
    "rayleigh_quotients",
    "solve",
    "solvers",
    "streams",
]
__version__ = "0.1.0"
