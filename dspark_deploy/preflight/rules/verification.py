"""Verification: which ways to verify drafts this engine, platform and model have."""

from __future__ import annotations

from dspark_deploy.preflight.facts import Facts
from dspark_deploy.preflight.rules.base import Findings, error, rule
from dspark_deploy.profile import LoadedProfile


@rule("ADAPTIVE_NEEDS_GRAPHS")
def adaptive_has_graphs(loaded: LoadedProfile, facts: Facts) -> Findings:
    """Adaptive verification needs full CUDA graphs, which a CPU has not."""
    speculative = loaded.profile.speculative
    adaptive = speculative is not None and speculative.verification.kind == "adaptive"
    args = loaded.profile.engine.args
    if adaptive and (loaded.profile.hardware.platform == "cpu" or args.get("enforce-eager") is True):
        yield error(
            "ADAPTIVE_NEEDS_GRAPHS",
            "adaptive verification needs full CUDA graphs, and this launch captures none",
            "set speculative.verification to {kind: fixed} or {kind: schedule, ...}",
            loaded.where("speculative", "verification"),
        )
