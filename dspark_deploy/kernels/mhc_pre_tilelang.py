"""TileLang kernels of mHC pre: `mix`, then `collapse`, as two launches. Imports TileLang.

Why two: upstream's single launch hands the mix to one part of a block and the collapse to another, so its
RMSNorm reduces over a thread group that need not start at a wave, and the two parts meet at a barrier that
not every lowering emits. Here each launch is one group that starts at thread 0, every barrier is reached by
the whole block, and no lane reads another lane's register: values cross lanes through shared memory only.
So nothing depends on how wide a wave is.

Each function returns a TIR `PrimFunc`, which `tilelang.compile` turns into a kernel. Every parameter is a
compile-time constant, except for the number of tokens. `dspark_deploy.kernels.mhc_pre` launches them, holds
their plain references, and chooses the block sizes.

Not covered: hc_mult other than 4, and hidden sizes that a block's vector accesses can't cover evenly.
"""

from typing import Any

import tilelang
import tilelang.language as T

# Upstream compiles its mHC kernels so; warp specialisation and TMA would bring their own barriers.
PASS_CONFIGS = {
    tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True,
    tilelang.PassConfigKey.TL_DISABLE_TMA_LOWER: True,
}

HC = 4
MIXES = HC * (HC + 2)
LANES = 32  # threads that belong to one token in `mix`: 24 coefficients, padded to a power of two


