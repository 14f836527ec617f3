"""A DeepSeek-V4 checkpoint of the release's geometry: few layers, random weights, DSpark stages included.

    python -m bench.gpu.v4_checkpoint FOLDER

Sizes are those of DeepSeek-V4-Flash-0731's config.json: hidden 4096, 64 heads of 512, ranks of 1024, eight
output groups, experts of 2048 of which six are chosen, a window of 128, Markov rank 256, blocks of five.
Fewer are layers (one of each kind: hash-routed and sliding, ratio 4, ratio 128, sliding) and experts (32 in
place of 256). Formats as released: block-scaled fp8 linears with e8m0 scales, fp4 experts with an e8m0 scale
for 32 values, mHC in float32, the rest bf16. Weights are drawn so that activations keep their size; text
from them means nothing, and a draft of them is accepted by chance alone.

vLLM's loader refuses a name that it doesn't know; a tensor that is missing it would leave as it is, so
`bench.gpu.v4` checks that logprobs are finite. Not covered: more than one file, accuracy, DeepSeek-V4.1.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dspark_deploy.tiny.tokenizer import build_tokenizer, save_tokenizer

COMPRESSION = (0, 4, 128, 0)
STAGES, HIDDEN, HEADS, HEAD, ROTATED, RANK, GROUPS = 3, 4096, 64, 512, 64, 1024, 8
EXPERTS, CHOSEN, EXPERT = 32, 6, 2048
VOCABULARY, STREAMS, MARKOV = 129_280, 4, 256
INDEX_HEADS, INDEX_HEAD = 64, 128
BLOCK = 128
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "moe_intermediate_size": EXPERT,
    "num_hidden_layers": len(COMPRESSION),
    "num_attention_heads": HEADS,
    "num_key_value_heads": 1,
    "head_dim": HEAD,
    "qk_rope_head_dim": ROTATED,
    "q_lora_rank": RANK,
    "o_lora_rank": RANK,
    "o_groups": GROUPS,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "n_shared_experts": 1,
    "num_hash_layers": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hidden_act": "silu",
    "hc_mult": STREAMS,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "sliding_window": 128,
    "compress_ratios": [*COMPRESSION, *(0 for _ in range(STAGES))],
    "index_n_heads": INDEX_HEADS,
    "index_head_dim": INDEX_HEAD,
    "index_topk": 512,
    "max_position_embeddings": 1_048_576,
    "rope_theta": 10_000.0,
    "compress_rope_theta": 160_000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65_536,
    },
    "tie_word_embeddings": False,
    "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    },
    "num_nextn_predict_layers": 1,  # as released; vLLM 0.26 wants k to be a multiple of it
    "n_mtp_layers": STAGES,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128_799,
    "dspark_target_layer_ids": [1, 2, 3],
    "dspark_markov_rank": MARKOV,
}
Tensors = Iterator[tuple[str, torch.Tensor]]


class Random:
    """Weights of one generator, on the GPU where there is one."""

    def __init__(self, seed: int = 0) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.generator = torch.Generator(self.device).manual_seed(seed)

    def normal(self, *shape: int, std: float, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        values = torch.randn(*shape, generator=self.generator, device=self.device) * std
        return values.to(dtype).cpu()

    def norm(self, size: int) -> torch.Tensor:
        return 1 + self.normal(size, std=0.1)

    def fp8(self, name: str, rows: int, columns: int) -> Tensors:
        """A block-scaled linear whose outputs are as large as its inputs: e4m3, and 2 ** -n in e8m0."""
        yield f"{name}.weight", self.normal(rows, columns, std=1.0, dtype=torch.float8_e4m3fn)
        yield f"{name}.scale", _e8m0(columns**-0.5, -(-rows // BLOCK), -(-columns // BLOCK))

    def fp4(self, name: str, rows: int, columns: int) -> Tensors:
        """An expert's linear: two e2m1 values a byte, which have rms 2.9, one e8m0 scale for 32."""
        size = (rows, columns // 2)
        packed = torch.randint(0, 256, size, generator=self.generator, device=self.device, dtype=torch.uint8)
        yield f"{name}.weight", packed.view(torch.int8).cpu()
        yield f"{name}.scale", _e8m0(columns**-0.5 / 2.9, rows, columns // 32)


def _e8m0(scale: float, *shape: int) -> torch.Tensor:
    exponent = torch.tensor(scale).log2().round()
    return torch.full(shape, float(2**exponent)).to(torch.float8_e8m0fnu)


def _streams(random: Random, name: str, mixes: int, scales: int) -> Tensors:
    """One mHC block's coefficients, in float32."""
    wide = STREAMS * HIDDEN
    yield f"{name}_fn", random.normal(mixes, wide, std=wide**-0.5, dtype=torch.float32)
    yield f"{name}_base", random.normal(mixes, std=0.5, dtype=torch.float32)
    yield f"{name}_scale", torch.full((scales,), 0.5)


def _compressor(random: Random, name: str, ratio: int, head: int) -> Tensors:
    width = head * (2 if ratio == 4 else 1)  # ratio 4 overlaps two windows
    for part in ("wkv", "wgate"):
        yield f"{name}.{part}.weight", random.normal(width, HIDDEN, std=HIDDEN**-0.5)
    yield f"{name}.ape", random.normal(ratio, width, std=0.1, dtype=torch.float32)
    yield f"{name}.norm.weight", random.norm(head)


def _attention(random: Random, name: str, ratio: int) -> Tensors:
    yield f"{name}.attn_sink", random.normal(HEADS, std=0.5, dtype=torch.float32)
    yield from random.fp8(f"{name}.wq_a", RANK, HIDDEN)
    yield from random.fp8(f"{name}.wq_b", HEADS * HEAD, RANK)
    yield from random.fp8(f"{name}.wkv", HEAD, HIDDEN)
    yield from random.fp8(f"{name}.wo_a", GROUPS * RANK, HEADS * HEAD // GROUPS)
    yield from random.fp8(f"{name}.wo_b", HIDDEN, GROUPS * RANK)
    yield f"{name}.q_norm.weight", random.norm(RANK)
    yield f"{name}.kv_norm.weight", random.norm(HEAD)
    if ratio:
        yield from _compressor(random, f"{name}.compressor", ratio, HEAD)
    if ratio == 4:
        yield from random.fp8(f"{name}.indexer.wq_b", INDEX_HEADS * INDEX_HEAD, RANK)
        yield f"{name}.indexer.weights_proj.weight", random.normal(INDEX_HEADS, HIDDEN, std=HIDDEN**-0.5)
        yield from _compressor(random, f"{name}.indexer.compressor", ratio, INDEX_HEAD)


def _experts(random: Random, name: str, hashed: bool) -> Tensors:
    yield f"{name}.gate.weight", random.normal(EXPERTS, HIDDEN, std=HIDDEN**-0.5)
    if hashed:
        chosen = torch.rand(VOCABULARY, EXPERTS, generator=random.generator, device=random.device)
        yield f"{name}.gate.tid2eid", chosen.topk(CHOSEN).indices.to(torch.int32).cpu()
    else:
        yield f"{name}.gate.bias", random.normal(EXPERTS, std=0.01, dtype=torch.float32)
    for expert in range(EXPERTS):
        yield from random.fp4(f"{name}.experts.{expert}.w1", EXPERT, HIDDEN)
        yield from random.fp4(f"{name}.experts.{expert}.w2", HIDDEN, EXPERT)
        yield from random.fp4(f"{name}.experts.{expert}.w3", EXPERT, HIDDEN)
    for part, rows, columns in (("w1", EXPERT, HIDDEN), ("w2", HIDDEN, EXPERT), ("w3", EXPERT, HIDDEN)):
        yield from random.fp8(f"{name}.shared_experts.{part}", rows, columns)


def _layer(random: Random, name: str, ratio: int, hashed: bool) -> Tensors:
    for part in ("attn", "ffn"):
        yield f"{name}.{part}_norm.weight", random.norm(HIDDEN)
        yield from _streams(random, f"{name}.hc_{part}", STREAMS * (STREAMS + 2), 3)
    yield from _attention(random, f"{name}.attn", ratio)
    yield from _experts(random, f"{name}.ffn", hashed)


def _head(random: Random, prefix: str) -> Tensors:
    """What collapses the streams behind the last layer, or behind the last stage."""
    yield f"{prefix}norm.weight", random.norm(HIDDEN)
    yield from _streams(random, f"{prefix}hc_head", STREAMS, 1)


def tensors(seed: int = 0) -> Tensors:
    """Every tensor of the checkpoint by its name there."""
    random = Random(seed)
    yield "embed.weight", random.normal(VOCABULARY, HIDDEN, std=1.0)
    yield "head.weight", random.normal(VOCABULARY, HIDDEN, std=HIDDEN**-0.5)
    yield from _head(random, "")
    for number, ratio in enumerate(COMPRESSION):
        yield from _layer(random, f"layers.{number}", ratio, hashed=number < CONFIG["num_hash_layers"])
    yield from random.fp8("mtp.0.main_proj", HIDDEN, HIDDEN * len(CONFIG["dspark_target_layer_ids"]))
    yield "mtp.0.main_norm.weight", random.norm(HIDDEN)
    for stage in range(STAGES):
        yield from _layer(random, f"mtp.{stage}", 0, hashed=False)
    last = f"mtp.{STAGES - 1}."
    yield from _head(random, last)
    for part in ("markov_w1", "markov_w2"):
        yield f"{last}markov_head.{part}.weight", random.normal(VOCABULARY, MARKOV, std=MARKOV**-0.5)
    yield f"{last}confidence_head.proj.weight", random.normal(1, HIDDEN + MARKOV, std=HIDDEN**-0.5)


def write(folder: Path) -> None:
    """Write the checkpoint into `folder`: 6 GB of weights, and the built-in tiny language's tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors()), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")
    save_tokenizer(build_tokenizer(seed=0), folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="gets 6 GB of weights")
    write(parser.parse_args().folder)
