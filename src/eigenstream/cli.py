"""The command line: ``eigenstream fit | merge | transform | report | demo``."""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import typer

from eigenstream import distributed as processes
from eigenstream import estimators, streams
from eigenstream.app import folders
from eigenstream.app import report as reports
from eigenstream.app.options import named_solver, shape_and_dtype
from eigenstream.core.moments import BLOCK_ROWS
from eigenstream.estimators import model_files
from eigenstream.estimators.merging import merge_named
from eigenstream.run.checkpoint import plain
from eigenstream.run.result import Status
from eigenstream.solvers.choice import SOLVERS

#: Exit codes: a step failed; bad input or usage; interrupted with Ctrl-C, with the model saved.
FAILED, BAD, INTERRUPTED = 1, 2, 130

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Leading eigenvectors of A v = λ B v from data that does not fit in memory: PCA, CCA, PLS, LDA, ICA, graphs.",
)


Kind = StrEnum("Kind", "pca cca multiview pls lda ica laplacian clustering")

#: The estimator of each problem and its number of sources; None for two or more.
PROBLEMS: dict[Kind, tuple[Any, int | None]] = {
    Kind.pca: (estimators.PCA, 1),
    Kind.cca: (estimators.CCA, 2),
    Kind.multiview: (estimators.MultiviewCCA, None),
    Kind.pls: (estimators.PLS, 2),
    Kind.lda: (estimators.LDA, 2),
    Kind.ica: (estimators.ICA, 1),
    Kind.laplacian: (estimators.SpectralEmbedding, 1),
    Kind.clustering: (estimators.SpectralClustering, 1),
}
GRAPHS = (Kind.laplacian, Kind.clustering)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@app.command()
def fit(
    problem: Annotated[Kind, typer.Argument(help="What to solve.")],
    sources: Annotated[
        list[str],
        typer.Argument(
            help="Files of rows: .npy .npz .zarr .h5 .parquet .arrow .feather .csv .txt; two views for cca and pls, "
            "two or more for multiview, rows and labels for lda, a list of edges (i j [weight]) for laplacian and "
            "clustering. x.h5::name selects an array, x.parquet::a,b columns."
        ),
    ],
    k: Annotated[int | None, typer.Option("-k", "--components", help="Number of components. Default: all.")] = None,
    out: Annotated[Path, typer.Option(help="The folder for the model, the metrics and the checkpoints.")] = Path("run"),
    solver: Annotated[str, typer.Option(help=f"auto, {', '.join(SOLVERS)}.")] = "auto",
    option: Annotated[
        list[str] | None, typer.Option(help="A setting of the solver, such as learning_rate=0.05 or optimizer=adam.")
    ] = None,
    ridge: Annotated[float | None, typer.Option(help="Added to B, relative to its mean eigenvalue.")] = None,
    center: Annotated[bool, typer.Option(help="Whether to subtract the means.")] = True,
    which: Annotated[str | None, typer.Option(help="largest, smallest or (ica) magnitude.")] = None,
    clusters: Annotated[int | None, typer.Option(help="Number of clusters. Default: -k, or 8.")] = None,
    nodes: Annotated[int | None, typer.Option(help="Number of nodes. Default: counted in a first pass.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows per step of a streaming solver.")] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Maximal number of passes of a streaming solver. Default: 1; the game's own.")
    ] = None,
    tol: Annotated[float | None, typer.Option(help="Stop below this residual; the game, below this shortfall.")] = None,
    shuffle: Annotated[bool, typer.Option(help="Whether a streaming solver reads the rows in random order.")] = True,
    memory_budget: Annotated[
        float | None, typer.Option(help="Bytes that auto allows exact sums. Default: half of what is free.")
    ] = None,
    precision: Annotated[str | None, typer.Option(help="Precision of GPU products: float32, tf32 or bf16.")] = None,
    mesh: Annotated[str | None, typer.Option(help="Shard the work over devices: auto, or data=2,feature=4.")] = None,
    distributed: Annotated[
        bool, typer.Option("--distributed", help="Join the other processes of this job; see docs/many_hosts.md.")
    ] = False,
    half_life: Annotated[float | None, typer.Option(help="A row's weight halves after this many further rows.")] = None,
    random_state: Annotated[int, typer.Option(help="Seed.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out from its checkpoint.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete an earlier run in --out first.")] = False,
    checkpoint_every: Annotated[float, typer.Option(help="Seconds between checkpoints.")] = 60.0,
    keep_statistics: Annotated[
        bool, typer.Option("--keep-statistics", help="Keep the exact solver's sums, for eigenstream merge.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Hide the progress bar.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Fit a model to files of any size.

    Rows are read batch by batch. The model is saved to OUT/model.safetensors and OUT/config.json.

    eigenstream fit cca x.npy y.npy -k 8 --out run/
    """
    if keep_statistics and solver not in ("auto", "exact"):
        raise ValueError(f"--solver {solver} keeps no sums: give --keep-statistics with --solver exact")
    solver = "exact" if keep_statistics else solver
    if distributed:
        processes.initialize()
        mesh = mesh or "auto"
    given = {
        "n_components": k,
        "solver": named_solver(solver, option or []),
        "ridge": ridge,
        "center": center,
        "which": which,
        "n_clusters": k if clusters is None else clusters,
        "batch_size": batch_size,
        "max_epochs": epochs,
        "tol": tol,
        "memory_budget": memory_budget,
        "precision": precision,
        "mesh": mesh,
        "half_life": half_life,
        "random_state": random_state,
        "verbose": not quiet and not as_json,
    }
    kind, n_sources = PROBLEMS[problem]
    known = kind().get_params()
    for name, value in (("ridge", ridge), ("which", which), ("center", None if center else False)):
        if value is not None and name not in known:
            raise ValueError(f"--{'no-' * (name == 'center')}{name} does not apply to {problem.value}")
    settings = {name: value for name, value in given.items() if name in known and value is not None}
    estimator = kind(**settings)
    if len(sources) != n_sources if n_sources else len(sources) < 2:
        raise ValueError(f"{problem.value} takes {n_sources or 'two or more'} sources, not {len(sources)}: see --help")
    started = {
        "problem": problem.value,
        "sources": [shape_and_dtype(path) for path in sources],
        "shuffle": shuffle,
        "nodes": nodes,
        "settings": plain({name: value for name, value in settings.items() if name not in ("verbose", "mesh")}),
    }
    if keep_statistics:
        started["keep_statistics"] = True
    if folders.claim(out, started, resume, overwrite):
        estimator = estimators.load(out)
    else:
        cut: Any = streams.edges if problem in GRAPHS else streams.batches
        extra = {"n_nodes": nodes} if problem in GRAPHS else {}
        stream = cut(*sources, batch_size=estimator.batch_size, shuffle=shuffle, random_state=random_state)
        if keep_statistics and problem == Kind.ica:
            # Sums that can be merged are taken in one pass.
            stream = iter(stream.in_order(BLOCK_ROWS))
        try:
            with warnings.catch_warnings():
                # The summary reports an interruption or a failed step.
                warnings.simplefilter("ignore")
                estimator.fit_stream(stream, folder=out, resume=True, checkpoint_every=checkpoint_every, **extra)
        except ValueError:
            # Input was rejected before the first checkpoint: clear the folder, so that the corrected command needs no
            # --overwrite.
            if not any((out / "checkpoints").glob("[0-9]*")):
                folders.clear(out)
            raise
        _save(estimator, out, keep_statistics, run=started)
    _print(_summary(problem, estimator, out), as_json)
    if estimator.status_ == Status.INTERRUPTED:
        raise typer.Exit(INTERRUPTED)
    if estimator.status_ == Status.FAILED:
        raise typer.Exit(FAILED)


def _save(estimator: Any, out: Path, statistics: bool, **more: Any) -> None:
    model_files.save(estimator, out, statistics, **more)
    for name in ("labels_", "embedding_"):
        if hasattr(estimator, name) and processes.is_first():
            np.save(out / f"{name[:-1]}.npy", getattr(estimator, name))


def _summary(problem: Kind, estimator: Any, out: Path) -> dict[str, Any]:
    values = {
        "problem": problem.value,
        "solver": type(estimator.solver_).__name__,
        "reason": getattr(estimator, "reason_", "as given"),
        "rows": estimator.n_samples_seen_,
        "steps": estimator.n_iter_,
        "converged": estimator.converged_,
        "status": estimator.status_,
        "message": estimator.message_,
        "eigenvalues": estimator.eigenvalues_,
        "residuals": estimator.residuals_,
        "model": str(out / "model.safetensors"),
    }
    names = ("correlations_", "explained_variance_ratio_", "covariances_")
    values |= {name[:-1]: getattr(estimator, name) for name in names if hasattr(estimator, name)}
    if problem == Kind.clustering:
        values |= {"cluster_sizes": np.bincount(estimator.labels_), "labels": str(out / "labels.npy")}
    if problem in GRAPHS:
        values["embedding"] = str(out / "embedding.npy")
    return plain(values)


def _print(values: dict[str, Any], as_json: bool) -> None:
    """Print in the first process only."""
    if not processes.is_first():
        return
    if as_json:
        typer.echo(json.dumps(values))
        return
    for name, value in values.items():
        if isinstance(value, list):
            more = f" … ({len(value)})" if len(value) > 8 else ""
            value = " ".join(f"{item:.6g}" for item in value[:8]) + more
        typer.echo(f"{name.replace('_', ' '):26s}{value}")


@app.command()
def merge(
    runs: Annotated[list[Path], typer.Argument(help="The folders of models fitted with --keep-statistics, or merged.")],
    out: Annotated[Path, typer.Option(help="The folder for the model of all rows, with its sums.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete an earlier run in --out first.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Merge models of parts of the rows into the model of all rows, without reading a row.

    eigenstream merge part1/ part2/ --out whole/
    """
    estimator = merge_named((str(run), estimators.load(run)) for run in runs)
    if (out / "config.json").exists() and not overwrite:
        raise ValueError(f"{out} holds a run: give --overwrite, or another --out")
    problem = next(name for name, (kind, _) in PROBLEMS.items() if kind is type(estimator))
    summary = _summary(problem, estimator, out)
    folders.clear(out)
    _save(estimator, out, True, run={"problem": problem.value, "merged": [str(run) for run in runs]})
    _print(summary, as_json)


@app.command()
def transform(
    run: Annotated[Path, typer.Argument(help="The folder of a fitted model.")],
    sources: Annotated[list[str], typer.Argument(help="Files of rows, as in fit: one view or all.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The .npy file for the scores.")],
    view: Annotated[int, typer.Option(help="The view that a single source belongs to, for cca and pls: 1 or 2.")] = 1,
    batch_size: Annotated[int, typer.Option(help="Rows in memory at a time.")] = 8192,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Project rows onto a fitted model's components, batch by batch.

    Scores of several views are written side by side: columns 1 to k hold the first view.

    eigenstream transform run/ x.npy -o z.npy
    """
    estimator = estimators.load(run)
    if not hasattr(estimator, "transform"):
        raise ValueError(f"{run} holds a {type(estimator).__name__}, which has no transform for new rows")
    if output.suffix != ".npy":
        raise ValueError(f"--output {output}: give a .npy file")
    batches = streams.batches(*sources, batch_size=batch_size, shuffle=False)
    partial = output.with_name(f".{output.name}.new")
    done = 0
    for batch in batches:
        scores = _scores(estimator, batch, view)
        if not done:
            result = np.lib.format.open_memmap(partial, "w+", scores.dtype, (batches.n_rows, scores.shape[1]))
        result[done : done + len(scores)] = scores
        done += len(scores)
    result.flush()
    partial.replace(output)
    _print({"rows": done, "components": scores.shape[1], "output": str(output)}, as_json)


def _scores(estimator: Any, batch: Any, view: int) -> np.ndarray:
    views = batch if isinstance(batch, tuple) else (batch,)
    is_pair = isinstance(estimator, estimators.CCA | estimators.PLS)
    if view != 1 and (view != 2 or len(views) > 1 or not is_pair):
        raise ValueError("--view is 1 or 2, with one source and a model of cca or pls")
    if isinstance(estimator, estimators.MultiviewCCA):
        return np.hstack(estimator.transform(list(views)))
    if len(views) > 1 + is_pair:
        raise ValueError(f"{type(estimator).__name__} transforms one source, not {len(views)}")
    scores = estimator.transform(*views) if view == 1 else estimator.transform(None, *views)
    return np.hstack(scores) if len(views) > 1 else scores


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="The folder of a fitted model.")],
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write a table and a figure of a run: RUN/report.md and RUN/report.png."""
    estimator = estimators.load(run)
    metrics = run / "metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    page, picture = reports.write(estimator, records, run)
    _print({"report": str(page), "picture": str(picture)}, as_json)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="The folder for the picture.")] = Path("demo"),
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the digits.")] = 150,
    debug: Debug = False,
) -> None:
    """Stream scikit-learn's digits through CCA of their upper and lower halves; compare with the exact solution."""
    from eigenstream.app.demo import demo as run

    run(out, epochs)


def main() -> None:
    """Run the command line; print an error on one line and exit with its code."""
    if not jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", str(Path.home() / ".cache" / "eigenstream" / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    try:
        app()
    except (ValueError, OSError, MemoryError) as error:
        if "--debug" in sys.argv:
            raise
        typer.echo(f"eigenstream: error: {' '.join(str(error).split())}", err=True)
        _exit(BAD)
    except KeyboardInterrupt:
        typer.echo("eigenstream: interrupted", err=True)
        _exit(INTERRUPTED)
    except Exception:
        if "--distributed" not in sys.argv:
            raise
        traceback.print_exc()
        _exit(FAILED)


def _exit(code: int) -> None:
    if "--distributed" in sys.argv:
        # A normal exit would wait for the other processes, which wait for this one.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
