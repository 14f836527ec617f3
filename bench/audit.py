"""Dependencies: what is known against the installed ones, and whether the product declares all it imports.

    make audit
    python -m bench.audit --pip-audit .venv-audit/bin/pip-audit

Known vulnerabilities are asked of PyPI's service by pip-audit, which lives in an environment of its own, so
that the audit changes nothing of what it audits. Offline are checked: every import of the product is declared
in pyproject.toml, and every installed dependency is of the version that is asked for.

Exit codes: 0 nothing is known; 1 something is; 2 the service could not be asked, so nothing is known either
way. pip-audit itself ends with 0 where the service told it of no package at all; here that is 2. Not covered:
a build of torch from another index, which no service knows; it is named.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PACKAGES = ("dspark_deploy", "tuning", "profiles")
# They come with the engine, and pip must leave them as the image has them.
OF_THE_ENGINE = {
    "vllm",
    "torch",
    "triton",
    "tilelang",
    "safetensors",
    "tokenizers",
    "datasets",
    "pynvml",
    "amdsmi",
}
TIMEOUT_S = 300
# More packages than this that the service doesn't know, and it has not been asked at all.
MOST_UNKNOWN = 0.5


def requirements() -> list[Requirement]:
    """What pyproject.toml declares, the extras included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [each for found in project["optional-dependencies"].values() for each in found]
    return [Requirement(each) for each in project["dependencies"] + extras]


def imported(source: str) -> Iterator[str]:
    """Packages that a module imports, by their top name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def undeclared() -> list[str]:
    """Imports of the product that belong to no declared distribution."""
    owners = metadata.packages_distributions()
    declared = {canonicalize_name(each.name) for each in requirements()}
    known = sys.stdlib_module_names | OF_THE_ENGINE | set(PACKAGES)
    places: dict[str, Path] = {}
    for path in sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py")):
        for package in set(imported(path.read_text())) - known:
            if not {canonicalize_name(owner) for owner in owners.get(package, [])} & declared:
                places.setdefault(package, path.relative_to(ROOT))
    return [f"{path}: imports {package}, which pyproject.toml lacks" for package, path in places.items()]


def outside_their_range() -> list[str]:
    """Installed distributions whose version is not the one that is asked for."""
    faults = []
    for each in requirements():
        try:
            version = metadata.version(each.name)
        except metadata.PackageNotFoundError:
            continue  # of an extra that is not installed
        if not each.specifier.contains(version, prereleases=True):
            faults.append(f"{each.name} {version} is installed, and {each.specifier} is asked for")
    return faults


def judge(document: Mapping[str, Any]) -> tuple[int, list[str]]:
    """Exit code and lines for people, from pip-audit's JSON."""
    packages = document["dependencies"]
    skipped = [each["skip_reason"] for each in packages if "skip_reason" in each]
    if not packages or len(skipped) > MOST_UNKNOWN * len(packages):
        return 2, [
            f"the vulnerability service knew {len(packages) - len(skipped)} of {len(packages)} packages: it "
            f"was not reached. Nothing was audited; run it where the network reaches it",
            *skipped[:1],
        ]
    lines = [f"not audited: {reason}" for reason in skipped]
    code = 0
    for each in packages:
        for fault in each.get("vulns", []):
            fixed = ", ".join(fault["fix_versions"]) or "no release"
            lines.append(f"{each['name']} {each['version']}: {fault['id']}, fixed in {fixed}")
            code = 1
    return code, [*lines, f"{len(packages) - len(skipped)} packages audited"]


def ask(program: str) -> tuple[int, list[str]]:
    """What the service knows against the packages of this environment."""
    site = sysconfig.get_paths()["purelib"]
    command = [program, "--path", site, "--format", "json", "--progress-spinner", "off", "--timeout", "15"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        return judge(json.loads(done.stdout))
    except subprocess.TimeoutExpired:
        return 2, [f"pip-audit did not end within {TIMEOUT_S} s. Nothing was audited"]
    except (OSError, ValueError) as error:
        said = str(error) if isinstance(error, OSError) else done.stderr.strip().rpartition("\n")[2]
        return 2, [f"pip-audit gave no answer: {said}. Nothing was audited"]


def main() -> None:
    """Check, ask, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pip-audit", default="pip-audit", help="the program")
    faults = undeclared() + outside_their_range()
    code, lines = ask(parser.parse_args().pip_audit)
    print("\n".join([*faults, *lines]))
    sys.exit(1 if faults else code)


if __name__ == "__main__":
    main()
