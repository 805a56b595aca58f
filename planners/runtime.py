"""Seconds of one update on one rank, per candidate: a pure function of workload, trace and hardware."""

from dataclasses import replace

from leangrpo.planners.costs import Costs
from leangrpo.planners.types import Candidate, HardwareSpec, Layout, PolicyTrace, TimeEstimate, Workload


def estimate_time(
    candidate: Candidate, workload: Workload, trace: PolicyTrace, hardware: HardwareSpec, *, by_block: bool = False
) -> TimeEstimate:
    """One rollout and its `updates_per_rollout` optimizer steps.

    With F and B of one forward batch: T F for the rollout, + S F for Native's second forward, + S B; + S F for the
    reference of a KL term, + S B for its own backward under Reweight. Only the first optimizer step can be lean: what
    comes after it is Native with ratio and clip, whatever the schedule. `by_block`: see `Costs`.
    """
    costs, layout = Costs(candidate, workload, trace, hardware, by_block), Layout.of(workload, hardware.ranks)
    batch = candidate.samples_per_forward
    forwards = layout.rounds * (layout.samples // batch)
    selected = workload.selected_steps * forwards
    one_forward, one_backward = costs.forward(batch), costs.backward(batch)
    with_kl = workload.beta > 0
    backwards = selected * (2 if with_kl and candidate.schedule == "reweight" else 1)
    reductions = _reductions(candidate, layout, with_kl)
    samples = layout.rounds * layout.samples
    replay = 0.0
    if workload.updates_per_rollout > 1:
        native = Costs(replace(candidate, schedule="native"), workload, trace, hardware)
        one_replay = selected * (one_forward + native.backward(batch)) + native.optimizer() + native.gather_once()
        one_replay += _reductions(native.candidate, layout, with_kl) * native.reduction()
        replay = (workload.updates_per_rollout - 1) * one_replay
    return TimeEstimate(
        encode=costs.other_models("prompt", layout.rounds),
        rollout=workload.denoising_steps * forwards * one_forward,
        recompute=selected * one_forward if candidate.schedule == "native" else 0.0,
        reference=selected * one_forward if with_kl else 0.0,
        backward=backwards * one_backward,
        correction=layout.rounds * costs.correction(),
        synchronisation=reductions * costs.reduction() + costs.gather_once(),
        reward=costs.other_models("sample", samples),
        optimizer=costs.optimizer(),
        replay=replay,
    )


def _reductions(candidate: Candidate, layout: Layout, with_kl: bool) -> int:
    """How many reductions an update has outside of its backwards and of streaming_sharded's sample rounds."""
    if candidate.sync == "every_backward":
        return 0
    if candidate.schedule == "reweight" and candidate.buffers == "streaming_sharded" and not with_kl:
        return 0
    return layout.rounds if candidate.sync == "every_group" else 1
