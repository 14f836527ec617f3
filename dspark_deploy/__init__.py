"""Takes DeepSeek-V4 with DSpark speculative decoding into production on top of an unmodified vLLM.

Nothing is imported here on purpose: every vLLM process imports this package to reach
`dspark_deploy.plugin`, and must not pay for the commands' dependencies.
"""

__version__ = "0.1.0"
