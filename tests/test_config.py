"""Configurations: what is read, what is refused and with which words, and what `--help` says."""

import dataclasses
import inspect
import re
import typing
from pathlib import Path

import pytest

from leangrpo.configs import (
    Config,
    ConfigError,
    check_config,
    describe_keys,
    dump_config,
    load_config,
    packaged_configs,
    resume_differences,
)
from leangrpo.configs.help import nearest_keys
from leangrpo.configs.schema import AdvantageConfig, AlgorithmConfig, RewardConfig, SamplerConfig

LORA = "digits_flowgrpo_lora"
MINIMAL = "out_dir: runs/x\n"


def refusal(tmp_path: Path, text: str, overrides: tuple[str, ...] = ()) -> str:
    """The error for a file `run.yaml` with this text, its folder left out."""
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(str(path), overrides)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message.replace(f"{tmp_path}/", "")


# File (after out_dir, so line 2 is the first), key and value, where it was said, the way out.
MALFORMED_FILES = {
    "unknown key": ("shedule: native", "shedule=", "run.yaml, line 2", "did you mean schedule?"),
    "wrong section": ("learning_rate: 1e-3", "learning_rate=0.001", "line 2", "optimizer.learning_rate?"),
    "initials": ("lr: 1e-3", "lr=0.001", "run.yaml, line 2", "did you mean optimizer.learning_rate?"),
    "unknown section": ("optimiser: {beta1: 0}", 'optimiser={"beta1": 0}', "line 2", "did you mean optimizer?"),
    "nested": ("sampler:\n  steps: 8", "sampler.steps=8", "line 3", "did you mean sampler.denoising_steps"),
    "in a list": ("rewards:\n- {name: x, wieght: 2}", "rewards.0.wieght=2", "line 3", "mean rewards.0.weight?"),
    "nothing alike": ("zzz: 1", "zzz=1", "run.yaml, line 2", "leangrpo train --help"),
    "text for integer": ("updates: many", 'updates="many"', "run.yaml, line 2", "an integer >= 1"),
    "float for integer": ("updates: 60.0", "updates=60.0", "run.yaml, line 2", "an integer >= 1"),
    "boolean for integer": ("updates: true", "updates=true", "run.yaml, line 2", "an integer >= 1"),
    "boolean for ddof": ("algorithm: {advantage: {ddof: true}}", "advantage.ddof=true", "line 2", ">= 0 and <= 1"),
    "quoted number": ('updates: "60"', 'updates="60"', "run.yaml, line 2", "an integer >= 1"),
    "yes for true": ("resume: yes", 'resume="yes"', "run.yaml, line 2", "true or false"),
    "no choice": ("schedule: rewieght", 'schedule="rewieght"', "line 2", "native, retain or reweight; did you mean"),
    "union": ("checkpointing: 0", "checkpointing=0", "run.yaml, line 2", "none, all or an integer >= 1"),
    "too small": ("group_size: 1", "group_size=1", "run.yaml, line 2", "an integer >= 2"),
    "negative": ("optimizer:\n  learning_rate: -1e-3", "optimizer.learning_rate=-0.001", "line 3", "a number > 0"),
    "infinite": ("sampler: {eta: 1e999}", "sampler.eta=Infinity", "run.yaml, line 2", "a number > 0"),
    "not a number": ("sampler: {eta: .nan}", 'sampler.eta=".nan"', "line 2", "a number > 0"),
    "octal": ("seed: 010", 'seed="010"', "run.yaml, line 2", "an integer >= 0"),
    "empty section": ("sampler:", "sampler=null", "line 2", "denoising_steps, shift, transition, eta"),
    "list for section": ("sampler: [1]", "sampler=[1]", "line 2", "denoising_steps, shift, transition, eta"),
    "no list": ("rewards: {name: x}", 'rewards={"name": "x"}', "line 2", "a list of one or more: {name, weight}"),
    "empty list": ("rewards: []", "rewards=[]", "run.yaml, line 2", "a list of one or more: {name, weight}"),
    "wrong entry": ("evaluation: {metrics: [acuracy]}", "evaluation.metrics.0=", "line 2", "did you mean accuracy?"),
    "missing in a list": ("rewards:\n- weight: 2", "rewards.0.name (", "line 3", "digits_classifier, jpeg"),
    "empty text": ('prompts: ""', 'prompts=""', "run.yaml, line 2", "non-empty text"),
    "duplicate": ("seed: 1\nseed: 2", "seed is there twice", "run.yaml, line 3", "run.yaml, line 2); remove one"),
    "tab": ("sampler:\n\teta: 1", "found character '\\t'", "run.yaml, line 3", "indent with spaces"),
    "syntax": ("rewards: [\nseed: 1", "run.yaml", "line 3", "expected ',' or ']'"),
    "control character": ("prompts: a\0b", "#x0000", "run.yaml, line 2", "is not allowed"),
    "dotted": ("sampler.eta: 1", "sampler.eta", "run.yaml, line 2", "sampler: and below it, indented, eta:"),
    "alias": ("seed: &a 1\nupdates: *a", "aliases", "run.yaml, line 3", "write the value out"),
    "tag": ("prompts: !!python/name:os.system x", '"x"', "run.yaml, line 2", "remove that"),
    "key that is no word": ("[a]: 1", "a key", "run.yaml, line 2", "must be a word"),
}


