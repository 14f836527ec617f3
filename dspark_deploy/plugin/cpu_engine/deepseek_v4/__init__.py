"""What vLLM's CPU build lacks to serve DeepSeek-V4 with DSpark: kernels, routing, metadata keys, the draft.

vLLM has DeepSeek-V4 for CPUs with AVX-512, without a draft. Here are torch versions of its kernels for other
CPUs, in the same cache layout, and a draft composed of vLLM's own classes.
"""
