"""From a checked profile to a running engine.

Nothing is imported here: vLLM's own process passes through this package (`launch.vllm_command`).
"""
