"""Names of flags and variables, which the schema takes as they are: known to this vLLM, and given once?"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from dspark_deploy.plugin.resolved import FLAGS
from dspark_deploy.preflight.facts import VARIABLES, Facts
from dspark_deploy.preflight.rules.base import Findings, error, rule, warning
from dspark_deploy.preflight.rules.context import arg, named_arg, where_arg, where_env
from dspark_deploy.preflight.vllm_build import KEYS
from dspark_deploy.profile import LoadedProfile
from dspark_deploy.profile.flags import as_read
from dspark_deploy.profile.loading import AFTER
from dspark_deploy.profile.schema import OWNED_ARGS
from dspark_deploy.redaction import mask_text

# Names of vLLM's are alike (`max-num-seqs`, `max-num-active-seqs`): closer than this is a slip of the finger.
SLIP = 0.9
LEAST_CUT = 4  # `--spec` and the like are many flags' beginning


def _closest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), "")


@rule("FLAG_UNKNOWN", "FLAG_ABBREVIATED", "FLAG_MISSPELT")
def flags_are_known(loaded: LoadedProfile, facts: Facts) -> Findings:
    """vLLM stops at a flag that it doesn't know, and takes one cut short, which no rule here looks for."""
    known = set(facts.vllm_flags)
    for name in loaded.profile.engine.args:
        if name.startswith("-"):  # no name at all: FLAG_UNREAD
            continue
        # Keys of a JSON flag can be flags of their own, as in compilation-config.mode.
        bare = name.partition(".")[0]
        positive = bare.removeprefix("no-")
        where = where_arg(loaded, name)
        if not known:
            close = _closest(positive, FLAGS, SLIP)
            if close and close != positive:
                yield warning(
                    "FLAG_MISSPELT",
                    f"{named_arg(loaded, name)} is close to {close}; this vLLM's flags are not known here",
                    f"write {close}, or check on the machine that serves",
                    where,
                )
        elif not {bare, positive} & known:
            longer = sorted(each for each in known if each.startswith(bare))
            if len(longer) == 1:
                yield error(
                    "FLAG_ABBREVIATED",
                    f"{named_arg(loaded, name)} is {longer[0]} for vLLM, and no rule here looks at it",
                    f"write {longer[0]}",
                    where,
                )
                continue
            close = _closest(positive, known)
            yield error(
                "FLAG_UNKNOWN",
                f"{named_arg(loaded, name)} is no flag of vLLM {facts.vllm_version}, which stops at it",
                f"did you mean {close}?" if close else "take it out; `vllm serve --help=all` lists all",
                where,
            )


@rule("FLAG_HAS_NO_OPPOSITE")
def only_switches_are_turned_off(loaded: LoadedProfile, facts: Facts) -> Findings:
    """vLLM has a --no-name for a flag that is on or off, and stops at one for a flag that takes a value."""
    if not facts.vllm_switches:
        return
    for name, value in loaded.profile.engine.args.items():
        flag = name.removeprefix("no-")
        off = value is False if flag == name else name not in facts.vllm_flags
        if off and flag in facts.vllm_flags and flag not in facts.vllm_switches:
            yield error(
                "FLAG_HAS_NO_OPPOSITE",
                f"{named_arg(loaded, name)} becomes --no-{flag}, which vLLM {facts.vllm_version} doesn't "
                f"have: {flag} takes a value, or can only be turned on",
                f"leave {flag} out, or give it a value",
                where_arg(loaded, name),
                "vllm engine/arg_utils.py",
            )


