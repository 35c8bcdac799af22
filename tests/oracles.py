"""Answers to compare with, in plain NumPy.

Dense A and B of every problem from their definitions, matrices of prescribed spectra, and the paper's algorithms as
printed.
"""

import jax
import numpy as np
import scipy.linalg

import eigenstream as es
from eigenstream.core import host_batches, players


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


def assert_same_up_to_sign(found, wanted, atol):
    signs = np.sign((found * wanted).sum(0))
    np.testing.assert_allclose(found * signs, wanted, atol=atol)


def drawn(problem, batch, k=3, seed=1):
    """Random players for rows like these."""
    return players.normal(jax.random.key(seed), k, problem.template(problem.accept(batch)))


def batch_products(problem, batch, V):
    """A V and B V of one batch, as a solver computes them."""
    batch = host_batches.to_device(problem.accept(batch))
    memory = problem.observe(problem.start(batch), batch)
    [(products, _)] = problem.estimate(memory, batch, V, independent=False)
    return products


def assert_products(found, V, A, B, tol=1e-10):
    V = players.to_matrix(V)
    scale = max(np.abs(A).max(), np.abs(B).max())
    np.testing.assert_allclose(players.to_matrix(found.AV), A @ V, atol=tol * scale)
    np.testing.assert_allclose(players.to_matrix(found.BV), B @ V, atol=tol * scale)


def algorithm_2(V, Bv, pairs, eta, gamma, rho):
    """One step of Algorithm 2 as printed, player by player and machine by machine."""
    k, new_V, new_Bv = len(V), np.zeros_like(V), np.zeros_like(V)
    for i in range(k):
        nabla, nabla_Bv = 0, 0
        for A, B in pairs:
            v = V[i]
            rewards = (v @ B @ v) * (A @ v) - (v @ A @ v) * (B @ v)
            penalties = np.zeros_like(v)
            for j in range(i):
                root = np.sqrt(max(V[j] @ Bv[j], rho))
                y, By = V[j] / root, Bv[j] / root
                penalties += (v @ A @ y) * ((v @ B @ v) * By - (v @ By) * (B @ v))
            nabla = nabla + (rewards - penalties) / len(pairs)
            nabla_Bv = nabla_Bv + (B @ v - Bv[i]) / len(pairs)
        moved = V[i] + eta * nabla
        new_V[i] = moved / np.linalg.norm(moved)
        new_Bv[i] = Bv[i] + gamma * nabla_Bv
    return new_V, new_Bv


def algorithm_3(V, Bv, z, pairs, eta, gamma, rho, nu):
    """One step of Algorithm 3 as printed."""
    sigma = 1 / (1 + np.exp(-z))
    norms = np.exp(np.log(rho) + (np.log(nu) - np.log(rho)) * sigma)
    scaled = Bv.copy()
    new_V, new_Bv, new_z = np.zeros_like(V), np.zeros_like(V), z.copy()
    for i in range(len(V)):
        nabla, nabla_Bv, v = 0, 0, V[i]
        for A, B in pairs:
            penalties = np.zeros_like(v)
            for j in range(i):
                y, By = V[j] / np.sqrt(norms[j]), scaled[j] / np.sqrt(norms[j])
                penalties += (v @ A @ y) * ((v @ B @ v) * By - (v @ By) * (B @ v))
            nabla = nabla + ((v @ B @ v) * (A @ v) - (v @ A @ v) * (B @ v) - penalties) / len(pairs)
            nabla_Bv = nabla_Bv + (B @ v - Bv[i]) / len(pairs)
        slope = norms[i] * (np.log(nu) - np.log(rho)) * sigma[i] * (1 - sigma[i])
        new_z[i] = z[i] + gamma * (v @ Bv[i] - norms[i]) * slope
        moved = v + eta * nabla
        new_V[i], new_Bv[i] = moved / np.linalg.norm(moved), Bv[i] + gamma * nabla_Bv
    return new_V, new_Bv, new_z
