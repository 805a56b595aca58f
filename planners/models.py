"""The model families a plan can be made for without their weights: diffusers configurations, shapes of the inputs,
and the frozen models that come with them.

Configurations are those of the published checkpoints (`transformer/config.json`; for Stable Diffusion 1.5
`unet/config.json`). Parameter counts of text encoders and VAEs are those of the same repositories.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Family = Literal["sd3", "flux", "wan", "unet"]
Shape = tuple[tuple[int, ...], str]
"""dimensions and dtype ("policy": that of the policy)"""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A family of pretrained weights."""

    family: Family
    class_name: str
    """in diffusers"""
    config: Mapping[str, Any]
    height: int
    """pixels, by default"""
    width: int
    frames: int = 1
    text_tokens: int
    text_encoder_parameters: int
    text_encoder_tokens: int
    vae_parameters: int
    decode_flops: float
    """of the VAE's decoder, per pixel and frame"""
    spatial_factor: int
    """pixels per latent, along one axis"""
    temporal_factor: int = 1
    guidance_embedded: bool = False
    """guidance is an input; otherwise it doubles the batch (classifier-free guidance)"""


IMAGE_DECODE = 9.5e6  # 2.5 TFLOP at 512 x 512: convolutions of AutoencoderKL's decoder
VIDEO_DECODE = 6.0e6  # AutoencoderKLWan's decoder: 3 x 3 x 3 convolutions, 96 channels at full resolution
CLIP_L, CLIP_G, T5_XXL, UMT5_XXL = 123_060_480, 694_659_840, 4_762_310_656, 5_680_910_336

SD3_CONFIG: dict[str, Any] = {
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "attention_head_dim": 64,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 2048,
}
WAN_CONFIG: dict[str, Any] = {
    "patch_size": [1, 2, 2],
    "attention_head_dim": 128,
    "text_dim": 4096,
    "freq_dim": 256,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
}
SD3_TEXT: dict[str, Any] = {
    "text_tokens": 205,  # 77 of CLIP and 128 of T5, as Flow-GRPO and MixGRPO prompt it
    "text_encoder_parameters": CLIP_L + CLIP_G + T5_XXL,
    "text_encoder_tokens": 128,
    "vae_parameters": 83_819_683,
    "decode_flops": IMAGE_DECODE,
    "spatial_factor": 8,
}
WAN_TEXT: dict[str, Any] = {
    "text_tokens": 512,
    "text_encoder_parameters": UMT5_XXL,
    "text_encoder_tokens": 512,
    "decode_flops": VIDEO_DECODE,
    "temporal_factor": 4,
}


def _wan(heads: int, ffn_dim: int, layers: int, channels: int = 16) -> dict[str, Any]:
    return WAN_CONFIG | {
        "num_attention_heads": heads,
        "ffn_dim": ffn_dim,
        "num_layers": layers,
        "in_channels": channels,
        "out_channels": channels,
    }