@rule("FLAG_UNREAD")
def every_part_is_a_flags(loaded: LoadedProfile, facts: Facts) -> Findings:
    """A word on the command line that belongs to no flag is a second model for vLLM, which stops at it."""
    if "help" in loaded.after.args:
        yield error(
            "FLAG_UNREAD",
            "--help makes vLLM print its flags and end, so nothing would be served",
            "ask `vllm serve --help=all` by itself",
            AFTER,
        )
    shorts = [name for name in loaded.after.args if name.startswith("-")]  # no short name of vLLM's
    for part in (*loaded.after.unread, *shorts):
        yield error(
            "FLAG_UNREAD",
            f"{mask_text(part)!r} belongs to no flag of vLLM's",
            "write --name value, and --no-name for what is to be off",
            AFTER,
        )


@rule("FLAG_OWNED")
def owned_flags_stand_in_their_sections(loaded: LoadedProfile, facts: Facts) -> Findings:
    """What a section of the profile renders, given once more, wins in vLLM, and everything else misses it."""
    for name in loaded.after.args:
        owned = _owned(name, bool(facts.vllm_flags))
        if owned is not None:
            yield error(
                "FLAG_OWNED",
                f"--{name} would take the place of {OWNED_ARGS[owned]}, by which this launch is checked and "
                f"watched",
                f"leave it out, and set {OWNED_ARGS[owned]}: in the profile, or by --set",
                AFTER,
            )


def _owned(name: str, known: bool) -> str | None:
    """The flag of a section; cut short too, where nobody knows this vLLM's flags to say so."""
    if name in OWNED_ARGS:
        return name
    longer = [each for each in OWNED_ARGS if each.startswith(name)]
    return longer[0] if len(longer) == 1 and len(name) > LEAST_CUT and not known else None


@rule("FLAG_OVERRIDDEN", "FLAG_REPEATED")
def flags_are_given_once(loaded: LoadedProfile, facts: Facts) -> Findings:
    """vLLM takes the last of what is given twice, and a key behind a dot takes the whole flag's place."""
    # `no-NAME` and `NAME.key` are the flag NAME.
    own = {
        name.partition(".")[0].removeprefix("no-"): value
        for name, value in loaded.own_args.items()
        if value is not None
    }
    for name, value in loaded.after.args.items():
        if name in own and as_read(own[name]) != value:
            whole = " as a whole" if isinstance(value, dict) else ""
            yield warning(
                "FLAG_OVERRIDDEN",
                f"--{name} takes the place of the profile's engine.args.{name}{whole}: vLLM takes the last",
                f"leave it out, or change the profile's value by --set engine.args.{name}=...",
                AFTER,
            )
    for name in loaded.after.repeated:
        yield error(
            "FLAG_REPEATED",
            f"--{name} is given more than once, and vLLM takes the last",
            "keep one",
            AFTER,
        )


@rule("FLAGS_IN_FILE")
def flags_are_in_the_profile(loaded: LoadedProfile, facts: Facts) -> Findings:
    """vLLM's own file of flags is read by vLLM alone, so nothing in it is checked."""
    if arg(loaded, "config") is not None:
        yield error(
            "FLAGS_IN_FILE",
            f"{named_arg(loaded, 'config')} names a file of flags, which no rule of this preflight reads",
            "write its flags under engine.args, and what they say of the model, the draft and the address in "
            "model, speculative and engine",
            where_arg(loaded, "config"),
        )


@rule("VALUE_UNKNOWN")
def values_are_among_vllms(loaded: LoadedProfile, facts: Facts) -> Findings:
    """vLLM stops at a value that it doesn't list, and at a key of a JSON flag that it doesn't know."""
    for name, known in facts.vllm_choices.items():
        value = arg(loaded, name)
        given = [value] if isinstance(value, str) else list(value) if isinstance(value, dict) else []
        for each in given:
            if each in known or (
                isinstance(value, str) and name in KEYS
            ):  # JSON that can't be read: elsewhere
                continue
            close = _closest(each, known)
            yield error(
                "VALUE_UNKNOWN",
                f"{named_arg(loaded, name)}: {mask_text(each)} is none of those of vLLM {facts.vllm_version}",
                f"did you mean {close}?" if close else f"there are {', '.join(known)}",
                where_arg(loaded, name),
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
