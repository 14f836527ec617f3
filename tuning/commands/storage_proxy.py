"""`dspark-tune storage-proxy`: optuna's gRPC proxy before a storage, for many workers.

    dspark-tune storage-proxy --storage postgresql://tuner@localhost/sweeps --host 0.0.0.0
    dspark-tune sweep --profile mi355x.yaml --storage grpc://HOST:13000          on every worker

The proxy keeps trials in its memory and answers many workers with one connection to the database. It has no
password and no encryption: let only the workers' network reach it. It runs until a signal comes.

Not covered: a proxy before a journal file, which optuna does not support.
"""

from __future__ import annotations

import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import optuna
import typer

from dspark_deploy.console import people, print_json
from dspark_deploy.errors import InputError
from tuning.commands.common import Json
from tuning.storage import GRPC_PORT, open_storage, shown

THREADS = 32
POLL_S = 0.5


def storage_proxy(
    storage: Annotated[str, typer.Option(help="postgresql://HOST/DATABASE or sqlite:///FILE")],
    host: Annotated[str, typer.Option(help="Where to listen")] = "localhost",
    port: Annotated[int, typer.Option(help="Where to listen", min=1, max=65535)] = GRPC_PORT,
    as_json: Json = False,
) -> None:
    """Serve a storage to workers that name it as grpc://HOST:PORT."""
    if not storage.startswith(("postgresql", "sqlite:///")):
        raise InputError(f"--storage {shown(storage)}: the proxy serves postgresql://... or sqlite:///FILE")
    backend = open_storage(storage)
    # Behind the imports of sweeps that need no gRPC.
    from optuna.storages._grpc.server import make_server

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        cached = optuna.storages.get_storage(backend)
        server = make_server(cached, host, port, ThreadPoolExecutor(THREADS))
    server.start()
    people(as_json).print(f"{shown(storage)} for workers at grpc://{host}:{port}", markup=False)
    if as_json:
        print_json({"status": "ready", "storage": shown(storage), "url": f"grpc://{host}:{port}"})
    try:
        while True:
            time.sleep(POLL_S)
    finally:
        server.stop(grace=1.0).wait()
