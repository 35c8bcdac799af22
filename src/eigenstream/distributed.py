"""One program on many hosts, by JAX's distributed runtime: every process does the same steps, each with its own rows.

Arrays are shared out over the devices of all processes as over those of one, so the steps know nothing of it. What is
decided on a host, when to save and when to stop, is agreed on. Nothing here acts where there is one process.
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
from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import numpy as np
from jax._src.distributed import global_state
from jax.experimental import multihost_utils

__all__ = ["initialize"]

#: Seconds without a sign of life after which JAX takes a process for lost, and ends the others.
HEARTBEAT = 20
#: Seconds to connect in, and to find out that a process is lost in before an error is taken for another.
CONNECT, GRACE = 60, 3
#: Where process 0 tells its port, and the word of a process that has come to its end; other words are who is lost.
_PORT, _DONE = "eigenstream/port", 2**32 - 1

log = logging.getLogger("eigenstream")


def initialize(
    coordinator_address: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> None:
    """Join the other processes of this job; to be called before anything touches a device.

    Parameters
    ----------
    coordinator_address : str, optional
        Host and port of process 0, such as ``"10.0.0.1:1234"``.
    num_processes, process_id : int, optional
        How many there are, and which this one is.

    Notes
    -----
    What is left out comes from ``JAX_COORDINATOR_ADDRESS``, ``JAX_NUM_PROCESSES`` and ``JAX_PROCESS_ID``, or from what
    SLURM, Open MPI and Kubernetes tell JAX. See docs/many_hosts.md.
    """

    def whole(given: int | None, name: str) -> int | None:
        value = os.environ.get(name)
        if given is None and value is not None and not value.isdigit():
            raise ValueError(f"{name}={value!r}: give a whole number")
        return int(value) if given is None and value is not None else given

    num_processes, process_id = whole(num_processes, "JAX_NUM_PROCESSES"), whole(process_id, "JAX_PROCESS_ID")
    try:
        jax.distributed.initialize(
            coordinator_address,
            num_processes,
            process_id,
            heartbeat_timeout_seconds=HEARTBEAT,
            shutdown_timeout_seconds=HEARTBEAT,
        )
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"the other processes are not known ({error}): set JAX_COORDINATOR_ADDRESS=host:port, JAX_NUM_PROCESSES "
            "and JAX_PROCESS_ID, or start under SLURM, Open MPI or Kubernetes"
        ) from error
    if count() > 1:
        _watch()


def count() -> int:
    """Processes of this job."""
    return jax.process_count()


def is_first() -> bool:
    """Whether this is the process that writes what is written once."""
    return jax.process_index() == 0


def wait(name: str) -> None:
    """Until all processes are here."""
    if count() > 1:
        multihost_utils.sync_global_devices(name)


def agreed(*flags: bool) -> tuple[bool, ...]:
    """For every flag whether any process has it up."""
    if count() == 1:
        return flags
    up = np.asarray(multihost_utils.process_allgather(np.array(flags)))
    return tuple(bool(up[:, i].any()) for i in range(len(flags)))


def of_all(tree: Any) -> list[Any]:
    """What each process has in the place of this tree of host arrays, in their order."""
    if count() == 1:
        return [tree]
    leaves, structure = jax.tree.flatten(tree)
    # As bytes: JAX would round float64 off.
    found = [np.asarray(multihost_utils.process_allgather(_bytes(leaf))) for leaf in leaves]
    return [
        jax.tree.unflatten(structure, [_array(all_[p], leaf) for all_, leaf in zip(found, leaves, strict=True)])
        for p in range(count())
    ]


def _bytes(leaf: Any) -> np.ndarray:
    return np.frombuffer(np.ascontiguousarray(leaf).tobytes(), np.uint8)


def _array(raw: np.ndarray, like: Any) -> np.ndarray:
    return np.frombuffer(raw.tobytes(), np.asarray(like).dtype).reshape(np.shape(like))


def joined_rows(part: np.ndarray, start: int, total: int) -> np.ndarray:
    """Values ``(..., total)`` of all rows of a batch, of which this process has those from ``start`` on."""
    if part.shape[-1] == total:
        return part
    whole = np.zeros((*part.shape[:-1], total), part.dtype)
    whole[..., start : start + part.shape[-1]] = part
    # Where several processes have the same rows, they have the same values.
    for other, (lo, hi) in of_all((whole, np.array([start, start + part.shape[-1]]))):
        whole[..., lo:hi] = other[..., lo:hi]
    return whole


# Who is lost.


def lost(process: int) -> None:
    """Say that a process is gone, and end this one: the arrays that both held cannot be had any more."""
    print(
        f"eigenstream: error: process {process} of {count()} is lost (it failed, was killed, or its host is gone): its "
        "own last words say more; start all of them again, with --resume (resume=True) to go on from the last "
        "checkpoint",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)


def waiting_for_the_others(f: Callable[..., Any]) -> Callable[..., Any]:
    """A function of which an error that JAX meets between processes waits until it is known who is lost, if one is."""

    @wraps(f)
    def waiting(*arguments: Any, **options: Any) -> Any:
        try:
            return f(*arguments, **options)
        except jax.errors.JaxRuntimeError:
            if count() > 1:
                time.sleep(GRACE)
            raise

    return waiting


def _watch() -> None:
    """Hold a connection between process 0 and each other one, which breaks when one of them goes without a word."""
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
        _say(list(peers), _DONE)
        return
    for peer in peers:
        # Hosts that vanish without closing anything.
        for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, option):
                peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        peer.settimeout(None)
    _part_in_words(peers)
    threading.Thread(target=_listen, args=(peers,), daemon=True, name="eigenstream-watch").start()


def _part_in_words(peers: dict[socket.socket, int]) -> None:
    """At the end of this process say that it is done; if an error ends it, break the connections at once."""
    usual, failed = sys.excepthook, []

    def hook(*error: Any) -> None:
        failed.append(True)
        usual(*error)

    def part() -> None:
        if not failed:
            _say(list(peers), _DONE)
        for peer in peers if failed else ():
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)

    sys.excepthook = hook
    atexit.register(part)


def _say(peers: list[socket.socket], word: int) -> None:
    for peer in peers:
        with contextlib.suppress(OSError):
            peer.sendall(word.to_bytes(4, "big"))


def _listen(peers: dict[socket.socket, int]) -> None:
    with selectors.DefaultSelector() as selector:
        for peer in peers:
            selector.register(peer, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                one: Any = key.fileobj
                try:
                    heard = one.recv(4, socket.MSG_WAITALL)
                except OSError:
                    heard = b""
                word = int.from_bytes(heard, "big") if len(heard) == 4 else peers[one]
                if word == _DONE:
                    selector.unregister(one)
                    continue
                if peers[one] != 0:
                    _say([other for other in peers if other is not one], word)
                lost(word)
