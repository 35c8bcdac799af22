"""Dense A and B of every problem from their definitions, in plain NumPy, and matrices of prescribed spectra."""

import numpy as np
import scipy.linalg

import eigenstream as es


def covariance(X, center=True):
    X = np.asarray(X, np.float64)
    return np.cov(X.T, ddof=1) if center else X.T @ X / len(X)


def ridged(C, ridge):
    return C + ridge * np.trace(C) / len(C) * np.eye(len(C))


def pca(X, center=True, ridge=0.0):
    return covariance(X, center), (1 + ridge) * np.eye(X.shape[1])


def views(blocks, center=True, ridge=0.0):
    C = covariance(np.hstack(blocks), center)
    B, start = np.zeros_like(C), 0
    for X in blocks:
        s = slice(start, start := start + X.shape[1])
        B[s, s] = C[s, s]
    A = C - B
    start = 0
    for X in blocks:
        s = slice(start, start := start + X.shape[1])
        B[s, s] = ridged(B[s, s], ridge)
    return A, B


def pls(X, Y, center=True, ridge=0.0):
    A, _ = views([X, Y], center)
    return A, (1 + ridge) * np.eye(len(A))


def lda(X, y, ridge=0.0):
    grand, n, d = X.mean(0), len(X), X.shape[1]
    A, B = np.zeros((d, d)), np.zeros((d, d))
    for c in np.unique(y):
        members = X[y == c]
        mean = members.mean(0)
        A += len(members) / n * np.outer(mean - grand, mean - grand)
        B += (members - mean).T @ (members - mean) / n
    return A, ridged(B, ridge)


def ica(X, ridge=0.0):
    X = X - X.mean(0)
    B = X.T @ X / len(X)
    fourth = np.einsum("r,ri,rj->ij", (X**2).sum(1), X, X) / len(X)
    return fourth - np.trace(B) * B - 2 * B @ B, ridged(B, ridge)


def laplacian(n, i, j, w, normalized=True, ridge=0.0):
    L = np.zeros((n, n))
    for a, b, weight in zip(i, j, w, strict=True):
        e = np.zeros(n)
        e[a] += 1
        e[b] -= 1
        L += weight * np.outer(e, e)
    return L, ridged(np.diag(np.diag(L)) if normalized else np.eye(n), ridge)


SPECTRA = ("stepped", "decaying", "clustered", "flat")


def spectrum(kind, d, k):
    lam = np.zeros(d)
    if kind == "stepped":
        lam[:k] = 1 - 0.25 * np.arange(k)
        lam[k:] = 0.05
    elif kind == "decaying":
        lam[:] = 0.6 ** np.arange(d)
    elif kind == "clustered":
        lam[:k] = 1 - 1e-4 * np.arange(k)
        lam[k:] = np.linspace(0.3, 0.01, d - k) if d > k else ()
    else:
        lam[:k] = 1
        lam[k:] = 0.2
    return lam


def pencil(lam, condition=3.0, seed=0, identity=False):
    """A and B whose generalized eigenvalues are ``lam``, B of the given condition."""
    rng = np.random.default_rng(seed)
    d = len(lam)
    W = np.linalg.qr(rng.normal(size=(d, d)))[0]
    if identity:
        return (W * lam) @ W.T, None
    Q = np.linalg.qr(rng.normal(size=(d, d)))[0]
    root = (Q * np.sqrt(np.geomspace(1, condition, d) / np.sqrt(condition))) @ Q.T
    T = root @ W
    A, B = (T * lam) @ T.T, root @ root
    return (A + A.T) / 2, (B + B.T) / 2


def leading(A, B, k, which="largest"):
    lam, V = scipy.linalg.eigh(A, B)
    order = np.argsort(-lam if which == "largest" else lam)[:k]
    return lam[order], V[:, order]


def same_space(V, V_true, B=None):
    return es.metrics.subspace_error(V, V_true, B)
