"""Figure 4, tables 5 and 6: a network during its training compared with its final state, over all activations."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

import eigenstream as es
from eigenstream.core import players, views
from eigenstream.run.loop import Run
from experiments.common import STYLES, command_line, save, table, write_json, write_page
from experiments.networks import NETWORKS, Architecture, Images, Pair, accuracy, harvest, train

BATCH, K = 2048, 1024
#: Added to both covariances, relative to their mean eigenvalue.
RIDGE = 1e-4
#: Components with a larger correlation count for a subspace error: for correlations of 0 no subspace is unique.
CLEAR = 0.05
#: Leading components that are reported separately: they converge first.
FIRST = 10
#: Milliseconds of the paper's steps, activations included, on eight TPU devices.
PAPER = {2_048: 4.7, 116_736: 30.2}


class Plan(NamedTuple):
    """How the kept states of a network are compared with its last state."""

    net: Architecture
    #: Components of the game, passes over the images, and images in a batch.
    k: int
    passes: int
    batch: int = BATCH
    #: Steps of Algorithm 2 with `K` players, on the second of the kept states, and its step size.
    steps: int = 0
    rate: float = 1e-4
    #: The states that the game compares; None for all.
    played: tuple[int, ...] | None = None
    #: Precision of the game's products.
    precision: str | None = None


#: With a million dimensions about 256 components of the game fit on one GPU: a player has 13 vectors of that length.
PLANS = {
    "2048": Plan(NETWORKS[2_048], K, 3, steps=5000, rate=1e-3, precision="float32"),
    "116736": Plan(NETWORKS[116_736], K, 3, steps=1500),
    "1000448": Plan(NETWORKS[1_000_448], 256, 2, batch=1024, steps=100),
}
#: A few minutes on two CPU cores.
QUICK = Plan(NETWORKS[2_048]._replace(steps=800, kept=(0, 30, 100, 300)), K, 1, played=(100,))


def game(plan: Plan, pair: Pair) -> tuple[dict[str, Any], Any]:
    """Correlations of the accelerated game, its seconds including the activations, and its directions."""
    start = time.perf_counter()
    problem, options = es.problems.cca(ridge=RIDGE), {"max_epochs": plan.passes, "precision": plan.precision}
    result = es.solve(problem, pair, plan.k, es.solvers.Game(rank=384), **options)
    spent = time.perf_counter() - start
    heldout = np.full(plan.k, np.nan) if result.heldout is None else result.heldout
    found = {"correlations": result.eigenvalues, "held out": heldout}
    found["residuals"] = np.asarray(result.state.preconditioned_residuals)
    return found | {"seconds": spent, "shortfall": result.shortfall, "message": result.message}, result.eigenvectors


def algorithm_two(pair: Pair, steps: int, base: float, k: int) -> tuple[dict[str, Any], Any]:
    """Algorithm 2 with Adam and the paper's schedule, shortened: the time of its steps, and its directions."""
    rate = es.solvers.warmup_harmonic(base=base, final=base / 100, warmup=max(1, steps // 20), total=steps)
    solver = es.solvers.Paper(optimizer=optax.adam, learning_rate=rate, averaging=0.01, independent=False)
    run = Run(es.problems.cca(ridge=RIDGE), k, solver)

    def step(batch: Any) -> None:
        run.take(batch)
        jax.block_until_ready(run.engine.state)

    start, times = time.perf_counter(), []
    while run.steps < steps:
        times += timed(pair, step, steps - run.steps)
    spent = time.perf_counter() - start
    result = run.result()
    found = {"steps": steps, "k": k, "rate": base, "seconds": spent, "message": result.message}
    found["diverged"] = run.engine.failed
    found |= {"ms of a step": 1e3 * float(np.median(times))}
    found |= {"ms of its activations": 1e3 * float(np.median(timed(pair, jax.block_until_ready)))}
    return found, result.eigenvectors


def timed(pair: Pair, f: Any, most: int | None = None) -> list[float]:
    """Seconds of ``f`` on each batch, including the time to make the batch."""
    times, start = [], time.perf_counter()
    for batch in itertools.islice(pair, most):
        f(batch)
        times.append(time.perf_counter() - start)
        start = time.perf_counter()
    return times


def on_images(pair: Pair, V: Any) -> np.ndarray:
    """The correlation of each pair of directions on all images."""
    V = jax.tree.map(jnp.asarray, V)
    scores = [[np.asarray(_scores(x, v), np.float64) for x, v in zip(batch, V, strict=True)] for batch in pair]
    x, y = (np.concatenate([both[i] for both in scores], axis=1) for i in range(2))
    x, y = (z - z.mean(1, keepdims=True) for z in (x, y))
    lengths = np.sqrt((x**2).sum(1) * (y**2).sum(1))
    return (x * y).sum(1) / np.where(lengths > 0, lengths, 1)


@jax.jit
def _scores(x: Any, V: Any) -> jax.Array:
    return views.project(x, V)


class Truth(NamedTuple):
    """Exact correlations, the directions as columns, and ``B``."""

    correlations: np.ndarray
    V: np.ndarray
    B: np.ndarray

    @classmethod
    def of(cls, pair: Pair, k: int) -> Truth:
        problem = es.problems.cca(ridge=RIDGE)
        run = Run(problem, k, "exact")
        for batch in pair:
            # In float32, variances as small as the ridge would be lost to rounding.
            run.take(jax.tree.map(lambda x: np.asarray(x, np.float64), batch))
        result, state = run.result(), run.engine.state
        # B by the problem's own products, evaluated on its sums.
        _, B = problem.products(views.read(state.statistics.operands()), players.identity(state.template))
        return cls(result.eigenvalues, result.V, players.to_matrix(B))

    def clear(self) -> int:
        """The number of components with a correlation above CLEAR."""
        return int((self.correlations > CLEAR).sum())

    def error(self, V: Any) -> float:
        """The subspace error over these components."""
        count = self.clear()
        return es.metrics.subspace_error(players.to_matrix(V)[:, :count], self.V[:, :count], self.B)


def run(plan: Plan, data: dict[str, np.ndarray], file: Path, k: int = K) -> dict[str, Any]:
    """Train, then compare every kept state with the last: by the game and, if it fits in memory, exactly.

    The file is written after each comparison.
    """
    net = plan.net
    images, tests = jnp.asarray(data["x_train"]), jnp.asarray(data["x_test"])
    labels, test_labels = (jnp.asarray(data[name].astype(np.int32)) for name in ("y_train", "y_test"))
    start = time.perf_counter()
    networks = jax.block_until_ready(train(net, images, labels))
    last = networks[net.steps]
    found: dict[str, Any] = {"seconds of training": time.perf_counter() - start, "device": jax.devices()[0].device_kind}
    found |= {"accuracy": accuracy(net, last, tests, test_labels), "images": len(images) // plan.batch * plan.batch}
    print({key: found[key] for key in ("seconds of training", "accuracy")}, flush=True)
    d = 2 * sum(x[0].size for x in harvest(net, last, images[:1]).values())
    found |= {"d": d, "k": plan.k, "batch": plan.batch, "passes": plan.passes, "training steps": net.steps, "steps": {}}
    found["all play"] = es.solvers.Game().players(d, plan.k) == d
    for t in net.kept:
        both = net, networks[t], last
        learned, tested = (Pair(*both, Images(x, size)) for x, size in ((images, plan.batch), (tests, 500)))
        one: dict[str, Any] = {}
        truth = Truth.of(learned, plan.k) if d < 10_000 else None
        if truth is not None:
            one |= {"exact": truth.correlations, "clear components": truth.clear()}
        if plan.played is None or t in plan.played:
            played, V = game(plan, learned)
            one |= played | {"on test images": on_images(tested, V)}
            one |= {} if truth is None else {"subspace error": truth.error(V)}
        found["steps"][str(t)] = one
        write_json(file, found)
        print(d, t, {key: one[key] for key in ("seconds", "subspace error", "message") if key in one}, flush=True)
        if plan.steps and t == net.kept[1]:
            stepped, V = algorithm_two(Pair(*both, Images(images, BATCH)), plan.steps, plan.rate, k)
            stepped |= {"on test images": on_images(tested, V)}
            stepped |= {} if truth is None else {"subspace error": truth.error(V)}
            found["Algorithm 2"] = stepped
            print({key: value for key, value in stepped.items() if np.ndim(value) == 0}, flush=True)
            write_json(file, found)
    return found


def draw(found: list[dict[str, Any]], path: Path) -> None:
    figure = Figure(figsize=(4.8 * len(found), 4), layout="constrained")
    for axes, one in zip(figure.subplots(1, len(found), squeeze=False)[0], found, strict=True):
        games = []
        for i, (t, step) in enumerate(one["steps"].items()):
            kind, curve = curve_of(step)
            x = np.arange(1, len(curve) + 1)
            axes.plot(x, curve, linestyle=STYLES[i], color=f"C{i}", label=f"step {int(t):,}, {kind}")
            if kind == "exact" and "correlations" in step:
                games += axes.plot(x, step["correlations"], color="black", linewidth=0.6)
        if games:
            games[0].set_label("the game")
        title = f"d = {one['d']:,}, {one['training steps']:,} steps of training"
        least = min(np.nanmin(curve_of(step)[1]) for step in one["steps"].values())
        # Zoom in on curves that are all near 1.
        low, high = (0, 1.02) if least < 0.9 else (1.2 * least - 0.2, 1)
        axes.set(xlabel="component", ylabel="correlation with the final network", title=title, ylim=(low, high))
        axes.legend(fontsize="small", loc="lower left")
    save(figure, path)


def main(out: Path, small: bool) -> None:
    data = es.datasets.cifar10()
    for name, plan in ({"quick": QUICK} if small else PLANS).items():
        run(plan, data, out / f"neural_cca_{name}.json")
        write(out)


def write(out: Path) -> None:
    """Write the page and the figure from the data of all runs on disk."""
    files = {name: out / f"neural_cca_{name}.json" for name in ("quick", *PLANS)}
    found = [json.loads(file.read_text()) for file in files.values() if file.exists()]
    draw(found, out / "neural_cca")
    runs = "; ".join(
        f"d = {one['d']:,} on {one['device']}, trained for {one['training steps']:,} steps, test accuracy "
        f"{one['accuracy']:.3f}, k = {one['k']}, {one['passes']} pass(es) over {one['images']:,} images in batches "
        f"of {one['batch']}" + (", a player for every dimension" if one["all play"] else "")
        for one in found
    )
    missing = [f"{int(name):,}" for name in PLANS if not files[name].exists()]
    left_out = f"Not among the runs below: d = {', '.join(missing)}." if missing else ""
    header = ["d", "trained for", "step", "correlations", "their mean", "game: residual", "seconds", "subspace error"]
    write_page(
        out / "neural_cca.md",
        "A network during its training, against its final state (figure 4)",
        "CCA over all activations of a network shows how its representation approaches the final one, at 10³, 10⁵ and "
        "10⁶ dimensions; at d = 2,048 the top 1,024 eigenvectors are found to a subspace error of 0.002, by 10⁷ steps "
        "of 4.7 ms on eight TPU devices.",
        f"{verdict_on_training(found)} {verdict_at_2048(found)} {left_out}",
        f"""
![correlations with the final network, by component](neural_cca.png)

{table(header, [row for one in found for row in rows_of(one)])}

Runs: {runs}.

Exact correlations are computed in double precision from the same images. The others are those of the game's directions
on the 10,000 test images, because with more units than images correlations on the training images say little;
directions that have not converged correlate less. Seconds: the game with its activations and compilation, on the
device; the first comparison of a run compiles most programs. Residual: the median preconditioned residual, relative to
the largest eigenvalue. Subspace errors are over the components with an exact correlation above {CLEAR}. The ridge is
{RIDGE:g} of the mean eigenvalue of each covariance. With 1,024 components of 2,048 dimensions the game has a player for
every dimension: it keeps a running mean of the whole problem, in float32, and solves it at every move. Products of the
larger networks are in TF32.

{algorithm_two_of(found)}

Convolutions are 3×3, each followed by 2×2 pooling, which gives the first two networks the number of activations in the
paper's table. The third network, with over a million, is not in the paper. It is compared by 256 components: a player
of the game has 13 vectors of that length, and more would not fit on one GPU. Data: `neural_cca_*.json` in this folder.
`--small` makes the quick run, trained for {QUICK.net.steps:,} steps. The others need a GPU, and compile there in
seconds instead of minutes with `XLA_FLAGS=--xla_gpu_enable_triton_gemm=false`.
""",
    )


def rows_of(one: dict[str, Any]) -> list[list[Any]]:
    """One row for each state of a network."""
    rows = []
    for t, step in one["steps"].items():
        kind, curve = curve_of(step)
        game = "correlations" in step
        rows.append([f"{one['d']:,}", f"{one['training steps']:,}", f"{int(t):,}", kind, f"{np.mean(curve):.4f}"])
        rows[-1] += [float(np.median(step["residuals"])), f"{step['seconds']:.1f}"] if game else ["", ""]
        rows[-1] += [f"{step['subspace error']:.1e}" if "subspace error" in step else ""]
    return rows


def verdict_on_training(found: list[dict[str, Any]]) -> str:
    """Whether later states correlate more, in each run; a rise below the game's estimated shortfall does not count."""
    kinds: dict[str, list[str]] = {"Holds that": [], "Does not hold that": [], "It stays open whether": []}
    for one in found:
        rises, missing = np.diff(means(one)), max(shortfall(step) for step in one["steps"].values())
        kind = "Does not hold that" if (rises < -missing).any() else "Holds that" if (rises > missing).all() else None
        which = f"d = {one['d']:,} ({one['training steps']:,} steps of training)"
        if kind is None or not len(rises):
            kind = "It stays open whether"
            if len(rises):
                which += f", where means rise by {rises.min():.2g} and the estimated shortfall is {missing:.2g}"
        kinds[kind].append(which)
    what = "later networks correlate more with the final one"
    return " ".join(f"{kind} {what} at {', '.join(runs)}." for kind, runs in kinds.items() if runs)


def shortfall(step: dict[str, Any]) -> float:
    """The game's estimated shortfall; 0 for exact correlations."""
    return 0.0 if "exact" in step else step["shortfall"]


def verdict_at_2048(found: list[dict[str, Any]]) -> str:
    compared = [(one, step) for one in found for step in one["steps"].values() if "subspace error" in step]
    if not compared:
        return ""
    worst = max(step["subspace error"] for _, step in compared)
    counts = [step["clear components"] for _, step in compared]
    devices = dict.fromkeys(one["device"] for one, _ in compared)
    took = [(max(step["seconds"] for one, step in compared if one["device"] == name), name) for name in devices]
    stepped = [one["Algorithm 2"] for one in found if "subspace error" in one.get("Algorithm 2", {})]
    return (
        f"{'Holds' if worst <= 0.002 else 'Does not hold'} for the accelerated game that the subspace is found: over "
        f"the {min(counts)} to {max(counts)} components with a correlation above {CLEAR} its error is at most "
        f"{worst:.1e}, after at most "
        + " and ".join(f"{seconds:.1f} s on {device}" for seconds, device in took)
        + ", activations and compilation included"
        + "".join(f"; after {one['steps']:,} steps of Algorithm 2 it is {one['subspace error']:.2f}" for one in stepped)
        + "."
    )


def algorithm_two_of(found: list[dict[str, Any]]) -> str:
    """The time of steps of Algorithm 2 against the paper's, and the correlations it reached."""
    rows = []
    for one in found:
        if "Algorithm 2" not in one:
            continue
        steps = one["Algorithm 2"]
        game = one["steps"][list(one["steps"])[1]]
        rows.append([f"{one['d']:,}", f"{steps['ms of a step']:.1f}", f"{steps['ms of its activations']:.1f}"])
        rows[-1] += [PAPER.get(one["d"], ""), f"{steps['rate']:g}", f"{steps['steps']:,}", f"{steps['seconds']:.0f}"]
        ours, theirs = (np.array(x["on test images"], float) for x in (game, steps))
        theirs = theirs[: len(ours)]
        got = [f"{np.mean(theirs):.3f}", f"{np.mean(theirs[:FIRST]):.3f}"]
        got += [f"{(theirs < -CLEAR).sum()} of {len(theirs)}"]
        rows[-1] += ["diverged", "", ""] if steps["diverged"] else got
        rows[-1] += [f"{np.mean(ours):.3f}", f"{np.mean(ours[:FIRST]):.3f}", f"{game['seconds']:.1f}"]
    if not rows:
        return ""
    header = ["d", "a step, ms", "its activations", "the paper's step", "step size", "steps", "seconds"]
    header += ["mean correlation on test images", f"of the first {FIRST}", f"below -{CLEAR}"]
    header += ["the game's", f"of its first {FIRST}", "in seconds"]
    return f"""
## Algorithm 2

{table(header, rows)}

On the second of the states above, with Adam, 1,024 players, batches of 2,048 and the paper's schedule, with far fewer
steps than the paper's 10⁷. The paper's step size is 10⁻⁴. The time of a step includes its activations, as in the paper
(eight TPU devices; here one GPU). Correlations are over as many players as the game has. Negative correlations are
probably due to parents that still overlap: each of them penalises a player, and if many are near a few leading
directions, the sum of their penalties exceeds the reward. The player then follows a direction with the second view
reversed, of eigenvalue -ρ in place of ρ.
""".strip()


def means(one: dict[str, Any]) -> list[float]:
    return [float(np.mean(curve_of(step)[1])) for step in one["steps"].values()]


def curve_of(step: dict[str, Any]) -> tuple[str, np.ndarray]:
    """Correlations by component: exact, or the game's on test images."""
    kind = "exact" if "exact" in step else "on test images"
    return kind, np.array([np.nan if x is None else x for x in step[kind]], float)


if __name__ == "__main__":
    command_line(main, has_small=True)
