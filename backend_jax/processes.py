"""The processes of a run on many hosts: each is waited for by its number, then `jax.distributed` connects them.

`jax.distributed.initialize` by itself ends a process, without a number, where another one does not come, and lets the
others of a dead one wait for longer than a minute. Here they meet first where the coordinator will be, and the waits
are short.
"""

from __future__ import annotations

import errno
import os
import socket
import time

import jax

from core_numpy.contract.checks.common import require_int
from core_numpy.contract.parallel import check_present, started_processes

# A process that has not come for so long is missing. The slowest honest one imports JAX.
TIMEOUT = 60.0
# One that has not been heard of for so long is dead: JAX's own thread sends signs of life much more often. Shorter
# would end a run whose machine stood still for a moment; longer, and the others would wait for more than a minute.
HEARTBEAT = 45


def connect(coordinator: str, processes: int, rank: int, *, timeout: float = TIMEOUT) -> None:
    """Join `processes` processes, of which this one is number `rank`, before anything else is asked of JAX.

    coordinator: "host:port" of process 0, the same in all. TimeoutError names the processes that have not come within
    `timeout` seconds. A process that dies later ends the others: at once where they wait for it in a step, else when
    it has not been heard of for 45 s. Native: `jax.distributed.initialize`.
    """
    count = require_int("processes", processes, 1)
    if not 0 <= require_int("rank", rank, 0) < count:
        raise ValueError(f"rank must be from 0 to processes - 1 ({count - 1}); got {rank}")
    host, colon, port = coordinator.rpartition(":")
    if not colon or not host or not port.isdecimal():
        raise ValueError(f"coordinator must be host:port of process 0, such as 10.0.0.1:1234; got {coordinator!r}")
    if rank == 0:
        _wait_for_all(int(port), count, timeout)
    else:
        _come(host, int(port), rank, count, timeout)
    jax.distributed.initialize(
        coordinator, count, rank, initialization_timeout=max(int(timeout), 1), heartbeat_timeout_seconds=HEARTBEAT,
        shutdown_timeout_seconds=HEARTBEAT,
    )  # fmt: skip


def join() -> None:
    """`connect` to the processes that the environment speaks of: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Without a RANK there is this process alone. Refused under torchrun, which keeps MASTER_PORT for itself.
    """
    if "RANK" not in os.environ:
        return
    rank, count, host, port = started_processes()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ValueError(
            "torchrun must not start processes of JAX: it keeps MASTER_PORT for itself; start each with RANK, "
            "WORLD_SIZE, MASTER_ADDR and MASTER_PORT of your own"
        )
    if count > 1:
        connect(f"{host}:{port}", count, rank)


def _wait_for_all(port: int, count: int, timeout: float) -> None:
    """Process 0: take everybody's number, and tell all who is missing, or that nobody is."""
    until = time.monotonic() + timeout
    here: dict[int, socket.socket] = {}
    with _server(port, count) as server:
        try:
            while len(here) < count - 1 and (left := until - time.monotonic()) > 0:
                server.settimeout(left)
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    break
                connection.settimeout(timeout)
                said = connection.recv(16).decode("ascii", errors="replace").strip()
                if said.isdecimal() and 0 < int(said) < count and int(said) not in here:
                    here[int(said)] = connection
                else:  # somebody else's, or the same number twice: the one that lacks is named in the end
                    connection.close()
            missing = [number for number in range(1, count) if number not in here]
            for connection in here.values():
                connection.sendall(f"{','.join(map(str, missing)) or 'all'}\n".encode())
                connection.recv(1)  # who comes closes first: the port is free at once for JAX's own service
        finally:
            for connection in here.values():
                connection.close()
    check_present(missing, count, timeout)


def _server(port: int, count: int) -> socket.socket:
    try:
        return socket.create_server(("", port), backlog=count)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise OSError(
            error.errno, f"coordinator must have a port that is free on process 0's machine; {port} is taken"
        ) from error


def _come(host: str, port: int, rank: int, count: int, timeout: float) -> None:
    """The others: say the own number as soon as process 0 is there, and hear who is missing."""
    until = time.monotonic() + timeout
    while True:
        try:
            with socket.create_connection((host, port), timeout=1.0) as connection:
                connection.settimeout(timeout + 5.0)
                connection.sendall(f"{rank}\n".encode())
                said = connection.recv(4096).decode("ascii", errors="replace").strip()
            break
        except OSError:
            if time.monotonic() >= until:
                check_present([0], count, timeout)
            time.sleep(0.1)
    if not said:
        raise ValueError(f"process 0 did not take rank {rank}: it is taken, or processes ({count}) is not what it has")
    check_present([] if said == "all" else [int(number) for number in said.split(",")], count, timeout)