@pytest.mark.parametrize("case", MALFORMED_FILES)
def test_malformed_file(case: str, tmp_path: Path) -> None:
    text, *parts = MALFORMED_FILES[case]
    message = refusal(tmp_path, MINIMAL + text)
    assert not [part for part in parts if part not in message], message


# Overrides of the packaged LoRA configuration, key and value, where it was said, the way out.
LINE, REWEIGHT = "command line", "schedule=reweight"
MALFORMED_OVERRIDES = {
    "no equals sign": (["updates"], "updates (command line)", "not key=value", "write updates=VALUE"),
    "no key": (["=3"], "=3 (command line)", "not key=value", "write optimizer.learning_rate=1e-3"),
    "no value": (["updates="], "updates=", LINE, "an integer >= 1"),
    "unknown": (["optimiser.learning_rate=1"], "optimiser.learning_rate=1", LINE, "mean optimizer.learning_rate?"),
    "below a value": (["updates.x=3"], "updates.x=3", LINE, "write updates=VALUE"),
    "a section": (["optimizer={beta1: 0}"], "optimizer={beta1: 0}", LINE, "one by one: name, learning_rate"),
    "not YAML": (["rewards=[{name: a"], "rewards=[{name: a", LINE, "a list of one or more: {name, weight}"),
    "beyond the list": (["rewards.1.weight=2"], "rewards.1.weight=2", "rewards has length 1", "set rewards=[...]"),
    "unknown in a list": (["rewards.0.wieght=2"], "rewards.0.wieght=2", LINE, "mean rewards.0.weight?"),
    "wrong type": (["policy.lora.rank=4.0"], "policy.lora.rank=4.0", LINE, "an integer >= 1"),
    "last one wins": (["seed=1", "seed=x"], 'seed="x"', LINE, "an integer >= 0"),
    "no step": (["algorithm.selected_steps=0"], "algorithm.selected_steps=0", LINE, "use 1 to 8"),
    "S > T": (["algorithm.selected_steps=9"], "algorithm.selected_steps=9", LINE, "use at most 8"),
    "T < S of the file": (["sampler.denoising_steps=2"], "algorithm.selected_steps=4", "yaml, line", "use at most 2"),
    "random, S = T": (
        ["algorithm.selected_steps=8", "algorithm.selection=random"],
        "algorithm.selected_steps=8",
        "leaves out the last step",
        "use at most 7",
    ),
    "window, S = T = 1": (
        ["algorithm.selected_steps=1", "algorithm.selection=window", "sampler.denoising_steps=1"],
        "algorithm.selected_steps=1",
        LINE,
        "sampler.denoising_steps=1; use algorithm.selection=first",
    ),
    "cps, last step": (
        ["sampler.transition=cps", "algorithm.selected_steps=8"],
        "algorithm.selected_steps=8",
        "no log-probability",
        "use at most 7",
    ),
    "cps, eta": (["sampler.transition=cps", "sampler.eta=1.5"], "sampler.eta=1.5", LINE, "use at most 1"),
    "no divisor": (["samples_per_forward=3"], "samples_per_forward=3", "group_size=8", "use 2 or 4"),
    "beyond the group": (["samples_per_forward=16"], "samples_per_forward=16", LINE, "use 8"),
    "premature reduction": ([REWEIGHT, "sync=every_backward"], 'sync="every_', "advantage", "every_group or every_upd"),
    "resharded": (["residency=resharded"], 'residency="resharded"', "always whole", "use resident"),
    "odd best of n": (["algorithm.advantage.best_of_n=3"], "best_of_n=3", "group_size=8", "even number from 2 to 8"),
    "large best of n": (["algorithm.advantage.best_of_n=10"], "best_of_n=10", LINE, "even number from 2 to 8"),
    "streamed best of n": (
        ["algorithm.advantage.best_of_n=4", REWEIGHT, "buffers=streaming"],
        "best_of_n=4",
        "affine",
        "use buffers=per_sample",
    ),
    "no weight": (["rewards.0.weight=0"], "rewards.0.weight=0", LINE, "a weight other than 0"),
    "same reward twice": (
        ["rewards=[{name: digits_classifier}, {name: digits_classifier, weight: 2}]"],
        'rewards.1.name="digits_classifier"',
        LINE,
        "write it once",
    ),
    "without effect": (
        ["policy.weights=full", "policy.lora.rank=4"],
        "policy.lora.rank=4",
        "policy.weights=full",
        "leave it out",
    ),
}


