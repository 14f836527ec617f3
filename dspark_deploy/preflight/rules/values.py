"""Values of engine.args that no vLLM takes: found before a load of minutes, or before vLLM's own refusal.

Not covered: flags that are not named here, and whether a value that is possible is wise.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from dspark_deploy.plain_json import parse_json
from dspark_deploy.preflight.facts import Facts
from dspark_deploy.preflight.rules.base import Findings, error, rule
from dspark_deploy.preflight.rules.context import arg, named_arg, variable, where_arg
from dspark_deploy.profile import LoadedProfile
from dspark_deploy.profile.flags import COMPILATION, WITHIN, is_flag
from dspark_deploy.profile.schema import MOST_SEQUENCES, ArgValue
from dspark_deploy.redaction import redacted

UTILISATION, SIZES, LENGTH = "gpu-memory-utilization", "cudagraph-capture-sizes", "max-model-len"
TENSOR, PIPELINE, DATA = "tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size"
LONGER = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
# Kinds of rotary embedding whose max_position_embeddings has their factor in it already.
SCALED = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
SEQUENCES, BLOCK = "max-num-seqs", "block-size"
LOCAL, NODES = "data-parallel-size-local", "nnodes"
WHOLE = (SEQUENCES, TENSOR, PIPELINE, DATA, BLOCK, NODES)
BLOCK_REMEDY = (
    "it is tokens in a block of the KV cache, as 16, 64 or 256; left out, the attention backend chooses. "
    "The draft's block is another thing: speculative.num_speculative_tokens"
)
# vLLM reads these with a suffix: k, m, g and t are decimal and take a fraction, K, M, G and T are binary.
READABLE = ("max-num-batched-tokens", LENGTH)
_SUFFIXED = re.compile(r"\d+(?:\.\d+)?[kmgt]|\d+[KMGT]")
# Numbers inside JSON flags take suffixes too, which JSON does not know; texts stay as they are.
_IN_JSON = re.compile(r'("(?:[^"\\]|\\.)*")|\b\d+(?:\.\d+)?[kKmMgGtT]\b')
JSON_FLAGS = (
    "compilation-config",
    "hf-overrides",
    "kv-transfer-config",
    "override-generation-config",
    "limit-mm-per-prompt",
    "mm-processor-kwargs",
    "additional-config",
    "model-loader-extra-config",
)


def _count(value: object) -> int | None:
    """The whole number above 0 that argparse reads from it, or None."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        return None
    try:
        number = int(value)
    except ValueError:
        return None
    return number if number > 0 else None


def _readable(name: str, value: object) -> bool:
    """Whether vLLM reads a count above 0 from it: a whole number, one with a suffix, or a length to find."""
    text = str(value).strip()
    if name == LENGTH and not isinstance(value, bool) and (text == "-1" or text.lower() == "auto"):
        return True
    suffixed = isinstance(value, str) and _SUFFIXED.fullmatch(text) is not None
    return _count(value) is not None or (suffixed and float(text[:-1]) > 0)


def _share(value: object) -> bool:
    """Whether it is a number in (0, 1]."""
    try:
        return not isinstance(value, bool) and 0 < float(str(value)) <= 1
    except ValueError:
        return False


def _is_json(value: str) -> bool:
    try:
        parse_json(_IN_JSON.sub(lambda found: found[1] or "1", value))
    except ValueError:
        return False
    return True


def _faults(args: dict[str, ArgValue]) -> Iterator[tuple[str, str, str]]:
    """Flag, what it must be, and what to do, for each value that is not possible; a null is left out."""
    given = {name: value for name, value in args.items() if value is not None}
    if UTILISATION in given and not _share(given[UTILISATION]):
        yield UTILISATION, "must be a number above 0 and at most 1", "vLLM's own is 0.9"
    for name in (*WHOLE, *READABLE):
        if name in given and not (_readable(name, given[name]) if name in READABLE else _count(given[name])):
            suffix = ", and may end in k or K, m or M" if name in READABLE else ""
            remedy = BLOCK_REMEDY if name == BLOCK else f"write one, or leave {name} out"
            yield name, f"must be a whole number above 0{suffix}", remedy
    if (_count(given.get(SEQUENCES)) or 0) > MOST_SEQUENCES:
        yield (
            SEQUENCES,
            f"must be {MOST_SEQUENCES} at most",
            "write the number of requests of the largest batch",
        )
    if SIZES in given:
        sizes = given[SIZES]
        if not all(map(_count, sizes if isinstance(sizes, list) else [sizes])) or sizes == []:
            yield SIZES, "must hold whole numbers above 0", f"write them as a list, or leave {SIZES} out"
    for name, text in given.items():
        if isinstance(text, str) and text.strip().lower() in ("true", "false"):
            word = text.strip().lower()
            remedy = f"write {word} without quotes; on a command line --{name} or --no-{name}"
            yield name, "is a text, and vLLM's switches take no value", remedy
    for name in JSON_FLAGS:
        value = given.get(name)
        if isinstance(value, str) and not _is_json(value):
            yield name, "is a text, and no JSON", "write it as YAML: {name: value}"
    for name, value in given.items():
        texts = value if isinstance(value, list) else [value]
        if any(isinstance(text, str) and is_flag(text) for text in texts):
            yield (
                name,
                "begins with a dash, which vLLM reads as another flag",
                "give that flag by its own name",
            )


