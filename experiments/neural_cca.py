"""Figure 4, tables 5 and 6: a network along its training compared with its final self, over all its activations."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

import eigenstream as es
from eigenstream.run import Run
from experiments.common import STYLES, command_line, save, table, write_json, write_page

BATCH, K = 2048, 1024
#: Added to both covariances, relative to their mean eigenvalue.
RIDGE = 1e-4
#: Components that count for a subspace error: where correlations are 0, no subspace is unique.
CLEAR = 0.05


class Architecture(NamedTuple):
    """A network like those of the paper's table 5: 3×3 convolutions, each with 2×2 pooling, and one dense layer."""

    channels: tuple[int, ...]
    strides: tuple[int, ...]
    dense: int
    #: Layers whose activations are taken.
    harvested: tuple[str, ...]
    #: Steps of training, and those at which the network is kept.
    steps: int
    kept: tuple[int, ...]
    #: Passes of the game over the images.
    passes: int
    #: Of the kept networks, those that the game compares; all, if None.
    played: tuple[int, ...] | None = None


#: By the number of activations of two networks together: the paper's two, and one past a million in their manner.
NETWORKS = {
    2_048: Architecture((64, 32), (2, 1), 512, ("conv2", "dense"), 25_000, (0, 100, 1000, 5000, 10_000), 3),
    116_736: Architecture(
        (128, 256, 512), (1, 1, 1), 1024, ("conv1", "conv2", "conv3", "dense"), 25_000, (0, 100, 1000, 5000), 3
    ),
    1_000_448: Architecture(
        (1152, 2304, 3456), (1, 1, 1), 2560, ("conv1", "conv2", "conv3", "dense"), 3_000, (0, 300), 2
    ),
}
#: What two CPU cores train in two minutes.
QUICK = NETWORKS[2_048]._replace(steps=1500, kept=(0, 30, 100, 300, 800), passes=1, played=(100,))


def init(net: Architecture, key: Any) -> dict[str, Any]:
    """Weights after He et al., biases 0."""
    sizes, params, size = (3, *net.channels), {}, 32
    for i, (a, b, stride) in enumerate(zip(sizes, net.channels, net.strides, strict=False), start=1):
        key, now = jax.random.split(key)
        params[f"conv{i}"] = jax.random.normal(now, (3, 3, a, b)) * (2 / (9 * a)) ** 0.5, jnp.zeros(b)
        size //= 2 * stride
    for name, a, b in (("dense", size**2 * net.channels[-1], net.dense), ("out", net.dense, 10)):
        key, now = jax.random.split(key)
        params[name] = jax.random.normal(now, (a, b)) * (2 / a) ** 0.5, jnp.zeros(b)
    return params