@pytest.mark.parametrize("case", MALFORMED_OVERRIDES)
def test_malformed_override(case: str) -> None:
    overrides, *parts = MALFORMED_OVERRIDES[case]
    with pytest.raises(ConfigError) as caught:
        load_config(LORA, overrides)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert not [part for part in parts if part not in message], message


@pytest.mark.parametrize(
    "text, fragment",
    [
        ("", "run.yaml, line 1: nothing is there; write at least out_dir"),
        ("# only a comment\n", "run.yaml, line 1: nothing is there; write at least out_dir"),
        ("- a\n", 'run.yaml, line 1: ["a"] instead of a mapping'),
        ("updates: 3\n", "out_dir (run.yaml): is missing; give non-empty text (folder of the run"),
    ],
)
def test_malformed_whole_file(text: str, fragment: str, tmp_path: Path) -> None:
    assert fragment in refusal(tmp_path, text)


def test_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"out_dir: \xff\n")
    with pytest.raises(ConfigError, match=r"run\.yaml: cannot be read: .*utf-8"):
        load_config(str(path))


def test_first_of_several_errors_is_shown_with_their_number(tmp_path: Path) -> None:
    message = refusal(tmp_path, "updates: 0\nlr: 1\n")  # out_dir is missing, too
    assert message.startswith("lr=1 (run.yaml, line 2): unknown key")
    assert message.endswith("(and 2 more)")
    assert "more)" not in refusal(tmp_path, MINIMAL + "updates: 0\n")
    assert refusal(tmp_path, "updates: 0\n" + MINIMAL, ("lr=1",)).endswith("(and 1 more)")


def test_impossible_combinations_are_counted_too(tmp_path: Path) -> None:
    message = refusal(tmp_path, MINIMAL, ("schedule=reweight", "sync=every_backward", "residency=resharded"))
    assert message.startswith("sync=")
    assert message.endswith("(and 1 more)")


