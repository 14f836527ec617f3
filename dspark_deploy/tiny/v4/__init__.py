"""The training twin of a tiny DeepSeek-V4 with its DSpark stages: mHC, sliding and compressed attention, MoE.

Parameters are named as in transformers' DeepseekV4ForCausalLM. Nothing is imported here; all but `shape`
needs torch.
"""
