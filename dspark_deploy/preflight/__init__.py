"""What will go wrong, before a ten-minute load: facts about this machine, and rules over them."""

from dspark_deploy.preflight.facts import Facts, probe
from dspark_deploy.preflight.findings import Finding, Severity
from dspark_deploy.preflight.rules import RULES, check

__all__ = ["RULES", "Facts", "Finding", "Severity", "check", "probe"]