def mix(
    *,
    n_splits: int,
    rms_numel: int,
    rms_eps: float,
    pre_eps: float,
    sinkhorn_eps: float,
    post_mult: float,
    sinkhorn_repeat: int,
    threads: int = 64,
    pdl: bool = False,
) -> Any:
    """The coefficients of each token out of the projection: pre, post and comb (Sinkhorn).

    Tensors: gemm_mul [n_splits, tokens, 24] f32, gemm_sqrsum [n_splits, tokens] f32, scale [3] f32,
    base [24] f32 -> pre [tokens, 4] f32, post [tokens, 4] f32, comb [tokens, 16] f32, row-major 4 by 4.

    `rms_numel` is the number of elements behind gemm_sqrsum. A block of `threads` serves `threads // 32`
    tokens. `pdl` (CUDA only) lets the next launch start early. One thread does the Sinkhorn of a whole token:
    its sixteen values stay in registers, and four reciprocals take the place of sixteen divisions.
    """
    assert threads % LANES == 0, f"threads={threads} is no multiple of {LANES}"
    tokens_per_block = threads // LANES
    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def mhc_mix(
        gemm_mul: T.Tensor((n_splits, num_tokens, MIXES), "float32"),
        gemm_sqrsum: T.Tensor((n_splits, num_tokens), "float32"),
        scale: T.Tensor((3,), "float32"),
        base: T.Tensor((MIXES,), "float32"),
        pre: T.Tensor((num_tokens, HC), "float32"),
        post: T.Tensor((num_tokens, HC), "float32"),
        comb: T.Tensor((num_tokens, HC * HC), "float32"),
    ):
        with T.Kernel(T.ceildiv(num_tokens, tokens_per_block), threads=threads) as block:
            thread = T.get_thread_binding()
            logits = T.alloc_shared((tokens_per_block, LANES), "float32")
            sums = T.alloc_local((2,), "float32")
            gate = T.alloc_local((2,), "float32")
            slot = thread // LANES
            lane = thread % LANES
            token = block * tokens_per_block + slot

            # The model's own constants, ahead of the wait for the projection.
            if lane < MIXES:
                gate[0] = scale[T.min(lane // HC, 2)]
                gate[1] = base[lane]
            if pdl:
                T.pdl_sync()
                T.pdl_trigger()
            if token < num_tokens and lane < MIXES:
                sums[0] = 0.0
                sums[1] = 0.0
                for s in T.unroll(n_splits):
                    sums[0] += gemm_mul[s, token, lane]
                    sums[1] += gemm_sqrsum[s, token]
                sums[0] = sums[0] * T.rsqrt(sums[1] / rms_numel + rms_eps) * gate[0] + gate[1]
                if lane >= 2 * HC:
                    logits[slot, lane - 2 * HC] = sums[0]
                else:
                    sums[0] = 1.0 / (1.0 + T.exp(-sums[0]))
                    if lane < HC:
                        pre[token, lane] = sums[0] + pre_eps
                    else:
                        post[token, lane - HC] = sums[0] * post_mult
            T.sync_threads()

            mine = block * tokens_per_block + thread
            if thread < tokens_per_block and mine < num_tokens:
                cm = T.alloc_local((HC * HC,), "float32")
                top = T.alloc_local((1,), "float32")
                rowsum = T.alloc_local((HC,), "float32")
                for k in T.unroll(HC * HC):
                    cm[k] = logits[thread, k]
                for j in T.unroll(HC):
                    top[0] = T.max(T.max(cm[j * HC], cm[j * HC + 1]), T.max(cm[j * HC + 2], cm[j * HC + 3]))
                    for k in T.unroll(HC):
                        cm[j * HC + k] = T.exp(cm[j * HC + k] - top[0])
                    rowsum[j] = 1.0 / ((cm[j * HC] + cm[j * HC + 1]) + (cm[j * HC + 2] + cm[j * HC + 3]))
                    for k in T.unroll(HC):
                        cm[j * HC + k] = cm[j * HC + k] * rowsum[j] + sinkhorn_eps
                for k in T.unroll(HC):
                    rowsum[k] = 1.0 / (
                        (cm[k] + cm[HC + k]) + (cm[2 * HC + k] + cm[3 * HC + k]) + sinkhorn_eps
                    )
                for k in T.unroll(HC * HC):
                    cm[k] = cm[k] * rowsum[k % HC]
                # A NaN row (padding of a captured graph) stays NaN: its iterations change nothing, and
                # division is slow on NaN.
                if cm[0] >= 0.0:
                    for _ in T.serial(sinkhorn_repeat - 1):
                        for j in T.unroll(HC):
                            rowsum[j] = 1.0 / (
                                (cm[j * HC] + cm[j * HC + 1])
                                + (cm[j * HC + 2] + cm[j * HC + 3])
                                + sinkhorn_eps
                            )
                        for k in T.unroll(HC * HC):
                            cm[k] = cm[k] * rowsum[k // HC]
                        for k in T.unroll(HC):
                            rowsum[k] = 1.0 / (
                                (cm[k] + cm[HC + k]) + (cm[2 * HC + k] + cm[3 * HC + k]) + sinkhorn_eps
                            )
                        for k in T.unroll(HC * HC):
                            cm[k] = cm[k] * rowsum[k % HC]
                for k in T.vectorized(HC * HC):
                    comb[mine, k] = cm[k]

    return mhc_mix


def collapse(
    *,
    hidden_size: int,
    with_norm: bool,
    norm_eps: float = 0.0,
    split: int = 1,
    threads: int = 256,
    vector: int = 4,
    stream_zero: bool = False,
    write_aux: bool = False,
    pdl: bool = False,
) -> Any:
    """The layer's input: the streams of each token weighted by `pre`, with or without RMSNorm.

    Tensors: pre [tokens, 4] f32, residual [tokens, 4, hidden] bf16, norm_weight [hidden] bf16 -> layer_input
    [tokens, hidden] bf16, aux [tokens, hidden] bf16. `norm_weight` is read only `with_norm`, `aux` (the mean
    over the streams, for a draft model) is written only with `write_aux`, `pre` isn't read with `stream_zero`
    (a model's entry, where the input is stream zero); pass any tensor of that shape then.

    A token is shared by `split` blocks, which needs `with_norm` off, since a norm sums over the whole row.
    Each thread moves `vector` elements at a time. The collapsed value is rounded to bf16 before the norm, as
    it is where norm and collapse are separate operations. `pdl` (CUDA only) lets this launch read the
    residual while the launch before is still running.
    """
    chunk = threads * vector
    assert hidden_size % (split * chunk) == 0, f"hidden {hidden_size} over {split} blocks of {chunk}"
    assert split == 1 or not with_norm, f"split={split} with a norm"
    assert threads % LANES == 0, f"threads={threads} is no multiple of {LANES}"
    chunks = hidden_size // (split * chunk)
    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def mhc_collapse(
        pre: T.Tensor((num_tokens, HC), "float32"),
        residual: T.Tensor((num_tokens, HC, hidden_size), "bfloat16"),
        norm_weight: T.Tensor((hidden_size,), "bfloat16"),
        layer_input: T.Tensor((num_tokens, hidden_size), "bfloat16"),
        aux: T.Tensor((num_tokens, hidden_size), "bfloat16"),
    ):
        with T.Kernel(num_tokens, split, threads=threads) as (token, part):
            thread = T.get_thread_binding()
            streams = T.alloc_local((chunks, HC, vector), "bfloat16")
            weight = T.alloc_local((chunks, vector), "bfloat16")
            out = T.alloc_local((chunks, vector), "bfloat16")
            mean = T.alloc_local((vector,), "bfloat16")
            coefficient = T.alloc_local((HC,), "float32")
            total = T.alloc_local((1,), "float32")
            value = T.alloc_local((1,), "float32")

            # Every load of the row is in flight before the first one is used.
            for c in T.unroll(chunks):
                for m in T.unroll(HC):
                    for v in T.vectorized(vector):
                        streams[c, m, v] = residual[
                            token, m, (part * chunks + c) * chunk + thread * vector + v
                        ]
            if with_norm:
                for c in T.unroll(chunks):
                    for v in T.vectorized(vector):
                        weight[c, v] = norm_weight[c * chunk + thread * vector + v]
            if pdl:
                T.pdl_sync()
            if not stream_zero:
                for m in T.unroll(HC):
                    coefficient[m] = pre[token, m]

            total[0] = 0.0
            for c in T.unroll(chunks):
                for v in T.unroll(vector):
                    if stream_zero:
                        out[c, v] = streams[c, 0, v]
                    else:
                        value[0] = 0.0
                        for m in T.unroll(HC):
                            value[0] += coefficient[m] * T.cast(streams[c, m, v], "float32")
                        out[c, v] = T.cast(value[0], "bfloat16")
                    if with_norm:
                        value[0] = T.cast(out[c, v], "float32")
                        total[0] += value[0] * value[0]
                if write_aux:
                    for v in T.unroll(vector):
                        value[0] = 0.0
                        for m in T.unroll(HC):
                            value[0] += T.cast(streams[c, m, v], "float32")
                        mean[v] = T.cast(value[0] / HC, "bfloat16")
                    for v in T.vectorized(vector):
                        aux[token, (part * chunks + c) * chunk + thread * vector + v] = mean[v]

            if with_norm:
                # The first LANES threads each fold one column of partial sums into its own head, which no
                # other thread reads before the second barrier.
                partial = T.alloc_shared((threads,), "float32")
                partial[thread] = total[0]
                T.sync_threads()
                if thread < LANES:
                    for k in T.unroll(1, threads // LANES):
                        total[0] += partial[k * LANES + thread]
                    partial[thread] = total[0]
                T.sync_threads()
                total[0] = 0.0
                for k in T.unroll(LANES):
                    total[0] += partial[k]
                total[0] = T.rsqrt(total[0] / hidden_size + norm_eps)
                for c in T.unroll(chunks):
                    for v in T.unroll(vector):
                        out[c, v] = T.cast(
                            T.cast(out[c, v], "float32") * total[0] * T.cast(weight[c, v], "float32"),
                            "bfloat16",
                        )
            for c in T.unroll(chunks):
                for v in T.vectorized(vector):
                    layer_input[token, (part * chunks + c) * chunk + thread * vector + v] = out[c, v]

    return mhc_collapse
