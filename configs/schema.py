"""What users write: `Config`, one frozen dataclass per section of a run's YAML file.

Every key carries its range, its unit and one sentence; `leangrpo train --help` prints them from
here. The types are pydantic dataclasses: unknown keys, wrong types and values out of range are
errors, nothing is converted silently. Choices that are impossible only together with others are
refused in `leangrpo.configs.checks`.
"""

from dataclasses import field
from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

STRICT = ConfigDict(extra="forbid", strict=True)

Auto = Literal["auto"]
Backend = Literal["replicated", "fsdp2", "hsdp", "zero1", "zero2", "zero3"]
Schedule = Literal["native", "retain", "reweight"]
Buffers = Literal["per_sample", "streaming", "streaming_sharded"]
BufferDtype = Literal["float32", "bfloat16"]
BufferDevice = Literal["device", "host"]
Sync = Literal["every_backward", "every_group", "every_update"]
Residency = Literal["resharded", "resident"]
Checkpointing = Literal["none", "all"] | Annotated[int, Field(ge=1)]
PositiveInt = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Decay = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]

CHOICES = (
    "schedule",
    "buffers",
    "buffer_dtype",
    "buffer_device",
    "sync",
    "checkpointing",
    "residency",
    "samples_per_forward",
)
"""the keys that say how an update is executed: pinned, or auto and then chosen by the planner"""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LoraConfig:
    """Low-rank adapters through peft; used with policy.weights=lora."""

    rank: Annotated[PositiveInt, Field(description="rank r of the adapters")] = 8
    alpha: Annotated[PositiveInt, Field(description="scale: the adapters' output is multiplied by alpha / rank")] = 16
    target_modules: Annotated[
        tuple[str, ...],
        Field(min_length=1, description="suffixes of the Linear layers that get an adapter"),
    ] = (
        "to_q",
        "to_k",
        "to_v",
        "to_out.0",
        "add_q_proj",
        "add_k_proj",
        "add_v_proj",
        "to_add_out",
    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PolicyConfig:
    """The model that is trained."""

    name: Annotated[
        Literal["digits", "sd15", "sd3-medium", "sd35-medium", "flux1-dev", "wan21-1.3b", "wan21-14b", "wan22-ti2v-5b"],
        Field(
            description="digits: the embedded SD3 transformer on images of 16 x 16 pixels; "
            "the others can be planned, not trained"
        ),
    ] = "digits"
    weights: Annotated[
        Literal["lora", "full"],
        Field(description="train adapters, or every parameter of the transformer"),
    ] = "lora"
    height: Annotated[PositiveInt | None, Field(description="height of a sample; null: the model's; unit: pixels")] = (
        None
    )
    width: Annotated[PositiveInt | None, Field(description="width of a sample; null: the model's; unit: pixels")] = None
    frames: Annotated[
        PositiveInt | None, Field(description="length of a video, 1: an image; null: the model's; unit: frames")
    ] = None
    text_encoders: Annotated[
        Literal["device", "host", "precomputed"],
        Field(description="where text encoders wait between prompts; precomputed: embeddings are read, none is loaded"),
    ] = "device"
    vae_and_rewards: Annotated[
        Literal["device", "host"],
        Field(description="where the VAE and the models among the rewards wait between uses"),
    ] = "device"
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SamplerConfig:
    """How a trajectory is drawn."""

    denoising_steps: Annotated[PositiveInt, Field(description="T, denoising steps of a rollout; unit: steps")] = 8
    shift: Annotated[Positive, Field(description="timestep shift k of the sigmas; 1: equally spaced")] = 1.0
    transition: Annotated[
        Literal["flow_sde", "cps", "dance_sde"],
        Field(description="the stochastic step: of Flow-GRPO, coefficients-preserving, DanceGRPO"),
    ] = "flow_sde"
    eta: Annotated[Positive, Field(description="noise level of the stochastic step; cps: at most 1")] = 0.7
    guidance: Annotated[
        NonNegative | None,
        Field(description="guidance scale; doubles the batch where it is no input of the model; null: none"),
    ] = None
    unselected: Annotated[
        Literal["sde", "ode"],
        Field(description="steps that are not trained: with noise (sde), or Euler steps (ode)"),
    ] = "sde"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class AdvantageConfig:
    """From rewards to advantages: (reward - mean of the group) / (std + epsilon), clamped."""

    std: Annotated[
        Literal["group", "global"],
        Field(description="standard deviation over the group, or over all rewards of the update"),
    ] = "group"
    ddof: Annotated[int, Field(ge=0, le=1, description="divisor of the variance: n - ddof, n rewards")] = 0
    epsilon: Annotated[NonNegative, Field(description="added to the standard deviation")] = 1e-4
    clamp: Annotated[
        Positive,
        Field(description="advantages are clamped to +- this; unit: standard deviations"),
    ] = 5.0
    normalise: Annotated[
        Literal["sum", "per_reward"],
        Field(description="weighted sum of the rewards first, or each reward by itself"),
    ] = "sum"
    best_of_n: Annotated[
        PositiveInt | None,
        Field(
            description="train only the n/2 best and the n/2 worst samples of a group; even; null: all; unit: images"
        ),
    ] = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class AlgorithmConfig:
    """The policy-gradient objective."""

    name: Annotated[
        Literal["flow_grpo", "dance_grpo"],
        Field(description="flow_grpo: Flow-GRPO, arXiv 2505.05470; dance_grpo: DanceGRPO, arXiv 2505.07818, plan only"),
    ] = "flow_grpo"
    selected_steps: Annotated[
        int, Field(description="S, trained denoising steps per trajectory, 1 to T; unit: steps")
    ] = 4
    selection: Annotated[
        Literal["first", "random", "window"],
        Field(
            description="the first S steps; or, the last step left out, S random ones, "
            "or S consecutive ones from a random start"
        ),
    ] = "first"
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    clip_range: Annotated[Positive, Field(description="PPO clip of the ratio: 1 +- this")] = 1e-2
    beta: Annotated[NonNegative, Field(description="weight of the KL term to the frozen base; 0: no such term")] = 0.0
    kl_form: Annotated[
        Literal["flow_grpo", "exact"],
        Field(description="KL of the Gaussians without dt, as in flow_grpo's code, or exact"),
    ] = "flow_grpo"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RewardConfig:
    """One term of the reward; N counts from 0."""

    name: Annotated[
        Literal["digits_classifier", "jpeg_compressibility", "hpsv2", "pickscore", "ocr"],
        Field(
            description="probability (0 to 1) of the prompted digit; minus the JPEG size in bytes; the others can be "
            "planned, not trained"
        ),
    ]
    weight: Annotated[
        float,
        Field(allow_inf_nan=False, description="factor of this term, e.g. 0.005 per JPEG byte"),
    ] = 1.0


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OptimizerConfig:
    """AdamW with float32 master weights and states."""

    name: Annotated[
        Literal["adamw", "adamw_8bit"],
        Field(description="torch's AdamW, or bitsandbytes' AdamW with 8-bit states"),
    ] = "adamw"
    learning_rate: Annotated[Positive, Field(description="learning rate, constant")] = 3e-4
    beta1: Annotated[Decay, Field(description="decay of the first moment, per step")] = 0.9
    beta2: Annotated[Decay, Field(description="decay of the second moment, per step")] = 0.999
    epsilon: Annotated[Positive, Field(description="Adam's epsilon")] = 1e-8
    weight_decay: Annotated[NonNegative, Field(description="decoupled weight decay")] = 0.0
    max_grad_norm: Annotated[Positive, Field(description="gradients are clipped to this global L2 norm")] = 1.0
    states: Annotated[
        Literal["device", "host"],
        Field(description="where the moments wait between steps; host: two copies per step, less memory in between"),
    ] = "device"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EvaluationConfig:
    """Deterministic sampling (Euler, no noise) from latents that training never sees."""

    every: Annotated[
        PositiveInt,
        Field(description="time between two evaluations, also before and after; unit: updates"),
    ] = 20
    samples: Annotated[
        PositiveInt,
        Field(description="size of an evaluation, spread over the prompts; unit: images"),
    ] = 200
    denoising_steps: Annotated[PositiveInt, Field(description="Euler steps per image; unit: steps")] = 8
    metrics: Annotated[
        tuple[Literal["accuracy", "judge_accuracy", "diversity", "jpeg_bytes"], ...],
        Field(
            description="accuracy: of the reward classifier, 0 to 1; judge_accuracy: of a judge "
            "that is never the reward; diversity: standard deviation of a pixel (0 to 1) within "
            "a prompt; jpeg_bytes: mean file size in bytes"
        ),
    ] = ("accuracy", "judge_accuracy", "diversity")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CheckpointConfig:
    """What a resumed run starts from."""

    every: Annotated[
        PositiveInt,
        Field(description="time between two checkpoints, also at the end; unit: updates"),
    ] = 10
    keep: Annotated[PositiveInt, Field(description="number of latest checkpoints kept")] = 2


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LoggingConfig:
    """What is written beside metrics.jsonl, which is always written."""

    tensorboard: Annotated[bool, Field(description="write TensorBoard event files to OUT_DIR/tensorboard")] = True
    wandb_project: Annotated[
        Annotated[str, Field(min_length=1)] | None,
        Field(description="Weights & Biases project; null: none; needs leangrpo[wandb]"),
    ] = None
    progress: Annotated[bool, Field(description="show a progress bar, if the output is a terminal")] = True


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Config:
    """One run."""

    out_dir: Annotated[str, Field(min_length=1, description="folder of the run: metrics, images, checkpoints")]
    seed: Annotated[int, Field(ge=0, lt=2**63, description="everything random follows from it")] = 0
    updates: Annotated[
        PositiveInt,
        Field(description="length of the run, each a rollout and its optimizer steps"),
    ] = 60
    resume: Annotated[
        bool,
        Field(
            description="continue from OUT_DIR's last checkpoint if there is one; "
            "false: a folder that holds a run is refused"
        ),
    ] = False
    backend: Annotated[
        Backend,
        Field(description="how parameters and optimizer states are spread over the ranks"),
    ] = "replicated"
    shard_ranks: Annotated[
        PositiveInt | None,
        Field(description="hsdp: ranks that share one copy of the parameters; null: those of a node"),
    ] = None
    ranks_per_prompt: Annotated[
        PositiveInt | None,
        Field(description="g, ranks that share a prompt; null: the greatest common divisor of group_size and ranks"),
    ] = None
    timeout: Annotated[
        PositiveInt, Field(description="after this long without an answer from another rank a run ends; unit: seconds")
    ] = 1800
    device: Annotated[Literal["auto", "cpu", "cuda"], Field(description="auto: CUDA where there is one")] = "auto"
    threads: Annotated[PositiveInt | None, Field(description="CPU threads of torch; null: torch's choice")] = None
    hardware: Annotated[
        Annotated[str, Field(min_length=1)] | None,
        Field(
            description="what to plan for, e.g. 8xA6000-48GB or 2x8xH100-80GB (2 nodes); a run needs as many ranks; "
            "null: this machine"
        ),
    ] = None

    prompts: Annotated[
        str,
        Field(
            min_length=1,
            description="packaged list of prompts (digits), or a text file, one prompt per line",
        ),
    ] = "digits"
    prompts_per_update: Annotated[PositiveInt, Field(description="P, prompts (groups) per update")] = 10
    group_size: Annotated[
        int,
        Field(
            ge=2,
            description="M, generations per prompt, whose rewards are normalised together; unit: images",
        ),
    ] = 8
    updates_per_rollout: Annotated[
        PositiveInt,
        Field(description="optimizer steps on every rollout; the first is on-policy, later ones use ratio and clip"),
    ] = 1
    precision: Annotated[
        Literal["float32", "bfloat16"],
        Field(description="parameters and activations of the policy; the optimizer keeps float32 masters"),
    ] = "float32"

    schedule: Annotated[
        Auto | Schedule,
        Field(
            description="recompute selected steps (native), keep their graphs (retain), "
            "or backward at once and weight the gradients later (reweight); "
            "auto, here and in the next seven keys: chosen by the planner"
        ),
    ] = "auto"
    buffers: Annotated[
        Auto | Buffers,
        Field(description="reweight: one gradient per sample of the group, running sums, or sharded running sums"),
    ] = "auto"
    buffer_dtype: Annotated[
        Auto | BufferDtype, Field(description="of the local gradient buffers, before the optimizer")
    ] = "auto"
    buffer_device: Annotated[Auto | BufferDevice, Field(description="where those buffers live")] = "auto"
    sync: Annotated[Auto | Sync, Field(description="how often gradients are reduced over the ranks")] = "auto"
    checkpointing: Annotated[
        Auto | Checkpointing,
        Field(description="activation checkpointing of no, all, or the first k blocks"),
    ] = "auto"
    residency: Annotated[
        Auto | Residency,
        Field(
            description="parameters stay whole on a rank between rollout and optimizer step "
            "(resident), or are gathered for each use (resharded)"
        ),
    ] = "auto"
    samples_per_forward: Annotated[
        Auto | PositiveInt,
        Field(description="generations of a group that share a forward; divides group_size; unit: images"),
    ] = "auto"

    policy: PolicyConfig = field(default_factory=PolicyConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    rewards: Annotated[
        tuple[RewardConfig, ...],
        Field(min_length=1, description="terms of the reward, added up with their weights"),
    ] = (RewardConfig(name="digits_classifier"),)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
