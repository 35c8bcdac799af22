"""Rows on their way to the device: the same rows in the same order as on the host."""

from dataclasses import replace

import jax
import numpy as np
import pytest

import eigenstream as es
from eigenstream.core import transfer

rng = np.random.default_rng(0)
X = rng.normal(size=(1003, 6)).astype(np.float32)
Y = rng.normal(size=(1003, 3, 2))


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("size", [1, 7, 96, 400, 2000])
def test_picked_batches_are_those_of_the_host(size, shuffle):
    stream = es.streams.batches(X, batch_size=size, shuffle=shuffle)
    # Windows of 96 rows: batches begin and end within them, or span several.
    stream = replace(stream, window_numbers=96 * 6)
    for start in (0, len(stream) // 2):
        picked = stream.sent(lambda rows: rows).epoch(1, start)
        for wanted, batch in zip(stream.epoch(1, start), picked, strict=True):
            assert batch.shape[0] == len(wanted)
            np.testing.assert_array_equal(transfer.pick(batch), wanted)


def test_batches_are_picked_together_and_views_converted():
    stream = es.streams.batches(X, Y, batch_size=50)
    first, second = (list(s.epoch(0))[:2] for s in (stream, stream.sent(lambda views: (views[0], views[1] - 1))))
    found = transfer.pick(*second)
    np.testing.assert_array_equal(found[0], np.concatenate([x for x, _ in first]))
    np.testing.assert_array_equal(found[1], (np.concatenate([y for _, y in first]) - 1).astype(np.float32))
    assert not es.streams.batches(X, np.arange(1003)).can_be_sent


def test_a_mapped_file_can_be_sent(tmp_path):
    np.save(tmp_path / "x.npy", X)
    stream = es.streams.batches(tmp_path / "x.npy", batch_size=100)
    assert stream.can_be_sent
    picked = stream.sent(lambda rows: rows).epoch(0)
    for wanted, batch in zip(stream.epoch(0), picked, strict=True):
        np.testing.assert_array_equal(transfer.pick(batch), wanted)


def test_errors_in_a_thread_reach_the_caller():
    arrival = transfer.send([lambda: X, lambda: 1 / 0])
    with pytest.raises(ZeroDivisionError):
        arrival()


def test_threads_use_the_device_of_the_caller(monkeypatch):
    """A large array is cut into pieces and joined again, on the device that the caller chose."""
    monkeypatch.setattr(transfer, "FEW_BYTES", 0)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    seen = []
    send = transfer.send
    monkeypatch.setattr(transfer, "send", lambda jobs: seen.append(len(jobs)) or send(jobs))
    device = jax.devices()[-1]
    with jax.default_device(device):
        found = transfer.put(X)
    np.testing.assert_array_equal(found, X)
    assert seen == [transfer.THREADS]
    assert found.devices() == {device}
