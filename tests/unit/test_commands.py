"""The two commands as a person meets them, without an engine: output, JSON document, exit code."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dspark_deploy.console import interrupts
from dspark_deploy.errors import DSparkError, Interrupted
from dspark_deploy.serve import patch_rows
from tests.unit.facts import good_facts
from tests.unit.profiles import TEXT, write
from tuning.sweep import _judge


def run(module: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command as its entry point does."""
    program = f"from {module} import main; main()"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=cwd, capture_output=True, text=True, check=False
    )


def serve(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return run("dspark_deploy.serve", *arguments, cwd=cwd)


def last_json(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    """The JSON document on the last line of stdout."""
    document = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(document, dict)
    return document


@pytest.fixture
def facts(tmp_path: Path) -> str:
    path = tmp_path / "facts.json"
    path.write_text(json.dumps(good_facts().as_json()))
    return str(path)


def test_check_with_facts_of_another_machine(tmp_path: Path, facts: str) -> None:
    write(tmp_path)
    done = serve("--profile", "test.yaml", "--facts", facts, "--check", "--json", cwd=tmp_path)
    assert (done.returncode, last_json(done)) == (0, {"verdict": "ok", "findings": []})


def test_check_that_refuses(tmp_path: Path, facts: str) -> None:
    write(tmp_path, TEXT.replace(">=0.26", ">=9"))
    done = serve("--profile", "test.yaml", "--facts", facts, "--check", "--json", cwd=tmp_path)
    document = last_json(done)
    assert done.returncode == 3 and document["verdict"] == "refused" and document["exit_code"] == 3
    (finding,) = document["findings"]  # type: ignore[misc]
    assert set(finding) == {"code", "severity", "message", "where", "remedy", "source"}
    assert (finding["code"], finding["where"]) == ("VLLM_VERSION", "test.yaml:5")


def test_dry_run_starts_nothing(tmp_path: Path, facts: str) -> None:
    write(tmp_path)
    done = serve(
        "--profile", "test.yaml", "--facts", facts, "--dry-run", "--json", "--", "--seed", "1", cwd=tmp_path
    )
    document = last_json(done)
    assert done.returncode == 0
    assert document["command"][-2:] == ["--seed", "1"]  # type: ignore[index]
    assert not (tmp_path / "runs").exists()


def test_bad_input_lists_every_fault(tmp_path: Path) -> None:
    write(tmp_path, TEXT.replace("port: 8123", "prt: 1").replace("cpu", "gpu"))
    done = serve("--profile", "test.yaml", "--check", "--json", cwd=tmp_path)
    assert done.returncode == 2
    assert last_json(done)["status"] == "error"
    assert "2 faults" in done.stderr and "test.yaml:3:" in done.stderr and "test.yaml:6:" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--profile", "none.yaml"),
        ("--profile", "test.yaml", "--check", "--dry-run"),
        ("--profile", "test.yaml", "--set", "x"),
        ("--profile", "test.yaml", "--facts", "none.json", "--check"),
        ("--profile", "test.yaml", "--nonsense"),
    ],
)
def test_wrong_arguments(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    write(tmp_path)
    done = serve(*arguments, "--json", cwd=tmp_path)
    assert done.returncode == 2 and last_json(done)["exit_code"] == 2
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_refused_before_anything_loads(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        write(tmp_path, TEXT.replace("8123", str(port)))
        started = time.monotonic()
        done = serve("--profile", "test.yaml", "--json", cwd=tmp_path)
    assert done.returncode == 3 and f"127.0.0.1:{port} is in use" in done.stderr
    document = last_json(done)
    assert document["exit_code"] == 3 and "PORT_IN_USE" in json.dumps(document["findings"])
    assert time.monotonic() - started < 30, "nothing was loaded"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--num-speculative-tokens", "five"), "'five' is no number"),
        (("--num-speculative-tokens", "99"), "99 is not a number of speculative tokens"),
        (("--loads", "0"), "greater than or equal to 1"),
        (("--draft-sample-method", "best"), "'greedy' or 'probabilistic'"),
        (("--goal", "speed"), "'latency', 'throughput' or 'slo'"),
        (("--goal", "slo", "--set", "sweep.slo=null"), "goal: slo needs limits"),
        (("--sampler", "best"), "'grid', 'tpe', 'gp', 'nsga2' or 'random'"),
        (("--trials", "0"), "greater than or equal to 1"),
        (("--boots", "1"), "fewer than 3 say nothing"),
        (("--gpus", "0"), "the profile runs on the CPU"),
        (("--seed-from", "nowhere"), "neither a sweep's folder nor a study"),
        (("--storage", "mysql://x"), "sqlite:///FILE"),
        (("--storage", "sqlite:///"), "sqlite:///FILE"),
        (("--set", "engine.args.api-key=x"), "sends none"),
        (("--set", "sweep.workload=random"), "there is no workload 'random'"),
    ],
)
@pytest.mark.engine
def test_sweep_refuses_before_it_boots(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    done = run("tuning.sweep", "sweep", "--profile", "cpu-tiny.yaml", *arguments, "--json", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr and "Traceback" not in done.stderr
    assert last_json(done)["exit_code"] == 2


def test_what_nothing_foresaw_still_gives_a_document(tmp_path: Path) -> None:
    program = (
        "import typer; from dspark_deploy.console import run_app\n"
        "app = typer.Typer(pretty_exceptions_enable=False)\n"
        "@app.command()\n"
        "def broken(json: bool = False) -> None:\n"
        "    raise ZeroDivisionError('never foreseen')\n"
        "run_app(app, 'broken')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "--json"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "Traceback" in done.stderr
    assert last_json(done)["error"] == "a fault of ours: ZeroDivisionError: never foreseen"


def cell(label: str, k: int, **rest: object) -> dict[str, object]:
    return {"configuration": label, "num_speculative_tokens": k, **rest}


@pytest.mark.parametrize(
    ("cells", "code", "says"),
    [
        ([cell("k5", 5, state="complete", accurate=True, accuracy_verdict="pass")], 0, ""),
        ([cell("k5", 5, state="complete", accurate=False, accuracy_verdict="fail")], 7, "is a kernel"),
        (
            [cell("k5", 5, state="complete", accurate=False, accuracy_verdict="inconclusive")],
            7,
            "at least 73",
        ),
        ([cell("k5", 5, state="failed", reason="it died")], 1, "it died"),
        ([], 0, ""),
    ],
)
def test_the_verdict_on_a_sweep(cells: list[dict[str, object]], code: int, says: str) -> None:
    settings = {"accuracy_margin": 0.05, "accuracy_problems": 100}
    result = {"cells": [cell("none", 0, state="complete", accurate=True), *cells], "settings": settings}
    try:
        _judge(result)
    except DSparkError as error:
        assert error.exit_code == code and error.document == result and says in str(error)
    else:
        assert code == 0


def test_one_signal_raises_and_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted, match="SIGTERM"), interrupts():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert signal.getsignal(signal.SIGTERM) == before


def test_patches_that_ended_alike_share_a_row() -> None:
    def patch(name: str, state: str, detail: str) -> dict[str, str]:
        return {"name": name, "state": state, "detail": detail, "why": "w", "target": "t"}

    worker = [
        patch("driver", "applied", "d"),
        patch("twin:a", "applied", "1 module"),
        patch("twin:b", "applied", "2 modules"),
        patch("twin:c", "refused", "its source differs"),
    ]
    rows = patch_rows([{"pid": 1, "patches": worker[:1]}, {"pid": 2, "patches": worker}])
    assert [(row["name"], row["state"], row["processes"], row["detail"]) for row in rows] == [
        ("driver", "applied", 2, "d"),
        ("twin (2)", "applied", 1, "a, b"),
        ("twin (1)", "refused", 1, "c: its source differs"),
    ]


def test_prewarm_on_the_cpu_says_that_there_is_nothing(tmp_path: Path) -> None:
    done = serve("--profile", "cpu-tiny.yaml", "--set", "engine.port=0", "--prewarm", "--json", cwd=tmp_path)
    document = last_json(done)
    assert done.returncode == 0, done.stderr
    assert document["status"] == "nothing to warm" and "CPU engine" in str(document["reason"])
    assert not (tmp_path / "runs").exists(), "no engine was started"


@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)])
def test_closed_streams_are_no_fault_of_ours(tmp_path: Path, facts: str, closed: tuple[int, ...]) -> None:
    """As after `>&-` in a shell, or under a supervisor that gives none."""
    program = "from dspark_deploy.serve import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "--profile", write(tmp_path), "--check", "--facts", facts],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: [os.close(number) for number in closed],
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr


def test_prewarm_excludes_check(tmp_path: Path) -> None:
    done = serve("--profile", "cpu-tiny.yaml", "--prewarm", "--check", cwd=tmp_path)
    assert done.returncode == 2 and "exclude one another" in done.stderr


def test_jit_log_names_the_missing_key(tmp_path: Path) -> None:
    line = "dspark-deploy jit: library=tilelang kernel=mhc_post_tilelang phase=serving tokens=5 seconds=1.00"
    (tmp_path / "engine.log").write_text(f"(Worker) WARNING {line} source=compiled key=((4, 7168), ())\n")
    done = run("tuning.sweep", "jit-log", "engine.log", "--json", cwd=tmp_path)
    document = last_json(done)
    assert done.returncode == 0 and document["missing"] == [
        {
            "phase": "serving",
            "library": "tilelang",
            "kernel": "mhc_post_tilelang",
            "key": "((4, 7168), ())",
            "tokens": 5,
            "seconds": 1.0,
            "source": "compiled",
            "times": 1,
        }
    ]
    assert "after ready  tilelang 1" in done.stderr and "compiled, 1.00 s, 5 tokens" in done.stderr
    assert run("tuning.sweep", "jit-log", "gone.log", cwd=tmp_path).returncode == 2