def test_error_is_one_line_whatever_was_written(tmp_path: Path) -> None:
    message = refusal(tmp_path, MINIMAL + '"a\\nb\\e[31m\\u2028c": "x\\ny"\n')
    assert message.startswith('a b [31m c="x\\ny"')
    assert len(refusal(tmp_path, MINIMAL + f"updates: {'9' * 5000}\n")) < 200


@pytest.mark.parametrize(
    "source, nearest",
    [("digits_flowgrpo_ful", "digits_flowgrpo_full"), ("configs/digit_flowgrpo_lora.yaml", LORA)],
)
def test_unknown_configuration_names_the_packaged_ones_nearest_first(source: str, nearest: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    listed = str(caught.value).rsplit("packaged are ", 1)[1].split(", ")
    assert source in str(caught.value)
    assert listed[0] == nearest
    assert sorted(listed) == packaged_configs()


@pytest.mark.parametrize("name", packaged_configs())
def test_packaged_configuration_is_found_from_another_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(name)
    check_config(config)
    assert config.out_dir == f"runs/{name}"
    for other in (f"{name}.yaml", f"configs/{name}", f"configs/{name}.yaml", f"./configs/{name}.yaml"):
        assert load_config(other) == config
    (tmp_path / "configs").mkdir()
    (tmp_path / f"configs/{name}.yaml").write_text(MINIMAL)
    assert load_config(f"configs/{name}.yaml").out_dir == "runs/x"


def test_packaged_configurations_differ_in_what_is_trained_only() -> None:
    lora, full = load_config(LORA), load_config("digits_flowgrpo_full")
    different = {key for key, _, _ in resume_differences(lora, full)}
    assert different == {"policy.weights", "policy.lora.target_modules", "optimizer.learning_rate"}


def test_packaged_prompts() -> None:
    lines = (Path(inspect.getfile(load_config)).parent / "prompts/digits.txt").read_text().splitlines()
    assert lines == ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


@pytest.mark.parametrize(
    "overrides, expected",
    [
        (["optimizer.learning_rate=1e-4"], {"optimizer.learning_rate": 1e-4}),
        (["optimizer.learning_rate=.5", "sampler.eta=2"], {"optimizer.learning_rate": 0.5, "sampler.eta": 2.0}),
        (["seed=1", "seed=2"], {"seed": 2}),
        (["threads=2", "threads=null"], {"threads": None}),
        (["checkpointing=2"], {"checkpointing": 2}),
        (["checkpointing=all", "resume=true"], {"checkpointing": "all", "resume": True}),
        (["out_dir=on", "prompts=no"], {"out_dir": "on", "prompts": "no"}),
        (['out_dir="12"'], {"out_dir": "12"}),
        (["out_dir=a=b"], {"out_dir": "a=b"}),
        (["evaluation.metrics=[accuracy]"], {"evaluation.metrics": ("accuracy",)}),
        (["policy.lora.target_modules.1=x"], {"policy.lora.target_modules.1": "x"}),
        (["rewards.0.weight=2"], {"rewards.0.weight": 2.0, "rewards.0.name": "digits_classifier"}),
        (["rewards=[{name: jpeg_compressibility, weight: 2}]"], {"rewards.0.name": "jpeg_compressibility"}),
        (["rewards=[{name: jpeg_compressibility}]", "rewards.0.weight=3"], {"rewards.0.weight": 3.0}),
        (["algorithm.advantage.epsilon=0"], {"algorithm.advantage.epsilon": 0.0}),
        (["algorithm.advantage.normalise=per_reward"], {"algorithm.advantage.normalise": "per_reward"}),
        (["algorithm.selected_steps=8"], {"algorithm.selected_steps": 8}),
        (["schedule=native", "sync=every_backward"], {"sync": "every_backward"}),
        (["algorithm.advantage.best_of_n=4", "buffers=per_sample"], {"algorithm.advantage.best_of_n": 4}),
        (["algorithm.advantage.best_of_n=8", "schedule=retain"], {"algorithm.advantage.best_of_n": 8}),
    ],
)
@pytest.mark.parametrize("in_file", [True, False], ids=["over the recipe", "over the defaults"])
def test_overrides(overrides: list[str], expected: dict[str, object], in_file: bool, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(MINIMAL)
    config = load_config(LORA if in_file else str(tmp_path / "run.yaml"), overrides)
    for key, value in expected.items():
        found: typing.Any = config
        for part in key.split("."):
            found = found[int(part)] if part.isdecimal() else getattr(found, part)
        assert found == value
        assert type(found) is type(value)


def test_override_takes_the_place_of_what_the_file_said(tmp_path: Path) -> None:
    assert "(command line)" in refusal(tmp_path, MINIMAL + "updates: 3\n", ("updates=x",))
    reward = MINIMAL + "rewards:\n- name: digits_classifier\n"
    assert refusal(tmp_path, reward, ("rewards=[{weight: 2}]",)).startswith("rewards.0.name (command line)")


def test_override_of_a_default_leaves_the_default_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(MINIMAL)
    assert load_config(str(tmp_path / "run.yaml"), ["rewards.0.weight=3"]).rewards[0].weight == 3
    changed = load_config(str(tmp_path / "run.yaml"), ["rewards.0.name=jpeg_compressibility"])
    assert changed.rewards == (RewardConfig(name="jpeg_compressibility", weight=1.0),)


def test_recipe_for_adapters_serves_full_training_as_well() -> None:
    assert load_config(LORA, ["policy.weights=full"]).policy.weights == "full"


def test_file_is_read_by_the_rules_of_yaml_1_2(tmp_path: Path) -> None:
    text = "out_dir: off\nseed: -0\nsampler: {eta: 5E-1, shift: 3}\noptimizer:\n  learning_rate: 1e-3\n"
    (tmp_path / "run.yaml").write_text(text + "prompts: 2025-12-01\nthreads: ~\nlogging: {progress: False}\n")
    config = load_config(str(tmp_path / "run.yaml"))
    assert (config.out_dir, config.seed, config.prompts, config.threads) == ("off", 0, "2025-12-01", None)
    assert (config.sampler.eta, config.sampler.shift, config.optimizer.learning_rate) == (0.5, 3.0, 1e-3)
    assert config.logging.progress is False


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["schedule=native", "checkpointing=3", "threads=2", "algorithm.beta=0.04", "seed=9223372036854775807"],
        ["optimizer.learning_rate=1e-30", "optimizer.epsilon=1e22", "rewards.0.weight=-0.5"],
        *([f'out_dir="{text}"'] for text in ("1e-4", "null", "~", "010", "no", "a: b #c", "é\\n\\tz", " ", "*a")),
        ['out_dir="' + "word " * 60 + '"'],
        ["rewards=[{name: jpeg_compressibility, weight: 0.005}, {name: digits_classifier}]"],
    ],
)
def test_dumped_configuration_is_read_back(overrides: list[str], tmp_path: Path) -> None:
    config = load_config(LORA, overrides)
    text = dump_config(config)
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    assert load_config(str(path)) == config
    assert dump_config(load_config(str(path))) == text
    assert re.findall(r"^(\w+):", text, re.MULTILINE) == [one.name for one in dataclasses.fields(Config)]


