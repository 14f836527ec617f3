"""One engine over several machines: the flags that differ from node to node.

    dspark-serve --profile P --node-rank 1 --head-address 10.0.0.1

`engine.args.nnodes` says how many nodes there are, and vLLM splits tensor, pipeline and data parallel ranks
over them. Node 0 answers requests; the others hold workers only, unless the profile balances data parallel
ranks outside of vLLM (`data-parallel-external-lb`, `data-parallel-hybrid-lb`), where each node answers.

Not covered: Ray, and starting anything on another machine; `--emit` writes what does that.
"""

from __future__ import annotations

from collections.abc import Sequence

from dspark_deploy.errors import InputError
from dspark_deploy.profile import LoadedProfile, Profile
from dspark_deploy.profile.flags import as_vllm_reads, parse_flags

SERVES_EVERYWHERE = ("data-parallel-external-lb", "data-parallel-hybrid-lb")


def node_count(profile: Profile) -> int:
    """`engine.args.nnodes`, or 1."""
    found = profile.engine.args.get("nnodes", 1)
    return found if isinstance(found, int) else 1


def answers(profile: Profile, rank: int) -> bool:
    """Whether the node of this rank has an API server."""
    return rank == 0 or any(profile.engine.args.get(name) is True for name in SERVES_EVERYWHERE)


def node_flags(
    loaded: LoadedProfile, rank: int | None, head: str | None, extra: Sequence[str] = ()
) -> list[str]:
    """vLLM's flags for the node of `rank`, whose head is reached at `head`.

    Empty for an engine on one machine. Raises InputError for a rank that the profile has no node for, and
    for several nodes of which nobody says which this one is.
    """
    loaded = loaded.with_flags(extra)
    count, where = node_count(loaded.profile), loaded.where("engine", "args", "nnodes")
    if rank is None and head is None:
        given = loaded.after.args.get("node-rank")
        if given is not None and given not in range(count):
            raise InputError(_no_node(f"{given} after --", count, where))
        if count > 1 and given is None:
            raise InputError(
                f"{where}: engine.args.nnodes is {count}: give --node-rank, 0 to {count - 1}, and "
                f"--head-address, under which the other nodes reach node 0"
            )
        return []
    if rank is None or head is None:
        raise InputError("--node-rank and --head-address belong together; give both")
    if not 0 <= rank < count:
        raise InputError(_no_node(str(rank), count, where))
    flags = ["--node-rank", str(rank), "--master-addr", head]
    return flags if answers(loaded.profile, rank) else [*flags, "--headless"]


def _no_node(rank: str, count: int, where: str) -> str:
    return (
        f"{where}: --node-rank {rank} is no node of {count}; ranks are 0 to {count - 1}, and "
        f"engine.args.nnodes says how many nodes there are"
    )


def is_headless(profile: Profile, extra: Sequence[str]) -> bool:
    """Whether this node has workers and no API server, so that `/health` never answers on it."""
    return as_vllm_reads(profile, parse_flags(extra)).engine.args.get("headless") is True
