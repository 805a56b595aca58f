"""What cannot be together: combinations of valid values that are refused, and `ConfigError`.

One key by itself is checked by its type in `leangrpo.configs.schema`.
"""

import dataclasses
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from leangrpo.configs.schema import Config

# A resumed run may have another length, place, log, and rhythm of saving and looking; nothing else.
FREE_ON_RESUME = ("updates", "resume", "out_dir", "logging", "checkpoint", "evaluation")
REWARDS = ("digits_classifier", "jpeg_compressibility")  # those that can be trained with
SHOWN = 60  # characters of a value in an error


class ConfigError(ValueError):
    """A mistake of the user's in a configuration; its text is one line with the way out."""

    def __init__(self, line: str) -> None:
        printable = "".join(c if c.isprintable() else " " for c in line)
        super().__init__(" ".join(printable.split()))


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is wrong with a key: `subject` is `key=value` or what stands for it.

    `where` the value was given, if that is known.
    """

    key: str
    subject: str
    text: str
    where: str = ""


def problem(key: str, value: object, text: str, where: str = "") -> Problem:
    """A problem with the value of a key."""
    return Problem(key, f"{key}={show(value)}", text, where)


def show(value: object) -> str:
    """The value as it could stand in YAML, shortened."""
    return shorten(json.dumps(value, ensure_ascii=False))


def shorten(text: str) -> str:
    """The text, or its beginning."""
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def raise_first(problems: Sequence[Problem], said: Mapping[str, str], unsaid: str = "default") -> None:
    """Raises ConfigError for the first problem; `said`: where keys got their values."""
    if problems:
        first, others = problems[0], len(problems) - 1
        where = first.where or said.get(first.key, unsaid)
        more = f" (and {others} more)" if others else ""
        raise ConfigError(f"{first.subject} ({where}): {first.text}{more}")


def check_config(config: Config) -> None:
    """Raises ConfigError if choices that are valid one by one cannot be together."""
    raise_first(find_problems(config), {}, unsaid="configuration")


def find_problems(config: Config, given: Collection[str] = ()) -> list[Problem]:
    """Every impossible combination; `given`: keys whose values must not be without effect."""
    found = [one for check in CHECKS for one in check(config)]
    return found + list(_check_given(config, given))


def check_trainable(config: Config) -> None:
    """Raises ConfigError for what can be planned only."""
    plan_only: dict[str, tuple[object, object]] = {
        "policy.name": (config.policy.name, "digits"),
        "algorithm.name": (config.algorithm.name, "flow_grpo"),
        "sampler.guidance": (config.sampler.guidance, None),
        "policy.height": (config.policy.height, None),
        "policy.width": (config.policy.width, None),
        "policy.frames": (config.policy.frames, None),
        "policy.text_encoders": (config.policy.text_encoders, "device"),
        "policy.vae_and_rewards": (config.policy.vae_and_rewards, "device"),
    } | {
        f"rewards.{n}.name": (term.name, term.name if term.name in REWARDS else "")
        for n, term in enumerate(config.rewards)
    }
    for key, (value, trained) in plan_only.items():
        if value != trained:
            possible = " or ".join(REWARDS) if key.startswith("rewards") else show(trained).strip('"')
            raise ConfigError(f"{key}={value}: this version trains {possible}; plan it with leangrpo plan")


def check_world_size(config: Config, world_size: int) -> None:
    """Raises ConfigError for more than the one process that this version trains on."""
    if world_size > 1:
        raise ConfigError(
            f"world_size={world_size} (environment): this version trains on one process, backends "
            "for several are to come; start it without torchrun or deepspeed: "
            f"leangrpo train CONFIG out_dir={config.out_dir}"
        )


def resume_differences(old: Config, new: Config) -> list[tuple[str, object, object]]:
    """Keys, with old and new value, that would make a resumed run another run than the one begun.

    `threads` and `device` count: they change the last bits of a sum.
    """
    before, after = _flatten(dataclasses.asdict(old)), _flatten(dataclasses.asdict(new))
    return [
        (key, before[key], after[key])
        for key in before
        if before[key] != after[key] and key.split(".")[0] not in FREE_ON_RESUME
    ]


def _flatten(tree: dict[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in tree.items():
        inner = _flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else None
        flat |= {prefix + name: value} if inner is None else inner
    return flat


def _check_selection(config: Config) -> Iterator[Problem]:
    steps, chosen = config.sampler.denoising_steps, config.algorithm.selected_steps
    selection = config.algorithm.selection
    key, total = "algorithm.selected_steps", f"sampler.denoising_steps={steps}"
    if chosen < 1:
        yield problem(key, chosen, f"nothing would be trained; use 1 to {steps} ({total})")
    elif chosen > steps:
        yield problem(key, chosen, f"more than {total}; use at most {steps}, or raise that")
    elif chosen == steps and selection != "first":
        way_out = f"use at most {steps - 1}, or" if steps > 1 else "use"
        text = f"algorithm.selection={selection} leaves out the last step of {total}"
        yield problem(key, chosen, f"{text}; {way_out} algorithm.selection=first")
    elif chosen == steps and config.sampler.transition == "cps":
        way_out = f"use at most {steps - 1}" if steps > 1 else "use sampler.denoising_steps=2"
        text = "sampler.transition=cps has no noise, so no log-probability, in the last step of"
        yield problem(key, chosen, f"{text} {total}; {way_out}, or another transition")


def _check_noise(config: Config) -> Iterator[Problem]:
    sampler = config.sampler
    if sampler.transition == "cps" and sampler.eta > 1:
        text = "sampler.transition=cps takes sin(eta * pi / 2), which falls again above 1"
        yield problem("sampler.eta", sampler.eta, f"{text}; use at most 1")


def _check_samples_per_forward(config: Config) -> Iterator[Problem]:
    wanted, group = config.samples_per_forward, config.group_size
    if group % wanted:
        divisors = [d for d in range(1, group + 1) if group % d == 0]
        below, above = [d for d in divisors if d < wanted], [d for d in divisors if d > wanted]
        nearest = " or ".join(str(d) for d in below[-1:] + above[:1])
        text = f"does not divide group_size={group}; use {nearest}"
        yield problem("samples_per_forward", wanted, text)


def _check_execution(config: Config) -> Iterator[Problem]:
    if config.schedule == "reweight" and config.sync == "every_backward":
        yield problem(
            "sync",
            config.sync,
            "schedule=reweight would reduce a gradient before its sample's advantage is known, "
            "and nothing computed from the reduced one can repair it; "
            "use every_group or every_update, or schedule=native or retain",
        )
    if config.residency == "resharded":
        yield problem(
            "residency",
            config.residency,
            "on one process parameters are always whole; use resident (sharding over several processes is to come)",
        )


def _check_best_of_n(config: Config) -> Iterator[Problem]:
    key, n = "algorithm.advantage.best_of_n", config.algorithm.advantage.best_of_n
    if n is None:
        return
    even = config.group_size - config.group_size % 2
    if n % 2 or not 2 <= n <= config.group_size:
        text = f"takes n/2 best and n/2 worst of group_size={config.group_size}"
        yield problem(key, n, f"{text}; use an even number from 2 to {even}, or null")
    elif config.schedule == "reweight" and config.buffers == "streaming":
        text = "ranks are not affine in the rewards, which buffers=streaming needs"
        yield problem(key, n, f"{text}; use buffers=per_sample, or null")


def _check_rewards(config: Config) -> Iterator[Problem]:
    for index, term in enumerate(config.rewards):
        if term.name in [earlier.name for earlier in config.rewards[:index]]:
            text = "there is such a term already; write it once, with the sum of the weights"
            yield problem(f"rewards.{index}.name", term.name, text)
    if not any(term.weight for term in config.rewards):
        text = "every reward would be zero; give at least one term a weight other than 0"
        yield problem("rewards.0.weight", config.rewards[0].weight, text)


def _check_given(config: Config, given: Collection[str]) -> Iterator[Problem]:
    for name, value in _flatten(dataclasses.asdict(config)).items():
        named = any(key == name or key.startswith(f"{name}.") for key in given)
        if named and name.startswith("policy.lora.") and config.policy.weights == "full":
            text = "has no effect with policy.weights=full; leave it out, or use lora"
            yield problem(name, value, text)


CHECKS: tuple[Callable[[Config], Iterator[Problem]], ...] = (
    _check_selection,
    _check_noise,
    _check_samples_per_forward,
    _check_execution,
    _check_best_of_n,
    _check_rewards,
)
