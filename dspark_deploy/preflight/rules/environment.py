"""The environment: images and builds known to be bad, variables that contradict one another, caches."""

from __future__ import annotations

import re

from dspark_deploy.preflight.facts import Facts
from dspark_deploy.preflight.rules.base import Findings, error, rule, warning
from dspark_deploy.preflight.rules.context import DEEPSEEK_V4, family, variable, where_env
from dspark_deploy.profile import LoadedProfile
from dspark_deploy.profile.schema import REFERENCE

HIP, ROCR, CUDA = "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"
VISIBLE = {"rocm": (HIP, ROCR, CUDA), "cuda": (CUDA,)}  # HIP reads CUDA's variable too
RETENTION = "VLLM_PREFIX_CACHE_RETENTION_INTERVAL"
DISK_FLOOR_GIB = 5.0
# (pattern of an image's name, what happens there, source)
BAD_IMAGES = [
    (
        r"rocm.*:v?0\.21\.0",
        "cannot start DeepSeek-V4 on gfx950: its mhc_post_tilelang is compiled with an NVIDIA feature",
        "vllm#42876",
    ),
]


@rule("IMAGE_KNOWN_BAD")
def image_is_good(loaded: LoadedProfile, facts: Facts) -> Findings:
    """Images that public reports show not to start this model."""
    image = loaded.profile.engine.image
    for pattern, what, source in BAD_IMAGES:
        bad = image is not None and re.search(pattern, image) is not None
        if bad and loaded.profile.hardware.platform == "rocm" and family(loaded, facts) in DEEPSEEK_V4:
            yield error(
                "IMAGE_KNOWN_BAD",
                f"{image} {what}",
                "use a later image",
                loaded.where("engine", "image"),
                source,
            )


@rule("VISIBLE_DEVICES_CONTRADICT")
def visible_devices_agree(loaded: LoadedProfile, facts: Facts) -> Findings:
    """HIP counts within what ROCR left visible, so the same list in both can name GPUs that are not there."""
    if loaded.profile.hardware.platform != "rocm":
        return
    hip, rocr, cuda = (variable(loaded, facts, name) for name in (HIP, ROCR, CUDA))
    if hip and cuda and hip != cuda:
        yield warning(
            "VISIBLE_DEVICES_CONTRADICT",
            f"{HIP}={hip} and {CUDA}={cuda} differ, and HIP reads both",
            f"set {HIP} alone",
            where_env(loaded, HIP),
        )
    if hip and rocr:
        yield warning(
            "VISIBLE_DEVICES_CONTRADICT",
            f"{HIP}={hip} counts within the GPUs that {ROCR}={rocr} leaves visible",
            f"set one of them; {HIP} is what vLLM reads",
            where_env(loaded, HIP),
        )


def _visible(text: str) -> int:
    """How many GPUs such a list names: by number or UUID, each once, up to the first below zero."""
    names: dict[str, None] = {}
    for name in map(str.strip, text.split(",")):
        if not name or name.startswith("-"):
            break
        names[name] = None
    return len(names)


@rule("VISIBLE_DEVICES_TOO_FEW")
def visible_devices_suffice(loaded: LoadedProfile, facts: Facts) -> Findings:
    """A list of visible GPUs that is shorter than the profile's number ends in a worker without a GPU."""
    hardware = loaded.profile.hardware
    for name in VISIBLE.get(hardware.platform, ()):
        value = variable(loaded, facts, name)
        # Empty is unset for AMD's runtimes; what only refers to a variable is not known here.
        if not value or REFERENCE.search(value) or _visible(value) >= hardware.gpus:
            continue
        yield error(
            "VISIBLE_DEVICES_TOO_FEW",
            f"{name}={value} leaves {_visible(value)} GPU(s) visible, and hardware.gpus is {hardware.gpus}",
            "name as many, by comma (0,1,2,3: no ranges, and what follows -1 is not read), or leave it out",
            where_env(loaded, name),
        )


@rule("RETENTION_INTERVAL")
def retention_interval_fits(loaded: LoadedProfile, facts: Facts) -> Findings:
    """Needed on builds that treat DeepSeek-V4 as a sliding-window model, a ValueError on the others."""
    if variable(loaded, facts, RETENTION) and family(loaded, facts) in DEEPSEEK_V4:
        yield warning(
            "RETENTION_INTERVAL",
            f"{RETENTION} is needed by some builds and is a ValueError at start on others",
            "leave it out unless this very build asked for it",
            where_env(loaded, RETENTION),
            "InferenceX dsv4_fp4_mi355x_vllm_mtp.sh",
        )


@rule("JIT_CACHE_SHARED")
def jit_caches_are_local(loaded: LoadedProfile, facts: Facts) -> Findings:
    """AITER's builds were seen to hang where their folder is on a shared file system."""
    if loaded.profile.hardware.platform != "rocm":
        return
    for cache in facts.caches:
        if cache.network and cache.variable == "AITER_JIT_DIR":
            yield warning(
                "JIT_CACHE_SHARED",
                f"{cache.variable} is {cache.path}, on {cache.network}: AITER's builds can hang there, every "
                f"rank waiting for a lock",
                "set AITER_JIT_DIR to a folder on a local disk",
                where_env(loaded, cache.variable),
                "aiter#3635",
            )


@rule("LOCKS_LEFT_BEHIND")
def no_lock_is_left(loaded: LoadedProfile, facts: Facts) -> Findings:
    """A compiler that was killed leaves its lock, and the next start waits for it without a word."""
    for cache in facts.caches:
        if cache.stale_locks and loaded.profile.hardware.platform != "cpu":
            yield warning(
                "LOCKS_LEFT_BEHIND",
                f"{len(cache.stale_locks)} lock(s) under {cache.path} are older than half an hour, the first "
                f"{cache.stale_locks[0]}",
                "make sure that nothing compiles there, and remove them",
                where_env(loaded, cache.variable),
                "aiter#3635",
            )


@rule("DISK_LOW")
def caches_have_room(loaded: LoadedProfile, facts: Facts) -> Findings:
    """Compiled kernels and graphs of one model take gigabytes; a full disk ends a start halfway."""
    for cache in facts.caches:
        if cache.free_gib < DISK_FLOOR_GIB and loaded.profile.hardware.platform != "cpu":
            yield warning(
                "DISK_LOW",
                f"{cache.free_gib} GiB are free for {cache.path}; compilers want {DISK_FLOOR_GIB:.0f}",
                f"free some, or set {cache.variable} to a folder with room",
                where_env(loaded, cache.variable),
            )
