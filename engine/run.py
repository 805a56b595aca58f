"""A whole training run: the loop around `Engine.train_step`, and everything that it leaves in `out_dir`.

out_dir/config.yaml the resolved configuration; plan.json how updates are executed, and why; metrics.jsonl and
evaluations.jsonl; images/ before, during and after; reward_curve.png; checkpoints/; policy/ the trained weights in
diffusers' format.
"""

import dataclasses
import logging
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from leangrpo.configs.checks import ConfigError
from leangrpo.configs.schema import Config
from leangrpo.engine import checkpoint as checkpoints
from leangrpo.engine.distributed import World
from leangrpo.engine.evaluation import evaluate
from leangrpo.engine.images import save_curves, save_grid
from leangrpo.engine.measurement import PlanCheck
from leangrpo.engine.metrics import EVALUATIONS_FILE, METRICS_FILE, MetricsLog, read_lines, refuse_missing_wandb
from leangrpo.engine.planning import choose, explain
from leangrpo.engine.prompts import load_prompts, prompts_of_update
from leangrpo.engine.run_folder import find_checkpoint, note_measured, read_begun, take
from leangrpo.engine.trainer import Engine
from leangrpo.engine.types import StepMetrics

log = logging.getLogger("leangrpo")

RATIO_NOTE = {
    "native": "ratio: recomputed with the parameters of the rollout, so it is 1 up to rounding in the first optimizer "
    "step of a rollout; watch grad_norm, and ratio_deviation, which should be 0",
    "retain": "ratio: the rollout's own graph is the update, so it is exactly 1 in the first optimizer step of a "
    "rollout and the clip is inactive; watch grad_norm instead",
}
RATIO_NOTE["reweight"] = RATIO_NOTE["retain"]


class Run:
    """One run in `config.out_dir`, new or resumed; with several processes each has its own, and rank 0 writes.

    `plan` is what it follows; its choices stand in `self.config` where those of `config` are auto. ConfigError if the
    folder holds a run and resume is off, or if nothing that `config` allows can be executed.
    """

    def __init__(self, config: Config, world: World | None = None):
        self.directory = Path(config.out_dir)
        self.world = world or World()
        self.checkpoints = self.directory / "checkpoints"
        self.prompts = load_prompts(config.prompts)
        latest = find_checkpoint(config, self.prompts)
        refuse_missing_wandb(config.logging)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self.begun = read_begun(self.directory)
        self.plan = choose(config, self.world, self.begun)
        self.config = config = self.plan.candidate.resolve(config)
        self.engine = Engine.from_config(config, self.world)
        refuse_unreadable(self.prompts, self.engine)
        if latest is not None:
            resume(self.engine, latest)
        self.log: MetricsLog | None = None
        keeps_plan = self.world.broadcast(self.begun is not None and self.begun.keeps_plan(self.world.size))
        self.check = None if keeps_plan else PlanCheck(self.plan)
        self.world.barrier()  # nobody writes before all have looked
        if self.world.is_main:
            self.lock = take(config, self.prompts, None if keeps_plan else self.plan)
            if find_checkpoint(dataclasses.replace(config, resume=True), self.prompts) != latest:
                raise ConfigError(f"out_dir={config.out_dir}: another process has trained there meanwhile; start again")
            self.log = MetricsLog(self.directory, config.logging, dataclasses.asdict(config), self.engine.update)

    def train(self) -> Path:
        """Train to `config.updates` and return the run's folder."""
        config, engine = self.config, self.engine
        log.info(
            "%s, %s on %s: %s", config.algorithm.name, describe_policy(engine), engine.policy.device, describe(config)
        )
        log.info(explain(self.plan, self.begun))
        log.info(RATIO_NOTE[config.schedule])
        if engine.update == 0:
            self._evaluate("before")
        elif engine.update < config.updates:
            log.info("resumed after update %d", engine.update)
        with logging_redirect_tqdm(), self._progress_bar() as bar:
            while engine.update < config.updates:
                self._one_update(bar)
        return self._finish()

    def _progress_bar(self) -> Any:
        """Shows ETA, reward and throughput on a terminal; a log file gets the evaluations only."""
        done = min(self.engine.update, self.config.updates)
        hidden = None if self.config.logging.progress and self.world.is_main else True
        return tqdm(total=self.config.updates, initial=done, unit="update", disable=hidden, dynamic_ncols=True)

    def _one_update(self, bar: Any) -> None:
        config, engine = self.config, self.engine
        prompts = prompts_of_update(self.prompts, config.seed, engine.update, config.prompts_per_update)
        start = time.perf_counter()
        metrics = self.check.train_step(engine, prompts) if self.check else engine.train_step(prompts)
        seconds = time.perf_counter() - start
        if self.check and (self.check.updates == 2 or engine.update == config.updates):
            measured, self.check = self.check.conclude(engine, seconds), None
            if self.world.is_main:
                note_measured(self.directory, dataclasses.asdict(measured))
        report_dropped(metrics, engine.update)
        if engine.update == 1:
            refuse_drift(engine)
        values = to_json(metrics) | {"update": engine.update, "seconds": seconds}
        values["samples_per_second"] = metrics.samples / seconds
        last = engine.update == config.updates
        if last or engine.update % config.evaluation.every == 0:
            name = "after" if last else f"update_{engine.update:06d}"
            values |= {f"eval_{key}": score for key, score in self._evaluate(name).items()}
        if self.log is not None:
            self.log.update(values)
        if last or engine.update % config.checkpoint.every == 0:
            self._save()
        bar.set_postfix_str(
            f"reward {metrics.reward_mean:.3f}, {metrics.samples / seconds:.0f} samples/s", refresh=False
        )
        bar.update()

    def _evaluate(self, name: str) -> dict[str, float]:
        engine, config = self.engine, self.config
        evaluation = evaluate(engine.policy, engine.rewards, self.prompts, config.evaluation, config.seed)
        if self.log is not None:
            self.log.evaluation({"update": engine.update} | evaluation.scores)
            save_grid(evaluation.images, self.directory / "images" / f"{name}.png")
        scores = ", ".join(f"{key} {score:.3f}" for key, score in evaluation.scores.items())
        log.info("evaluation after update %d: %s", engine.update, scores)
        return evaluation.scores

    def _save(self) -> None:
        refuse_drift(self.engine)
        checkpoints.save_checkpoint(
            self.checkpoints, self.engine.update, self.engine.backend.save, self.world, self.config.checkpoint.keep
        )

    def _finish(self) -> Path:
        name = self.directory.name
        parameters = self.engine.backend.full_parameters()
        if self.log is not None:
            updates = {name: read_lines(self.directory / METRICS_FILE)}
            evaluations = {name: read_lines(self.directory / EVALUATIONS_FILE)}
            save_curves(updates, evaluations, self.directory / "reward_curve.png", title=name)
            self.engine.policy.save(self.directory / "policy", parameters)
            self.log.close()
        log.info("done: %d updates, everything in %s", self.engine.update, self.directory)
        return self.directory


