"""One worker among several: who it is, whether another is still alive, and which GPUs are its own.

A worker's name holds host, boot and process, so that on one machine a dead one is known at once. Elsewhere
it is known by its beats: a trial that runs carries a number that rises, and one that has not risen for
`STALE_S` by the observer's own clock belongs to nobody. Clocks of different hosts are never compared.

GPUs are held by locks on files, one per GPU, which the system lets go when the process ends, however it ends.
Not covered: GPUs that something else than a worker uses.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from dspark_deploy.errors import InputError
from tuning.storage import StorageErrors

BEAT_S = 20.0
STALE_S = 120.0

log = logging.getLogger(__name__)


def machine_id() -> str:
    """This machine, this boot of it, and this namespace of processes: where a pid means one process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
        space = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        boot, space = "", 0
    return f"{socket.gethostname()}/{boot}/{space}"


def worker_name() -> str:
    """This process, told apart from every other one, an earlier one of the same pid included."""
    return f"{machine_id()}:{os.getpid()}:{_state_and_birth(os.getpid())[1]}"


def _state_and_birth(pid: int) -> tuple[str, str]:
    """A process's state, and its start in clock ticks since boot, which a step of the clock leaves alone.

    Seconds since 1970, as psutil gives them, are reckoned back from the clock of this moment: after a step
    two workers would know one another by different names. Raises OSError where there is no such process.
    """
    # The name in parentheses may hold spaces; the third field of `man proc_pid_stat` follows the last one.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]


def is_alive(name: str) -> bool | None:
    """Whether a worker of this machine is running; None for one elsewhere, of which nothing is known."""
    parts = name.rsplit(":", 2)
    if len(parts) != 3 or parts[0] != machine_id() or not parts[1].isdecimal():
        return None
    _, pid, started = parts
    try:
        state, birth = _state_and_birth(int(pid))
    except OSError:
        return False
    return birth == started and state not in ("Z", "X")


@dataclass
class Pulse:
    """What was last seen of trials that others run: their beats, and since when they have not changed."""

    stale_s: float = STALE_S
    clock: Callable[[], float] = time.monotonic
    seen: dict[int, tuple[int, float]] = field(default_factory=dict)

    def is_dead(self, number: int, worker: str, beat: int) -> bool:
        """Whether the worker of trial `number` is dead, as far as can be told by now."""
        alive = is_alive(worker)
        if alive is not None:
            return not alive
        last, since = self.seen.get(number, (-1, self.clock()))
        if beat != last:
            self.seen[number] = (beat, self.clock())
            return False
        return self.clock() - since > self.stale_s


class Patience:
    """Waiting for other workers: briefly at first, then longer, so that many who wait cost little."""

    def __init__(self, first_s: float = 0.1, most_s: float = 5.0) -> None:
        self._wait_s, self._most_s = first_s, most_s

    def wait(self) -> None:
        """Wait once."""
        time.sleep(self._wait_s)
        self._wait_s = min(self._wait_s * 1.5, self._most_s)


@contextmanager
def beating(beat: Callable[[int], None], every_s: float = BEAT_S) -> Iterator[None]:
    """Call `beat` with 1, 2, 3, ... from a thread for as long as the block lasts."""
    ended = threading.Event()

    def run() -> None:
        count = 0
        while not ended.wait(every_s):
            count += 1
            try:
                beat(count)
            except StorageErrors as error:  # a network that comes back must not cost the measurement
                log.warning("the storage took no sign of life: %s", type(error).__name__)

    thread = threading.Thread(target=run, name="beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=every_s)


@contextmanager
def own_gpus(gpus: Sequence[int], folder: Path | None = None) -> Iterator[None]:
    """Hold these GPUs of this machine. Raises InputError where another worker has one of them."""
    place = folder or Path(tempfile.gettempdir())
    held: list[IO[str]] = []
    try:
        for gpu in gpus:
            handle = _open_lock(place / f"dspark-tune-gpu-{gpu}.lock")
            held.append(handle)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise InputError(
                    f"GPU {gpu} is another worker's; give each worker GPUs of its own by --gpus"
                ) from error
        yield
    finally:
        for handle in held:
            handle.close()


def _open_lock(path: Path) -> IO[str]:
    """The lock's file, which workers of other users may open as well."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise InputError(f"{path}: can't be opened to hold the GPU: {error.strerror}") from error
    return os.fdopen(number, "r")


def visible_gpus(platform: str, gpus: Sequence[int]) -> dict[str, str]:
    """The variable that shows an engine only these GPUs."""
    name = "HIP_VISIBLE_DEVICES" if platform == "rocm" else "CUDA_VISIBLE_DEVICES"
    return {name: ",".join(map(str, gpus))}
