"""Several processes that are one job, on this machine: Gloo between them, two devices each."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

import eigenstream as es
from eigenstream import distributed
from eigenstream.run.placement import Placement

# Processes that start and compile: not for every commit.
slow = pytest.mark.slow
WORKER = Path(__file__).parent / "on_two_processes.py"
COMMAND = [sys.executable, "-c", "from eigenstream.cli import main; main()"]


def environment(process=None, port=None, devices=2):
    # Programs are many and tiny: they take longer to optimise than to run.
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    # More threads than cores: a device that waits for another holds one.
    out = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "NPROC": "16"}
    if process is not None:
        out |= {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": "2"}
        out["JAX_PROCESS_ID"] = str(process)
    return out


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(*command, port):
    return [
        subprocess.Popen(command, env=environment(p, port), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for p in range(2)
    ]


def finished(*processes):
    outputs = [p.communicate(timeout=400) for p in processes]
    for p, (_, errors) in zip(processes, outputs, strict=True):
        assert p.returncode == 0, errors[-3000:]
    return outputs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two views of 1013 rows, 37 and 23 columns, with two correlations, and labels of three classes."""
    folder = tmp_path_factory.mktemp("rows")
    rng = np.random.default_rng(0)
    z = rng.normal(size=(1013, 3)) * [1.0, 0.7, 0.5]
    x, y = (z @ rng.normal(size=(3, d)) + rng.normal(size=(1013, d)) + 2 for d in (37, 23))
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", y)
    np.save(folder / "labels.npy", z.argmax(1))
    return folder


@pytest.fixture(scope="module")
def solved(folder):
    """The folder after two processes and one alone have solved its files."""
    finished(*start(sys.executable, str(WORKER), str(folder), port=free_port()))
    # The process alone resumes this run and deletes its old checkpoints.
    assert any((folder / "run" / "checkpoints").glob("40/state/ocdbt.process_1")), "written by both"
    done = subprocess.run([sys.executable, str(WORKER), str(folder)], env=environment(devices=1))
    assert done.returncode == 0
    return folder


def test_rows_that_several_processes_hold_are_joined_once():
    values = np.arange(10.0).reshape(2, 5)
    first, second = (np.where((np.arange(5) < 2) == head, values, 0) for head in (True, False))
    all_of_them = [(first, (0, 2)), (first, (0, 2)), (second, (2, 5)), (second, (2, 5))]
    with mock.patch.object(distributed, "gather_all", return_value=all_of_them):
        np.testing.assert_array_equal(distributed.gather_rows(values[:, :2], 0, 5), values)
    assert distributed.gather_rows(values, 0, 5) is values


@pytest.mark.parametrize(
    ("owners", "shares", "speakers"),
    [
        ([[0, 1], [2, 3]], [(0, 3), (0, 3), (3, 5), (3, 5)], [0, 2]),
        ([[0, 0], [1, 1]], [(0, 3), (3, 5)], [0, 1]),
        ([[0], [1], [1], [0]], [(0, 5), (0, 5)], [0, 1]),
        ([[0], [0], [1], [1]], [(0, 5), (0, 5)], [0, 1]),
    ],
)
def test_processes_agree_on_who_reads_what(owners, shares, speakers):
    devices = np.vectorize(lambda p: SimpleNamespace(process_index=p))(np.array(owners))
    mesh = SimpleNamespace(devices=devices, axis_names=("data", "feature"), shape={"data": len(owners)})
    place = Placement(mesh)
    found, speaking = [], []
    for process in range(len(shares)):
        with mock.patch("jax.process_index", return_value=process):
            found.append(place.share(5))
            speaking += [process] * place.is_first_with_its_rows
    assert found == shares
    assert speaking == speakers
    # One row cannot be shared: all processes read it.
    assert place.share(1) == (0, 1)


