"""Many devices give what one gives, and send no array that grows with the dimension."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import eigenstream as es
from eigenstream.run.placement import make_mesh


def on_eight_devices(what, more=""):
    # Eight devices that wait for one another in turn need more threads than two cores would give them.
    # Programs are many and tiny: they take longer to optimise than to run.
    flags = f"--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 {more}"
    threads = {"NPROC": "16", "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    env = {**os.environ, **threads}
    script = Path(__file__).parent / "on_eight_devices.py"
    run = subprocess.run([sys.executable, script, what], env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def in_float64():
    return on_eight_devices("float64")


@pytest.mark.slow
def test_every_mesh_gives_what_one_device_gives(in_float64):
    far = in_float64["meshes"]
    assert len(far) == 2 * 4 + 7 * 2 + 2
    assert {name: apart for name, apart in far.items() if not apart[0] < 1e-8} == {}


@pytest.mark.slow
def test_a_mesh_gives_the_same_span_in_float32():
    far = on_eight_devices("float32")["meshes"]
    assert len(far) == 9
    assert {name: apart for name, apart in far.items() if not apart[1] < 1e-3} == {}


@pytest.mark.slow
def test_exact_sums_on_every_mesh_give_what_one_process_gives():
    """1, 2, 4 and 8 devices, panels of the sums spread over 2, 4 and 8 of them, and a run resumed on another mesh."""
    far = on_eight_devices("exact")
    assert len(far) == 5 + 4 + 1
    assert {name: apart for name, apart in far.items() if not (apart[0] < 1e-12 and apart[1] < 1e-7)} == {}


@pytest.mark.slow
def test_no_device_gathers_a_matrix_of_an_exact_solution(tmp_path):
    """All programs of solutions on 2 x 4 devices: none sends half a panel, of 163 or more rows and 408 columns."""
    far = on_eight_devices("spread", f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text")
    assert far.pop("refused") == 0
    assert {name: apart for name, apart in far.items() if not apart < 1e-12} == {}
    sent = {}
    for program in tmp_path.glob("*after_optimizations.txt"):
        for line in program.read_text().splitlines():
            operation = re.search(r" = (.*?) (all-gather|all-to-all|all-reduce|collective-permute)\(", line)
            for numbers in re.findall(r"f64\[([\d,]+)\]", operation[1]) if operation else ():
                size = math.prod(map(int, numbers.split(",")))
                sent[program.name] = max(size, sent.get(program.name, 0))
    assert sent
    assert {name: size for name, size in sent.items() if size > 163 * 408 / 2} == {}


def test_sharded_features_send_nothing_that_grows_with_them():
    sent = on_eight_devices("collectives")
    few, many = sent["data=1,feature=8"]
    assert few
    assert few == many
    # Sharded rows: one sum of the products of both views, and nothing else as long as a player.
    for d, sizes in zip((1024, 4096), sent["data=8,feature=1"], strict=True):
        assert sorted(size for size in sizes if size >= d) == [2 * 16 * d] * 2


@pytest.mark.slow
def test_runs_resume_on_another_mesh_and_models_can_be_pickled(in_float64):
    far = in_float64["travelled"]
    assert len(far) == 4
    assert {name: apart for name, apart in far.items() if not apart[0] < 1e-8} == {}


@pytest.mark.parametrize("mesh", ["auto", "data=1", make_mesh("auto")])
def test_estimators_take_a_mesh(mesh, tmp_path):
    X = np.random.default_rng(0).normal(size=(300, 7))
    plain, meshed = (es.PCA(2, solver=es.solvers.Game(rank=4), mesh=m).fit(X) for m in (None, mesh))
    np.testing.assert_allclose(meshed.components_, plain.components_)
    meshed.save(tmp_path / "model")
    assert es.load(tmp_path / "model").mesh == (mesh if isinstance(mesh, str) else None)


@pytest.mark.parametrize(
    ("mesh", "cure"),
    [("rows=2", "data=2,feature=4"), ("data=x", "data=2,feature=4"), (3, "jax.sharding.Mesh"), ("data=64", "devices")],
)
def test_an_impossible_mesh_is_named(mesh, cure):
    with pytest.raises(ValueError, match=cure):
        es.solve(es.problems.pca(), [np.eye(5)], 2, es.solvers.Game(rank=4), mesh=mesh)


def test_one_device_needs_no_mesh():
    assert make_mesh("data=1,feature=1") is None