MODELS: dict[str, ModelSpec] = {
    "digits": ModelSpec(
        family="sd3",
        class_name="SD3Transformer2DModel",
        config={
            "sample_size": 16,
            "patch_size": 4,
            "in_channels": 1,
            "out_channels": 1,
            "num_layers": 4,
            "attention_head_dim": 16,
            "num_attention_heads": 4,
            "joint_attention_dim": 32,
            "caption_projection_dim": 64,
            "pooled_projection_dim": 32,
            "pos_embed_max_size": 4,
        },
        height=16,
        width=16,
        text_tokens=5,
        text_encoder_parameters=1024,
        text_encoder_tokens=5,
        vae_parameters=0,
        decode_flops=0.0,
        spatial_factor=1,
    ),
    "sd3-medium": ModelSpec(
        family="sd3",
        class_name="SD3Transformer2DModel",
        config=SD3_CONFIG
        | {
            "num_layers": 24,
            "num_attention_heads": 24,
            "caption_projection_dim": 1536,
            "pos_embed_max_size": 192,
        },
        height=512,
        width=512,
        **SD3_TEXT,
    ),
    "sd35-medium": ModelSpec(
        family="sd3",
        class_name="SD3Transformer2DModel",
        config=SD3_CONFIG
        | {
            "num_layers": 24,
            "num_attention_heads": 24,
            "caption_projection_dim": 1536,
            "pos_embed_max_size": 384,
            "dual_attention_layers": list(range(13)),
            "qk_norm": "rms_norm",
        },
        height=512,
        width=512,
        **SD3_TEXT,
    ),
    "flux1-dev": ModelSpec(
        family="flux",
        class_name="FluxTransformer2DModel",
        config={
            "patch_size": 1,
            "in_channels": 64,
            "num_layers": 19,
            "num_single_layers": 38,
            "attention_head_dim": 128,
            "num_attention_heads": 24,
            "joint_attention_dim": 4096,
            "pooled_projection_dim": 768,
            "guidance_embeds": True,
            "axes_dims_rope": [16, 56, 56],
        },
        height=720,
        width=720,
        text_tokens=512,
        text_encoder_parameters=CLIP_L + T5_XXL,
        text_encoder_tokens=512,
        vae_parameters=83_819_683,
        decode_flops=IMAGE_DECODE,
        spatial_factor=8,
        guidance_embedded=True,
    ),
    "wan21-1.3b": ModelSpec(
        family="wan",
        class_name="WanTransformer3DModel",
        config=_wan(12, 8960, 30),
        height=480,
        width=832,
        frames=81,
        vae_parameters=126_892_531,
        spatial_factor=8,
        **WAN_TEXT,
    ),
    "wan21-14b": ModelSpec(
        family="wan",
        class_name="WanTransformer3DModel",
        config=_wan(40, 13824, 40),
        height=480,
        width=832,
        frames=81,
        vae_parameters=126_892_531,
        spatial_factor=8,
        **WAN_TEXT,
    ),
    "wan22-ti2v-5b": ModelSpec(
        family="wan",
        class_name="WanTransformer3DModel",
        config=_wan(24, 14336, 30, channels=48),
        height=704,
        width=1280,
        frames=121,
        vae_parameters=704_687_580,
        spatial_factor=16,
        **WAN_TEXT,
    ),
    "sd15": ModelSpec(
        family="unet",
        class_name="UNet2DConditionModel",
        config={"cross_attention_dim": 768, "attention_head_dim": 8, "sample_size": 64},
        height=512,
        width=512,
        text_tokens=77,
        text_encoder_parameters=CLIP_L,
        text_encoder_tokens=77,
        vae_parameters=83_653_863,
        decode_flops=IMAGE_DECODE,
        spatial_factor=8,
    ),
}


PATCH: dict[Family, Callable[[Mapping[str, Any]], int]] = {
    "sd3": lambda config: int(config["patch_size"]),
    "flux": lambda config: 2,  # the pipeline packs 2 x 2 latents into a token
    "wan": lambda config: int(config["patch_size"][-1]),
    "unet": lambda config: 8,  # three times halved
}


def input_shapes(spec: ModelSpec, height: int, width: int, frames: int, rows: int) -> dict[str, Shape]:
    """The keyword arguments of one forward; `rows`: samples, twice as many under classifier-free guidance.

    Raises ValueError for a size that the model cannot patch.
    """
    config = spec.config
    step = spec.spatial_factor * PATCH[spec.family](config)
    for name, pixels in (("height", height), ("width", width)):
        if pixels % step:
            raise ValueError(
                f"policy.{name}={pixels}: {spec.class_name} takes multiples of {step} pixels; "
                f"use {max(step, pixels // step * step)} or {(pixels // step + 1) * step}"
            )
    h, w = height // spec.spatial_factor, width // spec.spatial_factor
    text = ((rows, spec.text_tokens, config.get("joint_attention_dim", config.get("text_dim", 768))), "policy")
    if spec.family == "flux":
        return _flux_inputs(config, (h // 2) * (w // 2), spec.text_tokens, rows, text)
    if spec.family == "wan":
        latents = (rows, config["in_channels"], 1 + (frames - 1) // spec.temporal_factor, h, w)
        return {"hidden_states": (latents, "policy"), "encoder_hidden_states": text, "timestep": ((rows,), "float32")}
    if spec.family == "unet":
        return {"sample": ((rows, 4, h, w), "policy"), "timestep": ((rows,), "float32"), "encoder_hidden_states": text}
    return {
        "hidden_states": ((rows, config["in_channels"], h, w), "policy"),
        "encoder_hidden_states": text,
        "pooled_projections": ((rows, config["pooled_projection_dim"]), "policy"),
        "timestep": ((rows,), "float32"),
    }


def _flux_inputs(config: Mapping[str, Any], tokens: int, text_tokens: int, rows: int, text: Shape) -> dict[str, Shape]:
    """FLUX takes the positions of its tokens as inputs."""
    return {
        "hidden_states": ((rows, tokens, config["in_channels"]), "policy"),
        "encoder_hidden_states": text,
        "pooled_projections": ((rows, config["pooled_projection_dim"]), "policy"),
        "timestep": ((rows,), "policy"),
        "guidance": ((rows,), "float32"),
        "img_ids": ((tokens, 3), "float32"),
        "txt_ids": ((text_tokens, 3), "float32"),
    }
