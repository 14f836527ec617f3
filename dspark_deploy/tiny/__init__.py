"""The built-in tiny checkpoint `tiny-qwen3`: a Qwen3 target and a DSpark draft, about 1 MB, trained here.

`language` and `checkpoint` need the standard library only; the rest is for training, and needs torch.
"""
