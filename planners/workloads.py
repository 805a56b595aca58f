"""From a configuration to what it asks of the machine: `Workload`, trace, hardware."""

from typing import Any

from leangrpo.configs.schema import CHOICES, Config
from leangrpo.planners.hardware import detect_hardware, parse_hardware
from leangrpo.planners.model_trace import LoraSpec, find_model, trace_model
from leangrpo.planners.models import ModelSpec
from leangrpo.planners.types import BYTES, HardwareSpec, OtherModel, PolicyTrace, Workload

# Parameters, and FLOPs and bytes of activations per image, of reward models: ViT-H/14 with its text tower (HPSv2.1,
# PickScore), the digits' convolutions; the others run on the host's cores.
REWARD_MODELS = {
    "hpsv2": (986_109_441, 3.4e11, 0),
    "pickscore": (985_981_440, 3.4e11, 0),
    "digits_classifier": (38_314, 7.2e6, 2 * 4 * 32 * 16 * 16),  # in and out of its second layer
}


def workload_of(config: Config) -> Workload:
    """What one update of `config` has to compute."""
    advantage = config.algorithm.advantage
    return Workload(
        weights=config.policy.weights,
        group_size=config.group_size,
        prompts_per_update=config.prompts_per_update,
        denoising_steps=config.sampler.denoising_steps,
        selected_steps=config.algorithm.selected_steps,
        updates_per_rollout=config.updates_per_rollout,
        beta=config.algorithm.beta,
        global_std=advantage.std == "global",
        reward_terms=len(config.rewards) if advantage.normalise == "per_reward" else 1,
        affine_advantage=advantage.best_of_n is None,
        precision=config.precision,
        optimizer=config.optimizer.name,
        optimizer_states=config.optimizer.states,
        backend=config.backend,
        shard_ranks=config.shard_ranks,
        ranks_per_prompt=config.ranks_per_prompt,
        other_models=_other_models(config, find_model(config.policy.name)),
    )


def trace_of(config: Config) -> PolicyTrace:
    """The policy of `config`, traced or read from the cache."""
    policy = config.policy
    lora = LoraSpec(rank=policy.lora.rank, target_modules=policy.lora.target_modules)
    return trace_model(
        policy.name,
        lora=lora if policy.weights == "lora" else None,
        height=policy.height,
        width=policy.width,
        frames=policy.frames,
        guided=config.sampler.guidance not in (None, 1.0),
        dtype=config.precision,
    )


def pins_of(config: Config) -> dict[str, Any]:
    """The choices that `config` does not leave to the planner."""
    return {name: value for name in CHOICES if (value := getattr(config, name)) != "auto"}


def hardware_of(config: Config) -> HardwareSpec:
    """What `config` names, or this machine."""
    return parse_hardware(config.hardware) if config.hardware else detect_hardware(device=config.device)


def _other_models(config: Config, spec: ModelSpec) -> tuple[OtherModel, ...]:
    policy = config.policy
    height, width, frames = (getattr(policy, one) or getattr(spec, one) for one in ("height", "width", "frames"))
    models = []
    working = BYTES[config.precision]
    if policy.text_encoders != "precomputed":
        models.append(
            OtherModel(
                name="text encoders",
                bytes=spec.text_encoder_parameters * working,
                flops=2.0 * spec.text_encoder_parameters * spec.text_encoder_tokens,
                per="prompt",
                place=policy.text_encoders,
            )
        )
    if spec.vae_parameters:
        flops = spec.decode_flops * height * width * frames
        models.append(
            OtherModel(
                name="VAE", bytes=spec.vae_parameters * working, flops=flops, per="sample", place=policy.vae_and_rewards
            )
        )
    for term in config.rewards:
        if term.name in REWARD_MODELS:
            parameters, flops, activations = REWARD_MODELS[term.name]
            models.append(
                OtherModel(
                    name=term.name,
                    bytes=parameters * working,
                    flops=flops,
                    per="sample",
                    place=policy.vae_and_rewards,
                    working_bytes=activations,
                )
            )
    return tuple(models)