@rule("VALUE_IMPOSSIBLE")
def values_are_possible(loaded: LoadedProfile, facts: Facts) -> Findings:
    """vLLM stops at a value that it can't read, and some stop it only when the weights are loaded."""
    args = loaded.profile.engine.args
    for name, says, remedy in _faults(args):
        # A value of JSON may hold a secret, so it is not repeated.
        found = "" if name in JSON_FLAGS else f", and is {redacted(args[name])!r}"
        said = f"{named_arg(loaded, name)} {says}{found}"
        yield error("VALUE_IMPOSSIBLE", said, remedy, where_arg(loaded, name))
    own = loaded.own_args
    inside = arg(loaded, COMPILATION)
    for name, key in WITHIN.items():
        given = own.get(name) is not None or name in loaded.after.args
        if given and isinstance(inside, dict) and inside.get(key) is not None:
            yield error(
                "VALUE_IMPOSSIBLE",
                f"{named_arg(loaded, name)} is given, and so is {key} in {COMPILATION}: vLLM takes one alone",
                f"take {key} out of {COMPILATION}",
                where_arg(loaded, name),
            )
    for name in own:
        # Of a flag and its opposite vLLM takes the last; a key behind a dot takes the whole flag's place.
        other = name.partition(".")[0].removeprefix("no-")
        if other != name and own[name] is not None and own.get(other) is not None:
            yield error(
                "VALUE_IMPOSSIBLE",
                f"engine.args has both {other} and {name}, of which vLLM takes one",
                f"leave {name} out, and write {other} alone",
                where_arg(loaded, name),
            )


@rule("GPUS_TOO_FEW")
def gpus_hold_all_ranks(loaded: LoadedProfile, facts: Facts) -> Findings:
    """Every tensor, pipeline and data-parallel rank takes a GPU, on all nodes of the launch together."""
    hardware = loaded.profile.hardware
    if hardware.platform == "cpu" or hardware.gpus == 0:
        return
    tensor, pipeline, nodes = (_count(arg(loaded, name)) or 1 for name in (TENSOR, PIPELINE, NODES))
    ranks, name, on = _data_ranks(loaded, tensor * pipeline, hardware.gpus, nodes)
    needed = tensor * pipeline * ranks
    if needed > hardware.gpus * nodes:
        factors = (
            {TENSOR: tensor, PIPELINE: pipeline, name: ranks}
            if ranks > 1
            else {TENSOR: tensor, PIPELINE: pipeline}
        )
        most = max(factors, key=lambda each: (arg(loaded, each) is not None, factors[each]))
        yield error(
            "GPUS_TOO_FEW",
            f"{' * '.join(factors)} = {' * '.join(map(str, factors.values()))} = {needed} GPUs, and "
            f"hardware.gpus is {hardware.gpus}{on}",
            f"lower {most}, or raise hardware.gpus to what the machine has",
            where_arg(loaded, most),
        )


def _data_ranks(loaded: LoadedProfile, copy: int, gpus: int, nodes: int) -> tuple[int, str, str]:
    """Data-parallel ranks that share these nodes' GPUs, the flag that says so, and where, in words.

    `copy` is the GPUs of one rank. One rank alone where each has a command of its own, or Ray places them.
    """
    on = f" on each of {nodes} nodes" if nodes > 1 else ""
    local = arg(loaded, LOCAL)
    if isinstance(local, int) and not isinstance(local, bool) and copy <= gpus:
        return max(local, 1) * nodes, LOCAL, on
    own = any(arg(loaded, each) is not None for each in ("data-parallel-rank", "data-parallel-start-rank"))
    if (
        own
        or arg(loaded, "data-parallel-external-lb") is True
        or arg(loaded, "data-parallel-backend") == "ray"
    ):
        return 1, DATA, on
    return _count(arg(loaded, DATA)) or 1, DATA, on


@rule("CONTEXT_TOO_LONG")
def context_is_the_models(loaded: LoadedProfile, facts: Facts) -> Findings:
    """vLLM refuses a length beyond the model's positions, after a start that has read its configuration."""
    config = facts.model.config if facts.model else {}
    positions, asked = _count(config.get("max_position_embeddings")), _tokens(arg(loaded, LENGTH))
    allowed = variable(loaded, facts, LONGER) or ""
    if positions is None or asked is None or arg(loaded, "hf-overrides") is not None:
        return
    most = max(int(positions * _stretch(config)), _count(config.get("model_max_length")) or 0)
    if asked > most and allowed.strip().lower() not in ("1", "true"):
        yield error(
            "CONTEXT_TOO_LONG",
            f"{named_arg(loaded, LENGTH)} is {asked} tokens, and config.json of the model has {most}",
            f"lower it to {most} at most",
            where_arg(loaded, LENGTH),
        )


def _tokens(value: object) -> int | None:
    """A length in tokens as vLLM reads it, its suffix too; None for one that it finds itself."""
    text = str(value).strip()
    if isinstance(value, str) and _SUFFIXED.fullmatch(text):
        number, unit = float(text[:-1]), text[-1]
        return int(number * (1000 if unit.islower() else 1024) ** (1 + "kmgt".index(unit.lower())))
    return _count(value)


def _stretch(config: dict[str, Any]) -> float:
    """How many times its positions a model's rotary embedding reaches, where config.json leaves that out."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    layers = [each for each in (found, *found.values()) if isinstance(each, dict)] if found else []
    factors = [
        float(each["factor"])
        for each in layers
        if isinstance(each.get("factor"), int | float)
        and each.get("rope_type", each.get("type")) not in SCALED
    ]
    return max([1.0, *factors])
