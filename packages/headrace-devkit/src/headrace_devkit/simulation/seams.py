"""Replaces what a process takes from its machine: time, threads, chance, names, sockets, and the client of Kafka.

Code of Headrace stays as it is. Where one of its modules holds an object of the table, it gets the simulated one while
a world runs: also a name that was imported from the module that makes it.
"""

import contextlib
import errno
import fcntl
import functools
import importlib
import itertools
import os
import pkgutil
import queue
import random
import secrets
import socket
import sys
import termios
import threading
import time
import types
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import WeakSet

import confluent_kafka
from confluent_kafka import admin

import headrace
from headrace.feature import features, imported
from headrace.kafka import consumer, producer_client
from headrace.kafka.client import native
from headrace.runtime import failpoints, gauge_registry, memory, threads
from headrace.runtime.telemetry import correlation
from headrace_devkit.simulation import greenlet_threads
from headrace_devkit.simulation.network import ListeningSocket, Network
from headrace_devkit.simulation.world import EPOCH_SECONDS, Machine, World

_OUTSIDE = ("headrace.cli.", "headrace_devkit")
_THREADS = {
    threading.Thread: greenlet_threads.Thread,
    threading.Event: greenlet_threads.ThreadEvent,
    threading.Lock: greenlet_threads.ThreadLock,
    threading.RLock: greenlet_threads.RLock,
    threading.Condition: greenlet_threads.Condition,
    threading.get_ident: greenlet_threads.get_ident,
    queue.Queue: greenlet_threads.Queue,
    queue.SimpleQueue: greenlet_threads.Queue,
    time.sleep: greenlet_threads.sleep,
    ThreadPoolExecutor: greenlet_threads.Executor,
}
_LOOKS: Mapping[str, Mapping[str, float]] = {
    "headrace.kafka.client.reachability": {"_POLL_SECONDS": 0.25},
    "headrace.kafka.producer_client": {"_POLL_SECONDS": 0.5},
    "headrace.kafka.reader": {"_WAIT_SECONDS": 1.0},
    "headrace.runtime.telemetry.loop_delay": {"_INTERVAL_SECONDS": 5.0},
}
"""Longer than in the product: waits that work ends at once. Of a quiet process, most events would be these."""


class Clients:
    """The simulated clients of Kafka: classes that replace those of `confluent_kafka`."""

    def __init__(self, consumer: Any = None, producer: Any = None, admin_client: Any = None) -> None:
        self.consumer = consumer
        self.producer = producer
        self.admin_client = admin_client


@contextlib.contextmanager
def installed(network: Network, clients: Clients, reached: Callable[[str], None]) -> Iterator[None]:
    """Let every module of Headrace run on a world; `reached` is called at each failpoint."""
    import_all()
    replaced = _table(network, clients, reached)
    changes: list[tuple[dict[str, Any], str, Any]] = []
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0].startswith("headrace") and not name.startswith(_OUTSIDE):
            names = vars(module)
            changes += [(names, key, value) for key, value in names.items() if id(value) in replaced]
    for names, key, value in changes:
        names[key] = replaced[id(value)][1]
    for name, looks in _LOOKS.items():
        names = vars(sys.modules[name])
        changes += [(names, key, names[key]) for key in looks]
        names.update(looks)
    for names, key, value in _state():
        changes.append((names, key, names[key]))
        names[key] = value
    try:
        yield
    finally:
        for names, key, value in changes:
            names[key] = value


def _state() -> list[tuple[dict[str, Any], str, Any]]:
    """Return what the modules of a new process know: a run must not depend on those before it, in the same process."""
    return [
        (vars(threads), "_pool", None),
        (vars(native), "_opened", lambda: None),  # it opens sockets of the machine
        (vars(threads), "_unreturned", []),
        (vars(consumer), "_consumers", WeakSet()),  # those of killed machines hang for ever
        (vars(correlation), "_burst", correlation._Burst()),
        (vars(producer_client), "_client_numbers", itertools.count(1)),
        (vars(gauge_registry), "_gauges", {}),
    ]


@functools.cache
def import_all() -> None:
    """Import the core and the parts of every feature: a module that is imported later would have the real objects."""
    for found in pkgutil.walk_packages(headrace.__path__, "headrace."):
        if not found.name.startswith(_OUTSIDE) and not found.name.endswith("__main__"):
            with contextlib.suppress(ImportError):  # a library that is not installed
                importlib.import_module(found.name)
    for one in features():
        for where in filter(None, (one.parts, one.section)):
            imported(where)


