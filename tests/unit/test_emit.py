"""`--emit`: each format passes its own validator and holds the launch that --dry-run shows, and no secret."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from dspark_deploy.emit import Format, Rendered, render
from dspark_deploy.errors import InputError
from dspark_deploy.launch import command as rendering
from dspark_deploy.launch.nodes import node_flags
from dspark_deploy.profile import LoadedProfile, load_profile
from tests.unit.facts import good_facts
from tests.unit.profiles import TEXT, load, write
from tests.unit.test_commands import last_json, serve
from tests.unit.test_shipped_profiles import FOLDER, machine

BIN = Path(sys.executable).parent
IMAGE = "registry.example/dspark:1"
TWO_NODES = ["engine.args.nnodes=2", "engine.args.data-parallel-size=2"]
PROFILES = ("mi355x-v4-pro.yaml", "h200-v41-flash.yaml", "cpu-tiny.yaml")
AWKWARD = 'it\'s "quoted" $HOME ${HOME} $(id) `id` \\ END_OF_PROFILE\nEND_OF_PROFILE\n  indented: yes # no\té'


def rendered(form: Format, loaded: LoadedProfile, extra: tuple[str, ...] = ()) -> Rendered:
    several = loaded.profile.engine.args.get("nnodes") == 2
    head = "10.0.0.1" if form is Format.COMPOSE and several else None
    return render(form, loaded, IMAGE, head, extra)


def validate(form: Format, text: str, folder: Path) -> None:
    """Hold a rendered file against its format's own validator."""
    path = folder / f"rendered-{form}.yaml"
    path.write_text(text)
    if form is Format.KUBERNETES:
        for document in yaml.safe_load_all(text):
            kubernetes_validate.validate(document, "1.31", strict=True)
        return
    commands = {
        Format.COMPOSE: [[BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", path]],
        Format.SLURM: [["bash", "-n", path], [BIN / "shellcheck", path]],
    }
    for command in commands[form]:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def nodes(form: Format, text: str, folder: Path) -> list[tuple[str, list[str]]]:
    """Of each node, the profile's text and the arguments that dspark-serve is given there."""
    if form is Format.COMPOSE:
        document = json.loads(json.dumps(yaml.safe_load(text)).replace("$$", "$"))
        content = document["configs"]["profile"]["content"]
        return [(content, service["command"]) for service in document["services"].values()]
    if form is Format.SLURM:
        return run_slurm(text, folder)
    documents = list(yaml.safe_load_all(text))
    (content,) = (each["data"]["profile.yaml"] for each in documents if each["kind"] == "ConfigMap")
    found = []
    for each in documents:
        if each["kind"] == "StatefulSet":
            (container,) = each["spec"]["template"]["spec"]["containers"]
            first = each["spec"].get("ordinals", {}).get("start", 0)
            for ordinal in range(first, first + each["spec"]["replicas"]):
                arguments = [part.replace("$(DSPARK_NODE_RANK)", str(ordinal)) for part in container["args"]]
                found.append((content, [part.replace("$$", "$") for part in arguments]))
    return found


def run_slurm(text: str, folder: Path) -> list[tuple[str, list[str]]]:
    """Run the script, with an `srun` that runs each task here and a program that writes what it gets."""
    stand_ins = {
        "srun": "while [[ $1 == --* ]]; do shift; done\nfor SLURM_NODEID in $(seq 0 $((NODES - 1))); do "
        'export SLURM_NODEID; "$@"; done',
        "scontrol": "printf '10.0.0.1\\nother\\n'",
        "dspark-serve": 'printf "%s\\0" "$@" >>"$TOLD"; printf "\\n\\0" >>"$TOLD"',
    }
    for name, body in stand_ins.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (folder / name).chmod(0o755)
    script, told = folder / "engine.sbatch", folder / "told"
    script.write_text(text)
    told.unlink(missing_ok=True)
    (count,) = re.findall(r"^#SBATCH --nodes=(\d+)$", text, re.MULTILINE)
    env = {"PATH": f"{folder}:/usr/bin:/bin", "HOME": str(folder), "TOLD": str(told), "NODES": count}
    env |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "x[1-2]", "DSPARK_CACHE": str(folder / "cache")}
    env |= {"VLLM_API_KEY": "k", "HF_TOKEN": "t", "PROXY": "p"}
    done = subprocess.run(["bash", script], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    calls = [call.split("\0") for call in told.read_text().removesuffix("\0\n\0").split("\0\n\0")]
    return [(Path(call[call.index("--profile") + 1]).read_text(), call) for call in calls]


def started(text: str, arguments: list[str], folder: Path, facts: Any) -> tuple[LoadedProfile, list[str]]:
    """What dspark-serve would start from these arguments: the profile, and vLLM's command."""
    loaded = load_profile(write(folder, text, "inside.yaml"))
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    extra = arguments[len(options) + 1 :]
    value = dict(itertools.pairwise(options))
    rank = int(value["--node-rank"]) if "--node-rank" in value else None
    flags = node_flags(loaded, rank, value.get("--head-address"))
    return loaded, rendering.serve_command(loaded.profile, facts, 8000, [*flags, *extra])


@pytest.mark.parametrize("form", Format)
@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize("sets", [[], TWO_NODES])
def test_what_is_rendered_starts_what_a_dry_run_shows(
    tmp_path: Path, form: Format, name: str, sets: list[str]
) -> None:
    facts = machine(name) if name != "cpu-tiny.yaml" else good_facts()
    loaded = load_profile(FOLDER / name, sets)
    text = rendered(form, loaded, ("--seed", "1")).text
    validate(form, text, tmp_path)
    found = nodes(form, text, tmp_path)
    assert len(found) == (2 if sets else 1)
    for rank, (content, arguments) in enumerate(found):
        inside, command = started(content, arguments, tmp_path, facts)
        head = command[command.index("--master-addr") + 1] if sets else None
        flags = node_flags(loaded, rank if sets else None, head)
        shown = rendering.serve_command(loaded.profile, facts, 8000, [*flags, "--seed", "1"])
        shown[shown.index("--host") + 1] = inside.profile.engine.host
        assert command == shown
        assert ("--headless" in command) == (rank > 0)
        assert inside.profile.speculative == loaded.profile.speculative
        assert inside.profile.engine.env["VLLM_API_KEY"] == "${VLLM_API_KEY}", "nothing is open without a key"


@pytest.mark.parametrize("form", Format)
def test_awkward_values_survive(tmp_path: Path, form: Format) -> None:
    loaded = load(tmp_path, TEXT).revised(
        {"description": AWKWARD, "engine.env.NOTE": AWKWARD, "engine.args.chat-template": AWKWARD}
    )
    text = rendered(form, loaded, ("--note", AWKWARD)).text
    validate(form, text, tmp_path)
    ((content, arguments),) = nodes(form, text, tmp_path)
    inside, command = started(content, arguments, tmp_path, good_facts())
    assert inside.profile.description == AWKWARD
    assert inside.profile.engine.env["NOTE"] == AWKWARD
    assert command[command.index("--chat-template") + 1] == AWKWARD and command[-2:] == ["--note", AWKWARD]


@pytest.mark.parametrize("form", Format)
def test_a_secret_is_named_and_never_written(tmp_path: Path, form: Format) -> None:
    env = {
        "HF_TOKEN": "hf_hidden",
        "HTTPS_PROXY": "http://me:hidden@proxy",
        "PLAIN": "${PROXY}",
        "FOO": "hf_hiddenabcdefghijklmnopqrstuvwxyz",
        "DSN": "host=x password=hidden",
        "BARE": "me:hidden@host:80",
        "LOG": "shown",
    }
    loaded = load(tmp_path, TEXT).revised({"engine.env": env, "engine.args": {"api-key": "sk-hidden"}})
    found = rendered(form, loaded)
    validate(form, found.text, tmp_path)
    env_names = ("HF_TOKEN", "HTTPS_PROXY", "PROXY", "VLLM_API_KEY", "FOO", "DSN", "BARE")
    assert found.secrets == sorted(env_names) and "hidden" not in found.text and "shown" in found.text
    reference = {
        Format.COMPOSE: r"^ +{0}: \$\{{{0}:\?",
        Format.KUBERNETES: r"secretKeyRef:\n +name: test-secrets\n +key: {0}$",
        Format.SLURM: r'^: "\$\{{{0}:\?',
    }
    for name in env_names:
        assert re.search(reference[form].format(name), found.text, re.MULTILINE), name


@pytest.mark.parametrize(
    ("sets", "extra", "message"),
    [
        (["engine.port=0"], (), "engine.port"),
        (
            ["engine.args.kv-transfer-config={auth_token: abc}"],
            (),
            "kv-transfer-config.auth_token holds a secret",
        ),
        (["engine.args.url=http://me:pw@host"], (), "engine.args.url holds a secret"),
        (["engine.args.served=sk-abcdefghijklmnopqrst"], (), "engine.args.served holds a secret"),
        ([], ("--my-token=abc",), "a flag after --"),
        ([], ("--header", "Authorization: Bearer abc"), "a flag after --"),
    ],
)
def test_what_would_show_a_secret_is_refused(
    tmp_path: Path, sets: list[str], extra: tuple[str, ...], message: str
) -> None:
    for form in Format:
        with pytest.raises(InputError, match=re.escape(message)):
            rendered(form, load(tmp_path, TEXT, sets), extra)


def test_a_number_under_a_name_like_a_secret_is_none(tmp_path: Path) -> None:
    loaded = load(tmp_path, TEXT, ["engine.args.hf-overrides={num_key_value_heads: 8}"])
    assert "num_key_value_heads: 8" in rendered(Format.SLURM, loaded).text


def test_probes_wait_as_long_as_the_profile() -> None:
    loaded = load_profile(FOLDER / "mi355x-v4-pro.yaml", ["engine.ready_timeout_s=1234"])
    (service,) = yaml.safe_load(rendered(Format.COMPOSE, loaded).text)["services"].values()
    assert int(service["healthcheck"]["start_period"].removesuffix("s")) > 1234
    manifests = list(yaml.safe_load_all(rendered(Format.KUBERNETES, loaded).text))
    (container,) = manifests[-1]["spec"]["template"]["spec"]["containers"]
    probe = container["startupProbe"]
    assert probe["failureThreshold"] * probe["periodSeconds"] > 1234
    assert "livenessProbe" not in container


def test_devices_are_the_platforms() -> None:
    def service(name: str) -> dict[str, Any]:
        text = rendered(Format.COMPOSE, load_profile(FOLDER / name)).text
        (found,) = yaml.safe_load(text)["services"].values()
        assert isinstance(found, dict)
        return found

    rocm, cuda, cpu = (service(name) for name in PROFILES)
    assert {"/dev/kfd:/dev/kfd", "/dev/dri:/dev/dri"} <= set(rocm["devices"])
    assert {"video", "render"} <= set(rocm["group_add"]) and rocm["ipc"] == "host"
    (reserved,) = cuda["deploy"]["resources"]["reservations"]["devices"]
    assert reserved["count"] == 8 and "devices" not in cuda
    assert "AITER_JIT_DIR" in rocm["environment"] and "AITER_JIT_DIR" not in cuda["environment"]
    assert "devices" not in cpu and "deploy" not in cpu


def test_a_checkpoint_on_the_host_is_mounted_to_be_read(tmp_path: Path) -> None:
    loaded = load(tmp_path)
    (service,) = yaml.safe_load(rendered(Format.COMPOSE, loaded).text)["services"].values()
    mounted = [each for each in service["volumes"] if isinstance(each, dict)]
    assert {(each["source"], each["target"], each["read_only"]) for each in mounted} == {
        ("/models/target", "/models/target", True),
        ("/models/draft", "/models/draft", True),
    }


def test_the_command_writes_a_file_after_the_preflight(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "facts.json").write_text(json.dumps(good_facts().as_json()))
    emit = ("--profile", "test.yaml", "--facts", "facts.json", "--emit", "compose", "--image", IMAGE)
    done = serve(*emit, "--out", "compose.yaml", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = last_json(done)
    assert document == {
        "status": "rendered",
        "format": "compose",
        "secrets": ["VLLM_API_KEY"],
        "file": "compose.yaml",
    }
    printed = serve(*emit, cwd=tmp_path)
    assert printed.stdout == (tmp_path / "compose.yaml").read_text()
    refused = serve(*emit, "--set", "engine.vllm='>=9'", "--out", "other.yaml", cwd=tmp_path)
    assert refused.returncode == 3 and not (tmp_path / "other.yaml").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--emit", "compose"), "needs --image"),
        (("--emit", "nomad"), "nomad"),
        (("--image", IMAGE), "belong to --emit"),
        (("--emit", "slurm", "--check"), "exclude one another"),
        (("--emit", "slurm", "--node-rank", "0"), "leave --node-rank out"),
        (("--emit", "slurm", "--head-address", "x"), "know where node 0 is"),
        (("--emit", "compose", "--image", IMAGE, "--set", "engine.args.nnodes=2"), "needs --head-address"),
        (("--dry-run", "--node-rank", "0"), "belong together"),
        (("--dry-run", "--node-rank", "1", "--head-address", "x"), "is no node of 1"),
        (("--check", "--node-rank", "1", "--head-address", "x"), "is no node of 1"),
        (("--check", "--", "-r", "2"), "is no node of 1"),
        (("--check", "--", "--nnodes", "2", "--node_rank=-1"), "is no node of 2"),
        (("--emit", "compose", "--image", ""), "is no name of an image"),
        (("--emit", "slurm", "--image", " "), "is no name of an image"),
        (("--emit", "compose", "--image", "an image"), "is no name of an image"),
        (("--emit", "kubernetes", "--image", "image\n"), "is no name of an image"),
        (("--emit", "slurm", "--", "-n", "2"), "set engine.args.nnodes"),
        (("--set", "engine.args.nnodes=2"), "give --node-rank"),
    ],
)
def test_what_is_missing_is_said(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    write(tmp_path)
    (tmp_path / "facts.json").write_text(json.dumps(good_facts().as_json()))
    facts = () if arguments[0] == "--set" else ("--facts", "facts.json")
    profile = "cpu-tiny.yaml" if arguments[0] == "--set" else "test.yaml"
    done = serve("--profile", profile, *facts, *arguments, cwd=tmp_path)
    assert done.returncode == 2 and message in " ".join(done.stderr.split()), done.stderr
