"""The command line: ``eigenstream fit | transform | report | demo``."""

from __future__ import annotations

import dataclasses
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
from eigenstream.estimators import model_files
from eigenstream.estimators.model_files import OPTIMIZERS
from eigenstream.run.checkpoint import plain
from eigenstream.run.result import Status
from eigenstream.solvers.choice import SOLVERS
from eigenstream.streams.batching import edges

#: Exit codes beside 0: a run that failed; bad input or usage; interrupted with Ctrl-C, the model kept.
FAILED, BAD, INTERRUPTED = 1, 2, 130

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Leading eigenvectors of A v = λ B v from data that does not fit in memory: PCA, CCA, PLS, LDA, ICA, graphs.",
)


class Kind(StrEnum):
    """The problems by their names on the command line."""

    pca = "pca"
    cca = "cca"
    multiview = "multiview"
    pls = "pls"
    lda = "lda"
    ica = "ica"
    laplacian = "laplacian"
    clustering = "clustering"


ESTIMATORS: dict[Kind, Any] = {
    Kind.pca: estimators.PCA,
    Kind.cca: estimators.CCA,
    Kind.multiview: estimators.MultiviewCCA,
    Kind.pls: estimators.PLS,
    Kind.lda: estimators.LDA,
    Kind.ica: estimators.ICA,
    Kind.laplacian: estimators.SpectralEmbedding,
    Kind.clustering: estimators.SpectralClustering,
}
GRAPHS = (Kind.laplacian, Kind.clustering)
#: How many sources each takes, if not one; None: two or more.
SOURCES: dict[Kind, int | None] = {Kind.cca: 2, Kind.pls: 2, Kind.lda: 2, Kind.multiview: None}

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of words.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@app.command()
def fit(
    problem: Annotated[Kind, typer.Argument(help="What to solve.")],
    sources: Annotated[
        list[str],
        typer.Argument(
            help="Files of rows: .npy .npz .zarr .h5 .parquet .arrow .feather .csv .txt; two views for cca and pls, "
            "two or more for multiview, rows and labels for lda, a list of edges (i j [weight]) for laplacian and "
            "clustering. x.h5::name picks an array, x.parquet::a,b columns."
        ),
    ],
    k: Annotated[int | None, typer.Option("-k", "--components", help="How many components; all if left out.")] = None,
    out: Annotated[Path, typer.Option(help="The folder for the model, the metrics and the checkpoints.")] = Path("run"),
    solver: Annotated[str, typer.Option(help=f"auto, {', '.join(SOLVERS)}.")] = "auto",
    option: Annotated[
        list[str] | None, typer.Option(help="A setting of the solver, such as learning_rate=0.05 or optimizer=adam.")
    ] = None,
    ridge: Annotated[float | None, typer.Option(help="Added to B, relative to its mean eigenvalue.")] = None,
    center: Annotated[bool, typer.Option(help="Whether to take off the means.")] = True,
    which: Annotated[str | None, typer.Option(help="largest, smallest or (ica) magnitude.")] = None,
    clusters: Annotated[int | None, typer.Option(help="Clusters, for clustering; as many as -k, or 8.")] = None,
    nodes: Annotated[int | None, typer.Option(help="Nodes of a graph; found by a first pass if left out.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows in a step of a streaming solver.")] = None,
    epochs: Annotated[int, typer.Option(help="The most passes of a streaming solver.")] = 1,
    tol: Annotated[float | None, typer.Option(help="The residual at which a streaming solver stops.")] = None,
    shuffle: Annotated[bool, typer.Option(help="Whether a streaming solver takes rows in random order.")] = True,
    memory_budget: Annotated[float, typer.Option(help="Bytes that auto may spend on exact statistics.")] = 4e9,
    precision: Annotated[
        str | None, typer.Option(help="Of a streaming solver's products on a GPU: float32, tf32 or bf16.")
    ] = None,
    mesh: Annotated[
        str | None, typer.Option(help="Devices to share the work out over: auto, or data=2,feature=4.")
    ] = None,
    distributed: Annotated[
        bool, typer.Option("--distributed", help="One of several processes, started alike; see docs/many_hosts.md.")
    ] = False,
    half_life: Annotated[float | None, typer.Option(help="Rows after which a row counts half.")] = None,
    random_state: Annotated[int, typer.Option(help="The seed.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an earlier run in --out was stopped.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete an earlier run in --out first.")] = False,
    checkpoint_every: Annotated[float, typer.Option(help="Seconds between checkpoints.")] = 60.0,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Fit a model to files of any size.

    Rows are read as they are needed. The model goes to OUT/model.safetensors and OUT/config.json.

    eigenstream fit cca x.npy y.npy -k 8 --out run/
    """
    if distributed:
        processes.initialize()
        mesh = mesh or "auto"
    given = {
        "n_components": k,
        "solver": _solver(solver, option or []),
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
    known = ESTIMATORS[problem]().get_params()
    for name, value in (("ridge", ridge), ("which", which), ("center", None if center else False)):
        if value is not None and name not in known:
            raise ValueError(f"--{'no-' * (name == 'center')}{name} does not apply to {problem.value}")
    settings = {name: value for name, value in given.items() if name in known and value is not None}
    estimator = ESTIMATORS[problem](**settings)
    expected = SOURCES.get(problem, 1)
    if (expected is None and len(sources) < 2) or (expected is not None and len(sources) != expected):
        raise ValueError(f"{problem.value} takes {expected or 'two or more'} sources, not {len(sources)}: see --help")
    started = {
        "problem": problem.value,
        "sources": [_described(path) for path in sources],
        "shuffle": shuffle,
        "nodes": nodes,
        "settings": plain({name: value for name, value in settings.items() if name not in ("verbose", "mesh")}),
    }
    finished = folders.claim(out, started, resume, overwrite)
    if not finished:
        rows = estimator.batch_size
        stream: Any = (
            edges(sources[0], rows, shuffle, random_state)
            if problem in GRAPHS
            else streams.batches(*sources, batch_size=rows, shuffle=shuffle, random_state=random_state)
        )
        extra: dict[str, Any] = {"n_nodes": nodes} if problem in GRAPHS else {}
        try:
            with warnings.catch_warnings():
                # What is said of an interruption or a failed step is said below.
                warnings.simplefilter("ignore")
                estimator.fit_stream(stream, folder=out, resume=True, checkpoint_every=checkpoint_every, **extra)
        except ValueError:
            # Input was rejected before the first checkpoint: clear the folder, so that the corrected command needs no
            # --overwrite.
            if not any((out / "checkpoints").glob("[0-9]*")):
                folders.clear(out)
            raise
        model_files.save(estimator, out, run=started)
        for name in ("labels_", "embedding_"):
            if hasattr(estimator, name) and processes.is_first():
                np.save(out / f"{name[:-1]}.npy", getattr(estimator, name))
    else:
        estimator = estimators.load(out)
    _tell(_summary(problem, estimator, out), as_json)
    if estimator.status_ == Status.INTERRUPTED:
        raise typer.Exit(INTERRUPTED)
    if estimator.status_ == Status.FAILED:
        raise typer.Exit(FAILED)


def _solver(name: str, options: list[str]) -> Any:
    """A solver's name, or an object where it was given settings."""
    if name != "auto" and name not in SOLVERS:
        raise ValueError(f"--solver {name}: give auto, {', '.join(SOLVERS)}")
    if not options:
        return name
    if name == "auto":
        raise ValueError("--option needs a named --solver")
    kind: Any = SOLVERS[name]
    fields = {f.name for f in dataclasses.fields(kind)}
    settings: dict[str, Any] = {}
    for item in options:
        key, _, value = item.partition("=")
        if key not in fields:
            raise ValueError(f"--option {item}: {name} has the settings {', '.join(sorted(fields))}")
        if key == "optimizer":
            if value not in OPTIMIZERS:
                raise ValueError(f"--option {item}: give {' or '.join(OPTIMIZERS)}")
            settings[key] = OPTIMIZERS[value]
            continue
        try:
            settings[key] = json.loads(value)
        except json.JSONDecodeError:
            raise ValueError(f"--option {item}: give a number, true, false or null") from None
    return kind(**settings)


def _described(path: str) -> dict[str, Any]:
    source = streams.open_source(path)
    return {"path": path, "shape": [int(n) for n in source.shape], "dtype": str(source.dtype)}


def _summary(problem: Kind, estimator: Any, out: Path) -> dict[str, Any]:
    values = {
        "problem": problem.value,
        "solver": type(estimator.solver_).__name__,
        "rows": estimator.n_samples_seen_,
        "steps": estimator.n_iter_,
        "converged": estimator.converged_,
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


def _tell(values: dict[str, Any], as_json: bool) -> None:
    if not processes.is_first():
        return
    if as_json:
        typer.echo(json.dumps(values))
        return
    for name, value in values.items():
        if isinstance(value, list):
            shown = " ".join(f"{item:.6g}" for item in value[:8]) + (f" … ({len(value)})" if len(value) > 8 else "")
        else:
            shown = str(value)
        typer.echo(f"{name.replace('_', ' '):26s}{shown}")


@app.command()
def transform(
    run: Annotated[Path, typer.Argument(help="The folder of a fitted model.")],
    sources: Annotated[list[str], typer.Argument(help="Files of rows, as in fit; one view or all.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The .npy file for the scores.")],
    view: Annotated[int, typer.Option(help="Which view a single source is, for cca and pls: 1 or 2.")] = 1,
    batch_size: Annotated[int, typer.Option(help="Rows in memory at a time.")] = 8192,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Project rows onto a fitted model's components, a batch at a time.

    Of several views, the scores of all stand side by side: those of the first view in the first k columns.

    eigenstream transform run/ x.npy -o z.npy
    """
    estimator = estimators.load(run)
    if not hasattr(estimator, "transform"):
        raise ValueError(f"{run} holds a {type(estimator).__name__}, which has no transform for new rows")
    if output.suffix != ".npy":
        raise ValueError(f"--output {output}: give a .npy file")
    batches = streams.batches(*sources, batch_size=batch_size, shuffle=False)
    result = None
    done = 0
    partial = output.with_name(f".{output.name}.new")
    for batch in batches:
        scores = _scores(estimator, batch, view)
        if result is None:
            shape = (batches.n_rows, scores.shape[1])
            result = np.lib.format.open_memmap(partial, "w+", scores.dtype, shape)
        result[done : done + len(scores)] = scores
        done += len(scores)
    if result is None:
        raise ValueError(f"{sources[0]} has no rows")
    result.flush()
    partial.replace(output)
    _tell({"rows": done, "components": int(result.shape[1]), "output": str(output)}, as_json)


def _scores(estimator: Any, batch: Any, view: int) -> np.ndarray:
    if view != 1:
        if view != 2 or isinstance(batch, tuple) or not isinstance(estimator, estimators.CCA | estimators.PLS):
            raise ValueError("--view is 1 or 2, with one source and a model of cca or pls")
        return estimator.transform(None, batch)
    if isinstance(estimator, estimators.MultiviewCCA):
        return np.hstack(estimator.transform(list(batch)))
    if not isinstance(batch, tuple):
        return estimator.transform(batch)
    if not isinstance(estimator, estimators.CCA | estimators.PLS) or len(batch) != 2:
        raise ValueError(f"{type(estimator).__name__} transforms one source, not {len(batch)}")
    return np.hstack(estimator.transform(*batch))


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="The folder of a fitted model.")],
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Tables and pictures of a run: RUN/report.md and RUN/report.png."""
    from eigenstream.app import report as reports

    estimator = estimators.load(run)
    metrics = run / "metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    page, picture = reports.write(estimator, records, run)
    _tell({"report": str(page), "picture": str(picture)}, as_json)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="The folder for the picture.")] = Path("demo"),
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the digits.")] = 150,
    debug: Debug = False,
) -> None:
    """Stream scikit-learn's digits through CCA of their upper and lower halves, and compare with the exact answer."""
    from eigenstream.app.demo import demo as run

    run(out, epochs)


def main() -> None:
    """Run the command line: errors on one line, exit codes as documented."""
    if not jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        # What JAX compiles is kept for the next run, unless it was told where.
        jax.config.update("jax_compilation_cache_dir", str(Path.home() / ".cache" / "eigenstream" / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    try:
        app()
    except (ValueError, OSError) as error:
        if "--debug" in sys.argv:
            raise
        typer.echo(f"eigenstream: error: {' '.join(str(error).split())}", err=True)
        _leave(BAD)
    except KeyboardInterrupt:
        typer.echo("eigenstream: interrupted", err=True)
        _leave(INTERRUPTED)
    except Exception:
        if "--distributed" not in sys.argv:
            raise
        traceback.print_exc()
        _leave(FAILED)


def _leave(code: int) -> None:
    """End with this exit code; of several processes, without waiting for the others, who wait for this one."""
    if "--distributed" in sys.argv:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
