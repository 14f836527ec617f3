"""Forced acceptance, which vLLM's own flags can ask for and a profile can't."""

from __future__ import annotations

from dataclasses import replace

from dspark_deploy.preflight.facts import Facts
from dspark_deploy.preflight.rules.base import Findings, rule
from dspark_deploy.preflight.rules.context import where_arg
from dspark_deploy.preflight.synthetic import FLAG, config_of_args, synthetic_faults
from dspark_deploy.profile import LoadedProfile


@rule(
    "SYNTHETIC_IN_SERVING",
    "SYNTHETIC_UNREADABLE",
    "SYNTHETIC_WITH_ADAPTIVE",
    "SYNTHETIC_AL_NOT_FOR_THIS_K",
    "SYNTHETIC_AL_OUT_OF_RANGE",
)
def acceptance_is_not_forced(loaded: LoadedProfile, facts: Facts) -> Findings:
    """Synthetic acceptance commits drafts whatever the target says, so what users read means nothing."""
    for fault in synthetic_faults(config_of_args(loaded.profile.engine.args), "serve"):
        yield replace(fault, where=where_arg(loaded, FLAG))
