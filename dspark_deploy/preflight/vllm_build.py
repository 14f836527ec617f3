"""What the installed vLLM can do, read from its sources without importing it.

Releases, nightlies and patched images differ in ways that a version number does not tell, so each feature is
looked for in the text of the module that would have it. An empty answer means that the sources are not here
(`--facts` from elsewhere, or no vLLM), never that the feature is absent.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

# feature -> (file below vllm/, pattern that is there exactly where the feature is)
PROBES: dict[str, tuple[str, str]] = {
    # `enable_adaptive_verification` is an unknown field elsewhere, and an unknown field stops the engine.
    "adaptive_verification": ("config/speculative.py", r"^\s+enable_adaptive_verification\s*:"),
    # Refuses k below the trained block at start.
    "block_guard": ("config/speculative.py", r"num_speculative_tokens\s*<\s*dspark_block_size"),
    # Takes DSpark's width from the block; others read the number of draft stages as the width.
    "block_is_width": ("config/speculative.py", r"use_dspark\(\):\s+if self\.num_speculative_tokens is None"),
    # V4.1's indexer on ROCm can run the uneven batches of adaptive verification.
    "adaptive_v41_rocm": ("models/deepseek_v41/amd/rocm.py", r"enable_adaptive_verification"),
    "breakable_cudagraph": ("envs.py", r"VLLM_USE_BREAKABLE_CUDAGRAPH"),
    # The draft's Markov projection for its best candidates only; an unknown field stops the engine.
    "draft_topk": ("config/speculative.py", r"^\s+dspark_draft_topk\s*:"),
    # Acceptance of each request in its own answer (vllm#48915).
    "per_request_acceptance": ("engine/arg_utils.py", r"--per-request-spec-decode-metrics"),
}

# Where flags of `vllm serve` are declared: as text, and as fields of the classes that hold arguments.
FLAG_FILES = ("engine/arg_utils.py", "entrypoints/cli/serve.py", "utils/argparse_utils.py")
FLAG = re.compile(r"""["']--([a-z][a-z0-9-]+)["']""")
FIELD = re.compile(r"^    ([a-z][a-z0-9_]+): ", re.MULTILINE)
# A field that may be true or false becomes --name and --no-name; what only turns on is declared as text.
SWITCH = re.compile(r"^    ([a-z][a-z0-9_]+): [^=\n]*\bbool\b", re.MULTILINE)
ONE_WAY = re.compile(r"""["']--([a-z][a-z0-9-]+)["'],[^()]*?action=["']store_true["']""")
# Flags whose values vLLM lists: flag -> (file, name of the list). None that a plugin may add to.
CHOICES = {
    "kv-cache-dtype": ("config/cache.py", "CacheDType"),
    "moe-backend": ("config/kernel.py", "MoEBackend"),
    "all2all-backend": ("config/parallel.py", "All2AllBackend"),
    "dtype": ("config/model.py", "ModelDType"),
}
# The keys of one JSON flag.
KEYS = {"compilation-config": ("config/compilation.py", "CompilationConfig")}
VARIABLE = re.compile(r"""["'](VLLM_[A-Z0-9_]+)["']""")


def vllm_folder() -> Path | None:
    """The installed `vllm/`, found without importing it."""
    spec = importlib.util.find_spec("vllm")
    places = list(spec.submodule_search_locations or []) if spec else []
    return Path(places[0]) if places else None


def features(folder: Path | None) -> dict[str, bool]:
    """Feature by feature, whether the vLLM in `folder` has it; empty where there is no vLLM to read."""
    if folder is None:
        return {}
    found = {}
    for name, (file, pattern) in PROBES.items():
        found[name] = re.search(pattern, _text(folder, file), re.MULTILINE) is not None
    return found


def flags(folder: Path | None) -> list[str]:
    """Names that `vllm serve` takes as flags, without dashes; empty where there are no sources to read.

    A name too many does no harm. The file of the server's own flags has moved between releases.
    """
    texts = _flag_texts(folder)
    found = {name for text in texts for name in FLAG.findall(text)}
    fields = {name.replace("_", "-") for text in texts for name in FIELD.findall(text)}
    return sorted(found | fields) if found else []


def switches(folder: Path | None) -> list[str]:
    """Those of `flags` that have a --no-name beside them; empty where there are no sources to read."""
    texts = _flag_texts(folder)
    fields = {name.replace("_", "-") for text in texts for name in SWITCH.findall(text)}
    return sorted(fields - {name for text in texts for name in ONE_WAY.findall(text)})


def _flag_texts(folder: Path | None) -> list[str]:
    if folder is None:
        return []
    paths = [folder / file for file in FLAG_FILES] + sorted((folder / "entrypoints").glob("**/cli_args.py"))
    return [path.read_text(errors="replace") for path in paths if path.is_file()]


def choices(folder: Path | None) -> dict[str, list[str]]:
    """What the flags of `CHOICES` take, and the keys of those of `KEYS`. Only plain lists are read."""
    found: dict[str, list[str]] = {}
    for flag, (file, name) in CHOICES.items():
        listed = re.search(rf"^{name} *= *Literal\[([^\]]*)\]", _text(folder, file), re.MULTILINE)
        # Names without quotes would be lists of their own.
        if listed and re.fullmatch(r"(\s|,|#.*|\"[^\"]+\")*", listed[1]):
            found[flag] = re.findall(r"\"([^\"]+)\"", re.sub(r"#.*", "", listed[1]))
    for flag, (file, name) in KEYS.items():
        body = re.search(
            rf"^class {name}\b.*?(?=^\S)", _text(folder, file) + "\nend", re.MULTILINE | re.DOTALL
        )
        if body and (keys := FIELD.findall(body[0])):
            found[flag] = keys
    return found


def _text(folder: Path | None, file: str) -> str:
    path = folder / file if folder is not None else None
    return path.read_text(errors="replace") if path is not None and path.is_file() else ""


def variables(folder: Path | None) -> list[str]:
    """Names of VLLM_* variables that vLLM knows; empty where there are no sources to read."""
    return sorted(set(VARIABLE.findall(_text(folder, "envs.py"))))