def _table(network: Network, clients: Clients, reached: Callable[[str], None]) -> dict[int, tuple[Any, Any]]:
    """Return what is replaced by its identity, with the original, which must live as long."""
    world = network.world
    pairs = {**_THREADS, **_clock(world), **_chance(world), **_sockets(network)}
    pairs[memory.memory_bytes] = lambda process=None: 50_000_000
    pairs[memory.trim] = lambda: None
    pairs[failpoints.reach] = reached
    for real, fake in (
        (confluent_kafka.Consumer, clients.consumer),
        (confluent_kafka.Producer, clients.producer),
        (admin.AdminClient, clients.admin_client),
    ):
        if fake is not None:
            pairs[real] = fake
    table = {id(real): (real, fake) for real, fake in pairs.items()}
    for module in (time, threading, queue, random, secrets, uuid, socket, os, fcntl, confluent_kafka, admin):
        table[id(module)] = module, _with(module, table)
    return table


def _with(module: types.ModuleType, table: dict[int, tuple[Any, Any]]) -> types.ModuleType:
    """Return a copy of a module in which what the table has is replaced."""
    copy = types.ModuleType(module.__name__)
    names = {key: table[id(value)][1] if id(value) in table else value for key, value in vars(module).items()}
    vars(copy).update(names)
    return copy


def _machine(world: World) -> Machine:
    assert world.current, "code of a process runs outside of all machines"
    return world.current


def _clock(world: World) -> dict[Any, Any]:
    def wall() -> float:
        return world.current.now if world.current else EPOCH_SECONDS + world.now

    def steady() -> float:
        return world.now

    return {
        time.time: wall,
        time.time_ns: lambda: int(wall() * 1e9),
        time.monotonic: steady,
        time.monotonic_ns: lambda: int(world.now * 1e9),
        time.perf_counter: steady,
        time.perf_counter_ns: lambda: int(world.now * 1e9),
        time.process_time: steady,
        time.thread_time: steady,
    }


def _chance(world: World) -> dict[Any, Any]:
    own = world.random
    calls: dict[Any, Any] = {
        getattr(random, name): getattr(own, name)
        for name in (
            "random",
            "uniform",
            "randint",
            "randrange",
            "choice",
            "choices",
            "sample",
            "shuffle",
            "getrandbits",
        )
    }
    calls[random.Random] = lambda seed=None: random.Random(own.getrandbits(64) if seed is None else seed)
    calls[secrets.token_bytes] = lambda nbytes=32: own.randbytes(nbytes)
    calls[secrets.token_hex] = lambda nbytes=32: own.randbytes(nbytes).hex()
    calls[secrets.token_urlsafe] = lambda nbytes=32: own.randbytes(nbytes).hex()
    calls[secrets.randbelow] = own.randrange
    calls[secrets.randbits] = own.getrandbits
    calls[uuid.uuid4] = lambda: uuid.UUID(int=own.getrandbits(128), version=4)
    calls[os.urandom] = own.randbytes
    return calls


def _sockets(network: Network) -> dict[Any, Any]:
    def create_server(address: tuple[str, int], **_options: Any) -> ListeningSocket:
        return ListeningSocket(network, _machine(network.world), address[1])

    def pid() -> int:
        return 1000 + [*network.world.machines].index(_machine(network.world).name)

    def ioctl(descriptor: int, request: int, waiting: Any) -> bytes:
        """Return how many bytes of a connection wait to be acknowledged, or to be read."""
        transport = network.sockets.get(descriptor)
        if transport is None:
            raise OSError(errno.EBADF, "Bad file descriptor")
        of_peer = request == termios.TIOCOUTQ
        count = transport.get_extra_info("socket").unacknowledged() if of_peer else len(transport.unread)
        size = int(count).to_bytes(4, sys.byteorder)
        if isinstance(waiting, bytearray):
            waiting[:4] = size
        return size

    found: dict[Any, Any] = {
        fcntl.ioctl: ioctl,
        socket.create_server: create_server,
        socket.gethostname: lambda: _machine(network.world).host,
        os.getpid: pid,
    }
    if network.children:
        found |= {socket.socketpair: network.children.socketpair, os.killpg: network.children.killpg}
    return found
