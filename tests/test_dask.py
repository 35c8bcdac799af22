"""Dask collections are summed on the workers: the model is that of one fit, and no row comes to the client."""

import os
import pickle
import signal
import threading
import time

import numpy as np
import pandas
import pytest
import scipy.sparse

import eigenstream as es
from conftest import check_refused
from parts import CASES, MIXED, NAMES, N, X, Y, assert_same, fitted

pytest.importorskip("distributed")
import dask
import dask.array as da
import dask.dataframe as dd
from distributed import Client, LocalCluster

CHUNKS = (150, 1, 49, 200)


@pytest.fixture(scope="module", params=["threads", "two processes"])
def scheduler(request):
    """Threads of this process, or a cluster of two worker processes."""
    if request.param == "threads":
        with dask.config.set(scheduler="threads"):
            yield None
        return
    options = {"n_workers": 2, "threads_per_worker": 1, "processes": True, "dashboard_address": ":0"}
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        yield client


def as_dask(rows):
    return [da.from_array(x, chunks=(CHUNKS, *x.shape[1:])) for x in rows]


@pytest.mark.parametrize("case", CASES)
def test_partitions_equal_one_fit(case, scheduler):
    make, rows = CASES[case]
    assert_same(fitted(make(), as_dask(rows)), fitted(make(), rows))


def test_a_dataframe_gives_names_and_unknown_sizes(scheduler):
    frame = pandas.DataFrame(X, columns=list("abcde")).assign(wood=NAMES, row=range(N))
    # The second of five partitions loses all of its rows, the third some.
    some, kept = (f[(f["row"] < 70) | (f["row"] > 180)] for f in (dd.from_pandas(frame, npartitions=5), frame))
    columns = list("abcd")
    pca = es.PCA().fit(some[columns])
    assert_same(pca, es.PCA().fit(kept[columns]))
    assert pca.feature_names_in_.tolist() == columns
    assert_same(es.LDA().fit(some[columns], some["wood"]), es.LDA().fit(kept[columns], kept["wood"]))
    cca = es.CCA().fit(some[columns], some["e"])
    assert_same(cca, es.CCA().fit(kept[columns], kept["e"]))
    assert cca.predict(kept[columns]).ndim == 1
    assert_same(es.PCA().fit(some[columns].to_dask_array()), es.PCA().fit(kept[columns].to_numpy()))
    # Of other partitions, of unknown sizes.
    other = some[["e"]].repartition(npartitions=2)
    assert_same(es.PLS().fit(some[columns], other), es.PLS().fit(kept[columns], kept[["e"]]))


def test_other_chunks_are_brought_together(scheduler):
    left, right = da.from_array(X, chunks=(90, 2)), da.from_array(Y, chunks=(130, 3))
    assert_same(es.CCA().fit(left, right), es.CCA().fit(X, Y))
    assert left.chunks[1] == (2, 2, 1)


def test_sparse_blocks_are_summed(scheduler):
    rows = np.where(X > 5, X, 0)
    thin = da.from_array(rows, chunks=(100, 5)).map_blocks(scipy.sparse.csr_matrix)
    assert_same(es.PCA().fit(thin), es.PCA().fit(rows))


def test_a_model_of_a_collection_is_merged_and_continued(scheduler, tmp_path):
    first, second = da.from_array(X[:200], chunks=(60, 5)), da.from_array(X[200:350], chunks=(60, 5))
    merged = es.PCA().fit(first).merge(es.PCA().fit(second))
    merged.save(tmp_path, statistics=True)
    assert_same(es.load(tmp_path).partial_fit(X[350:]), es.PCA().fit(X))


