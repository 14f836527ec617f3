"""What runs inside vLLM's processes on AMD Instinct: the mHC patches, their warm-up and the capture guard.

Nothing is imported here. `modules.patches` says which module's loading brings which patch.
"""