@slow
def test_two_processes_give_what_one_gives_and_read_their_own_rows(solved):
    alone, first, second = (json.loads((solved / f"{n}.json").read_text()) for n in ("alone", "process0", "process1"))
    for name in alone:
        if name == "read":
            continue
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)
        np.testing.assert_allclose(first[name], alone[name], rtol=1e-8, atol=1e-9, err_msg=name)
    # All of the first batch, for the shapes, and half of the others.
    assert alone["read"] == 1013
    assert max(first["read"], second["read"]) <= 53 + 27 * 19
    assert first["read"] + second["read"] >= 1013


@slow
@pytest.mark.parametrize("name", ["lanczos", "crowded", "singular"])
def test_two_processes_solve_matrices_that_neither_holds(solved, name):
    first, second, alone = (np.load(solved / f"spread_{name}_{n}.npz").values() for n in ("0", "1", "alone"))
    for one, two, whole in zip(first, second, alone, strict=True):
        np.testing.assert_array_equal(one, two)
        np.testing.assert_allclose(one, whole, rtol=1e-12, atol=1e-8)


@slow
def test_two_processes_play_one_accelerated_game(solved):
    first, second, alone = (np.load(solved / f"game{n}.npy") for n in ("0", "1", "alone"))
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first, alone, rtol=1e-6, atol=1e-7)


@slow
def test_one_process_resumes_a_run_of_two(solved):
    resumed, alone = np.load(solved / "resumed.npy")
    np.testing.assert_allclose(resumed, alone, rtol=1e-7, atol=1e-8)
    for name in ("mesh", "apart"):
        assert list((solved / name / "checkpoints").glob("[0-9]*"))
        resumed, alone = np.load(solved / f"exact_{name}.npy")
        np.testing.assert_allclose(resumed, alone, rtol=1e-9, atol=1e-10)


@slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_lost_process_is_named_and_the_job_resumes(tmp_path, victim):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(20_000, 40)).astype("f4")
    for name, view in (("x", x), ("y", x @ rng.normal(size=(40, 30)).astype("f4"))):
        np.save(tmp_path / f"{name}.npy", view)
    command = [*COMMAND, "fit", "cca", str(tmp_path / "x.npy"), str(tmp_path / "y.npy"), "-k", "2", "--quiet"]
    command += ["--solver", "paper", "--epochs", "20", "--batch-size", "50", "--checkpoint-every", "0.5"]
    command += ["--out", str(tmp_path / "run")]
    job = start(*command, "--distributed", port=free_port())
    deadline = time.monotonic() + 120
    while not list((tmp_path / "run" / "checkpoints").glob("[0-9]*/commit_success.txt")):
        assert time.monotonic() < deadline, [p.poll() for p in job]
        time.sleep(0.1)
    job[victim].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    job[victim].communicate()
    survivor = job[1 - victim]
    _, errors = survivor.communicate(timeout=60)
    assert time.monotonic() - killed < 60
    assert survivor.returncode != 0
    assert f"process {victim} of 2 is lost" in errors, errors[-2000:]
    finished = subprocess.run(
        [*command, "--resume", "--json", "--epochs", "20"], env=environment(devices=1), text=True, capture_output=True
    )
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout)["rows"] == 20 * 20_000


@slow
def test_the_commands_of_the_page_run(tmp_path):
    page = (Path(__file__).parent.parent / "docs" / "many_hosts.md").read_text()
    make, first, second, resume, *_ = re.findall(r"```sh\n(.*?)```", page, re.S)
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "eigenstream"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -c "from eigenstream.cli import main; main()" "$@"\n')
    command.chmod(0o755)
    port = str(free_port())
    env = environment()
    env["PATH"] = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{env['PATH']}"

    def shell(script):
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(["sh", "-ec", script.replace("12355", port)], cwd=tmp_path, env=env, **pipe)

    finished(shell(make))
    (told, _), (silent, _) = finished(shell(first), shell(second))
    assert "solver                    Exact" in told
    assert "solver" not in silent
    assert "solver                    Exact" in finished(shell(resume))[0][0]
    correlations = es.load(tmp_path / "run").correlations_
    views = np.load(tmp_path / "x.npy"), np.load(tmp_path / "y.npy")
    exact = es.CCA(4, solver="exact").fit(*views).correlations_
    np.testing.assert_allclose(correlations, exact, atol=0.01)
