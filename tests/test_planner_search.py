"""What a plan chooses and refuses. Every test of the choice names its workload and its hardware."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import yaml
from planning import PLANNING, planned, round_trace, round_workload

from leangrpo.configs import ConfigError, check_trainable, load_config
from leangrpo.planners.candidates import preference
from leangrpo.planners.hardware import parse_hardware
from leangrpo.planners.plan import Plan
from leangrpo.planners.search import plan, search
from leangrpo.planners.types import CHOICES, Workload


def schedules_that_fit(found: Plan) -> set[str]:
    return {one.candidate.schedule for one in found.candidates if one.feasible}


def test_reweight_where_many_selected_steps_make_retain_not_fit() -> None:
    """SD3.5-M LoRA, 24 samples, 9 of 10 steps, global std (all groups wait), on 8 x A6000."""
    found = planned("sd35m_flowgrpo_lora", "8xA6000", "algorithm.beta=0", "updates_per_rollout=1")
    assert found.candidate.schedule == "reweight"
    assert schedules_that_fit(found) == {"native", "reweight"}
    reasons = [reason for choice, reason in found.rejected if choice.schedule == "retain"]
    assert all("activations" in reason or "bfloat16" in reason for reason in reasons)


def test_retain_where_many_generations_per_rank_with_small_tensors_fit() -> None:
    """Digits, every parameter trained (norms too: Reweight takes samples one by one), M = 32, one RTX 4090."""
    found = planned("digits_flowgrpo_full", "1xRTX4090", "group_size=32")
    assert found.candidate.schedule == "retain"
    assert found.candidate.samples_per_forward == 32
    assert found.candidate.checkpointing == "none"


def test_kl_favours_retain() -> None:
    """FLUX.1-dev LoRA, M = 12, 6 of 12 steps, on 8 x A100-80, without and with KL."""
    without, with_kl = (
        planned("flux_dancegrpo_lora", "8xA100-80", f"algorithm.beta={beta}").candidate.schedule for beta in (0.0, 0.04)
    )
    assert (without, with_kl) == ("reweight", "retain")


def test_kl_under_global_std_costs_reweight_a_buffer_and_a_second_backward() -> None:
    """Round policy, 8 prompts of 8 samples, on 8 x H200."""
    spec = parse_hardware("8xH200")
    pins = {"schedule": "reweight", "buffers": "per_sample", "buffer_dtype": "bfloat16", "checkpointing": "none"}
    plain, with_kl = (
        search(round_trace(), round_workload(beta=beta, global_std=True), spec, pins).chosen for beta in (0.0, 0.1)
    )
    assert with_kl.memory.gradient_buffers - plain.memory.gradient_buffers == 2 * round_trace().trainable
    assert with_kl.time.backward == pytest.approx(2 * plain.time.backward)
    assert with_kl.time.reference > 0


def test_checkpointing_as_needed_and_no_more() -> None:
    """FLUX.1-dev LoRA on 8 x A100: none with 80 GB, some blocks with 40 GB; one block fewer does not fit."""
    assert planned("flux_dancegrpo_lora", "8xA100-80").candidate.checkpointing == "none"
    small = planned("flux_dancegrpo_lora", "8xA100-40")
    chosen = small.candidate.checkpointing
    assert isinstance(chosen, int) and 0 < chosen < 57
    pins = {name: getattr(small.candidate, name) for name in CHOICES} | {"checkpointing": chosen - 1}
    with pytest.raises(ConfigError, match="are missing"):
        planned("flux_dancegrpo_lora", "8xA100-40", **pins)


def test_frozen_base_is_resident_where_it_fits() -> None:
    """FLUX.1-dev LoRA: 24 GB of frozen weights stay whole on 8 x A6000 (48 GB), and cannot on 8 x RTX 4090 (24 GB)."""
    assert planned("flux_dancegrpo_lora", "8xA6000").candidate.residency == "resident"
    assert planned("flux_dancegrpo_lora", "8xRTX4090").candidate.residency == "resharded"


def test_only_the_first_of_several_updates_is_lean() -> None:
    """Digits LoRA on one RTX 4090, 1 and 3 optimizer steps per rollout."""
    once, thrice = (planned("digits_flowgrpo_lora", "1xRTX4090", f"updates_per_rollout={n}") for n in (1, 3))
    pins = {name: getattr(once.candidate, name) for name in CHOICES}
    lean = planned("digits_flowgrpo_lora", "1xRTX4090", "updates_per_rollout=3", **pins).time
    native = planned("digits_flowgrpo_lora", "1xRTX4090", **(pins | {"schedule": "native"})).time
    assert once.candidate.schedule != "native" and once.time.replay == lean.recompute == 0
    assert lean.total - once.time.total == pytest.approx(2 * (native.recompute + native.backward + native.optimizer))
    gains = [one.speedup_over_best_native(one.chosen) for one in (thrice, once)]
    assert gains[0] is not None and gains[1] is not None and 1 < gains[0] < gains[1]
    assert "Only the first of the 3 optimizer steps" in str(thrice)


def test_more_capacity_is_never_slower() -> None:
    """FLUX.1-dev, LoRA and full, on 8 GPUs with the speeds of an A100 and 24 to 192 GB; 0.5 % is a tie."""
    for config in ("flux_dancegrpo_lora", "flux_dancegrpo_full"):
        seconds = []
        for memory in (24, 32, 40, 48, 64, 80, 96, 128, 192):
            try:
                seconds.append(planned(config, f"8xA100-{memory}GB").time.total)
            except ConfigError:
                assert not seconds, "what fitted before does not fit with more"
        assert len(seconds) > 4
        assert all(more <= less * 1.005 for less, more in pairwise(seconds))


def test_ties_go_to_the_simpler_and_more_exact() -> None:
    """FLUX.1-dev LoRA on 8 x A6000: bfloat16 buffers would save nothing that shows."""
    found = planned("flux_dancegrpo_lora", "8xA6000")
    tied = [
        one for one in found.candidates if one.feasible and one.time.total <= 1.005 * found.candidates[0].time.total
    ]
    assert len(tied) > 1
    assert preference(found.candidate, 57) == min(preference(one.candidate, 57) for one in tied)
    assert found.candidate.buffer_dtype == "float32"


def test_plans_are_deterministic() -> None:
    first, second = (planned("flux_dancegrpo_full", "8xA6000") for _ in range(2))
    assert first == second
    assert str(first) == str(second)


def test_pins_are_kept_and_refused_with_the_reason() -> None:
    """FLUX.1-dev, LoRA and full, on 8 x A6000."""
    found = planned("flux_dancegrpo_lora", "8xA6000", schedule="native", checkpointing="all", buffers="auto")
    assert (found.candidate.schedule, found.candidate.checkpointing) == ("native", "all")
    assert found.pinned == {"schedule": "native", "checkpointing": "all"}
    for pins, words in (
        ({"schedule": "reweight", "sync": "every_backward"}, "before its sample's advantage is known"),
        ({"schedule": "reweight", "samples_per_forward": 3}, "Linear and Conv2d layers only"),
        (
            {"samples_per_forward": 2},
            "samples_per_forward=2: each rank makes 3 of the group_size=12 samples; use a div",
        ),
        ({"checkpointing": 58}, "checkpointing=58: the policy has 57 blocks; use all, none, or 1 to 57"),
        (
            {"schedule": "retain", "checkpointing": "none"},
            "GB are missing; use auto for one of schedule, checkpointing",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            planned("flux_dancegrpo_full", "8xA6000", **pins)


def test_what_is_not_exact_is_refused() -> None:
    """Round policy on 8 x H200: ranks as advantages, float32 training, many sums in bfloat16."""
    spec = parse_hardware("8xH200")

    def reasons(workload: Workload, **pins: object) -> str:
        return " ".join(reason for _, reason in search(round_trace(), workload, spec, pins).rejected)

    assert "affine in the reward" in reasons(round_workload(affine_advantage=False))
    assert "computed in float32" in reasons(round_workload(precision="float32"), buffer_dtype="float32") + _refused(
        round_workload(precision="float32"), buffer_dtype="bfloat16"
    )
    assert "added up in one bfloat16 buffer" in reasons(round_workload(selected_steps=8, group_size=64))
    assert "backend=zero3 keeps no sharded sums" in reasons(round_workload(backend="zero3"))
    assert "need all 8 ranks on one prompt, but 4 share one" in reasons(round_workload(group_size=12))
    assert "takes one reduction per optimizer step" in reasons(round_workload(backend="zero2"))
    assert "they are always whole" in _refused(round_workload(backend="zero1"), residency="resharded")


def _refused(workload: Workload, hardware: str = "8xH200", **pins: object) -> str:
    with pytest.raises(ConfigError) as caught:
        search(round_trace(), workload, parse_hardware(hardware), {"schedule": "reweight"} | pins)
    return str(caught.value)


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match=r"8xA6000-4GB: nothing fits; closest is schedule=.* [\d.]+ GB are missing"):
        planned("flux_dancegrpo_full", "8xA6000-4GB")
    with pytest.raises(ConfigError, match=r"unknown model; .*did you mean flux1-dev"):
        plan("flux1-def", round_workload(), parse_hardware("8xH100"))
    with pytest.raises(ValueError, match="selected_steps=0: nothing would be trained"):
        round_workload(selected_steps=0)
    with pytest.raises(ConfigError, match=r"algorithm.selected_steps=0 .*nothing would be trained"):
        planned("flux_dancegrpo_full", "8xA6000", "algorithm.selected_steps=0")
    with pytest.raises(ConfigError, match="workload: is missing"):
        plan(round_trace())
    with pytest.raises(ConfigError, match="shedule=native: is no choice of a plan; those are schedule, buffers"):
        plan(round_trace(), round_workload(), parse_hardware("8xH100"), {"shedule": "native"})
    with pytest.raises(ConfigError, match=r"schedule=rewieght: .*'retain' or 'reweight'"):
        plan(round_trace(), round_workload(), parse_hardware("8xH100"), {"schedule": "rewieght"})


def test_closest_candidate_and_what_is_missing_add_up() -> None:
    """Round policy on 8 GPUs of 8 GB; with what is missing added, something fits."""
    spec = parse_hardware("8xA100-8GB")
    with pytest.raises(ConfigError) as caught:
        search(round_trace(), round_workload(), spec, {})
    missing = float(str(caught.value).split(" GB are missing")[0].rsplit(" ", 1)[1]) * 1e9
    search(round_trace(), round_workload(), replace(spec, memory_bytes=spec.memory_bytes + int(missing + 1e8)), {})
    with pytest.raises(ConfigError):
        less = replace(spec, memory_bytes=spec.memory_bytes + int(missing - 2e8))
        search(round_trace(), round_workload(), less, {})


@pytest.mark.parametrize("hardware", ["8xA6000", "8xA100-80", "1xRTX4090"])
def test_table_fits_80_columns(hardware: str) -> None:
    text = str(planned("digits_flowgrpo_lora", hardware))
    assert max(map(len, text.splitlines())) <= 80
    for words in ("Plan: ", "peak", "capacity", "total", "public trainers", "its own best plan", "runners-up"):
        assert words in text


def test_dict_is_json_with_the_promised_keys_and_yaml_starts_with_the_choice() -> None:
    found = planned("flux_dancegrpo_lora", "8xA6000")
    stored = json.loads(json.dumps(found.to_dict()))
    assert list(stored["choice"]) == list(CHOICES)
    keys = {
        "peak_memory_bytes",
        "seconds_per_update",
        "speedup_over_public_native",
        "speedup_over_best_native",
        "feasible",
        "reason",
    }
    assert all(set(one) == {*CHOICES, *keys} for one in stored["candidates"])
    chosen = [one for one in stored["candidates"] if all(one[name] == stored["choice"][name] for name in CHOICES)]
    assert len(chosen) == 1 and chosen[0]["feasible"]
    assert all(one["feasible"] == (one["reason"] == "") for one in stored["candidates"])
    assert list(yaml.safe_load(found.to_yaml()))[: len(CHOICES)] == list(CHOICES)
    memory = stored["predicted"]["memory_bytes"]
    assert memory["peak"] == sum(
        value for name, value in memory.items() if name not in ("peak", "margin", "phase", "host")
    )


@pytest.mark.parametrize("name", PLANNING)
def test_planning_configurations_are_refused_by_training(name: str) -> None:
    config = load_config(name)
    assert config.hardware
    with pytest.raises(ConfigError, match=r"^policy.name=\S+: this version trains digits; plan it with leangrpo plan$"):
        check_trainable(config)


def test_digits_are_trainable_and_say_which_key_is_not() -> None:
    check_trainable(load_config("digits_flowgrpo_lora"))
    for override, words in (
        ("sampler.guidance=4.5", "sampler.guidance=4.5: this version trains null"),
        ("algorithm.name=dance_grpo", "algorithm.name=dance_grpo: this version trains flow_grpo"),
        ("rewards.0.name=hpsv2", "rewards.0.name=hpsv2: this version trains digits_classifier or jpeg_compress"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_trainable(load_config("digits_flowgrpo_lora", [override]))
