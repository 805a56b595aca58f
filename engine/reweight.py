"""Where Reweight keeps gradients whose advantage is unknown: per sample, as running sums, or as sharded sums."""

from collections.abc import Sequence

import torch
from torch import Tensor

from leangrpo.engine.advantages import AdvantageRule, GroupStatistics
from leangrpo.engine.distributed import all_gather
from leangrpo.engine.replay import Objective
from leangrpo.engine.schedules import Group, Native, Retain, Reweight, Schedule
from leangrpo.engine.sharding.base import ShardedSums
from leangrpo.engine.types import Trajectory
from leangrpo.kernels.rescale_accumulate import rescale_accumulate_
from leangrpo.planners.types import Candidate


class ReweightPerSample(Reweight):
    """One buffer per sample of the group: any advantage, memory grows with the group.

    A rank's only sample needs no second buffer: weighted in place, its own becomes the total if there is none yet.
    """

    def __init__(
        self, objective: Objective, rule: AdvantageRule, generations: tuple[int, ...], samples_per_forward: int
    ):
        super().__init__(objective, rule, generations, samples_per_forward)
        self.pending: Tensor | None = None

    def _rows(self, generations: tuple[int, ...]) -> Tensor:
        if self.pending is None:
            self.pending = self.objective.gradients.new_buffer(len(self.generations))
        first = self.generations.index(generations[0])
        return self.pending[first : first + len(generations)]

    def group_known(self, group: Group) -> None:
        if self.rule.global_std:
            for term, numerators_G in enumerate(group.statistics.numerators_GK.unbind(dim=1)):
                rescale_accumulate_(
                    self.objective.gradients.get_numerator(term), self._known(), self._weights(numerators_G)
                )
            self._known().zero_()

    def advantages_known(self, groups: Sequence[Group]) -> None:
        gradients = self.objective.gradients
        if self.rule.global_std:
            divisors_K = groups[0].divisors_K
            gradients.divide_numerators(self.rule.weights_K / divisors_K)
            self._add_differences(groups, [self.rule.affine(group.statistics, divisors_K) for group in groups])
            return
        for group in groups:
            pending, weights = self._known(), self._weights(group.advantages_G)
            if gradients.total is None and len(weights) == 1:
                gradients.total, self.pending = _weighted_(pending[0], weights[0]), None
            else:
                rescale_accumulate_(gradients.get_total(), pending, weights)
                pending.zero_()
            gradients.group_done()

    def _known(self) -> Tensor:
        assert self.pending is not None, "a group has been rolled out"
        return self.pending

    def _weights(self, factors_G: Tensor) -> list[float]:
        """Of this rank's samples in the total."""
        weights: list[float] = (-factors_G[list(self.generations)] / self.objective.normaliser).tolist()
        return weights


def _weighted_(row: Tensor, weight: float) -> Tensor:
    """In place; a dropped sample's row may hold NaN."""
    return row.mul_(weight) if weight != 0.0 else row.zero_()


class ReweightStreaming(Reweight):
    """Running sums instead of one buffer per sample: memory does not depend on the size of the group.

    With r_q known when sample q is done and c the group's first finite reward, S0 = sum G_q and S1 = sum (r_q - c) G_q
    give sum (r_q - mean) G_q = S1 - (mean - c) S0. Centring at c keeps float32 as exact as one buffer per sample.
    """

    def __init__(
        self, objective: Objective, rule: AdvantageRule, generations: tuple[int, ...], samples_per_forward: int
    ):
        super().__init__(objective, rule, generations, samples_per_forward)
        gradients, terms = objective.gradients, len(rule.weights_K)
        self.pending = gradients.new_buffer(samples_per_forward)
        self.sum_0 = gradients.new_buffer()
        self.sum_1 = gradients.new_buffer(terms)
        self.centre_K: Tensor | None = None

    def _rows(self, generations: tuple[int, ...]) -> Tensor:
        return self.pending[: len(generations)]

    def rewards_known(self, trajectory: Trajectory) -> None:
        finite_B = trajectory.terms_BK.isfinite().all(dim=1)
        for index in finite_B.nonzero().flatten().tolist():
            terms_K, row = trajectory.terms_BK[index], self.pending[index : index + 1]
            if self.centre_K is None:
                self.centre_K = terms_K
            rescale_accumulate_(self.sum_0, row, [1.0])
            for sum_1, weight in zip(self.sum_1, (terms_K - self.centre_K).tolist(), strict=True):
                rescale_accumulate_(sum_1, row, [weight])
        self.pending.zero_()

    def group_known(self, group: Group) -> None:
        if self.rule.global_std:
            for term in range(len(self.rule.weights_K)):
                self._fold(self.objective.gradients.get_numerator(term), group.statistics, term, 1.0)
            self._clear()

    def advantages_known(self, groups: Sequence[Group]) -> None:
        divisors_K = groups[0].divisors_K
        scale_K = self.rule.weights_K / divisors_K
        if self.rule.global_std:
            self.objective.gradients.divide_numerators(scale_K)
        else:
            for term, scale in enumerate(scale_K.tolist()):
                self._fold(self.objective.gradients.get_total(), groups[0].statistics, term, scale)
            self._clear()
        self._add_differences(groups, [self.rule.affine(group.statistics, divisors_K) for group in groups])
        self.objective.gradients.group_done()

    def _fold(self, out: Tensor, statistics: GroupStatistics, term: int, scale: float) -> None:
        if self.centre_K is None:  # no sample of the group had a finite reward
            return
        offset = float(statistics.mean_K[term] - self.centre_K[term])
        factor = -scale / self.objective.normaliser
        rescale_accumulate_(out, self.sum_1[term : term + 1], [factor])
        rescale_accumulate_(out, self.sum_0[None], [-offset * factor])

    def _clear(self) -> None:
        self.sum_0.zero_()
        self.sum_1.zero_()
        self.centre_K = None


