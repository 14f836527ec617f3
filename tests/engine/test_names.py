"""Every flag and variable that vLLM itself knows is found in its sources, without importing it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from dspark_deploy.preflight.vllm_build import flags, variables, vllm_folder

pytestmark = pytest.mark.engine
ASK = """
import json
from dspark_deploy.launch.vllm_command import answer_for_vllm
answer_for_vllm()
from vllm import envs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
actions = make_arg_parser(FlexibleArgumentParser())._actions
print(json.dumps([[o for a in actions for o in a.option_strings], list(envs.environment_variables)]))
"""


def test_nothing_that_vllm_knows_is_called_unknown() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ASK], capture_output=True, text=True, timeout=300, check=True
    )
    options, names = json.loads(done.stdout.splitlines()[-1])
    found = set(flags(vllm_folder()))
    theirs = {option[2:] for option in options if option.startswith("--")}
    assert len(theirs) > 300, "the parser was there"
    assert {name for name in theirs if name not in found and name.removeprefix("no-") not in found} == set()
    assert len(found) < 1.1 * len(theirs), "and hardly anything is taken for a flag that is none"
    assert {name for name in names if name.startswith("VLLM_")} <= set(variables(vllm_folder()))
