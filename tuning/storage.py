"""Where a sweep keeps its trials: one URL, the same for every worker of it.

    sqlite:///FILE                        one machine; the default, in the sweep's folder
    journal:///FILE                       several machines with one disk: optuna's journal file
    postgresql://USER:PASSWORD@HOST/DB    many machines: a PostgreSQL server
    grpc://HOST:PORT                      many machines: optuna's gRPC proxy before any of these

`docs/scale.md` says which one to choose. Passwords are kept out of every message: `shown` is the URL for
people.
Not covered: MySQL, whose text columns are too short for a measurement, and Redis.
"""

from __future__ import annotations

import fcntl
import importlib.util
import time
import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import optuna
from alembic.util import CommandError
from optuna.storages import BaseStorage, GrpcStorageProxy, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import TrialState
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from dspark_deploy.errors import InputError, MeasurementError
from dspark_deploy.launch.rundir import make_folder
from dspark_deploy.redaction import mask_credentials

KINDS = "sqlite:///FILE, journal:///FILE, postgresql://HOST/DATABASE or grpc://HOST:PORT"
GRPC_PORT = 13000
WAIT_S = 60
OPENINGS, OPENING_S = 5, 0.2
# File systems on which SQLite's locks are not to be trusted.
NETWORK_DISKS = ("nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "fuse.ceph", "beegfs", "gpfs", "9p", "afs")
# What a storage raises that was there and no longer answers.
RpcErrors: tuple[type[Exception], ...] = ()
if importlib.util.find_spec("grpc") is not None:
    from grpc import RpcError

    RpcErrors = (RpcError,)
StorageLost: tuple[type[Exception], ...] = (
    *(SQLAlchemyError, optuna.exceptions.StorageInternalError),
    *RpcErrors,
)
# What it raises besides when it can't be opened or read.
StorageErrors: tuple[type[Exception], ...] = (*StorageLost, OSError, ValueError)
# What optuna's readers run into where a file can be read and holds something else than this optuna writes.
# RuntimeError is another release's schema, CommandError a table of schemas that is none.
Nonsense: tuple[type[Exception], ...] = (
    *(LookupError, TypeError, AttributeError, ValueError, ArithmeticError, AssertionError, RuntimeError),
    CommandError,
)


class SqliteStorage(RDBStorage):
    """An SQLite file of which each waiting trial is taken once.

    SQLite knows no row locks, so between reading that a trial waits and writing that it runs, another thread
    or process may do the same, and both are told that it is theirs. A lock on a file beside it prevents it.
    """

    def set_trial_state_values(
        self, trial_id: int, state: TrialState, values: Sequence[float] | None = None
    ) -> bool:
        """As optuna's; False where another has taken the trial."""
        file = self.engine.url.database
        with Path(f"{file}.lock").open("a") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            return super().set_trial_state_values(trial_id, state, values)


class _TrimmingLock(JournalFileOpenLock):
    """optuna's lock of a journal; whoever gets it removes what a killed writer left of a line.

    Without that the next line would be written behind the half one, and nobody could read the journal again.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._journal = path

    def acquire(self) -> bool:
        held = super().acquire()
        with self._journal.open("r+b") as handle:
            end = handle.seek(0, 2)
            handle.seek(max(end - 1, 0))
            if end and handle.read(1) != b"\n":
                handle.seek(0)
                handle.truncate(sum(len(line) for line in handle if line.endswith(b"\n")))
        return held


class _Journal(JournalFileBackend):
    """optuna's journal, whose disk's faults are told as a storage's: full, gone, damaged."""

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        try:
            super().append_logs(logs)
        except OSError as error:
            raise optuna.exceptions.StorageInternalError(f"the journal takes no line: {error}") from error

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        try:
            yield from super().read_logs(log_number_from)
        except (OSError, ValueError, RecursionError) as error:
            raise optuna.exceptions.StorageInternalError(f"the journal is damaged: {error}") from error


class _JournalReplay(JournalStorage):
    """optuna's journal storage, whose replay of lines that are JSON and no journal is told as damage.

    Of a line that lacks what its operation needs, optuna raises whatever comes of it.
    """

    def _sync_with_backend(self) -> None:
        try:
            super()._sync_with_backend()
        except Nonsense as error:
            raise optuna.exceptions.StorageInternalError(f"the journal is damaged: {error!r}") from error


def open_storage(url: str) -> BaseStorage:
    """The storage at `url`. Raises InputError, with the URL redacted."""
    if url.startswith("postgresql"):
        _require("psycopg2", "PostgreSQL", "postgres")
    if url.startswith("grpc://"):
        _require("grpc", "optuna's gRPC proxy", "grpc")
    with naming_a_damaged_storage(url):
        return _open_beside_others(url)


# Of a table, of its first row in SQLite, and in PostgreSQL.
MADE_MEANWHILE = ("already exists", "UNIQUE constraint failed: ", "duplicate key value")


def _open_beside_others(url: str) -> BaseStorage:
    """Two workers that come first make the tables at one moment, and one of them is told that they exist."""
    for attempt in range(1, OPENINGS):
        try:
            return _open(url)
        except SQLAlchemyError as error:
            if not any(sign in str(error) for sign in MADE_MEANWHILE):
                raise
            time.sleep(OPENING_S * attempt)
    return _open(url)


def _open(url: str) -> BaseStorage:
    parts = urlsplit(url)
    if url.startswith("journal:///") and url != "journal:///":
        path = Path(url.removeprefix("journal://"))
        make_folder(path.parent)
        # The lock of exclusively created files holds on NFS 3 as well, unlike symbolic links on some disks.
        return _JournalReplay(_Journal(str(path), _TrimmingLock(path)))
    if url.startswith("sqlite:///") and url != "sqlite:///" and not url.endswith(":memory:"):
        path = Path(url.removeprefix("sqlite:///"))
        make_folder(path.parent)
        disk = file_system(path.parent)
        if disk in NETWORK_DISKS:
            raise InputError(
                f"{url}: lies on {disk}, where SQLite's locks lose trials; use journal:///FILE there"
            )
        return SqliteStorage(url, engine_kwargs={"connect_args": {"timeout": WAIT_S}})
    if parts.scheme in ("postgresql", "postgresql+psycopg2") and parts.path.strip("/"):
        # SQLAlchemy's own choice of a driver differs between its releases.
        driven = url.replace("postgresql://", "postgresql+psycopg2://", 1)
        # A connection may lie idle for hours while an engine is measured; it is tried before it is used.
        return RDBStorage(driven, engine_kwargs={"pool_pre_ping": True})
    if parts.scheme == "grpc" and parts.hostname:
        return _proxy(parts.hostname, parts.port or GRPC_PORT)
    raise InputError(f"--storage {shown(url)}: write {KINDS}")


def _proxy(host: str, port: int) -> BaseStorage:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        storage = GrpcStorageProxy(host=host, port=port)
    try:
        storage.wait_server_ready(timeout=10)
    except (ConnectionError, TimeoutError) as error:
        raise InputError(
            f"grpc://{host}:{port}: nobody answers; start `dspark-tune storage-proxy` there"
        ) from error
    return storage


def study_names(storage: BaseStorage) -> list[str]:
    """The names of all studies. Raises TypeError for one that is no text, as damage leaves it."""
    names = optuna.get_all_study_names(storage)
    if not all(isinstance(name, str) for name in names):
        raise TypeError("a study's name is no text")
    return names


@contextmanager
def naming_a_damaged_storage(url: str) -> Iterator[None]:
    """Raises InputError for a storage that can't be opened or read. For calls of optuna's, and nothing else:
    what it runs into would hide faults of ours.
    """
    try:
        yield
    except (*StorageErrors, *Nonsense) as error:
        raise unusable(url, error) from error


def unusable(url: str, error: Exception) -> InputError:
    """The error for a storage that can't be opened or read."""
    reason = str(error).partition("\n")[0] or type(error).__name__
    return InputError(f"{shown(url)}: can't be used as storage: {shown(reason)}; {_remedy(url, error)}")


def _remedy(url: str, error: Exception) -> str:
    """What to do about a storage that can't be used: it can't be reached, can't be written, or is damaged."""
    server = url.startswith(("postgresql", "grpc://"))
    if server and isinstance(error, (OperationalError, *RpcErrors)):
        return "see that the server is up, and that host, port, user, password and database are right"
    unwritable = any(sign in str(error) for sign in ("unable to open database file", "readonly database"))
    if unwritable or isinstance(error, OSError) or isinstance(error.__cause__, OSError):
        return "see that the path is right and may be written, or name another --out or --storage"
    return "where it is damaged, start anew with another --out or --storage"


@contextmanager
def naming_a_lost_storage(url: str) -> Iterator[None]:
    """Raises MeasurementError for a storage that is lost inside the block, naming it without its password."""
    try:
        yield
    except StorageLost as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise MeasurementError(
            f"{shown(url)}: the storage no longer answers: {shown(reason)}. What has ended is in it; run the "
            f"same command again to go on"
        ) from error


def shown(url: str) -> str:
    """The URL without user and password."""
    return mask_credentials(url)


def file_system(folder: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """The type of the file system that holds `folder`; empty where the system doesn't tell."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    where = folder.resolve()
    found = [line.split()[1:3] for line in lines if len(line.split()) > 2]
    holding = [(place, kind) for place, kind in found if where.is_relative_to(place)]
    return max(holding, key=lambda each: len(each[0]))[1] if holding else ""


def _require(module: str, what: str, extra: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise InputError(f"{what} needs {module}: pip install 'dspark-deploy[{extra}]'")
