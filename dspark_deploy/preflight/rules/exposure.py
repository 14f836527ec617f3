"""Exposure: who can reach the engine, and whose code it runs."""

from __future__ import annotations

from collections.abc import Iterator

from dspark_deploy.preflight.facts import API_KEY, Facts
from dspark_deploy.preflight.rules.base import Findings, error, rule, warning
from dspark_deploy.preflight.rules.context import arg, named_arg, where_arg
from dspark_deploy.profile import LoadedProfile
from dspark_deploy.redaction import is_secret, mask_credentials, mask_text


@rule("OPEN_WITHOUT_KEY")
def open_engines_ask_for_a_key(loaded: LoadedProfile, facts: Facts) -> Findings:
    """On every interface and without a key, anybody who reaches the port uses the GPUs."""
    engine = loaded.profile.engine
    keyed = facts.api_key_set or bool(engine.env.get(API_KEY)) or bool(arg(loaded, "api-key"))
    if _is_every_interface(engine.host) and not keyed:
        yield warning(
            "OPEN_WITHOUT_KEY",
            f"engine.host: {engine.host} listens on every interface, and no API key is set",
            f"set {API_KEY} in the environment, or listen on 127.0.0.1 behind a proxy",
            loaded.where("engine", "host"),
        )


def _is_every_interface(host: str) -> bool:
    """Whether a server that binds to it is reached from outside: no address, or nought in any spelling."""
    bare = host.strip("[] ")
    return not bare.replace("0", "").strip(".:")


@rule("TRUST_REMOTE_CODE")
def remote_code_is_not_trusted(loaded: LoadedProfile, facts: Facts) -> Findings:
    """The models that this is for ship in vLLM; none needs code from a checkpoint."""
    if str(arg(loaded, "trust-remote-code")).lower() in ("true", "1"):
        yield warning(
            "TRUST_REMOTE_CODE",
            "trust-remote-code lets the checkpoint run code of its own, and DeepSeek-V4 needs none",
            "leave trust-remote-code out",
            where_arg(loaded, "trust-remote-code"),
        )


@rule("PASSWORD_IN_COMMAND", "SECRET_IN_COMMAND")
def flags_hold_no_secret(loaded: LoadedProfile, facts: Facts) -> Findings:
    """Flags stand in the engine's command line, which `ps` shows to everybody, and vLLM logs them."""
    for name, value in loaded.profile.engine.args.items():
        texts = list(_texts(value))
        if any(mask_credentials(text) != text for _, text in texts):
            yield error(
                "PASSWORD_IN_COMMAND",
                f"{named_arg(loaded, name)} has a key, or a URL with a password, which `ps` shows to all",
                "leave it out here, and give it by a variable of engine.env",
                where_arg(loaded, name),
            )
        elif any(is_secret(key) or mask_text(text) != text for key, text in texts):
            yield warning(
                "SECRET_IN_COMMAND",
                f"{named_arg(loaded, name)} seems to hold a secret, and `ps` shows every flag",
                "give it by a variable of engine.env, where the service reads one",
                where_arg(loaded, name),
            )


def _texts(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    """Every text inside a flag's value, with the key that it is under there."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _texts(inner, str(name))
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner, key)
