"""Which sampler proposes the next configuration, and why.

A space of up to `MOST_IN_GRID` points is measured whole: no sampler is better than all of them. Beyond, TPE,
which holds to conditions (nothing is drawn for drafts without speculation) and, beside other workers, keeps
away from what they run. GP and NSGA-II on request; both see every setting, whether it has a meaning or not.
Random is what the others have to beat.
"""

from __future__ import annotations

import importlib.util
import warnings

import optuna
from optuna.samplers import BaseSampler

from dspark_deploy.errors import InputError

AUTO, GRID, TPE, GP, NSGA2, RANDOM = "auto", "grid", "tpe", "gp", "nsga2", "random"
MOST_IN_GRID = 64
SAMPLED_TRIALS = 64  # where nobody says how many
STARTUP = 10
POPULATION = 16
# They model a fixed set of settings, so a setting without a meaning gets a value all the same.
SETTLED = (GP, NSGA2)


def choose(asked: str, points: int) -> tuple[str, str]:
    """The sampler, and why it is that one."""
    if asked != AUTO:
        return asked, "as asked"
    if points <= MOST_IN_GRID:
        return GRID, f"{points} points are no more than {MOST_IN_GRID}, so all of them are measured"
    return TPE, f"{points} points are more than {MOST_IN_GRID}"


def make_sampler(name: str, seed: int | None = None) -> BaseSampler:
    """Optuna's sampler. Without a seed each worker draws its own. Raises InputError for GP without torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        if name == TPE:
            return optuna.samplers.TPESampler(
                n_startup_trials=STARTUP, multivariate=True, group=True, constant_liar=True, seed=seed
            )
        if name == GP:
            if importlib.util.find_spec("torch") is None:
                raise InputError("--sampler gp needs torch, which comes with vLLM")
            return optuna.samplers.GPSampler(n_startup_trials=STARTUP, seed=seed)
        if name == NSGA2:
            return optuna.samplers.NSGAIISampler(population_size=POPULATION, seed=seed)
    # In a grid every configuration is enqueued, so nothing is left to choose.
    return optuna.samplers.RandomSampler(seed=seed)
