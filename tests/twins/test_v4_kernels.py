"""DeepSeek-V4's kernels in torch against vLLM's Triton kernels, interpreted: the cache holds the same.

What has no Triton kernel in vLLM (attention, the output's rotation, routing) is held against its formula.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from dspark_deploy.plugin.cpu_engine.deepseek_v4 import cache, kernels
from dspark_deploy.plugin.cpu_engine.deepseek_v4.experts import limited_experts
from dspark_deploy.plugin.cpu_engine.deepseek_v4.routing import biased_topk_cpu

COMPRESS = "vllm.models.deepseek_v4.common.ops.fused_compress_quant_cache"
BLOCKS, SIZE, STATE_SIZE = 3, 4, 8  # blocks, entries in each, states in each
MAIN, INDEX = (512, 64, 576, 8), (128, 128, 128, 4)  # entry, channels a scale, bytes, scale bytes


def cos_sin(positions: int) -> torch.Tensor:
    angles = torch.outer(torch.arange(positions).float(), 10_000 ** (-torch.arange(32) / 32))
    return torch.cat([angles.cos(), angles.sin()], 1)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("entry", "group", "row", "scale"), [MAIN, INDEX], ids=["main", "indexer"])
@pytest.mark.parametrize("overlap", [1, 0], ids=["ratio 4", "ratio 128's kind"])
def test_compressed_entries_are_vllms_bytes(
    entry: int, group: int, row: int, scale: int, overlap: int
) -> None:
    import importlib

    module = importlib.import_module(COMPRESS)
    name = "sparse_attn" if entry == 512 else "indexer_attn"
    reference = getattr(module, f"_fused_kv_compress_norm_rope_insert_{name}")
    ratio, tokens = 4, 11
    width = (1 + overlap) * entry
    states = normal(2, STATE_SIZE, 2 * width) * torch.tensor([1.0, 3.0]).repeat_interleave(width)
    positions = torch.arange(tokens)
    block_table = torch.tensor([[1, 0]], dtype=torch.int32)
    slots = torch.arange(tokens)
    slots[7] = -1  # a token that pads the batch
    ends = (positions + 1) % ratio == 0
    entry_slots = torch.where(ends, 2 * SIZE - 1 + positions // ratio, -1)
    stride = SIZE * (row + scale)
    expected = torch.randint(0, 255, (BLOCKS, stride), dtype=torch.uint8)
    before, actual = expected.clone(), expected.clone()
    weight = 1 + 0.2 * normal(entry, seed=1)
    reference[(tokens,)](
        states,
        states.stride(0),
        states.stride(1),
        torch.zeros(tokens, dtype=torch.int32),
        positions,
        slots,
        block_table,
        block_table.stride(0),
        STATE_SIZE,
        weight,
        1e-6,
        cos_sin(tokens),
        64,
        expected,
        torch.where(slots >= 0, entry_slots, -1),
        SIZE,
        HEAD_SIZE=entry,
        TRITON_BLOCK_SIZE=entry,
        STATE_WIDTH=width,
        COMPRESS_RATIO=ratio,
        OVERLAP=overlap,
        ROPE_HEAD_DIM=64,
        FP8_MAX=448.0,
        QUANT_BLOCK=group,
        TOKEN_STRIDE=row,
        SCALE_DIM=scale,
        KV_BLOCK_STRIDE=stride,
        **({"SANITIZE_CACHE_NANS": False} if entry == 512 else {}),
    )
    window = (1 + overlap) * ratio
    local = positions[:, None] - window + 1 + torch.arange(window)
    gathered = block_table[0, local.clamp(min=0) // STATE_SIZE].long() * STATE_SIZE + local % STATE_SIZE
    gathered = gathered.masked_fill(local < 0, -1)
    ours = (
        kernels.compress_norm_rope_store_cpu if entry == 512 else kernels.compress_norm_rope_store_indexer_cpu
    )
    ours(
        states, gathered, positions, torch.where(slots >= 0, entry_slots, -1), weight, 1e-6,
        cos_sin(tokens), actual, SIZE, ratio,
    )  # fmt: skip
    written = entry_slots[ends & (slots >= 0)]
    assert len(written) == 1 and not torch.equal(expected, before)
    untouched = torch.ones(BLOCKS * SIZE, dtype=torch.bool)
    untouched[written] = False
    for first, size in ((0, row), (SIZE * row, scale)):
        parts = [each[:, first : first + SIZE * size].reshape(-1, size) for each in (before, actual)]
        assert torch.equal(*(part[untouched] for part in parts)), "only the entry's own slot is written"
    values = [_read(each, int(written), row, group) for each in (expected, actual)]
    # Triton's interpreter truncates to bfloat16, and loses the carry of a fp8 mantissa that rounds up to a
    # power of two; hardware and torch do neither. So a few values differ by more than a step of fp8.
    off = (values[0] - values[1]).abs() > values[0].abs() / 7 + 1e-3
    assert off.float().mean() < 0.06, f"{int(off.sum())} of {off.numel()} values differ by more than a step"


def _read(stored: torch.Tensor, slot: int, row: int, group: int) -> torch.Tensor:
    """An entry's values, read by the layout that vLLM's kernels document."""
    data = stored[slot // SIZE, slot % SIZE * row :][:row]
    scales = stored[slot // SIZE, SIZE * row :]
    if row == 128:
        return data.view(torch.float8_e4m3fn).float() * scales[4 * (slot % SIZE) :][:4].view(torch.float32)
    factors = torch.exp2(scales[8 * (slot % SIZE) :][:7].float() - 127).repeat_interleave(group)
    plain = data[:448].view(torch.float8_e4m3fn).float() * factors
    return torch.cat([plain, data[448:].clone().view(torch.bfloat16).float()])


def test_rows_come_back_within_fp8s_rounding() -> None:
    rows = normal(6, 512) * torch.logspace(-3, 2, 6)[:, None]
    stored = torch.zeros(BLOCKS, SIZE * 584, dtype=torch.uint8)
    slots = torch.tensor([0, 5, -1, 7, 11, 2])
    cache.write_rows(stored, slots, rows, SIZE)
    kept = slots >= 0
    back = cache.read_rows(stored, slots[kept], SIZE)
    largest = rows[kept].unflatten(1, (8, 64)).abs().amax(-1).repeat_interleave(64, 1)
    error = (back - rows[kept]).abs()
    # e4m3 keeps three bits: half of a sixteenth of the value, and half of 2^-9 of the scale near zero.
    assert (error <= rows[kept].abs() / 16 + largest / 448 / 256).all()
    assert (error[:, 448:] <= rows[kept][:, 448:].abs() / 256).all()
    assert not stored[2].eq(0).all() and stored[0, 3 * 576 : 4 * 576].eq(0).all()


def test_queries_are_normed_and_rotated_and_keys_stored() -> None:
    q, kv, positions = normal(5, 2, 512), normal(5, 512, seed=1), torch.tensor([3, 4, 5, 9, 10])
    stored = torch.zeros(BLOCKS, SIZE * 584, dtype=torch.uint8)
    slots = torch.tensor([3, 4, 5, -1, 6])
    out = kernels.fused_qnorm_rope_kv_insert_cpu(q, kv, positions, stored, slots, cos_sin(16), 4, 1e-6, SIZE)
    assert out.shape == (5, 4, 512) and not out[:, 2:].any()
    normed = q / q.square().mean(-1, keepdim=True).add(1e-6).sqrt()
    pairs = torch.view_as_complex(normed[..., 448:].unflatten(-1, (32, 2)).contiguous())
    turns = torch.polar(torch.ones(5, 32), torch.outer(positions.float(), 10_000 ** (-torch.arange(32) / 32)))
    turned = torch.view_as_real(pairs * turns[:, None]).flatten(-2)
    assert torch.allclose(out[:, :2, 448:], turned, atol=1e-5)
    assert torch.allclose(out[:, :2, :448], normed[..., :448], atol=1e-6)
    back = kernels.inverse_gptj_rope_o_proj_cpu(out[:, :2], positions, cos_sin(16), 64)
    assert torch.allclose(back, normed, atol=1e-5)
    keys = cache.read_rows(stored, slots[slots >= 0], SIZE)
    assert torch.allclose(keys[:, :448], kv[slots >= 0][:, :448], rtol=0.07, atol=0.01)


def test_attention_is_its_formula_and_reads_no_slot_of_minus_one() -> None:
    stored = torch.zeros(BLOCKS, SIZE * 584, dtype=torch.uint8)
    entries = torch.zeros(2, SIZE * 584, dtype=torch.uint8)
    cache.write_rows(stored, torch.arange(12), normal(12, 512), SIZE)
    cache.write_rows(entries, torch.arange(8), normal(8, 512, seed=1), SIZE)
    stored[:, 0] = 0x7F  # NaN in fp8, in the first row of each block
    window = torch.tensor([[1, 2, -1, -1], [2, 3, 5, -1], [-1, -1, -1, -1]])
    compressed = torch.tensor([[0, -1], [7, 3], [-1, -1]])
    q, sink = normal(3, 2, 512, seed=2), torch.tensor([0.3, -1.0])
    out = torch.full((3, 2, 512), 9.0)
    kernels.flash_mla_with_kvcache_cpu(out, q, stored, window, SIZE, entries, compressed, SIZE, sink, 0.05)
    for token in range(3):
        rows = torch.cat(
            [
                cache.read_rows(stored, window[token][window[token] >= 0], SIZE),
                cache.read_rows(entries, compressed[token][compressed[token] >= 0], SIZE),
            ]
        )
        odds = torch.cat([q[token] @ rows.T * 0.05, sink[:, None]], 1).softmax(-1)[:, :-1]
        assert torch.allclose(out[token], odds @ rows, atol=1e-5), token
    assert not out[2].any(), "a token that sees nothing gives everything to the sink"


def test_partial_states_are_kept_by_slot() -> None:
    states = torch.zeros(2, 4, 6)
    kv, score, bias = normal(3, 3), normal(3, 3, seed=1), normal(2, 3, seed=2)
    kernels.save_partial_states_cpu(
        kv, score, bias, torch.tensor([0, 1, 2]), states, torch.tensor([5, -1, 2])
    )
    assert torch.equal(states[1, 1], torch.cat([kv[0], score[0] + bias[0]]))
    assert torch.equal(states[0, 2], torch.cat([kv[2], score[2] + bias[0]]))
    assert int((states != 0).any(-1).sum()) == 2


def test_routing_chooses_by_biased_score_and_weighs_by_score() -> None:
    logits, bias = torch.tensor([[1.0, 0.9, -3.0]]), torch.tensor([-5.0, 0.0, 0.0])
    weights, chosen = biased_topk_cpu(logits, logits, bias, 2, True, "sqrtsoftplus", 0, 1.5, True)
    assert chosen.tolist() == [[1, 2]]
    scores = F.softplus(logits[0, 1:]).sqrt()
    assert torch.allclose(weights[0], 1.5 * scores / scores.sum())
    with pytest.raises(ValueError, match="not DeepSeek-V4's"):
        biased_topk_cpu(logits, logits, bias, 2, True, "softmax", 0, 1.5, True)


def test_products_are_by_group() -> None:
    out, left, right = torch.empty(2, 3, 4), normal(2, 3, 5), normal(2, 4, 5, seed=1)
    kernels.bmm_cpu(out, left, kernels.convert_weight_packed(right), True, None)
    assert torch.allclose(out, torch.einsum("gtk,gnk->gtn", left, right), atol=1e-6)


def test_limited_experts_are_their_formula() -> None:
    x, both, down = normal(5, 8), 4 * normal(3, 12, 8, seed=1), normal(3, 8, 6, seed=2)
    weights, chosen = normal(5, 2, seed=3).abs(), torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0]])
    found = limited_experts(x, both, down, weights, chosen, 3.0)
    for token in range(5):
        expected = torch.zeros(8)
        for weight, expert in zip(weights[token], chosen[token], strict=True):
            gate, up = (both[expert] @ x[token]).chunk(2)
            assert gate.max() > 3.0 or up.abs().max() > 3.0 or token > 0, "the limit is reached"
            expected += weight * (down[expert] @ (F.silu(gate.clamp(max=3.0)) * up.clamp(-3.0, 3.0)))
        assert torch.allclose(found[token], expected, atol=1e-4)
    assert not torch.allclose(found, limited_experts(x, both, down, weights, chosen, 1e9), atol=1e-2)
