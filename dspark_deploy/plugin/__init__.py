"""The two functions that vLLM's plugin loader calls in every one of its processes.

`platform_hook` (entry point `vllm.platform_plugins`) runs while vLLM resolves its platform, before it
looks at Triton; it returns None, so vLLM's own platform stays. `general_hook` (`vllm.general_plugins`)
runs later and is where a failure can be reported: vLLM swallows what a platform plugin raises.

Both are inert unless `DSPARK_DEPLOY_SETTINGS` names a settings file, which `dspark-serve` writes.
Imports here are stdlib only and late: a vLLM process that was not started by us pays nothing.
"""

from __future__ import annotations

import os

from dspark_deploy.plugin.settings import SETTINGS_ENV


def platform_hook() -> None:
    """Install the patches that must precede `vllm.triton_utils`. Returns None: not a platform of our own."""
    if SETTINGS_ENV in os.environ:
        from dspark_deploy.plugin import process

        process.run_phase("platform")


def general_hook() -> None:
    """Install the remaining patches and write this process's report.

    Raises `PatchRefusedError` where a patch without which the engine can't work was refused.
    """
    if SETTINGS_ENV in os.environ:
        from dspark_deploy.plugin import process

        process.run_phase("general")
