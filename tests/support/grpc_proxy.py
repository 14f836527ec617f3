"""The command `dspark-tune storage-proxy` as a process, for tests and benchmarks of many workers."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dspark_deploy.launch.engine import free_port
from tests.support.postgres import PASSWORD


@contextmanager
def grpc_proxy(storage: str) -> Iterator[str]:
    """The command storage-proxy as a process; gives the URL that workers name."""
    pytest.importorskip("grpc", reason="grpcio is not installed: pip install 'dspark-deploy[grpc]'")
    port = free_port("127.0.0.1")
    program = "from tuning.sweep import main; main()"
    command = [sys.executable, "-c", program, "storage-proxy", "--storage", storage, "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert f"grpc://localhost:{port}" in line and PASSWORD not in line, line + process.stdout.read()
        yield f"grpc://localhost:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 130
