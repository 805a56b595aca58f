"""What cannot be together: combinations of valid values that are refused, and `ConfigError`.

One key by itself is checked by its type in `leangrpo.configs.schema`. A key that is `auto` is no reason for a refusal:
the planner asks the same checks which values it may choose.
"""

import dataclasses
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from leangrpo.configs.schema import CHOICES, Config

# A resumed run may have another length, place, log, and rhythm of saving and looking; nothing else.
FREE_ON_RESUME = ("updates", "resume", "out_dir", "timeout", "hardware", "logging", "checkpoint", "evaluation")
ZERO = ("zero1", "zero2", "zero3")
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

    @property
    def reason(self) -> str:
        """The text without the way out."""
        return self.text.partition("; ")[0]


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


def resume_differences(old: Config, new: Config) -> list[tuple[str, object, object]]:
    """Keys, with old and new value, that would make a resumed run another run than the one begun.

    `threads` and `device` count: they change the last bits of a sum. A choice that is auto takes what the run has.
    """
    before, after = _flatten(dataclasses.asdict(old)), _flatten(dataclasses.asdict(new))
    free = {*FREE_ON_RESUME, *(key for key in CHOICES if after[key] == "auto")}
    return [
        (key, before[key], after[key]) for key in before if before[key] != after[key] and key.split(".")[0] not in free
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
    if wanted != "auto" and group % wanted:
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
    if config.schedule == "reweight" and config.sync == "every_group" and config.algorithm.advantage.std == "global":
        text = "with algorithm.advantage.std=global no group is finished before the last; use every_update"
        yield problem("sync", config.sync, text)


def _check_backend(config: Config) -> Iterator[Problem]:
    backend = config.backend
    if config.buffers == "streaming_sharded" and config.schedule == "reweight":
        if backend not in ("fsdp2", "hsdp"):
            text = f"backend={backend} keeps no sharded sums; use streaming, or backend=fsdp2"
            yield problem("buffers", config.buffers, text)
        if config.samples_per_forward not in ("auto", 1):
            text = "buffers=streaming_sharded holds the gradient of one sample; use 1, or buffers=streaming"
            yield problem("samples_per_forward", config.samples_per_forward, text)
    if config.residency == "resharded" and backend == "replicated":
        text = "with backend=replicated parameters are always whole; use resident, or backend=fsdp2"
        yield problem("residency", config.residency, text)
    if config.residency == "resharded" and backend in ("zero1", "zero2"):
        text = f"backend={backend} partitions no parameters, they are always whole; use resident, or backend=zero3"
        yield problem("residency", config.residency, text)
    if config.residency == "resident" and backend == "zero3":
        text = "DeepSpeed partitions a parameter again after each use in stage 3; use resharded, or backend=zero2"
        yield problem("residency", config.residency, text)
    if config.sync not in ("auto", "every_update") and backend in ZERO:
        text = (
            f"backend={backend} takes one reduction per optimizer step: in stage 3 DeepSpeed writes the next gradient "
            "over the last, in stages 1 and 2 it sums locally and reduces at the step; use every_update"
        )
        yield problem("sync", config.sync, text)
    if backend == "zero3" and config.schedule == "reweight" and config.algorithm.beta > 0:
        text = (
            "schedule=reweight needs a second backward through a step's graph for the KL term, and DeepSpeed's stage 3 "
            "gathers parameters for one; use schedule=native or retain, or backend=zero2 or fsdp2"
        )
        yield problem("algorithm.beta", config.algorithm.beta, text)
    if config.optimizer.name == "adamw_8bit" and backend in ("fsdp2", "hsdp"):
        text = f"backend={backend} cannot shard its states; use adamw, or backend=replicated or a zero backend"
        yield problem("optimizer.name", config.optimizer.name, text)
    if config.optimizer.states == "host" and backend in ZERO:
        text = f"backend={backend} keeps its states on the device; use device, or backend=fsdp2"
        yield problem("optimizer.states", config.optimizer.states, text)
    if config.shard_ranks is not None and backend != "hsdp":
        text = f"has no effect with backend={backend}; leave it out, or use backend=hsdp"
        yield problem("shard_ranks", config.shard_ranks, text)


def _check_best_of_n(config: Config) -> Iterator[Problem]:
    key, n = "algorithm.advantage.best_of_n", config.algorithm.advantage.best_of_n
    if n is None:
        return
    even = config.group_size - config.group_size % 2
    if n % 2 or not 2 <= n <= config.group_size:
        text = f"takes n/2 best and n/2 worst of group_size={config.group_size}"
        yield problem(key, n, f"{text}; use an even number from 2 to {even}, or null")
    elif config.schedule == "reweight" and config.buffers not in ("auto", "per_sample"):
        text = "ranks are not affine in the rewards, which running sums need"
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
    _check_backend,
    _check_best_of_n,
    _check_rewards,
)