def keys_of(section: type, prefix: str = "") -> dict[str, object]:
    """Every dotted key of the dataclasses and its default, found without `leangrpo.configs.help`."""
    found: dict[str, object] = {}
    types = typing.get_type_hints(section)
    for one in dataclasses.fields(section):
        key, kind = prefix + one.name, types[one.name]
        if dataclasses.is_dataclass(kind):
            found |= keys_of(typing.cast(type, kind), f"{key}.")
        else:
            found[key] = one.default
    return found


def test_help_lists_every_key_with_its_default_in_80_columns() -> None:
    lines = describe_keys().splitlines()
    assert max(map(len, lines)) <= 80
    headings = [match for line in lines if (match := re.match(r"  (\S+?)(?:=(\S+)| )", line)) and line[2] != " "]
    listed = {match[1]: match[2] for match in headings}
    expected = keys_of(Config) | {f"rewards.N.{key}": value for key, value in keys_of(RewardConfig).items()}
    assert list(listed) == list(dict.fromkeys(listed))
    assert set(listed) == set(expected)
    for key, default in expected.items():
        if isinstance(default, int | float) and not isinstance(default, bool):
            assert float(listed[key]) == default
        elif isinstance(default, str):
            assert listed[key] == default


def test_help_says_type_unit_and_meaning_of_every_key() -> None:
    text = describe_keys()
    assert "out_dir (required; non-empty text)\n      folder of the run" in text
    assert "schedule=auto (auto, native, retain or reweight)\n      recompute" in text
    assert "checkpointing=auto (auto, none, all or an integer >= 1)\n" in text
    assert "samples_per_forward=auto (auto or an integer >= 1)\n" in text
    assert "beta1=0.9 (a number >= 0 and < 1)\n" in text
    assert "threads=null (an integer >= 1 or null)\n" in text
    assert "sampler: How a trajectory is drawn.\n  sampler.denoising_steps=8" in text
    for key, unit in {"sampler.denoising_steps": "steps", "evaluation.every": "updates", "samples": "images"}.items():
        assert re.search(rf"{key}=\d+ .*\n( {{6}}.*\n)*? {{6}}.*unit: {unit}", text), key
    blocks = re.split(r"\n(?=  \S)", "\n" + text)[1:]
    assert all(re.search(r"\n {6}\S", block) for block in blocks)


