"""`dspark-serve --emit`: the checked launch as a Compose file, Kubernetes manifests or a Slurm script.

    dspark-serve --profile P --emit compose --image IMAGE --out compose.yaml

What is rendered runs `dspark-serve --profile` again, so everything is checked once more where it serves. One
module a format; `workload` holds what they share. Nothing is started here, and no cluster is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from dspark_deploy.emit import compose, kubernetes, slurm
from dspark_deploy.emit.workload import EVERY_INTERFACE, workload
from dspark_deploy.errors import InputError
from dspark_deploy.launch.nodes import node_count
from dspark_deploy.profile import LoadedProfile
from dspark_deploy.profile.flags import parse_flags

# Flags that say which node this is, of how many.
PLACING = {"nnodes", "node-rank", "master-addr", "headless"}


class Format(StrEnum):
    """What `--emit` writes."""

    COMPOSE = "compose"
    KUBERNETES = "kubernetes"
    SLURM = "slurm"


@dataclass(frozen=True, slots=True)
class Rendered:
    """The text of one file, and the names of the secrets that it refers to."""

    text: str
    secrets: list[str]


def render(
    form: Format, loaded: LoadedProfile, image: str | None, head: str | None, extra: Sequence[str]
) -> Rendered:
    """Render a launch that the preflight has passed. `head` is the address of node 0, for Compose.

    Raises InputError for what a format needs and hasn't got, and for a secret that would be shown.
    """
    if image is not None and not (image.isprintable() and image and " " not in image):
        raise InputError(f"--image {image!r}: is no name of an image; give one, as registry/name:tag")
    placed = sorted(PLACING & set(parse_flags(extra).args))
    if placed:
        raise InputError(
            f"--{placed[0]} after --: every node would get it; set engine.args.nnodes, and the file gives "
            f"each node its place"
        )
    several = node_count(loaded.profile) > 1
    if image is None and form is not Format.SLURM:
        base = loaded.profile.engine.image
        argument = f" --build-arg BASE={base}" if base else ""
        raise InputError(
            f"--emit {form} needs --image, one that holds dspark-deploy; build it: "
            f"docker build -f docker/Dockerfile.rocm{argument} -t IMAGE ."
        )
    if head is not None and not (several and form is Format.COMPOSE):
        raise InputError(
            "--head-address is for --emit compose with engine.args.nnodes above 1; kubernetes and slurm know "
            "where node 0 is"
        )
    if several and form is Format.COMPOSE and head is None:
        raise InputError(
            "--emit compose for several nodes needs --head-address, under which the others reach node 0"
        )
    host = loaded.profile.engine.host
    if form is Format.COMPOSE:
        # One node: inside its container every interface, outside the profile's. Several: the hosts' network.
        load = workload(loaded, extra, None if several else EVERY_INTERFACE)
        text = compose.render(load, image or "", head or "", host)
    elif form is Format.KUBERNETES:
        load = workload(loaded, extra, EVERY_INTERFACE)
        text = kubernetes.render(load, image or "")
    else:
        load = workload(loaded, extra)
        text = slurm.render(load, image)
    return Rendered(text, load.secrets)
