"""The rules of the preflight, one module for each thing that goes wrong; importing them registers them."""

from dspark_deploy.preflight.rules import (
    aiter,
    build,
    checkpoints,
    environment,
    exposure,
    graphs,
    machine,
    memory,
    names,
    routes,
    speculation,
    synthetic,
    values,
    verification,
)
from dspark_deploy.preflight.rules.base import RULES, Rule, check

__all__ = [
    "RULES",
    "Rule",
    "aiter",
    "build",
    "check",
    "checkpoints",
    "environment",
    "exposure",
    "graphs",
    "machine",
    "memory",
    "names",
    "routes",
    "speculation",
    "synthetic",
    "values",
    "verification",
]
