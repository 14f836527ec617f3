"""Nothing that the commands start listens beyond this machine, unless it is told to."""

from __future__ import annotations

import ipaddress
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from dspark_deploy.launch.engine import free_port
from tests.support.commands import QUICK, SWEEP, Command
from tests.support.sweeps import sweep


def listening(pid: int) -> set[str]:
    """Addresses that a process and those below it listen on."""
    own = psutil.Process(pid)
    family = [own, *own.children(recursive=True)]
    return {
        each.laddr.ip
        for process in family
        for each in process.net_connections("inet")
        if each.status == psutil.CONN_LISTEN
    }


def wait_listening(pid: int, seconds: float = 30) -> set[str]:
    """The same, once there is one."""
    deadline = time.monotonic() + seconds
    while not (found := listening(pid)):
        assert time.monotonic() < deadline, "nothing listens"
        time.sleep(0.05)
    return found


def local(addresses: set[str]) -> bool:
    """Whether all of them are this machine's own."""
    known = [ipaddress.ip_address(each.removeprefix("::ffff:")) for each in addresses]
    return all(each.is_loopback for each in known)


def test_an_engine_listens_on_loopback(tmp_path: Path) -> None:
    command = Command(tmp_path, "serve", "--profile", "cpu-tiny.yaml", "--set", "engine.port=0", *QUICK)
    command.wait_for('"ready"')
    found = wait_listening(command.process.pid)
    command.process.send_signal(signal.SIGTERM)
    assert command.end().code == 130
    assert local(found), found


def test_a_sweep_and_its_engines_listen_on_loopback(tmp_path: Path) -> None:
    command = Command(tmp_path, "tune", *SWEEP, *QUICK)
    seen: set[str] = set()
    while command.process.poll() is None:
        try:
            seen |= listening(command.process.pid)
        except psutil.NoSuchProcess:
            continue
        time.sleep(0.02)
    assert command.end().code in (0, 1)
    assert seen and local(seen), seen


def test_the_proxy_of_a_storage_listens_on_loopback(tmp_path: Path) -> None:
    pytest.importorskip("grpc", reason="grpc is not installed: pip install 'dspark-deploy[grpc]'")
    url, port = f"sqlite:///{tmp_path / 'study.db'}", str(free_port("127.0.0.1"))
    command = Command(tmp_path, "tune", "storage-proxy", "--storage", url, "--port", port)
    command.wait_for('"ready"')
    found = wait_listening(command.process.pid)
    command.process.send_signal(signal.SIGTERM)
    assert command.end().code == 130
    assert local(found), found


def test_the_dashboard_listens_on_loopback(tmp_path: Path) -> None:
    """Started as the documents say it."""
    program = shutil.which("optuna-dashboard", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("optuna-dashboard is not installed: pip install 'dspark-deploy[dashboard]'")
    sweep(tmp_path)
    command = [program, f"sqlite:///{tmp_path}/out/study.db", "--port", str(free_port("127.0.0.1"))]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        found = wait_listening(process.pid)
    finally:
        process.terminate()
        process.wait(30)
    assert local(found), found


def test_an_address_of_the_network_would_be_seen() -> None:
    assert not local({"127.0.0.1", "0.0.0.0"}) and not local({"::"}) and local({"::1", "::ffff:127.0.0.1"})
