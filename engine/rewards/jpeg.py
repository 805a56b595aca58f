"""JPEG compressibility: a reward for images that compress well, computed without any network.

After Black et al., "Training Diffusion Models with Reinforcement Learning" (DDPO), and
`jpeg_compressibility` in kvablack/ddpo-pytorch. That one is minus the size in kilobytes (1,000
bytes) of a JPEG at quality 95; this one is minus the size in bytes at quality 75, Pillow's default:
a 16-pixel image has a few hundred bytes and differences of tens, too few for kilobytes. Scale it by
its weight: classifier 1 with JPEG 0.005 is the mix "probability - bytes / 200".

Alone it is a lesson in reward hacking: a black image is the optimum, whatever the prompt says.
"""

from dataclasses import dataclass
from io import BytesIO

import torch
from PIL import Image
from torch import Tensor


def jpeg_bytes(images: Tensor, quality: int = 75) -> Tensor:
    """File size in bytes of each image as JPEG, written by Pillow: float32 [B] on images' device.

    images: uint8 [B, C, H, W], C = 1 (grey) or 3 (RGB). Raises ValueError for anything else.
    """
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3):
        raise ValueError(
            f"images are {images.dtype} {list(images.shape)}: JPEG sizes need torch.uint8 "
            "[B, C, H, W] with C = 1 (grey) or 3 (RGB)"
        )
    sizes = []
    for image in images.permute(0, 2, 3, 1).cpu().numpy():
        file = BytesIO()
        # Pillow takes grey images without a channel axis
        Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image).save(file, format="JPEG", quality=quality)
        sizes.append(file.tell())
    return torch.tensor(sizes, dtype=torch.float32, device=images.device)


@dataclass(frozen=True)
class JpegCompressibility:
    """Reward: minus the JPEG size in bytes, whatever the prompt; `quality` is Pillow's, 1 to 95."""

    quality: int = 75

    def __call__(self, images: Tensor, prompts: list[str]) -> Tensor:
        """rewards_B, float32, of uint8 images [B, C, H, W]; ValueError as `jpeg_bytes`."""
        return -jpeg_bytes(images, self.quality)