class ReweightStreamingSharded(Reweight):
    """Running sums of which each rank holds its shard only, reduced before any advantage exists.

    S0 = sum G_q and S1 = sum (r_q - c) G_q are linear in the samples, so both may be reduce-scattered round by round;
    c must be common to the ranks: the group's first finite reward. One local buffer and two shards per rank, for any
    group size, at two reduce-scatters per parameter group and round.
    """

    def __init__(
        self, objective: Objective, rule: AdvantageRule, generations: tuple[int, ...], samples_per_forward: int
    ):
        super().__init__(objective, rule, generations, samples_per_forward)
        assert samples_per_forward == 1, "refused by configs/checks.py"
        backend = objective.gradients.backend
        assert isinstance(backend, ShardedSums), "refused by configs/checks.py"
        self.backend = backend
        self.pending = objective.gradients.new_buffer(1)
        self.sum_0: Shards = []
        self.sum_1: list[Shards] = []
        self.numerators: list[Shards] = []
        self.centre_K: Tensor | None = None

    def _rows(self, generations: tuple[int, ...]) -> Tensor:
        return self.pending

    def rewards_known(self, trajectory: Trajectory) -> None:
        """Collective: one round of samples, one per rank."""
        row, world = self.pending[0], self.objective.world
        round_RK = torch.cat(all_gather(trajectory.terms_BK, None, world.size))
        finite_R = round_RK.isfinite().all(dim=1)
        if self.centre_K is None and finite_R.any():
            self.centre_K = round_RK[finite_R][0]
        if not finite_R[world.rank]:
            row.zero_()  # also where it holds NaN
        if self.centre_K is not None:
            add_shards(self.sum_0, self.backend.reduce_scatter(row))
            self.sum_1 = self.sum_1 or [[] for _ in self.centre_K]
            centred_K = (trajectory.terms_BK[0] - self.centre_K).nan_to_num(0.0, 0.0, 0.0).tolist()
            for sum_1, weight in zip(self.sum_1, centred_K, strict=True):
                add_shards(
                    sum_1, self.backend.reduce_scatter(row * weight if len(self.sum_1) > 1 else row.mul_(weight))
                )
        self.pending.zero_()

    def group_known(self, group: Group) -> None:
        if self.rule.global_std and self.centre_K is not None:
            self.numerators = self.numerators or [[] for _ in self.centre_K]
            for term, numerator in enumerate(self.numerators):
                add_shards(numerator, self._numerator(group.statistics, term))
        if self.rule.global_std:
            self._clear()

    def advantages_known(self, groups: Sequence[Group]) -> None:
        divisors_K = groups[0].divisors_K
        for term, scale in enumerate((self.rule.weights_K / divisors_K).tolist()):
            if self.rule.global_std:
                shards = self.numerators[term] if self.numerators else []
            else:
                shards = self._numerator(groups[0].statistics, term) if self.centre_K is not None else []
            self.backend.add_gradients([shard.mul_(scale) for shard in shards])
        self._clear()
        self.numerators = []
        self._add_differences(groups, [self.rule.affine(group.statistics, divisors_K) for group in groups])
        self.objective.gradients.group_done()

    def _numerator(self, statistics: GroupStatistics, term: int) -> "Shards":
        """-(S1 - (mean - c) S0) / normaliser; takes S1 over."""
        assert self.centre_K is not None
        offset = float(statistics.mean_K[term] - self.centre_K[term])
        factor = -1.0 / self.objective.normaliser
        return [
            s1.mul_(factor).add_(s0, alpha=-offset * factor)
            for s0, s1 in zip(self.sum_0, self.sum_1[term], strict=True)
        ]

    def _clear(self) -> None:
        self.sum_0, self.sum_1, self.centre_K = [], [], None


Shards = list[Tensor]
"""one tensor per parameter group: this rank's part"""


def add_shards(total: Shards, new: Shards) -> None:
    """total += new; an empty total becomes `new`."""
    if not total:
        total.extend(new)
        return
    for old, added in zip(total, new, strict=True):
        old.add_(added)


SCHEDULES: dict[str, type[Schedule]] = {"native": Native, "retain": Retain}
REWEIGHT: dict[str, type[Schedule]] = {
    "per_sample": ReweightPerSample,
    "streaming": ReweightStreaming,
    "streaming_sharded": ReweightStreamingSharded,
}


def schedule_type(candidate: Candidate) -> type[Schedule]:
    """The class that executes `candidate`; `buffers` matters under Reweight only."""
    return REWEIGHT[candidate.buffers] if candidate.schedule == "reweight" else SCHEDULES[candidate.schedule]
