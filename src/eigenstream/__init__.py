"""The leading eigenvectors of ``A v = λ B v`` from a stream of minibatches."""

from eigenstream import datasets, metrics, problems, solvers
from eigenstream.eigenpairs import rayleigh_quotients
from eigenstream.generalized import eigh
from eigenstream.run import Result, solve

__all__ = ["Result", "datasets", "eigh", "metrics", "problems", "rayleigh_quotients", "solve", "solvers"]
__version__ = "0.1.0"