def test_no_row_comes_to_the_client(scheduler, monkeypatch):
    received = []
    compute = dask.compute

    def counted(*collections, **options):
        found = compute(*collections, **options)
        received.append(len(pickle.dumps(found)))
        return found

    monkeypatch.setattr(dask, "compute", counted)
    rows = da.random.default_rng(0).normal(size=(20_000, 5), chunks=(1000, 5))
    es.LDA().fit(rows, (rows[:, 0] > 0).astype(int))
    # 800,000 bytes of rows, against the labels of twenty partitions and one set of sums.
    assert len(received) == 2
    assert sum(received) < 20_000


FEW = da.from_array(X, chunks=(100, 5))
#: An error if it is computed.
UNREAD = FEW.map_blocks(lambda block: 1 / 0, dtype=float, meta=np.zeros((0, 0)))
REFUSED = {
    "the game": (lambda: es.PCA(1, solver="game").fit(FEW), "solver='game' learns .* solver=\"exact\""),
    "the paper": (lambda: es.PCA(1, solver=es.solvers.Paper()).fit(FEW), 'solver=Paper.*solver="exact"'),
    "half_life": (lambda: es.PCA(half_life=10).fit(FEW), "half_life: .* half_life=None"),
    "memory": (lambda: es.PCA(memory_budget=10).fit(FEW), "over memory_budget, 1e-08 GB: give a larger"),
    "an array beside": (lambda: es.CCA().fit(FEW, Y), "ndarray beside a Dask collection"),
    "no second view": (lambda: es.CCA().fit(FEW), "NoneType beside a Dask collection"),
    "lengths": (lambda: es.CCA().fit(FEW, da.from_array(Y[:300])), r"the collections have \[400, 300\] rows"),
    "lengths, unknown": (
        lambda: es.PLS().fit(*(dd.from_pandas(pandas.DataFrame(v), npartitions=2) for v in (X, Y[:300]))),
        r"a partition has \[200, 150\] rows: repartition",
    ),
    "shape": (lambda: es.PCA().fit(FEW[:, :, None]), "two dimensions"),
    "a vector": (lambda: es.PCA().fit(FEW[:, 0]), "two dimensions"),
    "words": (lambda: es.PCA().fit(da.from_array(NAMES[:, None])), "give real numbers"),
    "components": (lambda: es.LDA(n_components=7).fit(UNREAD, da.from_array(NAMES)), "n_components=7"),
    "too many": (lambda: es.CCA(n_components=6).fit(UNREAD, UNREAD), "k=6 is too large"),
    "no rows": (lambda: es.PCA().fit(FEW[:0]), "X has no rows"),
    "one class": (lambda: es.LDA().fit(FEW, da.zeros(N, chunks=100, dtype=int)), "one class"),
    "numbers for classes": (lambda: es.LDA().fit(FEW, FEW[:, 0]), "continuous"),
    "not finite": (lambda: es.PCA().fit(FEW / da.where(X[7, 0] == FEW, 0, 1)), "infinity"),
    "wide rows of ICA": (lambda: es.ICA().fit(da.zeros((50, 200), chunks=(10, 200))), "single pass"),
}


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("case", REFUSED)
def test_mistakes_are_named(case):
    make, words = REFUSED[case]
    with dask.config.set(scheduler="threads"):
        check_refused(make, words)


@pytest.mark.slow
def test_a_killed_worker_changes_nothing():
    """One of two worker processes is killed while it sums; its partitions are summed again."""

    def slowly(block):
        import time

        time.sleep(0.15)
        return block

    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster, Client(cluster) as client:
        victim = next(iter(client.run(os.getpid).values()))
        rows = da.from_array(MIXED, chunks=(10, 4)).map_blocks(slowly, dtype=float)
        lost = []

        def kill():
            # Once the scheduler knows sums of both workers.
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and min(map(len, client.has_what().values())) < 2:
                time.sleep(0.02)
            os.kill(victim, signal.SIGKILL)
            lost.append(victim)

        killer = threading.Thread(target=kill)
        killer.start()
        model = es.ICA().fit(rows)
        killer.join()
        assert lost == [victim]
        assert victim not in client.run(os.getpid).values()
    assert_same(model, es.ICA().fit(MIXED))
