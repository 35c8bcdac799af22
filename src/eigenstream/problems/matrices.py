"""Problems without data: explicit matrices and matrix-vector products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
import scipy.sparse.linalg
from jax.experimental import sparse as jsparse

from eigenstream.core import players
from eigenstream.core.types import Tree
from eigenstream.problems.base import Problem, Products
from eigenstream.problems.statistics import Statistics


class Operands(NamedTuple):
    """``A`` and ``B`` on the host; a ``B`` of None is the identity."""

    A: Any
    B: Any = None


@jax.tree_util.register_static
@dataclass(frozen=True)
class Matvec:
    """A JAX function of one vector, used like a square matrix of ``size`` rows."""

    function: Callable[[Any], Any]
    size: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.size, self.size

    @property
    def dtype(self) -> Any:
        return jnp.zeros(()).dtype

    def __matmul__(self, x: Any) -> Any:
        return jax.vmap(self.function, in_axes=1, out_axes=1)(x)


class _Given:
    """The operands as given, for solvers on the host. Compared by identity, so that JAX can hash the problem."""

    def __init__(self, operands: Operands):
        self.operands = operands


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Matrices(Problem):
    """Given ``A`` and ``B``: the products of every step are exact."""

    A: Any
    B: Any
    given: _Given = field(metadata={"static": True})
    ridge: float = field(default=0.0, metadata={"static": True})
    noiseless = True
    has_rows = False

    @property
    def orthonormal(self) -> bool:  # type: ignore[override]
        return self.B is None

    def accept(self, batch: Tree) -> Tree:
        if batch is not None:
            raise ValueError("explicit matrices take no data: give batches=None and max_steps")

    def template(self, batch: Tree) -> Tree:
        return jax.ShapeDtypeStruct((self.A.shape[0],), jax.dtypes.canonicalize_dtype(self.A.dtype))

    def products(self, x: Tree, V: Tree) -> Products:
        AV = (self.A @ V.T).T
        BV = V if self.B is None else (self.B @ V.T).T
        mean = 1.0 if self.B is None or not self.ridge else self.diagonal((), None).mean()
        return Products(AV, players.ridged(V, BV, self.ridge, mean))

    def diagonal(self, memory: Tree, batch: Tree) -> jax.Array:
        if self.B is None:
            return super().diagonal(memory, batch)
        if isinstance(self.B, jsparse.BCOO):
            rows, columns = self.B.indices[:, 0], self.B.indices[:, 1]
            return jnp.zeros(self.B.shape[0], self.B.dtype).at[rows].add(jnp.where(rows == columns, self.B.data, 0))
        if isinstance(self.B, Matvec):
            return jnp.ones(self.B.shape[0], self.B.dtype)
        return jnp.diag(self.B)

    def estimate(self, memory: Tree, batch: Tree, V: Tree, independent: bool) -> list[tuple[Products, Products]]:
        exact = self.products(None, V)
        return [(exact, exact)]

    def fewest_rows(self, independent: bool) -> int:
        return 0

    def statistics_bytes(self, d: int, shards: int = 1) -> float:
        return 0

    def statistics(self, batch: Tree, repeatable: bool) -> MatrixStatistics:
        return MatrixStatistics(self, self.template(batch))


class MatrixStatistics(Statistics):
    """There is nothing to sum: the operands are given."""

    def add(self, batch: Tree) -> MatrixStatistics:
        return self

    def operands(self) -> Operands:
        A, B = self.problem.given.operands
        if not self.problem.ridge:
            return Operands(A, B)
        d = A.shape[0]
        one = scipy.sparse.eye_array(d, format="csr") if B is None or scipy.sparse.issparse(B) else np.eye(d)
        B = one if B is None else B
        return Operands(A, players.ridged(one, B, self.problem.ridge, float(B.diagonal().mean())))


def matrices(A: Any, B: Any = None, *, size: int | None = None, ridge: float = 0.0) -> Matrices:
    """``A v = λ B v`` for given matrices: dense, sparse, linear operators or functions.

    Parameters
    ----------
    A, B : array, scipy.sparse matrix, JAX BCOO, scipy LinearOperator or JAX function of one vector
        Symmetric; ``B`` positive definite. Default of ``B``: the identity.
    size : int
        The dimension, if ``A`` is a function.
    ridge : float
        Added to ``B``, relative to its mean eigenvalue; not for linear operators or functions.

    Examples
    --------
    >>> import numpy as np, eigenstream as es
    >>> problem = es.problems.matrices(np.diag([3.0, 2.0, 1.0]))
    >>> es.solve(problem, None, k=2, solver="exact").eigenvalues.tolist()
    [3.0, 2.0]
    """
    operands = check_operands(A, B, size)
    if ridge and any(isinstance(M, Matvec | scipy.sparse.linalg.LinearOperator) for M in operands):
        raise ValueError("ridge needs the diagonal of B, which a linear operator hides: add it inside the operator")
    return Matrices(to_jax(operands.A), to_jax(operands.B), _Given(operands), ridge)


def check_operands(A: Any, B: Any, size: int | None) -> Operands:
    """Check that both operands are square, real, of one size and, if their entries are known, symmetric."""
    A, B = _check_operand(A, "A", size), None if B is None else _check_operand(B, "B", size)
    if B is not None and A.shape != B.shape:
        raise ValueError(f"A has shape {A.shape} and B {B.shape}: they must be square and of one size")
    return Operands(A, B)


def _check_operand(M: Any, name: str, size: int | None) -> Any:
    if isinstance(M, scipy.sparse.linalg.LinearOperator | Matvec):
        pass
    elif callable(M) and not hasattr(M, "shape"):
        if size is None:
            raise ValueError(f"size is needed if {name} is a function: give its dimension")
        return Matvec(M, size)
    elif scipy.sparse.issparse(M):
        M = M.tocsr()
    elif not isinstance(M, jsparse.BCOO | jax.Array):
        M = np.asarray(M)
    if len(M.shape) != 2 or M.shape[0] != M.shape[1]:
        raise ValueError(f"{name} has shape {M.shape}: give a square matrix")
    kind = np.dtype(M.dtype).kind if M.dtype is not None else "f"
    if kind not in "biuf":
        raise ValueError(f"{name} has dtype {M.dtype}: give real numbers")
    if kind in "biu" and hasattr(M, "astype"):
        M = M.astype(np.float64)
    if isinstance(M, np.ndarray) or scipy.sparse.issparse(M):
        values = M.data if scipy.sparse.issparse(M) else M
        if not np.isfinite(values).all():
            raise ValueError(f"{name} holds NaN or infinity")
        gap, scale = abs(M - M.T).max(), abs(M).max()
        if gap > 1e-6 * scale:
            raise ValueError(
                f"{name} is not symmetric (|{name} - {name}ᵀ| reaches {gap:.2g}): give ({name} + {name}.T)/2"
            )
    return M


def to_jax(M: Any) -> Any:
    if M is None or isinstance(M, jsparse.BCOO | jax.Array | Matvec):
        return M
    if scipy.sparse.issparse(M):
        return jsparse.BCOO.from_scipy_sparse(M.tocoo())
    if isinstance(M, scipy.sparse.linalg.LinearOperator):
        return Matvec(_callback(M), M.shape[0])
    return jnp.asarray(M)


def _callback(operator: Any) -> Callable[[Any], Any]:
    """A JAX function that calls a SciPy operator on the host."""

    def host(x: np.ndarray) -> np.ndarray:
        return np.asarray(operator.matvec(np.asarray(x, np.float64)), x.dtype)

    def function(x: Any) -> Any:
        return jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential")

    return function
