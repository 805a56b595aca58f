"""The planner recommends nothing that the engine refuses, and refuses nothing that the engine can do."""

from dataclasses import asdict, replace
from typing import Any

import pytest
from planning import round_trace
from small import small_config

from leangrpo.configs import Config, ConfigError, check_config, check_world_size
from leangrpo.engine.distributed import World
from leangrpo.engine.prompt_group import PromptGroup
from leangrpo.planners.candidates import enumerate_candidates, refusal
from leangrpo.planners.hardware import PRESETS, parse_hardware
from leangrpo.planners.search import plan
from leangrpo.planners.types import CHOICES, Layout
from leangrpo.planners.workloads import workload_of

BACKENDS = ("replicated", "fsdp2", "hsdp", "zero1", "zero2", "zero3")
RANKS = (1, 2, 3, 4, 8)
WORKLOADS: dict[str, dict[str, Any]] = {
    "plain": {"group_size": 8, "prompts_per_update": 8},
    "bfloat16, 12 samples": {"group_size": 12, "prompts_per_update": 8, "precision": "bfloat16"},
    "one rank per prompt": {"group_size": 8, "prompts_per_update": 8, "ranks_per_prompt": 1},
    "two ranks per prompt": {"group_size": 8, "prompts_per_update": 12, "ranks_per_prompt": 2},
    "kl, global std": {"group_size": 8, "algorithm": {"beta": 0.1}, "advantage": {"std": "global"}},
    "best of n": {"group_size": 8, "advantage": {"best_of_n": 4}},
    "8-bit states": {"group_size": 8, "optimizer": {"name": "adamw_8bit"}, "prompts_per_update": 4},
    "copies": {"group_size": 24, "prompts_per_update": 4, "shard_ranks": 2, "backend": "hsdp"},
}
PLANNER_ONLY = ("Linear and Conv2d", "bfloat16 buffer")  # what a trace shows, and rounding


def accepted(config: Config, ranks: int) -> bool:
    try:
        check_config(config)
        check_world_size(config, ranks, ranks)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("name", WORKLOADS)
def test_planner_and_engine_refuse_the_same(name: str) -> None:
    auto = small_config(**({"prompts_per_update": 3} | WORKLOADS[name] | dict.fromkeys(CHOICES, "auto")))
    judged = 0
    for backend in BACKENDS if auto.backend != "hsdp" else ("hsdp",):
        for ranks in RANKS:
            config = replace(auto, backend=backend)
            spec, workload = replace(PRESETS["H200-141GB"], ranks_per_node=ranks), workload_of(config)
            if not accepted(config, ranks):
                with pytest.raises(ConfigError):
                    plan(round_trace(), workload, spec)
                continue
            for candidate in enumerate_candidates(workload, spec, {}):
                reason = refusal(candidate, workload, round_trace(), spec)
                if not any(words in reason for words in PLANNER_ONLY):
                    assert accepted(candidate.resolve(config), ranks) == (not reason), (backend, ranks, candidate)
                    judged += 1
    assert judged > 50


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_layout_is_the_engines(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptGroup, "_new_group", lambda self, index: None)  # there are no other processes
    config = small_config(**({"prompts_per_update": 8} | WORKLOADS[name] | {"samples_per_forward": 1}))
    for ranks in RANKS:
        if not accepted(config, ranks):
            continue
        layout = Layout.of(workload_of(config), ranks)
        for rank in range(ranks):
            world, sizes = World(rank, ranks, rank, ranks), (config.group_size, config.prompts_per_update, 1)
            group = PromptGroup(world, *sizes, config.ranks_per_prompt)
            found = (group.size, len(group.generations), len(group.slots))
            assert found == (layout.ranks_per_group, layout.samples, layout.rounds)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_plan_of_every_backend_is_accepted(backend: str) -> None:
    """8 prompts of 8 samples, full, bfloat16, round policy, on 8 x H200 and 2 x 8 x H200."""
    changes = {"backend": backend, "precision": "bfloat16", "prompts_per_update": 8, "group_size": 8}
    config = small_config(**changes, **dict.fromkeys(CHOICES, "auto"))
    for hardware in ("8xH200", "2x8xH200"):
        if backend == "hsdp":
            config = replace(config, shard_ranks=4)
        chosen = plan(round_trace(), workload_of(config), parse_hardware(hardware)).candidate
        resolved = chosen.resolve(config)
        assert asdict(chosen) == {name: getattr(resolved, name) for name in CHOICES}
        check_config(resolved)
        check_world_size(resolved, 16 if hardware.startswith("2x") else 8, 8)