def refuse_unreadable(prompts: list[str], engine: Engine) -> None:
    """ConfigError for a prompt that the policy cannot encode: now, and not in the middle of the run."""
    for prompt in prompts:
        try:
            engine.policy.encode(prompt, 1)
        except ValueError as error:
            raise ConfigError(f"prompts={engine.config.prompts}: {error}") from None


def refuse_drift(engine: Engine) -> None:
    """RuntimeError if ranks that should hold the same parameters do not. Collective."""
    drifted = engine.backend.drift()
    if drifted:
        raise RuntimeError(
            f"after update {engine.update} the ranks hold different values of {drifted}: they have drifted apart, and "
            "training on would mix two models; the last checkpoint is sound"
        )


def resume(engine: Engine, checkpoint: Path) -> None:
    """Bring `engine` to the state that `checkpoint` holds."""
    with checkpoints.readable(checkpoint):
        engine.backend.load(checkpoint)
        engine.update = checkpoints.read_update(checkpoint)
        checkpoints.restore_generators(checkpoint, engine.world.rank)


def to_json(metrics: StepMetrics) -> dict[str, Any]:
    """Flat: reward terms become `reward/NAME`."""
    values = dataclasses.asdict(metrics)
    terms = values.pop("reward_terms")
    return values | {f"reward/{name}": value for name, value in terms.items()}


def report_dropped(metrics: StepMetrics, update: int) -> None:
    """Say what was left out: a sample without a reward must not go unnoticed."""
    if metrics.dropped_samples:
        log.warning(
            "update %d: %d of %d samples had no finite reward and were dropped",
            update,
            metrics.dropped_samples,
            metrics.samples,
        )


def describe(config: Config) -> str:
    """The geometry of an update in a line."""
    how = config.schedule + (f" ({config.buffers})" if config.schedule == "reweight" else "")
    return (
        f"{config.updates} updates of {config.prompts_per_update} prompts x {config.group_size} samples, "
        f"{config.algorithm.selected_steps} of {config.sampler.denoising_steps} denoising steps trained, {how}"
    )


def describe_policy(engine: Engine) -> str:
    """Name and number of trainable parameters."""
    policy = engine.config.policy
    return f"{policy.name} ({policy.weights}, {engine.gradients.numel:,} trainable parameters)"
