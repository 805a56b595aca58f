"""`plan()`: enumerate the candidates, drop what is not exact or does not fit, choose the fastest."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from leangrpo.configs.checks import ConfigError
from leangrpo.configs.schema import CHOICES, Config
from leangrpo.planners.candidates import enumerate_candidates, find_refusals, preference, refusal
from leangrpo.planners.hardware import detect_hardware, parse_hardware
from leangrpo.planners.memory import estimate_memory
from leangrpo.planners.model_trace import trace_model
from leangrpo.planners.plan import GB, Plan
from leangrpo.planners.runtime import estimate_time
from leangrpo.planners.types import Candidate, Estimate, HardwareSpec, PolicyTrace, Workload
from leangrpo.planners.workloads import hardware_of, pins_of, trace_of, workload_of

_ADAPTERS: dict[str, TypeAdapter[Any]] = {name: TypeAdapter(kind) for name, kind in Candidate.__annotations__.items()}
TIE = 0.005  # candidates within this of the fastest are as fast: the estimates are not better than that


def plan(
    policy: Config | PolicyTrace | str,
    workload: Workload | None = None,
    hardware: HardwareSpec | str | None = None,
    pinned: Mapping[str, Any] | None = None,
) -> Plan:
    """The fastest way to execute an update that is exact and fits.

    `policy`: a configuration (workload and hardware are then read from it where they are not given), the name of a
    model family in its default size, or a trace. `hardware`: as in a configuration, e.g. "8xA6000-48GB"; this machine
    by default. `pinned`: choices, by name, that are not free, beside those that a configuration pins. Raises
    ConfigError for unknown names and values, for pins that cannot be, and if nothing fits: then it says what is closest
    and how much is missing.
    """
    pins = check_pins(pinned or {})
    if isinstance(hardware, str):
        hardware = parse_hardware(hardware)
    if isinstance(policy, Config):
        trace, pins = trace_of(policy), pins_of(policy) | pins
        workload, hardware = workload or workload_of(policy), hardware or hardware_of(policy)
    else:
        trace = trace_model(policy) if isinstance(policy, str) else policy
    if workload is None:
        raise ConfigError("workload: is missing; only a configuration brings its own")
    return search(trace, workload, hardware or detect_hardware(), pins)


def check_pins(pinned: Mapping[str, Any]) -> dict[str, Any]:
    """The pins that are not "auto". ConfigError for a name or value that does not exist."""
    kept: dict[str, Any] = {}
    for name, value in pinned.items():
        if name not in CHOICES:
            raise ConfigError(f"{name}={value}: is no choice of a plan; those are {', '.join(CHOICES)}")
        if value == "auto":
            continue
        try:
            kept[name] = _ADAPTERS[name].validate_python(value, strict=True)
        except ValidationError as error:
            raise ConfigError(f"{name}={value}: {error.errors()[0]['msg']}") from error
        if name == "samples_per_forward" and kept[name] < 1:
            raise ConfigError(f"{name}={value}: must be an integer >= 1")
    return kept


def search(trace: PolicyTrace, workload: Workload, hardware: HardwareSpec, pinned: Mapping[str, Any]) -> Plan:
    """As `plan`, with everything given."""
    _refuse_pins(trace, workload, hardware, pinned)
    candidates = [
        _estimate(candidate, workload, trace, hardware, "checkpointing" not in pinned)
        for candidate in enumerate_candidates(workload, hardware, pinned)
    ]
    feasible = [one for one in candidates if one.feasible]
    if not feasible:
        raise ConfigError(_nothing_fits(candidates, workload, hardware, pinned))
    blocks = len(trace.blocks)
    fastest = min(one.time.total for one in feasible)
    tied = [one for one in feasible if one.time.total <= fastest * (1 + TIE)]
    chosen = min(tied, key=lambda one: preference(one.candidate, blocks))
    order = sorted(candidates, key=lambda one: (not one.feasible, one.time.total, preference(one.candidate, blocks)))
    return _as_plan(chosen, order, trace, workload, hardware, pinned)


def predict(
    candidate: Candidate, trace: PolicyTrace, workload: Workload, hardware: HardwareSpec, pinned: Mapping[str, Any]
) -> Plan:
    """The plan of a run that was begun with `candidate`: nothing is chosen any more, and nothing refused."""
    judged = _judge(candidate, workload, trace, hardware)
    return _as_plan(judged, [judged], trace, workload, hardware, pinned)


def _as_plan(
    chosen: Estimate,
    candidates: Sequence[Estimate],
    trace: PolicyTrace,
    workload: Workload,
    hardware: HardwareSpec,
    pinned: Mapping[str, Any],
) -> Plan:
    natives = [
        _estimate(candidate, workload, trace, hardware, True)
        for candidate in enumerate_candidates(workload, hardware, {"schedule": "native"})
    ]
    return Plan(
        chosen=chosen,
        candidates=tuple(candidates),
        public_native=public_native(trace, workload, hardware),
        best_native_seconds=min((one.time.total for one in natives if one.feasible), default=None),
        trace=trace,
        workload=workload,
        hardware=hardware,
        pinned=dict(pinned),
    )


def _refuse_pins(trace: PolicyTrace, workload: Workload, hardware: HardwareSpec, pinned: Mapping[str, Any]) -> None:
    """ConfigError if workload, hardware and pins cannot be together, whatever the other choices are."""
    for one in find_refusals(workload, hardware, pinned):
        raise ConfigError(f"{one.subject}: {one.text}")
    count, blocks = pinned.get("checkpointing"), len(trace.blocks)
    if isinstance(count, int) and count > blocks:
        raise ConfigError(f"checkpointing={count}: the policy has {blocks} blocks; use all, none, or 1 to {blocks}")


def public_native(trace: PolicyTrace, workload: Workload, hardware: HardwareSpec) -> Estimate:
    """Native as the public trainers run it: one sample at a time, everything checkpointed, every backward reduced.

    Full fine-tuning shards parameters (DanceGRPO); a frozen base is whole on every rank if it fits (Flow-GRPO). Only
    memory is judged: the engine itself refuses such reductions under ZeRO.
    """
    alone, backend = hardware.ranks == 1, workload.backend
    whole = alone or backend in ("replicated", "zero1", "zero2") or (workload.weights == "lora" and backend != "zero3")
    candidate = Candidate(
        schedule="native",
        buffers="per_sample",
        buffer_dtype=workload.precision,
        buffer_device="device",
        sync="every_update" if alone else "every_backward",
        checkpointing="all",
        residency="resident" if whole else "resharded",
        samples_per_forward=1,
    )
    judged = _estimate_both(candidate, workload, trace, hardware, "", by_block=True)
    if workload.weights == "lora" and judged.missing_bytes and not alone and backend in ("fsdp2", "hsdp"):
        resharded = replace(candidate, residency="resharded")
        judged = _estimate_both(resharded, workload, trace, hardware, "", by_block=True)
    return judged


def _estimate(
    candidate: Candidate, workload: Workload, trace: PolicyTrace, hardware: HardwareSpec, choose_checkpointing: bool
) -> Estimate:
    """With as many blocks checkpointed as are needed to fit, and no more."""
    judged = _judge(candidate, workload, trace, hardware)
    blocks = len(trace.blocks)
    if judged.feasible or not judged.missing_bytes or not choose_checkpointing or not blocks:
        return judged
    everything = _judge(replace(candidate, checkpointing="all"), workload, trace, hardware)
    if not everything.feasible:
        return everything
    too_few, enough = 0, blocks  # invariant: the first does not fit, the second does
    found = everything
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        tried = _judge(replace(candidate, checkpointing=middle), workload, trace, hardware)
        if tried.feasible:
            enough, found = middle, tried
        else:
            too_few = middle
    return found


def _judge(candidate: Candidate, workload: Workload, trace: PolicyTrace, hardware: HardwareSpec) -> Estimate:
    refused = refusal(candidate, workload, trace, hardware)
    return _estimate_both(candidate, workload, trace, hardware, refused)


def _estimate_both(
    candidate: Candidate,
    workload: Workload,
    trace: PolicyTrace,
    hardware: HardwareSpec,
    reason: str,
    *,
    by_block: bool = False,
) -> Estimate:
    """Memory and time; `reason`: why the candidate is out already, empty if it is not."""
    memory = estimate_memory(candidate, workload, trace, hardware, by_block=by_block)
    time = estimate_time(candidate, workload, trace, hardware, by_block=by_block)
    missing = max(0, memory.peak + memory.margin - hardware.memory_bytes)
    host_share = hardware.host_memory_bytes // hardware.ranks_per_node
    if not reason and missing:
        needed = (memory.peak + memory.margin) / GB
        reason = f"needs {needed:.1f} of {hardware.memory_bytes / GB:.1f} GB, most in {_largest_part(memory)}"
    elif not reason and memory.host > host_share:
        reason = f"needs {memory.host / GB:.1f} of {host_share / GB:.1f} GB host memory per rank"
    else:
        missing = 0
    return Estimate(candidate=candidate, memory=memory, time=time, reason=reason, missing_bytes=missing)


def _largest_part(memory: Any) -> str:
    parts = ("parameters", "gathered_parameters", "gradients", "gradient_buffers", "optimizer_states", "activations")
    return max((*parts, "temporaries", "other_models"), key=lambda name: getattr(memory, name)).replace("_", " ")


def _nothing_fits(
    candidates: list[Estimate], workload: Workload, hardware: HardwareSpec, pinned: Mapping[str, Any]
) -> str:
    pins = " ".join(f"{name}={value}" for name, value in pinned.items())
    short = [one for one in candidates if one.missing_bytes]
    if not short:
        return f"{pins or 'plan'}: nothing can be executed: {candidates[0].reason}; set one of the choices to auto"
    closest = min(short, key=lambda one: one.missing_bytes)
    choice = closest.candidate
    named = f"schedule={choice.schedule} checkpointing={choice.checkpointing} residency={choice.residency}"
    if choice.schedule == "reweight":
        named += f" buffers={choice.buffers}"
    ways = [f"auto for one of {', '.join(pinned)}"] if pinned else []
    ways += ["more ranks"] if hardware.ranks > 1 else ["several ranks"]
    ways += ["policy.weights=lora"] if workload.weights == "full" else []
    if workload.weights == "full" and workload.optimizer == "adamw":
        smaller = replace(workload, optimizer="adamw_8bit")
        ways += [] if find_refusals(smaller, hardware, {}) else ["optimizer.name=adamw_8bit"]
    ways += ["a smaller sample"]
    return (
        f"hardware={hardware.title}: nothing fits; closest is {named} buffer_dtype={choice.buffer_dtype} "
        f"buffer_device={choice.buffer_device} sync={choice.sync}, which {closest.reason}: "
        f"{closest.missing_bytes / GB:.1f} GB are missing; use {', '.join(ways)}"
    )
