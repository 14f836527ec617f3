"""What several rules ask of a profile and its facts: one place for each question."""

from __future__ import annotations

from dspark_deploy.preflight.facts import Facts
from dspark_deploy.profile import LoadedProfile
from dspark_deploy.profile.flags import COMPILATION, WITHIN
from dspark_deploy.profile.schema import ArgValue, Speculative

DEEPSEEK_V4 = ("deepseek_v4", "deepseek_v41")


def family(loaded: LoadedProfile, facts: Facts) -> str:
    """The target's `model_type`: from config.json where that is at hand, else what the profile says."""
    config = facts.model.config if facts.model else {}
    return str(config.get("model_type") or loaded.profile.model.family or "")


def architecture(loaded: LoadedProfile, facts: Facts) -> str:
    """The GPUs' architecture: from the machine, else from the profile; empty where neither says."""
    return next(iter(facts.gpus), "") or loaded.profile.hardware.arch or ""


def variable(loaded: LoadedProfile, facts: Facts, name: str) -> str | None:
    """A variable as the engine will see it: the profile's, else that of our own environment."""
    return loaded.profile.engine.env.get(name, facts.environment.get(name))


def arg(loaded: LoadedProfile, name: str) -> ArgValue:
    """A flag of vLLM's, of the profile or after `--`, by its name without dashes; None where it is not."""
    return loaded.profile.engine.args.get(name)


def whole(loaded: LoadedProfile, name: str) -> int | None:
    """A flag of vLLM's that is a whole number, or None."""
    value = arg(loaded, name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def named_arg(loaded: LoadedProfile, name: str) -> str:
    """A flag as the person wrote it: `engine.args.NAME`, or `--NAME` for one on the command line."""
    return f"--{name}" if name in loaded.after.args else f"engine.args.{name}"


def where_arg(loaded: LoadedProfile, name: str) -> str:
    """file:line of a flag, or of the section where it is missing; `after --` for one on the command line."""
    if name in WITHIN and name not in loaded.own_args and name not in loaded.after.args:
        name = COMPILATION
    return loaded.where("engine", "args", name)


def where_env(loaded: LoadedProfile, name: str) -> str:
    """file:line of a variable, or of the section where it is missing."""
    return loaded.where("engine", "env", name)


def trained_block(speculative: Speculative, facts: Facts) -> int | None:
    """The block that the draft was trained for: of the draft's own checkpoint, else of the target's."""
    source = facts.draft if speculative.draft else facts.model
    return source.trained_block if source else None


def captures_graphs(loaded: LoadedProfile) -> bool:
    """Whether this launch captures CUDA or HIP graphs at all."""
    eager = arg(loaded, "enforce-eager") is True or graph_mode(loaded) == "NONE"
    return loaded.profile.hardware.platform != "cpu" and not eager


def graph_mode(loaded: LoadedProfile) -> str | None:
    """`cudagraph_mode` of compilation-config, in capitals; None where it is vLLM's default.

    Optimization level 0 captures nothing where the mode isn't said (vllm config/vllm.py).
    """
    config = arg(loaded, COMPILATION)
    mode = config.get("cudagraph_mode") if isinstance(config, dict) else None
    if mode is None and str(arg(loaded, "optimization-level")).upper().removeprefix("O") == "0":
        return "NONE"
    return str(mode).upper() if mode is not None else None
