"""Graph capture: sizes that verification can use, and the graph mode that a model's code has."""

from __future__ import annotations

from dspark_deploy.preflight.facts import Facts
from dspark_deploy.preflight.rules.base import Findings, error, note, rule, warning
from dspark_deploy.preflight.rules.context import (
    DEEPSEEK_V4,
    architecture,
    arg,
    captures_graphs,
    family,
    graph_mode,
    variable,
    where_arg,
    where_env,
    whole,
)
from dspark_deploy.profile import LoadedProfile

SIZES, LARGEST, SEQUENCES = "cudagraph-capture-sizes", "max-cudagraph-capture-size", "max-num-seqs"
BREAKABLE, METHOD = "VLLM_USE_BREAKABLE_CUDAGRAPH", "VLLM_WORKER_MULTIPROC_METHOD"
# model_type -> the value that its code on ROCm needs
BREAKABLE_ON_ROCM = {"deepseek_v41": "1", "kimi_k3": "0"}


def _width(loaded: LoadedProfile) -> int:
    """Tokens that one request verifies in a step: its drafts and the token before them."""
    speculative = loaded.profile.speculative
    return speculative.num_speculative_tokens + 1 if speculative else 1


@rule("CAPTURE_SIZES_MISS_STEPS")
def sizes_hold_every_step(loaded: LoadedProfile, facts: Facts) -> Findings:
    """A step verifies a multiple of k+1 tokens; one beyond the largest such size runs without graphs."""
    sizes, sequences, width = arg(loaded, SIZES), whole(loaded, SEQUENCES), _width(loaded)
    if not captures_graphs(loaded) or width == 1 or not isinstance(sizes, list) or sequences is None:
        return
    # A step is padded to the next size that is a multiple of k+1 (vllm v1/worker/gpu/cudagraph_utils.py).
    largest = max((size for size in sizes if isinstance(size, int) and size % width == 0), default=0)
    if largest < sequences * width:
        yield warning(
            "CAPTURE_SIZES_MISS_STEPS",
            f"{SIZES} has no graph for {sequences - largest // width} of the {sequences} steps that "
            f"verification makes: they are multiples of k+1 = {width} up to {sequences * width}, and the "
            f"largest such size is {largest or 'missing'}",
            f"leave {SIZES} out, and they are rendered from {SEQUENCES} and k",
            where_arg(loaded, SIZES),
            "vllm#54933",
        )


@rule("CAPTURE_SIZE_TOO_SMALL")
def largest_size_counts_tokens(loaded: LoadedProfile, facts: Facts) -> Findings:
    """The largest capture size counts tokens, not requests."""
    largest, sequences, width = whole(loaded, LARGEST), whole(loaded, SEQUENCES), _width(loaded)
    if not captures_graphs(loaded) or width == 1 or largest is None or sequences is None:
        return
    if largest < sequences * width:
        yield warning(
            "CAPTURE_SIZE_TOO_SMALL",
            f"{LARGEST}: {largest} is below {SEQUENCES} * (k+1) = {sequences} * {width} = "
            f"{sequences * width} tokens, so full batches run without graphs: once 133 tokens/s became 25",
            f"leave {LARGEST} out, or set it to {sequences * width}",
            where_arg(loaded, LARGEST),
            "vllm#54933",
        )


@rule("BREAKABLE_CUDAGRAPH")
def breakable_graphs_fit_model(loaded: LoadedProfile, facts: Facts) -> Findings:
    """Models on ROCm differ in whether their code needs breakable graphs or breaks by them."""
    needed = BREAKABLE_ON_ROCM.get(family(loaded, facts))
    if loaded.profile.hardware.platform != "rocm" or needed is None or not captures_graphs(loaded):
        return
    found = variable(loaded, facts, BREAKABLE) or "0"
    if found != needed:
        why = "its layers are not compiled piece by piece" if needed == "1" else "its graphs are whole"
        yield error(
            "BREAKABLE_CUDAGRAPH",
            f"{BREAKABLE} is {found}, and {family(loaded, facts)} on ROCm needs {needed}: {why}",
            f"set engine.env.{BREAKABLE} to '{needed}'",
            where_env(loaded, BREAKABLE),
            "vllm-project/recipes models/deepseek-ai/DeepSeek-V4.1-Flash.yaml",
        )


@rule("GRAPHS_LOSE_BREAKS")
def forked_engine_keeps_its_breaks(loaded: LoadedProfile, facts: Facts) -> Findings:
    """A forked engine has imported its model before vLLM turns breakable graphs on: none of them breaks."""
    platform, method = loaded.profile.hardware.platform, variable(loaded, facts, METHOD)
    if platform != "cuda" or family(loaded, facts) not in DEEPSEEK_V4 or not captures_graphs(loaded):
        return
    prompts_in_graphs = graph_mode(loaded) in (None, "PIECEWISE", "FULL_AND_PIECEWISE")
    if method == "fork" and variable(loaded, facts, BREAKABLE) is None and prompts_in_graphs:
        yield error(
            "GRAPHS_LOSE_BREAKS",
            f"{METHOD} is fork, and vLLM sets {BREAKABLE} itself for {family(loaded, facts)}, too late for a "
            "forked engine: its graphs hold attention, and prompts that fit into one come out wrong",
            f"leave {METHOD} out: vLLM's server spawns its engine; or set engine.env.{BREAKABLE} to '1'",
            where_env(loaded, METHOD),
            "bench/results/gpu_v4_graphs.json (NVIDIA H200, vLLM 0.26.0)",
        )


@rule("DECODE_ONLY_GRAPHS_V4")
def decode_only_graphs_are_tested(loaded: LoadedProfile, facts: Facts) -> Findings:
    """One report of lost accuracy in this graph mode, not seen again; only a measurement tells."""
    mode, arch = graph_mode(loaded), architecture(loaded, facts)
    if mode == "FULL_DECODE_ONLY" and arch == "gfx950" and family(loaded, facts) == "deepseek_v4":
        yield note(
            "DECODE_ONLY_GRAPHS_V4",
            "DeepSeek-V4 with FULL_DECODE_ONLY graphs on gfx950 once lost accuracy, and later did not",
            "compare accuracy with enforce-eager: true before you trust this build",
            where_arg(loaded, "compilation-config"),
            "vllm#52644",
        )
