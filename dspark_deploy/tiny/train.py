"""Train a tiny checkpoint from nothing: first the target, then its DSpark draft. Minutes on one core.

    python -m dspark_deploy.tiny.train --out DIR                                            tiny-qwen3
    python -m dspark_deploy.tiny.train --checkpoint tiny-v4 --out DIR [--device cuda]       tiny-v4

writes what vLLM loads (DIR/target and DIR/draft; of the V4, whose draft is part of the checkpoint, DIR),
DIR/losses.json, and DIR/MANIFEST.json with the recipe, what the pair is worth on held-out problems, and the
hash of every file. DIR appears when all of it is there, or not at all. On two cores the V4 takes an hour.

The same recipe on the same machine and versions gives the same weights; elsewhere, rounding makes others.
The weights that the package ships are what this command made. Needs torch, tokenizers and safetensors. What
the pair does in vLLM is not its business.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dspark_deploy.errors import DSparkError, InputError, Interrupted

DEFAULT = "tiny-qwen3"
NEEDED = ("torch", "tokenizers", "safetensors")


class Clock:
    """Prints the steps taken and the time left. Steps of target and draft take about the same time."""

    def __init__(self, target: int, draft: int, interval: int = 25) -> None:
        self.steps = {"target": target, "draft": draft}
        self.interval = interval
        self.taken = 0
        self.started = time.monotonic()

    def part(self, name: str) -> Callable[[float], None]:
        """Begin `name`; the result is to be called after each of its steps."""
        step, steps = 0, self.steps.pop(name)

        def after_step(loss: float) -> None:
            nonlocal step
            step, self.taken = step + 1, self.taken + 1
            if step % self.interval == 0 or step == steps:
                gone = time.monotonic() - self.started
                left = gone / self.taken * (steps - step + sum(self.steps.values()))
                times = f"{gone:.0f} s gone, at most about {left:.0f} s left"
                print(
                    f"{name:6}  step {step:4}/{steps}  loss {loss:.4f}  {times}", file=sys.stderr, flush=True
                )

        return after_step


class Stopwatch:
    """Wall-clock and CPU seconds of each part of a run."""

    def __init__(self) -> None:
        self.parts: dict[str, dict[str, float]] = {}
        self._last = (time.monotonic(), time.process_time())

    def lap(self, part: str) -> None:
        """Everything since the last lap was `part`."""
        now = (time.monotonic(), time.process_time())
        wall, cpu = (round(after - before, 1) for after, before in zip(now, self._last, strict=True))
        self.parts[part] = {"wall": wall, "cpu": cpu}
        self._last = now


def train(
    out: Path, recipe_changes: dict[str, Any], name: str = DEFAULT, device: str = "cpu"
) -> dict[str, Any]:
    """Train a pair into `out`, which must be new or empty, and return what its manifest says about it."""
    _check(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as unfinished:
        folder = Path(unfinished) / out.name
        folder.mkdir()
        facts = _train_into(folder, name, recipe_changes, device)
        folder.replace(out)
    return facts


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m dspark_deploy.tiny.train", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="new or empty folder to write to"
    )
    parser.add_argument("--checkpoint", default=DEFAULT, metavar="NAME", help="tiny-qwen3 or tiny-v4")
    parser.add_argument("--device", default="cpu", metavar="DEVICE", help="where torch computes [cpu]")
    for option, kind, text in (
        ("target-steps", int, "training steps of the target, at most"),
        ("exactness", float, "share of problems that the target must have exact for its training to end"),
        ("draft-steps", int, "training steps of the draft"),
        ("seed", int, "seed of the initial weights and of the anchors"),
        ("batch", int, "problems a step"),
        ("full-rate", float, "share of the steps taken at the full learning rate"),
        ("threads", int, "threads that torch may use"),
    ):
        parser.add_argument(f"--{option}", type=kind, metavar="N", help=text)
    given = vars(parser.parse_args(arguments))
    out, checkpoint, device = (given.pop(name) for name in ("out", "checkpoint", "device"))
    try:
        changes = {name: value for name, value in given.items() if value is not None}
        facts = train(out, changes, checkpoint, device)
    except DSparkError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped; nothing was written", file=sys.stderr)
        return Interrupted.exit_code
    print(json.dumps({"out": str(out), "held_out": facts["held_out"], "seconds": facts["seconds"]}))
    return 0


def _check(out: Path) -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    faults = [f"training needs {name}: pip install 'dspark-deploy[cpu]'" for name in missing]
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        faults.append(f"{out}: exists, and is not an empty folder")
    if faults:
        raise InputError(faults)


def _train_into(folder: Path, name: str, recipe_changes: dict[str, Any], device: str) -> dict[str, Any]:
    # Imported only now, so that _check is what reports a missing torch.
    import torch

    from dspark_deploy.tiny import evaluate, train_draft, train_target
    from dspark_deploy.tiny.architectures import ARCHITECTURES
    from dspark_deploy.tiny.checkpoint import write_manifest
    from dspark_deploy.tiny.tokenizer import TRAINING_SEED, build_tokenizer

    if name not in ARCHITECTURES:
        raise InputError(f"--checkpoint {name!r}: known are {', '.join(ARCHITECTURES)}")
    architecture = ARCHITECTURES[name]
    recipe = replace(architecture.recipe, **recipe_changes)
    torch.set_num_threads(recipe.threads)
    tokenizer = build_tokenizer(TRAINING_SEED)
    clock, watch = Clock(recipe.target_steps, recipe.draft_steps), Stopwatch()
    # Weights are drawn on the CPU, whatever the device, so that a seed means the same everywhere.
    target = architecture.make_target(torch.Generator().manual_seed(recipe.seed)).to(device)
    generator = torch.Generator().manual_seed(recipe.seed)
    draft = architecture.make_draft(target, generator).to(device)
    with torch.device(device):
        target_losses = train_target.train_target(target, recipe, tokenizer, clock.part("target"))
        architecture.as_served(target)
        watch.lap("target")
        progress = clock.part("draft")
        draft_losses = train_draft.train_draft(draft, target, recipe, tokenizer, generator, progress)
        architecture.as_served(draft)
        watch.lap("draft")
        held_out = evaluate.report(target, draft, tokenizer)
        watch.lap("evaluation")

    architecture.write(folder, target.cpu(), draft.cpu(), tokenizer)
    losses = {"target": target_losses, "draft": draft_losses}
    rows = {part: [asdict(loss) for loss in recorded] for part, recorded in losses.items()}
    (folder / "losses.json").write_text(json.dumps(rows) + "\n")
    facts = {
        "name": name,
        "recipe": asdict(recipe),
        "seeds": {
            "weights_and_anchors": recipe.seed,
            "target_problems": train_target.DATA_SEED,
            "validation_problems": train_target.VALIDATION_SEED,
            "draft_problems": train_draft.DATA_SEED,
            "tokenizer_problems": TRAINING_SEED,
            "held_out_problems": evaluate.SEED,
        },
        "shapes": architecture.shapes(),
        "device": device if device == "cpu" else torch.cuda.get_device_name(device),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in NEEDED},
        },
        "seconds": watch.parts,
        "held_out": held_out,
    }
    write_manifest(folder, facts)
    return facts


if __name__ == "__main__":
    sys.exit(main())
