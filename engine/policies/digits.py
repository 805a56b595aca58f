"""The embedded policy: diffusers' SD3Transformer2DModel on 16 px digits, no VAE (pixels are the latents)."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers import SD3Transformer2DModel
from diffusers.loaders import SD3LoraLoaderMixin
from diffusers.utils import SAFETENSORS_WEIGHTS_NAME
from peft import LoraConfig as PeftLoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from leangrpo.configs.checks import ConfigError
from leangrpo.configs.schema import Checkpointing, LoraConfig, PolicyConfig, SamplerConfig
from leangrpo.engine import transitions
from leangrpo.engine.policies.base import FlowMatchingPolicy, timesteps_of
from leangrpo.engine.policies.word_encoder import WordEncoder
from leangrpo.engine.types import Timestep

ASSETS = Path(__file__).parent.parent / "assets" / "digits"


class DigitsPolicy(FlowMatchingPolicy):
    """Digits that should follow their prompt, a word from "zero" to "nine"; float32 and on the CPU until `to`.

    `module` is trained through an adapter (policy.weights=lora) or whole. With `keep_base`, full fine-tuning keeps a
    frozen copy for the KL term; LoRA needs none, its base is the policy with the adapter switched off.
    """

    module: SD3Transformer2DModel

    def __init__(
        self,
        module: SD3Transformer2DModel,
        text_encoder: WordEncoder,
        config: PolicyConfig,
        sampler: SamplerConfig,
        *,
        seed: int,
        checkpointing: Checkpointing = "none",
        keep_base: bool = False,
    ):
        self.module, self.text_encoder, self.sampler = module, text_encoder.requires_grad_(False), sampler
        self.timesteps = self.make_timesteps(sampler.denoising_steps)
        self.has_adapter = config.weights == "lora"
        self.base: SD3Transformer2DModel | None = None
        if self.has_adapter:
            add_lora(module, config.lora, seed)
        elif keep_base:
            self.base = copy.deepcopy(module).requires_grad_(False)
            self.base_blocks = list(self.base.transformer_blocks)
        state, trainable = module.state_dict(), dict(module.named_parameters())
        self._buffers = {name: value for name, value in state.items() if name not in trainable}
        set_checkpointing(module, module.transformer_blocks, checkpointing)
        module.train()
        size = module.config.sample_size
        self.latent_shape = (module.config.in_channels, size, size)
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.blocks = list(module.transformer_blocks)
        self._active: nn.Module = module

    @classmethod
    def pretrained(cls, config: PolicyConfig, sampler: SamplerConfig, **settings: Any) -> "DigitsPolicy":
        """With the packaged base weights; `settings` as for the constructor."""
        text_encoder = WordEncoder()
        text_encoder.load_state_dict(load_file(ASSETS / "text_encoder.safetensors"))
        module = SD3Transformer2DModel.from_pretrained(ASSETS / "transformer", torch_dtype=torch.float32)
        return cls(module, text_encoder, config, sampler, **settings)

    def to(self, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
        for module in (self.module, self.base):
            if module is not None:
                nn.Module.to(module, device=device, dtype=dtype)  # diffusers' own `to` warns about nothing
        if dtype is not None:
            self.dtype = dtype
        if device is not None:
            self.device = device
            self.text_encoder.to(device)  # keeps float32

    def make_timesteps(self, denoising_steps: int) -> tuple[Timestep, ...]:
        return timesteps_of(transitions.shifted_linear_sigmas(denoising_steps, self.sampler.shift))

    def encode(self, prompt: str, batch: int) -> tuple[Tensor, Tensor]:
        """Token embeddings [B, L, E] and pooled embedding [B, E]. ValueError for a prompt it cannot read."""
        tokens, pooled = self.text_encoder([prompt])
        return tokens.expand(batch, -1, -1), pooled.expand(batch, -1)

    def velocity(self, latents: Tensor, sigma: float, conditioning: tuple[Tensor, Tensor]) -> Tensor:
        tokens, pooled = conditioning
        dtype = self.dtype
        velocity: Tensor = self._active(
            hidden_states=latents.to(dtype),
            encoder_hidden_states=tokens.to(dtype),
            pooled_projections=pooled.to(dtype),
            timestep=torch.full((len(latents),), 1000 * sigma, device=latents.device),
            return_dict=False,
        )[0]
        return velocity.to(torch.promote_types(dtype, torch.float32))

    def decode(self, latents: Tensor) -> Tensor:
        """uint8 [B, 1, 16, 16]."""
        return ((latents.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)

    @contextmanager
    def reference(self) -> Iterator[None]:
        if self.base is not None:
            self._active = self.base
            try:
                yield
            finally:
                self._active = self.module
        else:
            self.module.disable_adapters()
            try:
                yield
            finally:
                self.module.enable_adapters()

    def save(self, directory: Path, parameters: dict[str, Tensor]) -> None:
        """The adapter, for diffusers' `load_lora_weights`, or the whole transformer, for `from_pretrained`."""
        if self.has_adapter:
            SD3LoraLoaderMixin.save_lora_weights(
                directory,
                transformer_lora_layers=get_peft_model_state_dict(self.module, state_dict=parameters),
                transformer_lora_adapter_metadata=self.module.peft_config["default"].to_dict(),
            )
        else:
            self.module.save_config(directory)
            save_file(
                {name: p.contiguous().cpu() for name, p in (self._buffers | parameters).items()},
                directory / SAFETENSORS_WEIGHTS_NAME,
                metadata={"format": "pt"},
            )


def add_lora(module: SD3Transformer2DModel, config: LoraConfig, seed: int) -> None:
    """Freeze `module` and add one trainable adapter, initialised from `seed`. ConfigError if no layer matches."""
    module.requires_grad_(False)
    names = [name for name, _ in module.named_modules()]
    for target in config.target_modules:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            raise ConfigError(
                f"policy.lora.target_modules={target}: matches no layer of {type(module).__name__}; "
                "attention layers are to_q, to_k, to_v, to_out.0"
            )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module.add_adapter(
            PeftLoraConfig(
                r=config.rank,
                lora_alpha=config.alpha,
                init_lora_weights="gaussian",
                target_modules=list(config.target_modules),
            )
        )


def set_checkpointing(module: Any, blocks: nn.ModuleList, choice: Checkpointing) -> None:
    """Recompute the activations of no, all, or the first `choice` blocks in the backward (non-reentrant)."""
    if choice == "none":
        return
    count = len(blocks) if choice == "all" else choice
    if count > len(blocks):
        raise ConfigError(
            f"checkpointing={count}: the policy has {len(blocks)} blocks; use all, none, or 1 to {len(blocks)}"
        )
    chosen = {id(block) for block in blocks[:count]}

    def run(block: Callable[..., Any], *args: Any) -> Any:
        return checkpoint(block, *args, use_reentrant=False) if id(block) in chosen else block(*args)

    module.enable_gradient_checkpointing(run)
