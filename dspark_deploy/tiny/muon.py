"""The Muon optimiser in float32: momentum, each matrix's update made near-orthogonal before it is applied.

torch.optim.Muon does the same in bfloat16, which on a CPU without bfloat16 instructions takes twice as long
as all the rest of a training step. Matrices of one shape are updated together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5


class Muon(torch.optim.Optimizer):
    """For 2-D parameters only, every one of which must have a gradient."""

    def __init__(
        self, matrices: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.01
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        assert closure is None
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for matrix in group["params"]:
                by_shape[matrix.shape].append(matrix)
            for shape, matrices in by_shape.items():
                updates = [self._momentum(matrix, group["momentum"]) for matrix in matrices]
                rate = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for matrix, update in zip(matrices, orthogonalise(torch.stack(updates)), strict=True):
                    matrix.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=rate)

    def _momentum(self, matrix: nn.Parameter, momentum: float) -> Tensor:
        """Nesterov's update."""
        state = self.state[matrix]
        if not state:
            state["mean"] = torch.zeros_like(matrix)
        state["mean"].lerp_(matrix.grad, 1 - momentum)
        return matrix.grad.lerp(state["mean"], momentum)


def orthogonalise(matrices: Tensor) -> Tensor:
    """[N, R, C]: the matrices with their singular values brought to about 1."""
    if matrices.shape[1] > matrices.shape[2]:
        return orthogonalise(matrices.mT).mT
    first, third, fifth = NEWTON_SCHULZ
    matrices = matrices / matrices.flatten(1).norm(dim=1).clamp(min=1e-7)[:, None, None]
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = matrices @ matrices.mT
        matrices = first * matrices + (third * square + fifth * square @ square) @ matrices
    return matrices
