"""NRMSE of each mHC provider against fp64, by operator, output and number of tokens.

    dspark-tune kernels --hidden 5120 --streams 4
    python -m tuning.judging.kernels PROVIDER HIDDEN STREAMS      one provider, in a process of its own

Providers are vLLM's operators as this machine dispatches them (`auto`), forced to `tilelang`, `aiter` or
`torch`, and `native`, vLLM's own torch code, which runs anywhere. vLLM chooses by flags that modules copy
when they are loaded, hence a process each. The operators' inputs and references are the numerics gate's.

With a norm folded in where kernels serve, without one elsewhere, as vLLM's models call them.

Not covered: speed (`bench/gpu/kernels.py`), and shapes that a model doesn't have.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from dspark_deploy.kernels.causes import described

TOKENS = (1, 8, 64, 1024)
OPERATORS = ("MHCPreOp", "MHCPostOp", "MHCFusedPostPreOp", "MHCPreDelayedOp", "HCHeadOp")
NATIVE, AUTO = "native", "auto"
PROVIDERS = (AUTO, "tilelang", "aiter", "torch", NATIVE)


def provider_rows(provider: str, hidden: int, streams: int) -> dict[str, Any]:
    """The gate's rows for one provider in this process, or why there are none."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.platforms import current_platform

    from dspark_deploy.kernels.gate import check_operators
    from dspark_deploy.kernels.mhc_pre import Constants
    from dspark_deploy.kernels.references import Geometry
    from dspark_deploy.plugin.amd import provider as amd
    from dspark_deploy.plugin.registry import READY

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with set_current_vllm_config(VllmConfig()):
        import vllm.model_executor.layers.mhc as layers

        current_platform.import_kernels()
        if provider not in (AUTO, NATIVE):
            if not current_platform.is_rocm():
                return {"refused": "vLLM has one implementation on this platform: auto"}
            verdict = amd.examine(layers, provider)
            if verdict != READY:
                return {"refused": verdict.reason}
            amd.install(layers, provider)
        # Elsewhere vLLM's models apply the norm themselves; its native operators ignore one they are given.
        kernels_serve = device.type != "cpu" and provider not in ("torch", NATIVE)
        geometry = Geometry(hidden, streams, Constants(), fused_norm=kernels_serve)
        rows: list[dict[str, Any]] = []
        skipped: dict[str, str] = {}
        for name in OPERATORS:
            if not hasattr(layers, name):
                continue
            operator = getattr(layers, name)()
            if provider == NATIVE:
                for each in (operator, *operator.children()):
                    each._forward_method = each.forward_native
            found = check_operators({name: (operator, geometry)}, device, TOKENS).as_json()["rows"]
            # It raised: this provider hasn't the operator here.
            raised = [row["cause"] for row in found if not row["output"]]
            if raised:
                skipped[name] = raised[0].partition("\n")[0]
            else:
                rows += found
    return {"rows": rows, "skipped": skipped, "device": device.type}


def table(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per operator, variant, output and provider, with NRMSE by tokens, in that order."""
    cells: dict[tuple[str, str, str, str], dict[str, Any]] = {}
    for provider, document in found.items():
        for row in document.get("rows", []):
            key = (row["operator"], row["variant"], row["output"], provider)
            cells.setdefault(key, {})[str(row["tokens"])] = row["nrmse"]
    return [
        {"operator": key[0], "variant": key[1], "output": key[2], "provider": key[3], "nrmse": values}
        for key, values in sorted(cells.items())
    ]


def wrong(found: dict[str, dict[str, Any]]) -> list[str]:
    """The gate's sentence about every output outside its limits."""
    return list(
        dict.fromkeys(
            f"{provider}: {described(row)}"
            for provider, document in found.items()
            for row in document.get("rows", [])
            if row["cause"]
        )
    )


def main(arguments: Sequence[str]) -> None:
    """One provider's document on the last line of stdout."""
    provider, hidden, streams = arguments
    sys.stdout.write(json.dumps(provider_rows(provider, int(hidden), int(streams))) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
