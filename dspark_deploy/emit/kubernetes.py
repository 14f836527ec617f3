"""A launch for Kubernetes: the profile as a ConfigMap, StatefulSets, and the Service that clients reach.

    dspark-serve --profile P --emit kubernetes --image IMAGE --out engine.yaml && kubectl apply -f engine.yaml

StatefulSets, since each pod keeps caches of its own: compilers of two pods that share a folder wait for each
other's locks. With several nodes, node 0 is one StatefulSet with an API server, the others are a second,
whose ordinals are their ranks (Kubernetes 1.31 and later). The GPUs come from the device plugin of their
vendor.

Not covered: restarting a whole group when one of its nodes is lost (LeaderWorkerSet does), and RDMA devices,
whose resource names are each cluster's own.
"""

from __future__ import annotations

import math
from typing import Any

from dspark_deploy.emit.documents import yaml_documents
from dspark_deploy.emit.workload import CACHE, PROBE_PERIOD_S, PROFILE_FILE, PROGRAM, Workload

GPUS = {"rocm": "amd.com/gpu", "cuda": "nvidia.com/gpu"}
RANK_LABEL = "apps.kubernetes.io/pod-index"
RANK = "DSPARK_NODE_RANK"
# Kernels and graphs of one model take gigabytes; weights from the hub, up to DeepSeek-V4-Pro's 893 GB and as
# much again while a newer revision is downloaded.
CACHE_SIZE, CACHE_SIZE_WITH_WEIGHTS = "64Gi", "2Ti"
DIGEST = "dspark-deploy/profile"


def render(load: Workload, image: str) -> str:
    """The manifests, for `kubectl apply`; the Secret that they refer to is made beside them."""
    head = load.name if load.nodes == 1 else f"{load.name}-head"
    documents = [_config_map(load), _client_service(load, head)]
    if load.nodes == 1:
        documents += [_stateful_set(load, image, head, 1, 0, "")]
    else:
        address = f"{head}-0.{load.name}-nodes"
        documents += [
            _peer_service(load),
            _stateful_set(load, image, head, 1, 0, address),
            _stateful_set(load, image, f"{load.name}-worker", load.nodes - 1, 1, address),
        ]
    return yaml_documents("kubernetes", load, documents)


def _labels(load: Workload, part: str = "") -> dict[str, str]:
    labels = {"app.kubernetes.io/name": load.name, "app.kubernetes.io/managed-by": "dspark-deploy"}
    return labels | ({"app.kubernetes.io/component": part} if part else {})


def _object(load: Workload, version: str, kind: str, name: str, **content: Any) -> dict[str, Any]:
    metadata = {"name": name, "labels": _labels(load)}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **content}


def _config_map(load: Workload) -> dict[str, Any]:
    return _object(load, "v1", "ConfigMap", f"{load.name}-profile", data={"profile.yaml": load.text})


def _client_service(load: Workload, head: str) -> dict[str, Any]:
    port = {"name": "http", "port": load.profile.engine.port, "targetPort": "http"}
    return _object(load, "v1", "Service", load.name, spec={"selector": _labels(load, head), "ports": [port]})


def _peer_service(load: Workload) -> dict[str, Any]:
    """The name under which nodes find node 0, long before it is ready."""
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": _labels(load)}
    return _object(load, "v1", "Service", f"{load.name}-nodes", spec=spec)


def _stateful_set(
    load: Workload, image: str, name: str, replicas: int, first: int, address: str
) -> dict[str, Any]:
    labels = _labels(load, name)
    weights = CACHE_SIZE_WITH_WEIGHTS if not load.mounts else CACHE_SIZE
    claim = {
        "metadata": {"name": "cache"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": weights}}},
    }
    spec: dict[str, Any] = {
        "serviceName": f"{load.name}-nodes" if load.nodes > 1 else load.name,
        "replicas": replicas,
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": labels},
        "template": {
            "metadata": {"labels": labels, "annotations": {DIGEST: load.digest}},
            "spec": _pod(load, image, first, address),
        },
        "volumeClaimTemplates": [claim],
    }
    if first:
        spec["ordinals"] = {"start": first}
    return _object(load, "apps/v1", "StatefulSet", name, spec=spec)


def _pod(load: Workload, image: str, first: int, address: str) -> dict[str, Any]:
    rank = "0" if first == 0 else f"$({RANK})"
    mounts: list[dict[str, Any]] = [
        {"name": "profile", "mountPath": PROFILE_FILE, "subPath": "profile.yaml", "readOnly": True},
        {"name": "cache", "mountPath": CACHE},
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108
    ]
    volumes: list[dict[str, Any]] = [
        {"name": "profile", "configMap": {"name": f"{load.name}-profile"}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    for number, folder in enumerate(load.mounts):
        mounts.append({"name": f"model-{number}", "mountPath": folder, "readOnly": True})
        volumes.append({"name": f"model-{number}", "hostPath": {"path": folder, "type": "Directory"}})
    container: dict[str, Any] = {
        "name": "engine",
        "image": image,
        "command": [PROGRAM],
        "args": [each if each == rank else _literal(each) for each in load.arguments(rank, address)],
        "env": _environment(load, first),
        "volumeMounts": mounts,
    }
    resource, count = GPUS.get(load.profile.hardware.platform), load.profile.hardware.gpus
    if resource and count:
        container["resources"] = {"limits": {resource: count}}
    if first == 0 or load.answers(first):
        container["ports"] = [{"name": "http", "containerPort": load.profile.engine.port}]
        container |= _probes(load)
    return {
        "terminationGracePeriodSeconds": load.stop_s,
        "enableServiceLinks": False,
        "containers": [container],
        "volumes": volumes,
    }


def _environment(load: Workload, first: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"name": name, "value": value} for name, value in load.cache_environment().items()
    ]
    for name in load.secrets:
        reference = {"name": f"{load.name}-secrets", "key": name}
        found.append({"name": name, "valueFrom": {"secretKeyRef": reference}})
    if first:
        field = {"fieldPath": f"metadata.labels['{RANK_LABEL}']"}
        found.append({"name": RANK, "valueFrom": {"fieldRef": field}})
    return found


def _probes(load: Workload) -> dict[str, Any]:
    """A startup as long as the profile's; no liveness: an engine that ends takes its container along.

    A liveness probe would end a busy engine, and with it everything that took minutes to load.
    """
    health = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": PROBE_PERIOD_S}
    tries = math.ceil(load.startup_s / PROBE_PERIOD_S)
    return {
        "startupProbe": {**health, "failureThreshold": tries},
        "readinessProbe": {**health, "timeoutSeconds": PROBE_PERIOD_S},
    }


def _literal(text: str) -> str:
    """Kubernetes takes `$(NAME)` in arguments for a variable, and `$$` for a dollar."""
    return text.replace("$", "$$")
