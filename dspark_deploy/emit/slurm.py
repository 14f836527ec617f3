"""A launch as a batch script for Slurm: one task a node, in a container where an image is given (pyxis).

    sbatch --partition GPUS --time 24:00:00 engine.sbatch

Partition, account and time are the cluster's and stay flags of `sbatch`. No probe: `dspark-serve` itself
waits for readiness as long as the profile says and ends the job with exit code 5 otherwise. Caches are on
each node's own disk, in $DSPARK_CACHE.

Not covered: other container tools than pyxis; without an image, `dspark-serve` is the one on each node's
PATH.
"""

from __future__ import annotations

import shlex

from dspark_deploy.emit.documents import head as head_lines
from dspark_deploy.emit.workload import PROGRAM, Workload

DELIMITER = "END_OF_PROFILE"
WRITE = 'umask 077; mkdir -p "$1" && printf "%s\\n" "$3" >"$2"'


def render(load: Workload, image: str | None) -> str:
    """The batch script."""
    profile = load.profile
    options = [f"--job-name={load.name}", f"--nodes={load.nodes}", "--ntasks-per-node=1", "--exclusive"]
    if profile.hardware.gpus:
        options.append(f"--gpus-per-node={profile.hardware.gpus}")
    # The engine gets its time to stop before Slurm kills what is left.
    options += [f"--signal=TERM@{load.stop_s}", "--output=%x-%j.log"]
    lines = [
        "#!/usr/bin/env bash",
        *(f"#SBATCH {option}" for option in options),
        *(f"# {line}" for line in head_lines("slurm", load)),
        "# shellcheck disable=SC2016 # what stands in single quotes is for the shell on each node",
        "set -euo pipefail",
        "",
        *(f': "${{{name}:?export {name} before sbatch}}"' for name in load.secrets),
        "",
        "# On each node's own disk: compilers of two nodes that share a folder wait for each other's locks.",
        "cache=${DSPARK_CACHE:-/var/tmp/dspark-deploy-$(id -u)}",
        *(f'export {name}="{path}"' for name, path in load.cache_environment("$cache").items()),
        "",
        *_profile(load.text),
        "file=$cache/profile-$SLURM_JOB_ID.yaml",
        f'srun bash -c \'{WRITE}\' write "$cache" "$file" "$profile"',
        "",
        *_start(load, image),
    ]
    return "\n".join(lines) + "\n"


def _profile(text: str) -> list[str]:
    """The profile as a shell variable, whatever is in it."""
    delimiter, lines = DELIMITER, text.rstrip("\n").split("\n")
    while delimiter in lines:
        delimiter += "_"
    return [f"profile=$(cat <<'{delimiter}'", *lines, delimiter, ")"]


def _start(load: Workload, image: str | None) -> list[str]:
    command = ["srun", "--kill-on-bad-exit=1"]
    if image:
        folders = ['"$cache:$cache"', *(shlex.quote(f"{folder}:{folder}:ro") for folder in load.mounts)]
        command += [f"--container-image={shlex.quote(image)}", f"--container-mounts={','.join(folders)}"]
    own = ["--profile", '"$file"', "--run-dir", '"$cache/runs"']
    extra = ["--", *map(shlex.quote, load.extra)] if load.extra else []
    if load.nodes == 1:
        return [" ".join([*command, PROGRAM, *own, *extra])]
    return [
        # sed reads to the end: `head` would close the pipe, and pipefail make that scontrol's failure.
        'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)',
        " ".join(
            [
                *command,
                f'bash -c \'exec {PROGRAM} --node-rank "$SLURM_NODEID" "$@"\'',
                PROGRAM,
                *own,
                '--head-address "$head"',
                *extra,
            ]
        ),
    ]
