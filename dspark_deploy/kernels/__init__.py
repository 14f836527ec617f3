"""Our kernels for mHC, each with a plain torch twin, and the check of every mHC op against fp64.

    mhc_pre.py            launches of mHC pre, their `_ref` twins, block sizes
    mhc_pre_tilelang.py   the kernels themselves; imports TileLang, so it is imported at first use

Nothing here imports vLLM, or looks at the platform, at import.
"""
