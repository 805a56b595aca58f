"""Plans for the engine: of a policy that a user brings, and of a run, whose choices that are auto it closes."""

import dataclasses
import inspect
import logging
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from leangrpo.configs.checks import ConfigError
from leangrpo.configs.schema import Config
from leangrpo.engine.distributed import World
from leangrpo.engine.policies.base import DTYPES, PolicyAdapter
from leangrpo.engine.run_folder import PLAN, Begun
from leangrpo.planners import search
from leangrpo.planners.hardware import detect_hardware, parse_hardware
from leangrpo.planners.plan import Plan
from leangrpo.planners.report import in_words
from leangrpo.planners.trace import trace_module
from leangrpo.planners.types import Candidate, HardwareSpec, PolicyTrace, Workload
from leangrpo.planners.workloads import pins_of, trace_of, workload_of

log = logging.getLogger("leangrpo")


def plan(
    policy: PolicyAdapter | Config | PolicyTrace | str,
    workload: Workload | None = None,
    hardware: HardwareSpec | str | None = None,
    *,
    pinned: Mapping[str, Any] | None = None,
    prompt: str = "one",
) -> Plan:
    """The fastest way to execute an update of `workload` that is exact and fits; `print` it, or take its `candidate`.

    `policy`: a configuration, which brings its own workload, hardware and pins; the name of a model family; a trace
    (leangrpo.planners.trace.trace_module); or a policy on which no engine and no checkpointing has been set up, with
    any `prompt` that it can encode. `hardware`: e.g. "8xA6000-48GB", this machine by default. Raises ConfigError.
    """
    if isinstance(policy, PolicyAdapter):
        if workload is None:
            raise ConfigError("workload: is missing; only a configuration brings its own")
        policy = trace_policy(policy, prompt, workload.precision)
    return search.plan(policy, workload, hardware, pinned)


def trace_policy(policy: PolicyAdapter, prompt: str, precision: Literal["float32", "bfloat16"]) -> PolicyTrace:
    """What a denoising step of one sample costs, from the arguments with which `policy` calls its module."""
    inputs = {
        name: value.to(DTYPES[precision]) if isinstance(value, Tensor) and value.dtype == policy.dtype else value
        for name, value in module_inputs(policy, prompt).items()
    }
    rows = next(value.shape[0] for value in inputs.values() if isinstance(value, Tensor))
    return trace_module(policy.module, inputs, dtype=precision, batch=rows)


class _Called(Exception):
    """Ends a transition as soon as the module has been called."""


def module_inputs(policy: PolicyAdapter, prompt: str) -> dict[str, Any]:
    """The arguments, by name, with which `policy` calls its module for one sample; the module itself does not run."""
    found: dict[str, Any] = {}

    def catch(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.update(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
        raise _Called

    handle = policy.module.register_forward_pre_hook(catch, prepend=True, with_kwargs=True)
    try:
        with torch.no_grad():
            latents = torch.zeros(1, *policy.latent_shape, device=policy.device)
            policy.transition(latents, policy.timesteps[0], policy.encode(prompt, 1), stochastic=True)
    except _Called:
        return found
    finally:
        handle.remove()
    raise AssertionError("a transition must call policy.module")


def choose(config: Config, world: World, begun: Begun | None = None) -> Plan:
    """The plan that a run follows, the same on all ranks. Collective.

    Rank 0 plans: ranks may see different machines. `begun`: the run is resumed, and keeps its choices; only with
    another number of ranks are those that were not pinned chosen again. ConfigError, on all ranks, if a pin cannot be.
    """
    outcome: Plan | ConfigError | None = None
    if world.is_main:
        try:
            outcome = _choose(config, world, begun)
        except ConfigError as error:
            outcome = error
    outcome = world.broadcast(outcome)
    if isinstance(outcome, ConfigError):
        raise outcome
    assert outcome is not None
    return outcome


def _choose(config: Config, world: World, begun: Begun | None) -> Plan:
    trace, workload, pins = trace_of(config), workload_of(config), pins_of(config)
    if begun is None:
        return search.search(trace, workload, hardware_of_run(config, world), pins)
    if begun.planned_for is None:
        log.warning("%s: the run keeps the choices of its config.yaml; predictions are made anew", begun.fault)
        return search.search(trace, workload, hardware_of_run(config, world), begun.choices | pins)
    if begun.keeps_plan(world.size):
        return search.predict(Candidate(**begun.choices), trace, workload, begun.planned_for, begun.pinned)
    log.info("begun on %d ranks, now %d: what was not pinned is chosen again", begun.planned_for.ranks, world.size)
    return search.search(trace, workload, hardware_of_run(config, world), begun.pinned | pins)


def hardware_of_run(config: Config, world: World) -> HardwareSpec:
    """The machines of a run: what `config` names, or what rank 0 runs on. ConfigError if the ranks are not as many."""
    if config.hardware is None:
        nodes = world.size // world.local_size
        spec = detect_hardware(world.local_size, config.device)
        return dataclasses.replace(spec, nodes=nodes, ranks_per_node=world.local_size)
    spec = parse_hardware(config.hardware)
    if spec.ranks != world.size:
        raise ConfigError(
            f"hardware={config.hardware}: has {spec.ranks} ranks, and the run {world.size}; start as many, leave "
            "hardware out, or use leangrpo plan, which trains nothing"
        )
    return spec


def explain(plan: Plan, begun: Begun | None) -> str:
    """Which plan a run follows, what it predicts, and why it was chosen, in two lines."""
    memory, seconds = plan.memory.peak, plan.time.total
    pins = ", ".join(f"{name}={value}" for name, value in plan.pinned.items())
    if len(plan.candidates) == 1 and begun is not None:
        why = "as the run was begun"
    else:
        fitting = 1 + len(plan.alternatives)
        why = f"the fastest of {fitting} that fit, {len(plan.candidates)} judged"
    return (
        f"plan: {in_words(plan.candidate)}\n"
        f"      predicted {memory / 1e6:,.0f} MB per rank and {seconds:.3g} s per update; {why}"
        + (f"; pinned: {pins}" if pins else "")
        + f"; all of it in {PLAN}"
    )
