"""The tolerance rule for gradients of weights that are sums over few rows: unlucky tiles pass, and no fault does."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fusedlayers.closeness import Closeness, compare


class Experts:
    """The gradients of some experts' weights in bfloat16, each over its own rows: ours, torch's and in float64."""

    ROWS = (1, 2, 3, 40)
    WIDTH = 192

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).bfloat16().float()

        self.operands = [
            (drawn(rows, self.WIDTH), drawn(rows, self.WIDTH), *(drawn(3, self.WIDTH, self.WIDTH) / self.WIDTH**0.5))
            for rows in self.ROWS
        ]
        self.torch_result = self.stacked(self.rounded, self.rounded)
        self.truth = self.stacked(Tensor.double, Tensor.double).double()

    def ours(self, *without: tuple[int, int]) -> Tensor:
        """Rounds what is stored and nothing else; rows of experts may be missing."""
        return self.stacked(lambda inner: inner, self.rounded, without)

    @staticmethod
    def rounded(value: Tensor) -> Tensor:
        return value.bfloat16().float()

    def stacked(
        self, inner: Callable[[Tensor], Tensor], stored: Callable[[Tensor], Tensor],
        without: tuple[tuple[int, int], ...] = (),
    ) -> Tensor:  # fmt: skip
        found = []
        for expert, operands in enumerate(self.operands):
            x, dy, w_gate, w_up, w_down = (stored(each) for each in operands)
            z, up, dh = stored(x @ w_gate.T), stored(x @ w_up.T), inner(dy @ w_down)
            sigmoid = z.sigmoid()
            dz = stored(inner(dh * up) * (sigmoid * (1 + z * (1 - sigmoid))))
            for _, row in (each for each in without if each[0] == expert):
                dz[row] = 0
            found.append(dz.T @ x)
        stack = torch.stack(found)
        return stack if stack.dtype == torch.float64 else stack.bfloat16()

    def verdict(self, ours: Tensor, over_rows: bool = True) -> Closeness:
        return compare(ours, self.torch_result, self.truth, over_rows=over_rows)


def test_gradients_over_few_rows_are_right_although_tiles_are_unlucky() -> None:
    unlucky = 0
    for seed in range(12):
        experts = Experts(seed)
        verdict = experts.verdict(experts.ours())
        assert verdict.ok, verdict.message
        unlucky += not experts.verdict(experts.ours(), over_rows=False).ok
    assert unlucky, "these experts prove nothing"


def test_a_fault_at_the_expert_with_a_single_row_fails() -> None:
    for seed in range(4):
        experts = Experts(seed)
        right = experts.ours()
        larger, swapped, another = right.clone(), right[[1, 0, 2, 3]], right.clone()
        larger[0] *= 1.01
        another[0] = right[0].roll(1, 0)
        faults = {
            "one percent more": larger,
            "swapped with another expert": swapped,
            "another row": another,
            "no row": experts.ours((0, 0)),
            "a row of three missing": experts.ours((2, 1)),
            "a row of forty missing": experts.ours((3, 17)),
        }
        for name, wrong in faults.items():
            assert not experts.verdict(wrong).ok, f"{name}, seed {seed}"


def test_no_error_of_ours_loosens_the_rule_over_rows() -> None:
    """One tile may be wrong by any amount: the limits of the others follow from torch and the reference alone."""
    experts = Experts(0)
    ours = experts.ours()
    ours[3, 64:128, 64:128] = 0
    verdict = experts.verdict(ours)
    assert not verdict.ok
    assert verdict.worst_tile == (3, 1, 1)
    assert "1 of 36 tiles over" in verdict.message
