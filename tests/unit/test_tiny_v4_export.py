"""The tiny DeepSeek-V4 as a checkpoint: DeepSeek's names and dtypes, written and read back without loss."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

import torch
from safetensors.torch import load_file

from dspark_deploy.tiny.architectures import ARCHITECTURES
from dspark_deploy.tiny.tokenizer import TRAINING_SEED, build_tokenizer
from dspark_deploy.tiny.v4.export import read_checkpoint

ARCHITECTURE = ARCHITECTURES["tiny-v4"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("v4")
    target = ARCHITECTURE.make_target(torch.Generator().manual_seed(0))
    draft = ARCHITECTURE.make_draft(target, torch.Generator().manual_seed(1))
    ARCHITECTURE.write(folder, target, draft, build_tokenizer(TRAINING_SEED))
    return folder


def test_names_are_those_of_deepseeks_checkpoints(written: Path) -> None:
    stored = load_file(written / "model.safetensors")
    known = (
        r"(embed|head|norm)\.weight|hc_head_(fn|base|scale)"
        r"|(layers|mtp)\.\d\.(attn\.(wq_a|wq_b|wkv|wo_a|wo_b|q_norm|kv_norm)\.weight|attn\.attn_sink"
        r"|(attn|ffn)_norm\.weight|hc_(attn|ffn)_(fn|base|scale)|ffn\.gate\.(weight|bias)"
        r"|ffn\.(experts\.\d|shared_experts)\.w[123]\.weight)"
        r"|layers\.1\.attn\.(indexer\.)?compressor\.(ape|(wkv|wgate|norm)\.weight)"
        r"|layers\.1\.attn\.indexer\.(wq_b|weights_proj)\.weight"
        r"|mtp\.0\.(main_proj|main_norm|norm|markov_head\.markov_w[12]|confidence_head\.proj)\.weight"
        r"|mtp\.0\.hc_head_(fn|base|scale)"
    )
    assert [name for name in stored if not re.fullmatch(known, name)] == []
    wide = {name for name, value in stored.items() if value.dtype == torch.float32}
    assert {name for name in stored if re.search(r"hc_|attn_sink|\.ape|gate\.bias|confidence", name)} == wide


def test_what_was_written_is_read_back(written: Path) -> None:
    target, draft, _ = read_checkpoint(written)
    made = ARCHITECTURE.make_target(torch.Generator().manual_seed(0))
    made_draft = ARCHITECTURE.make_draft(made, torch.Generator().manual_seed(1))
    for one, other in ((made, target), (made_draft, draft)):
        ARCHITECTURE.as_served(one)
        for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b), name


def test_the_configuration_names_the_draft(written: Path) -> None:
    config = json.loads((written / "config.json").read_text())
    assert config["dspark_block_size"] == ARCHITECTURE.draft_shape.block
    assert config["n_mtp_layers"] == config["num_nextn_predict_layers"] == 1
    assert len(config["compress_ratios"]) == config["num_hidden_layers"] + config["n_mtp_layers"]
    assert config["dspark_target_layer_ids"] == [0, 1, 2]
