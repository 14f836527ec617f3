"""What a rule is: a pure function from (profile, facts) to findings, registered with the codes it can give.

A rule knows for which build, platform or checkpoint it holds; public reports contradict one another across
those. `check` runs them all, so that one run shows every fault. The modules beside this one hold the rules;
`docs/findings.md` is made from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from dspark_deploy.preflight.facts import Facts
from dspark_deploy.preflight.findings import Finding, Severity
from dspark_deploy.profile import LoadedProfile
from dspark_deploy.redaction import mask_credentials

Findings = Iterator[Finding]
Function = Callable[[LoadedProfile, Facts], Findings]


@dataclass(frozen=True, slots=True)
class Rule:
    """`codes` are all that `function` may give; its docstring says why the rule exists."""

    codes: tuple[str, ...]
    function: Function


RULES: list[Rule] = []


def rule(*codes: str) -> Callable[[Function], Function]:
    """Register a rule under the codes it can give. Raises ValueError for a code that is taken."""
    taken = {code for each in RULES for code in each.codes} & set(codes)
    if taken:
        raise ValueError(f"codes of two rules: {', '.join(sorted(taken))}")

    def register(function: Function) -> Function:
        RULES.append(Rule(codes, function))
        return function

    return register


def check(loaded: LoadedProfile, facts: Facts, flags: Sequence[str] = ()) -> list[Finding]:
    """Every finding of every rule, errors first. `flags` are the command line's own, after `--`."""
    launch = loaded.with_flags(flags)
    findings = [_shown(finding) for each in RULES for finding in each.function(launch, facts)]
    return sorted(findings, key=lambda finding: list(Severity).index(finding.severity))


def _shown(finding: Finding) -> Finding:
    """A finding quotes what it is about, which can be a path or a variable with a URL's password."""
    return replace(
        finding, message=mask_credentials(finding.message), remedy=mask_credentials(finding.remedy)
    )


def error(code: str, message: str, remedy: str, where: str = "", source: str = "") -> Finding:
    """A finding that refuses the launch."""
    return Finding(code, Severity.ERROR, message, remedy, where, source)


def warning(code: str, message: str, remedy: str, where: str = "", source: str = "") -> Finding:
    """A finding that is likely to cost something."""
    return Finding(code, Severity.WARNING, message, remedy, where, source)


def note(code: str, message: str, remedy: str, where: str = "", source: str = "") -> Finding:
    """A finding that is worth knowing."""
    return Finding(code, Severity.NOTE, message, remedy, where, source)
