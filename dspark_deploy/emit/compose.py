"""A launch as a Compose file: one service a node, each in a profile of its own where there are several.

    docker compose -f compose.yaml up                     one machine
    docker compose -f compose.yaml --profile node1 up     on the second machine of several

Needs Compose 2.23.1 for the profile's text inside the file. Not covered: Swarm, and devices for RDMA, whose
names differ from host to host.
"""

from __future__ import annotations

from typing import Any

from dspark_deploy.emit.documents import yaml_documents
from dspark_deploy.emit.workload import CACHE, PROBE_PERIOD_S, PROFILE_FILE, PROGRAM, Workload
from dspark_deploy.launch.command import engine_url

HEALTH = "import urllib.request; urllib.request.urlopen('{url}/health', timeout=5)"
# Failed inputs, preflight and numerics fail again; an engine that died is worth another start.
RESTART = "on-failure:3"


def render(load: Workload, image: str, head: str, host: str) -> str:
    """The Compose file. `host` is the address of the host on which port is published, of a single node."""
    services = {
        load.name if load.nodes == 1 else f"{load.name}-node{rank}": _service(load, image, head, host, rank)
        for rank in range(load.nodes)
    }
    document = {
        "name": load.name,
        "services": services,
        "volumes": {"cache": {}},
        "configs": {"profile": {"content": _literal(load.text)}},
    }
    return yaml_documents("compose", load, [document])


def _service(load: Workload, image: str, head: str, host: str, rank: int) -> dict[str, Any]:
    port = load.profile.engine.port
    environment = {name: f"${{{name}:?set {name} where docker compose runs}}" for name in load.secrets}
    environment |= load.cache_environment()
    service: dict[str, Any] = {
        "image": _literal(image),
        "entrypoint": [PROGRAM],
        "command": [_literal(each) for each in load.arguments(rank, head)],
        "environment": environment,
        "configs": [{"source": "profile", "target": PROFILE_FILE}],
        "volumes": [f"cache:{CACHE}", *(_bind(folder) for folder in load.mounts)],
        "ipc": "host",
        "ulimits": {"memlock": -1},
        "restart": RESTART,
        "stop_grace_period": f"{load.stop_s}s",
        **_devices(load),
    }
    if load.nodes == 1:
        address = {"localhost": "127.0.0.1"}.get(host, f"[{host}]" if ":" in host else host)
        service["ports"] = [f"{address}:{port}:{port}"]
    else:
        service["profiles"] = [f"node{rank}"]
        service["network_mode"] = "host"
    if load.answers(rank):
        service["healthcheck"] = {
            "test": [
                "CMD",
                "python3",
                "-c",
                _literal(HEALTH.format(url=engine_url(load.profile.engine.host, port))),
            ],
            "interval": f"{PROBE_PERIOD_S}s",
            "timeout": f"{PROBE_PERIOD_S}s",
            "retries": 3,
            "start_period": f"{load.startup_s}s",
        }
    return service


def _bind(folder: str) -> dict[str, Any]:
    place = _literal(folder)
    return {"type": "bind", "source": place, "target": place, "read_only": True}


def _devices(load: Workload) -> dict[str, Any]:
    hardware = load.profile.hardware
    if hardware.platform == "rocm":
        return {
            "devices": ["/dev/kfd:/dev/kfd", "/dev/dri:/dev/dri"],
            "group_add": ["video", "render"],
            "security_opt": ["seccomp=unconfined"],
        }
    if hardware.platform == "cuda":
        count = hardware.gpus or "all"
        reserved = {"driver": "nvidia", "count": count, "capabilities": ["gpu"]}
        return {"deploy": {"resources": {"reservations": {"devices": [reserved]}}}}
    return {}


def _literal(text: str) -> str:
    """Compose takes `$NAME` in any value for a variable of its own, and `$$` for a dollar."""
    return text.replace("$", "$$")
