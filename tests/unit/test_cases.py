"""Published contradictions as cases: k against the block, stages, methods, and forced acceptance."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from dspark_deploy.preflight import check
from dspark_deploy.preflight.synthetic import synthetic_faults
from tests.support.shared import case_json
from tests.unit.findings import BASES, FEATURES, FLASH, K
from tests.unit.profiles import load


def codes(folder: Path, config: dict[str, Any], sets: list[str], **features: bool) -> set[str]:
    """Codes of the preflight for a target with this config.json."""
    text, facts = BASES["mi355x"]
    known = replace(facts, model=replace(FLASH, config=config), features={**FEATURES, **features})
    return {finding.code for finding in check(load(folder, text, sets), known)}


def test_k_against_the_block(tmp_path: Path) -> None:
    case = case_json("01-k-vs-block.json")
    rows = [row for row in case["rows"] if isinstance(row["k"], int) and row["k"] > 0]
    assert len(rows) == 5
    for row in rows:
        guarded = row["vllm"].startswith("0.26.")
        found = codes(tmp_path, case["draft_config"], [f"{K}{row['k']}"], block_guard=guarded)
        about_k = {code for code in found if code.startswith("K_")}
        assert about_k == ({row["code"]} if row["code"] else set()), row


def test_stages_are_no_width(tmp_path: Path) -> None:
    case = case_json("02-stages-vs-block.json")
    wanted = {("affected", 5): "ENGINE_TREATS_STAGES_AS_MTP", ("affected", 6): "K_ABOVE_BLOCK"}
    for row in case["rows"]:
        if row["k"] is not None:
            fixed = row["engine"] == "fixed"
            found = codes(tmp_path, case["draft_config"], [f"{K}{row['k']}"], block_is_width=fixed)
            expected = wanted.get((row["engine"], row["k"]))
            assert found == ({expected} if expected else set()), row


def test_the_method_is_decided_on_config_json(tmp_path: Path) -> None:
    for row in case_json("03-method-vs-checkpoint.json")["rows"]:
        spec = row["spec"]
        method = "dspark" if spec["method"] == "dflash" else spec["method"]  # the schema has no dflash
        sets = [f"{K}{spec['num_speculative_tokens']}", f"speculative.method={method}"]
        sets += [f"speculative.draft={spec['model']}"] if "model" in spec else []
        found = codes(tmp_path, row["config"], sets)
        assert row["code"] in found if row["code"] else not found, row


def test_forced_acceptance() -> None:
    for row in case_json("10-synthetic-acceptance.json")["rows"]:
        task = "accuracy" if row["task"] == "gsm8k" else row["task"]
        measured = 4 if row["spec"]["synthetic_acceptance_length"] == 3.75 else None
        found = [finding.code for finding in synthetic_faults(row["spec"], task, measured)]
        verdict, _, code = row["expect"].partition(" ")
        assert (code in found) if verdict == "error" else found == [], row
