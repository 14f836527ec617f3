"""What vLLM lacks to run its V2 model runner, and so DSpark, on a CPU.

vLLM's CPU build ships the V2 runner, the DSpark speculator and the rejection sampler, whose Triton kernels
have no CPU backend in the Triton wheel. They are run by Triton's own interpreter, which is exact and slow;
`twins` holds torch versions of the kernels that a step spends its time in.
"""
