"""Torch and NumPy versions of the Triton kernels that a step of vLLM's V2 runner spends its time in.

Triton's interpreter takes milliseconds a launch, a twin takes microseconds. Each twin is one patch: it is
installed where the kernel is at its place, with the parameters and the source that the twin was written
and tested against. Otherwise it is refused, and the interpreted kernel stays, which is slow and right.
"""

from __future__ import annotations

from dataclasses import dataclass

_GPU = "vllm.v1.worker.gpu"
_MLA = "vllm.v1.attention.backends.mla"
_REJECTION = f"{_GPU}.spec_decode.rejection_sampler_utils"


@dataclass(frozen=True, slots=True)
class Twin:
    """`kernel` is the qualified name of vLLM's kernel, `twin` names our function as `module:function`.

    A kernel is an attribute of its module, or of a class in it, whose instances launch it.
    """

    kernel: str
    twin: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Shortcut:
    """`function` is the qualified name of a function or method of vLLM's, `wrapper` wraps it with ours."""

    function: str
    wrapper: str
    fingerprint: str


SHORTCUTS: tuple[Shortcut, ...] = (
    Shortcut(f"{_REJECTION}.rejection_sample", "greedy:rejection_sample", "4e7a4cd83ebeb20b"),
    Shortcut(
        f"{_GPU}.spec_decode.dspark.speculator.DSparkSpeculator._sample_sequential",
        "greedy:sample_sequential",
        "e3219e9ed19161d6",
    ),
)

CATALOGUE: tuple[Twin, ...] = (
    Twin(f"{_GPU}.buffer_utils._apply_write_kernel", "tables:apply_write", "2adf220c0fec792d"),
    Twin(f"{_GPU}.block_table._gather_block_tables_kernel", "tables:gather_block_tables", "cf644021197aea1e"),
    Twin(
        f"{_GPU}.block_table._compute_slot_mappings_kernel",
        "tables:compute_slot_mappings",
        "512e5f9018662e6f",
    ),
    Twin("vllm.v1.worker.utils._zero_kv_blocks_kernel", "blocks:zero_kv_blocks", "1c25e37369b0a32d"),
    Twin(
        "vllm.v1.attention.ops.metadata._token_request_mapping_kernel",
        "blocks:token_request_mapping",
        "e8618c1a1a126715",
    ),
    Twin(
        f"{_GPU}.input_batch._prepare_prefill_inputs_kernel",
        "inputs:prepare_prefill_inputs",
        "db898570811b27cc",
    ),
    Twin(
        f"{_GPU}.input_batch._prepare_pos_seq_lens_kernel", "inputs:prepare_pos_seq_lens", "02855161fd7b084a"
    ),
    Twin(
        f"{_GPU}.input_batch._combine_sampled_and_draft_tokens_kernel",
        "inputs:combine_sampled_and_draft_tokens",
        "678d8f2da036f4fb",
    ),
    Twin(f"{_GPU}.input_batch._expand_idx_mapping_kernel", "inputs:expand_idx_mapping", "2da86ce9d9d7470b"),
    Twin(
        f"{_GPU}.input_batch._get_num_sampled_and_rejected_kernel",
        "outputs:get_num_sampled_and_rejected",
        "bacf9cc355577544",
    ),
    Twin(f"{_GPU}.input_batch._post_update_kernel", "outputs:post_update", "54fe372a2650c3d6"),
    Twin(
        f"{_GPU}.spec_decode.rejection_sampler._gather_draft_sampled_kernel",
        "outputs:gather_draft_sampled",
        "40aa56b5cac0bf75",
    ),
    Twin(
        f"{_GPU}.spec_decode.rejection_sampler._flatten_sampled_kernel",
        "outputs:flatten_sampled",
        "4e2ad1cd64c702c0",
    ),
    Twin(
        f"{_GPU}.spec_decode.dflash.speculator._prepare_dflash_inputs_kernel",
        "drafting:prepare_dflash_inputs",
        "97666c326dd9bf2b",
    ),
    Twin(f"{_GPU}.sample.gumbel._temperature_kernel", "sampling:temperature", "059b1c2e6b5b3349"),
    Twin(f"{_GPU}.sample.gumbel._gumbel_sample_kernel", "sampling:gumbel_sample", "699d4f3349fcc6ac"),
    Twin(f"{_GPU}.sample.min_p._min_p_kernel", "sampling:min_p", "d32f609d91428cb9"),
    Twin(
        f"{_REJECTION}._compute_local_logits_stats_kernel",
        "verification:local_logits_stats",
        "b51b0c4fe7f81baf",
    ),
    Twin(
        f"{_REJECTION}._compute_cumulative_log_p_kernel", "verification:cumulative_log_p", "25afbb03e10c47ff"
    ),
    Twin(
        f"{_REJECTION}._compute_local_residual_mass_kernel",
        "verification:local_residual_mass",
        "f2d3eeccce959988",
    ),
    Twin(f"{_REJECTION}._rejection_kernel", "rejection:rejection", "7cac4dfe33955a18"),
    Twin(f"{_REJECTION}._resample_kernel", "rejection:resample", "db51af24677324dd"),
    Twin(f"{_REJECTION}._insert_resampled_kernel", "rejection:insert_resampled", "31f957a1dd85acea"),
    Twin(
        f"{_MLA}.compressor_utils.CompressedSlotMappingKernel.kernel",
        "blocks:compressed_slot_mapping",
        "51b4eb7158162167",
    ),
    Twin(
        f"{_MLA}.indexer.PrepareUniformDecodeKernel.kernel",
        "blocks:prepare_uniform_decode",
        "44b63d3a8e34f43f",
    ),
)
