"""What blocks a thread: threads, their events, locks and queues, and sleep. Callers use the names here, at each use.

So a simulation puts its own in place, where virtual time passes while a thread waits.
"""

from concurrent.futures import Executor, ThreadPoolExecutor
from queue import Empty, Full, Queue, SimpleQueue
from threading import Event, Lock, Thread
from time import sleep


def executor(name: str, threads: int) -> Executor:
    """Return threads for calls that block; `name` begins the names of the threads, which start when needed."""
    return ThreadPoolExecutor(threads, thread_name_prefix=name)