def test_nearest_keys_looks_at_the_whole_name_the_last_part_and_initials() -> None:
    assert nearest_keys("optimizer.lr") == ["optimizer.learning_rate"]
    assert nearest_keys("checkpoint.evry")[0] == "checkpoint.every"
    assert nearest_keys("algorithm.group_size") == ["group_size"]
    assert nearest_keys("every") == ["evaluation.every", "checkpoint.every"]
    assert nearest_keys("clip")[0] == "algorithm.clip_range"
    assert nearest_keys("evaluation.steps")[0] == "evaluation.denoising_steps"
    assert nearest_keys("zzz") == []


def test_check_config_serves_configurations_made_in_python() -> None:
    check_config(Config(out_dir="x"))
    algorithm = AlgorithmConfig(selected_steps=3)
    with pytest.raises(ConfigError, match=r"^algorithm.selected_steps=3 \(configuration\): .* at most 2"):
        check_config(Config(out_dir="x", algorithm=algorithm, sampler=SamplerConfig(denoising_steps=2)))
    best = AlgorithmConfig(advantage=AdvantageConfig(best_of_n=4))
    with pytest.raises(ConfigError, match=r"an even number from 2 to 2,"):
        check_config(Config(out_dir="x", algorithm=best, group_size=3))


def test_default_that_does_not_fit_is_called_default(tmp_path: Path) -> None:
    message = refusal(tmp_path, MINIMAL + "algorithm: {selection: first}\nsampler: {denoising_steps: 3}\n")
    assert message.startswith("algorithm.selected_steps=4 (default): more than sampler.denoising_steps=3")


def test_resume_differences() -> None:
    old = load_config(LORA)
    free = ["updates=99", "resume=true", "out_dir=y", "logging.progress=false", "checkpoint.every=1"]
    assert resume_differences(old, load_config(LORA, [*free, "evaluation.samples=10"])) == []
    new = load_config(LORA, ["threads=2", "device=cpu", "optimizer.beta2=0.5", "rewards.0.weight=2"])
    different = {key: (before, after) for key, before, after in resume_differences(old, new)}
    assert list(different) == ["device", "threads", "rewards", "optimizer.beta2"]
    assert different["optimizer.beta2"] == (0.99, 0.5)
