"""Names inside engine.args and engine.env, which the schema takes as they are: does this vLLM know them?"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from dspark_deploy.plugin.resolved import FLAGS
from dspark_deploy.preflight.facts import VARIABLES, Facts
from dspark_deploy.preflight.rules.base import Findings, error, rule, warning
from dspark_deploy.preflight.rules.context import where_arg, where_env
from dspark_deploy.profile import LoadedProfile

# Names of vLLM's are alike (`max-num-seqs`, `max-num-active-seqs`): closer than this is a slip of the finger.
SLIP = 0.9


def _closest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), "")


@rule("FLAG_UNKNOWN", "FLAG_ABBREVIATED", "FLAG_MISSPELT")
def flags_are_known(loaded: LoadedProfile, facts: Facts) -> Findings:
    """vLLM stops at a flag that it doesn't know, and takes one cut short, which no rule here looks for."""
    known = set(facts.vllm_flags)
    for name in loaded.profile.engine.args:
        # Keys of a JSON flag can be flags of their own, as in compilation-config.mode.
        bare = name.partition(".")[0]
        positive = bare.removeprefix("no-")
        where = where_arg(loaded, name)
        if not known:
            close = _closest(positive, FLAGS, SLIP)
            if close and close != positive:
                yield warning(
                    "FLAG_MISSPELT",
                    f"engine.args.{name} is close to {close}, and this vLLM's flags are not known here",
                    f"write {close}, or check on the machine that serves",
                    where,
                )
        elif not {bare, positive} & known:
            longer = sorted(each for each in known if each.startswith(bare))
            if len(longer) == 1:
                yield error(
                    "FLAG_ABBREVIATED",
                    f"engine.args.{name} is {longer[0]} for vLLM, and no rule of this preflight looks at it",
                    f"write {longer[0]}",
                    where,
                )
                continue
            close = _closest(positive, known)
            yield error(
                "FLAG_UNKNOWN",
                f"engine.args.{name} is no flag of vLLM {facts.vllm_version}, which stops at it",
                f"did you mean {close}?" if close else "take it out; `vllm serve --help=all` lists all",
                where,
            )


@rule("ENV_UNKNOWN")
def variables_are_known(loaded: LoadedProfile, facts: Facts) -> Findings:
    """A misspelt variable does nothing: vLLM warns of those that begin with VLLM_, nobody of the others."""
    ours = set(VARIABLES)
    for name in loaded.profile.engine.env:
        if name in ours or name in facts.vllm_variables:
            continue
        theirs = name.startswith("VLLM_") and bool(facts.vllm_variables)
        close = _closest(name, [*facts.vllm_variables, *ours], 0.6 if theirs else SLIP)
        if theirs or close:
            of = f"no variable of vLLM {facts.vllm_version}" if theirs else f"close to {close}"
            yield warning(
                "ENV_UNKNOWN",
                f"engine.env.{name} is {of}, and does nothing if it is a slip",
                f"did you mean {close}?" if close else "take it out, unless something else reads it",
                where_env(loaded, name),
            )