def forward(net: Architecture, params: dict[str, Any], images: jax.Array) -> dict[str, jax.Array]:
    """Every layer's activations on images of bytes."""
    x, out = images.astype(jnp.float32) / 127.5 - 1, {}
    for i, stride in enumerate(net.strides, start=1):
        W, b = params[f"conv{i}"]
        x = jax.lax.conv_general_dilated(x, W, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jax.lax.reduce_window(jax.nn.relu(x + b), -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        out[f"conv{i}"] = x
    W, b = params["dense"]
    out["dense"] = jax.nn.relu(x.reshape(len(x), -1) @ W + b)
    W, b = params["out"]
    return {**out, "out": out["dense"] @ W + b}


def train(net: Architecture, images: jax.Array, labels: jax.Array, seed: int = 0) -> dict[int, dict[str, Any]]:
    """The network at its kept steps and at the last."""
    optimizer = optax.adam(optax.cosine_decay_schedule(1e-3, net.steps))
    params = init(net, jax.random.key(seed))
    state = optimizer.init(params)

    def loss(params: Any, x: Any, y: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(forward(net, params, x)["out"], y).mean()

    @partial(jax.jit, donate_argnums=(0, 1), static_argnums=4)
    def several(params: Any, state: Any, key: Any, data: Any, count: int) -> Any:
        def one(carry: Any, key: Any) -> Any:
            params, state = carry
            chosen = jax.random.randint(key, (256,), 0, len(data[0]))
            change, state = optimizer.update(jax.grad(loss)(params, data[0][chosen], data[1][chosen]), state, params)
            return (optax.apply_updates(params, change), state), None

        return jax.lax.scan(one, (params, state), jax.random.split(key, count))[0]

    found, before = {}, 0
    for upto in (*net.kept, net.steps):
        for lo in range(before, upto, 500):
            count = min(500, upto - lo)
            key = jax.random.fold_in(jax.random.key(seed + 1), lo)
            params, state = several(params, state, key, (images, labels), count)
        found[upto], before = jax.tree.map(jnp.copy, params), upto
    return found


def accuracy(net: Architecture, params: Any, images: jax.Array, labels: jax.Array) -> float:
    run = jax.jit(lambda x: forward(net, params, x)["out"].argmax(1))
    guesses = [run(images[lo : lo + 1000]) for lo in range(0, len(images), 1000)]
    return float((jnp.concatenate(guesses) == labels).mean())


class Images:
    """Batches of images that lie on the device, in another order each time."""

    def __init__(self, images: jax.Array, batch: int = BATCH, seed: int = 0):
        self.images, self.batch, self.rng = images, batch, np.random.default_rng(seed)

    def __iter__(self) -> Iterator[jax.Array]:
        order = self.rng.permutation(len(self.images))
        for lo in range(0, len(order) - self.batch + 1, self.batch):
            yield self.images[np.sort(order[lo : lo + self.batch])]


def harvested(net: Architecture, params: Any) -> Any:
    run = jax.jit(lambda params, x: {name: forward(net, params, x)[name] for name in net.harvested})
    return partial(run, params)


class Compared(NamedTuple):
    correlations: np.ndarray
    heldout: np.ndarray
    residuals: np.ndarray
    seconds: float
    message: str
    V: Any


def compare(net: Architecture, a: Any, b: Any, images: Images, k: int, solver: Any, passes: int = 1) -> Compared:
    """Canonical correlations of two networks' activations, and how long they took with their activations."""
    run_a, run_b = harvested(net, a), harvested(net, b)

    class Stream:
        def __iter__(self) -> Iterator[Any]:
            return ((run_a(x), run_b(x)) for x in images)

    start = time.perf_counter()
    result = es.solve(es.problems.cca(ridge=RIDGE), Stream(), k, solver, max_epochs=passes)
    spent = time.perf_counter() - start
    nothing = np.full(k, np.nan)
    heldout = nothing if result.heldout is None else result.heldout
    return Compared(result.eigenvalues, heldout, result.residuals, spent, result.message, result.V)


def against_exact(net: Architecture, a: Any, b: Any, images: Images, k: int, V: Any) -> dict[str, Any]:
    """Exact correlations and, if there are some, the subspace error of ``V`` over those that are clear of 0."""
    run_a, run_b = harvested(net, a), harvested(net, b)
    problem = es.problems.cca(ridge=RIDGE)
    run = Run(problem, k, "exact")
    for x in images:
        run.take((run_a(x), run_b(x)))
    result = run.result()
    if V is None:
        return {"exact": result.eigenvalues}
    C = run.solver.covariance(run.engine.state)
    cut = len(C) // 2
    B = np.zeros_like(C)
    for part in (slice(None, cut), slice(cut, None)):
        B[part, part] = C[part, part] + RIDGE * np.trace(C[part, part]) / cut * np.eye(cut)
    count = int((result.eigenvalues > CLEAR).sum())
    error = es.metrics.subspace_error(V[:, :count], result.V[:, :count], B)
    return {"exact": result.eigenvalues, "clear components": count, "subspace error": error}


def run(net: Architecture, data: dict[str, np.ndarray], k: int = K, batch: int = BATCH) -> dict[str, Any]:
    """Train, then compare every kept network with the last: by the game and, where that can be, exactly."""
    images, labels = jnp.asarray(data["x_train"]), jnp.asarray(data["y_train"].astype(np.int32))
    start = time.perf_counter()
    networks = train(net, images, labels)
    last = networks[net.steps]
    found: dict[str, Any] = {"seconds of training": time.perf_counter() - start, "device": jax.devices()[0].device_kind}
    found["accuracy"] = accuracy(net, last, jnp.asarray(data["x_test"]), jnp.asarray(data["y_test"].astype(np.int32)))
    d = 2 * sum(int(np.prod(x.shape[1:])) for x in harvested(net, last)(images[:2]).values())
    found |= {"d": d, "k": k, "batch": batch, "passes": net.passes, "training steps": net.steps, "steps": {}}
    found["all play"] = es.solvers.Game().players(d, k) == d
    for t in net.kept:
        one: dict[str, Any] = {}
        V = None
        if net.played is None or t in net.played:
            game = compare(net, networks[t], last, Images(images, batch), k, "game", net.passes)
            one = {"correlations": game.correlations, "held out": game.heldout, "residuals": game.residuals}
            one |= {"seconds": game.seconds, "message": game.message}
            V = game.V
        if d < 10_000:
            one |= against_exact(net, networks[t], last, Images(images, batch), k, V)
        found["steps"][str(t)] = one
        print(d, t, {key: one[key] for key in ("seconds", "subspace error", "message") if key in one}, flush=True)
    return found


def draw(found: list[dict[str, Any]], path: Path) -> None:
    figure = Figure(figsize=(4.8 * len(found), 4), layout="constrained")
    for axes, one in zip(figure.subplots(1, len(found), squeeze=False)[0], found, strict=True):
        for i, (t, step) in enumerate(one["steps"].items()):
            kind, curve = curve_of(step)
            x = np.arange(1, len(curve) + 1)
            axes.plot(x, curve, linestyle=STYLES[i], color=f"C{i}", label=f"step {int(t):,}, {kind}")
            if kind == "exact" and "correlations" in step:
                axes.plot(x, step["correlations"], color="black", linewidth=0.6, label=f"step {int(t):,}, game")
        title = f"d = {one['d']:,}, {one['training steps']:,} steps of training"
        axes.set(xlabel="component", ylabel="correlation with the final network", title=title, ylim=(0, 1.02))
        axes.legend(fontsize="small")
    save(figure, path)


def main(out: Path, small: bool) -> None:
    data = es.datasets.cifar10()
    runs = {"quick": QUICK} if small else {f"{d}": net for d, net in NETWORKS.items()}
    for name, net in runs.items():
        write_json(out / f"neural_cca_{name}.json", run(net, data))
    write(out)


def write(out: Path) -> None:
    """The page and the figure, of all runs whose data are there."""
    files = [out / f"neural_cca_{name}.json" for name in ("quick", *NETWORKS)]
    found = [json.loads(file.read_text()) for file in files if file.exists()]
    draw(found, out / "neural_cca")
    rising = all(np.all(np.diff(means(one)) > 0) for one in found)
    errors = [step["subspace error"] for one in found for step in one["steps"].values() if "subspace error" in step]
    rows = []
    for one in found:
        for t, step in one["steps"].items():
            kind, curve = curve_of(step)
            cells = [f"{one['d']:,}", f"{one['training steps']:,}", f"{int(t):,}", kind, float(np.mean(curve))]
            if "correlations" in step:
                cells += [float(np.median(step["residuals"])), f"{step['seconds']:.0f}"]
            rows.append([*cells, f"{step['subspace error']:.6f}" if "subspace error" in step else ""])
            rows[-1] += [""] * (8 - len(rows[-1]))
    header = ["d", "trained for", "step", "correlations", "their mean", "game: residual", "seconds", "subspace error"]
    runs = "; ".join(
        f"d = {one['d']:,} on {one['device']}, trained for {one['training steps']:,} steps, {one['accuracy']:.3f} "
        f"of the test images right, k = {one['k']}, {one['passes']} pass(es) of batches of {one['batch']}"
        + (", all dimensions play" if one["all play"] else "")
        for one in found
    )
    large = [one for one in found if one["d"] > 10_000]
    at_2048 = (
        f"{'Holds' if max(errors) <= 0.002 else 'Does not hold'} at d = 2,048: over components of correlation "
        f"above {CLEAR}, the game's subspace error is at most {max(errors):.6f}. With 1,024 players wanted of "
        "2,048 dimensions the accelerated game plays with all of them, which makes it a running mean of the whole "
        "problem, solved at every move. "
        if errors
        else ""
    )
    write_page(
        out / "neural_cca.md",
        "A network along its training, against its final self (figure 4)",
        "CCA over all activations of a network shows how its representation approaches the final one, at 10³, 10⁵ and "
        "10⁶ dimensions; at d = 2,048 the top 1,024 eigenvectors are found to a subspace error of 0.002.",
        f"{'Holds' if rising else 'Does not hold'} that later networks correlate more with the final one, in every run "
        f"below. {at_2048}"
        + ("" if large else "The two larger networks want a GPU and are not among the runs below: `make reproduce`."),
        f"""
![correlations with the final network, by component](neural_cca.png)

{table(header, rows)}

Runs: {runs}. Correlations are exact where they could be had and else the game's, on rows before they were learned from:
with more units than images, those on the same rows say little. Seconds: of the game with the activations it reads,
compilation included. Residuals, their median, are relative to the largest eigenvalue, in the norm of the game's
preconditioner. Covariances have {RIDGE:g} of their mean eigenvalue added. Convolutions are 3×3 with 2×2
pooling after each,
by which the activations of the first two networks are as many as the paper's table says; the third, past a million, is
ours. Data: `neural_cca_*.json` beside this page; `--small` makes the quick one, of 1,500 steps.
""",
    )


def means(one: dict[str, Any]) -> list[float]:
    return [float(np.nanmean(curve_of(step)[1])) for step in one["steps"].values()]


def curve_of(step: dict[str, Any]) -> tuple[str, np.ndarray]:
    """Correlations by component: exact ones or, where there are none, the game's on rows not learned from."""
    kind = "exact" if "exact" in step else "held out"
    return kind, np.array([np.nan if x is None else x for x in step[kind]], float)


if __name__ == "__main__":
    command_line(main, has_small=True)
