"""Run one program on many hosts by JAX's distributed runtime. Every process takes the same steps with its own rows.

Arrays are sharded over the devices of all processes, so the steps are the same as in one process. Decisions on the
host (when to save, when to stop) are made together. With one process nothing here has an effect.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax._src.distributed import global_state
from jax.experimental import multihost_utils

__all__ = ["initialize"]

#: JAX ends the job when a process has sent no heartbeat for this many seconds.
HEARTBEAT = 20
#: Seconds allowed for connecting.
CONNECT = 60
#: Seconds to wait after a JAX error, in case it was caused by a lost process.
GRACE = 3
#: Key under which process 0 publishes its port.
_PORT = "eigenstream/port"
#: Message of a process that ends without an error. Any other message is the number of a lost process.
_DONE = 2**32 - 1

log = logging.getLogger("eigenstream")


def initialize(
    coordinator_address: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> None:
    """Join the other processes of this job. Call it before anything uses a device.

    Parameters
    ----------
    coordinator_address : str, optional
        Host and port of process 0, such as ``"10.0.0.1:1234"``.
    num_processes, process_id : int, optional
        Number of processes, and the number of this one, counted from 0.

    Notes
    -----
    Defaults: ``JAX_COORDINATOR_ADDRESS``, ``JAX_NUM_PROCESSES`` and ``JAX_PROCESS_ID``, or the environment of SLURM,
    Open MPI or Kubernetes. See docs/many_hosts.md.
    """
    numbers = _from_environment(num_processes, "JAX_NUM_PROCESSES"), _from_environment(process_id, "JAX_PROCESS_ID")
    timeouts: Any = {"heartbeat_timeout_seconds": HEARTBEAT, "shutdown_timeout_seconds": HEARTBEAT}
    try:
        jax.distributed.initialize(coordinator_address, *numbers, **timeouts)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"the other processes are not known ({error}): set JAX_COORDINATOR_ADDRESS=host:port, JAX_NUM_PROCESSES "
            "and JAX_PROCESS_ID, or start under SLURM, Open MPI or Kubernetes"
        ) from error
    if count() > 1:
        _watch_peers()


def _from_environment(given: int | None, name: str) -> int | None:
    value = os.environ.get(name)
    if given is not None or value is None:
        return given
    if not value.isdigit():
        raise ValueError(f"{name}={value!r}: give a whole number")
    return int(value)


def count() -> int:
    """The number of processes."""
    return jax.process_count()


def is_first() -> bool:
    """Whether this is process 0, which writes the files and prints."""
    return jax.process_index() == 0


def share(total: int) -> tuple[int, int]:
    """The range of ``total`` rows that this process sums, if every process sums its own."""
    me = jax.process_index()
    return me * total // count(), (me + 1) * total // count()


def wait(name: str) -> None:
    """Wait until all processes have called this."""
    if count() > 1:
        multihost_utils.sync_global_devices(name)


def agreed(*flags: bool) -> tuple[bool, ...]:
    """For every flag, whether it is set in any process."""
    if count() == 1:
        return flags
    return tuple(bool(column.any()) for column in np.stack(gather_all(np.array(flags))).T)


def gather_all(tree: Any) -> list[Any]:
    """Gather a tree of host arrays, equal in shapes, from every process; one tree per process."""
    if count() == 1:
        return [tree]

    def gather(leaf: Any) -> list[np.ndarray]:
        array = np.asarray(leaf)
        # Sent as bytes, because JAX would round float64.
        raw = np.asarray(multihost_utils.process_allgather(np.frombuffer(array.tobytes(), np.uint8)))
        return [np.frombuffer(own.tobytes(), array.dtype).reshape(array.shape) for own in raw]

    leaves, structure = jax.tree.flatten(tree)
    gathered = [gather(leaf) for leaf in leaves]
    return [jax.tree.unflatten(structure, [own[p] for own in gathered]) for p in range(count())]


def fetched(x: Any) -> np.ndarray:
    """An array in host memory, whichever processes hold its shards."""
    whole = not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated
    return np.asarray(x if whole else multihost_utils.process_allgather(x, tiled=True))


def of_first(x: Any) -> np.ndarray:
    """A small array on the host; one that processes share, as process 0 has it, so that all decide alike."""
    shared = isinstance(x, jax.Array) and not x.is_fully_addressable
    return gather_all(fetched(x))[0] if shared else np.asarray(x)


def gather_rows(part: np.ndarray, start: int, total: int) -> np.ndarray:
    """Values ``(..., total)`` of all rows of a batch. This process has a part, starting at row ``start``."""
    if part.shape[-1] == total:
        return part
    whole = np.zeros((*part.shape[:-1], total), part.dtype)
    whole[..., start : start + part.shape[-1]] = part
    # Processes that hold the same rows hold the same values.
    for other, (lo, hi) in gather_all((whole, np.array([start, start + part.shape[-1]]))):
        whole[..., lo:hi] = other[..., lo:hi]
    return whole


def exit_without(process: int) -> None:
    """Print that a process is lost and end this one: arrays sharded over both cannot be read any more."""
    print(
        f"eigenstream: error: process {process} of {count()} is lost (it failed, was killed, or its host is gone): see "
        "its own error; start all processes again, with --resume (resume=True) to continue from the last checkpoint",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)


@contextlib.contextmanager
def report_lost_first() -> Iterator[None]:
    """Delay a JAX error, so that a lost process is reported before the errors which it causes."""
    try:
        yield
    except jax.errors.JaxRuntimeError:
        if count() > 1:
            time.sleep(GRACE)
        raise


def _watch_peers() -> None:
    """Connect process 0 to every other one. A connection that closes without a message means a lost process."""
    client: Any = global_state.client
    me = jax.process_index()
    peers: dict[socket.socket, int] = {}
    try:
        if me == 0:
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            with socket.create_server(("", 0), family=family, dualstack_ipv6=both) as server:
                client.key_value_set(_PORT, str(server.getsockname()[1]))
                server.settimeout(CONNECT)
                while len(peers) < count() - 1:
                    peer, _ = server.accept()
                    peer.settimeout(CONNECT)
                    who = int.from_bytes(peer.recv(4, socket.MSG_WAITALL), "big")
                    if 0 < who < count() and who not in peers.values():
                        peers[peer] = who
        else:
            host = str(global_state.coordinator_address).rsplit(":", 1)[0].strip("[]")
            port = int(client.blocking_key_value_get(_PORT, 1000 * CONNECT))
            peer = socket.create_connection((host, port), CONNECT)
            peer.sendall(me.to_bytes(4, "big"))
            peers[peer] = 0
    except (OSError, jax.errors.JaxRuntimeError) as error:
        log.warning("no connection beside JAX's own (%s): a lost process is noticed by its heartbeat only", error)
        _send(list(peers), _DONE)
        return
    for peer in peers:
        # Detect hosts that vanish without closing the connection.
        for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, option):
                peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        peer.settimeout(None)
    _announce_exit(peers)
    threading.Thread(target=_listen, args=(peers,), daemon=True, name="eigenstream-watch").start()


def _announce_exit(peers: dict[socket.socket, int]) -> None:
    """At exit send `_DONE`; after an uncaught exception close the connections at once instead."""
    usual, failed = sys.excepthook, []

    def hook(*error: Any) -> None:
        failed.append(True)
        usual(*error)

    def announce() -> None:
        if not failed:
            _send(list(peers), _DONE)
        for peer in peers if failed else ():
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)

    sys.excepthook = hook
    atexit.register(announce)


def _send(peers: list[socket.socket], message: int) -> None:
    for peer in peers:
        with contextlib.suppress(OSError):
            peer.sendall(message.to_bytes(4, "big"))


def _listen(peers: dict[socket.socket, int]) -> None:
    with selectors.DefaultSelector() as selector:
        for connection in peers:
            selector.register(connection, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                peer: Any = key.fileobj
                received = b""
                with contextlib.suppress(OSError):
                    received = peer.recv(4, socket.MSG_WAITALL)
                # A connection that closed without a whole message: its peer is lost.
                message = int.from_bytes(received, "big") if len(received) == 4 else peers[peer]
                if message == _DONE:
                    selector.unregister(peer)
                    continue
                if peers[peer] != 0:
                    _send([other for other in peers if other is not peer], message)
                exit_without(message)
