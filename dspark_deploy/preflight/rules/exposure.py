"""Exposure: who can reach the engine, and whose code it runs."""

from __future__ import annotations

from dspark_deploy.preflight.facts import API_KEY, Facts
from dspark_deploy.preflight.rules.base import Findings, rule, warning
from dspark_deploy.preflight.rules.context import arg, where_arg
from dspark_deploy.profile import LoadedProfile

EVERY_INTERFACE = ("0.0.0.0", "::")  # noqa: S104


@rule("OPEN_WITHOUT_KEY")
def open_engines_ask_for_a_key(loaded: LoadedProfile, facts: Facts) -> Findings:
    """On every interface and without a key, anybody who reaches the port uses the GPUs."""
    engine = loaded.profile.engine
    keyed = facts.api_key_set or API_KEY in engine.env or arg(loaded, "api-key") is not None
    if engine.host in EVERY_INTERFACE and not keyed:
        yield warning(
            "OPEN_WITHOUT_KEY",
            f"engine.host: {engine.host} listens on every interface, and no API key is set",
            f"set {API_KEY} in the environment, or listen on 127.0.0.1 behind a proxy",
            loaded.where("engine", "host"),
        )


@rule("TRUST_REMOTE_CODE")
def remote_code_is_not_trusted(loaded: LoadedProfile, facts: Facts) -> Findings:
    """The models that this is for ship in vLLM; none needs code from a checkpoint."""
    if arg(loaded, "trust-remote-code") is True:
        yield warning(
            "TRUST_REMOTE_CODE",
            "trust-remote-code lets the checkpoint run code of its own, and DeepSeek-V4 needs none",
            "leave trust-remote-code out",
            where_arg(loaded, "trust-remote-code"),
        )
