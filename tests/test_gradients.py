"""The gradient accounting: why nothing is reduced before its advantage, and what the buffers hold."""

import pytest
import torch
from small import small_config, small_engine, small_policy
from torch import nn

from leangrpo.configs.checks import ConfigError
from leangrpo.configs.schema import Sync
from leangrpo.engine.gradients import Gradients
from leangrpo.engine.sharding.base import ShardingBackend
from leangrpo.kernels.rescale_accumulate import rescale_accumulate_


class Collector(ShardingBackend):
    """Keeps what is reduced; nothing of a real backend matters here."""

    def __init__(self, module: nn.Module):
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.reduced: list[torch.Tensor] = []

    def reduce(self, total: torch.Tensor) -> None:
        self.reduced.append(total)

    def step(self) -> float:
        raise AssertionError

    owned = full_parameters = full_gradients = load_parameters = save = load = drift = step  # type: ignore[assignment]


def accounting(
    module: nn.Module, batch: int = 1, dtype: torch.dtype = torch.float32, sync: Sync = "every_update"
) -> Gradients:
    return Gradients(
        module, Collector(module), sync=sync, dtype=dtype, device=torch.device("cpu"), per_sample_batch=batch
    )


def test_a_gradient_reduced_before_its_advantage_cannot_be_repaired() -> None:
    """method.md, "correction before synchronization": J and J + u h^T, h.1 = 0, reduce to the same vector."""
    generator = torch.Generator().manual_seed(0)
    samples, parameters = 4, 50
    jacobian = torch.randn(samples, parameters, generator=generator, dtype=torch.float64)
    advantages = torch.tensor([-1.2, -0.5, 0.2, 1.5], dtype=torch.float64)
    h = torch.tensor([1.0, -1.0, 0.0, 0.0], dtype=torch.float64)
    other = jacobian + h[:, None] * torch.randn(parameters, generator=generator, dtype=torch.float64)

    def reduced(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return rescale_accumulate_(torch.zeros(parameters, dtype=torch.float64), rows, weights.tolist())

    ones = torch.ones_like(advantages)
    assert torch.allclose(reduced(jacobian, ones), reduced(other, ones), atol=1e-12)  # what a premature sync leaves
    right, other_right = reduced(jacobian, advantages), reduced(other, advantages)
    assert (right - other_right).norm() / right.norm() > 0.1  # what is wanted
    # the one exception: an advantage affine in the reward needs J 1 and J r only, whatever the samples' own rows are
    rewards = torch.tensor([0.2, 0.4, 0.6, 1.0], dtype=torch.float64)
    affine = (rewards - rewards.mean()) / rewards.std(correction=0)
    sums = reduced(jacobian, rewards - rewards[0]), reduced(jacobian, ones)
    restored = (sums[0] - (rewards.mean() - rewards[0]) * sums[1]) / rewards.std(correction=0)
    assert torch.allclose(restored, reduced(jacobian, affine), atol=1e-12)


def test_premature_synchronisation_is_refused() -> None:
    with pytest.raises(ConfigError, match="before its sample's advantage is known"):
        small_engine(small_config(schedule="reweight", sync="every_backward"))


@pytest.mark.parametrize("weights", ["full", "lora"])
def test_per_sample_rows_are_the_samples_own_gradients(weights: str) -> None:
    engine = small_engine(small_config(policy={"weights": weights}, schedule="reweight", samples_per_forward=4))
    plain = small_engine(small_config(policy={"weights": weights}, schedule="native"))
    x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(2))
    rows = engine.gradients.new_buffer(4)
    conditioning = engine.policy.encode("two", 4)
    outputs = engine.policy.velocity(x, 0.7, conditioning)  # type: ignore[attr-defined]
    engine.gradients.backward_per_sample(outputs.square().flatten(1).mean(1), rows)
    for index in range(4):
        expected = plain.gradients.new_buffer()
        output = plain.policy.velocity(x[index : index + 1], 0.7, plain.policy.encode("two", 1))  # type: ignore[attr-defined]
        plain.gradients.backward(output.square().mean(), into=expected)
        assert (rows[index] - expected).norm() < 1e-6 * expected.norm()
        assert expected.norm() > 0


class Stacked(nn.Module):
    """A layer that sees [uncond, cond], as under classifier-free guidance, a strided convolution, and no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, stride=2, padding=1)
        self.linear = nn.Linear(3, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = self.conv(torch.cat([x, 2 * x + 1])).flatten(2).transpose(1, 2)
        uncond, cond = self.linear(both.tanh()).chunk(2)
        return uncond + 3 * (cond - uncond)


def test_guidance_stacks_and_convolutions_are_told_apart() -> None:
    torch.manual_seed(0)
    module = Stacked().double()
    x = torch.randn(3, 2, 6, 6, dtype=torch.float64, requires_grad=True)
    expected = []
    for index in range(3):
        loss = module(x[index : index + 1]).square().sum()
        expected.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))]))
    (input_gradient,) = torch.autograd.grad(module(x).square().sum(), x)
    gradients = accounting(module, batch=3, dtype=torch.float64)
    rows = gradients.new_buffer(3)
    gradients.backward_per_sample(module(x).square().flatten(1).sum(1), rows)
    assert torch.allclose(rows, torch.stack(expected), rtol=1e-12)
    assert x.grad is not None and torch.allclose(x.grad, input_gradient, rtol=1e-12)
    total = gradients.new_buffer()  # the same layers without a capture: the sum, as the KL term needs it
    gradients.backward(module(x.detach()).square().sum(), into=total)
    assert torch.allclose(total, torch.stack(expected).sum(0), rtol=1e-12)


def test_a_batch_that_a_layer_folds_away_is_an_error() -> None:
    module = nn.Sequential(nn.Flatten(0, 1), nn.Linear(4, 4))
    gradients = accounting(module, batch=3)
    out = module(torch.randn(3, 2, 4)[:, :1].repeat(1, 2, 1)[:, :1].expand(3, 1, 4)[:2])
    with pytest.raises(ValueError, match="samples_per_forward=3"):
        gradients.backward_per_sample(out.sum() * torch.ones(3), gradients.new_buffer(3))


def test_other_trainable_layers_need_single_samples() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    with pytest.raises(ValueError, match=r"1\.weight is not a weight of a Linear or Conv2d.*samples_per_forward=1"):
        accounting(module, batch=2)
    gradients = accounting(module)
    gradients.backward(module(torch.randn(2, 4)).square().sum())
    assert gradients.get_total().count_nonzero() == gradients.numel


def test_no_parameter_gradient_survives_a_backward() -> None:
    policy = small_policy(small_config())
    gradients = accounting(policy.module)
    loss = policy.velocity(torch.randn(2, 1, 8, 8), 0.5, policy.encode("two", 2)).square().mean()
    gradients.backward(loss)
    assert all(p.grad is None for p in policy.module.parameters())
    assert gradients.get_total().norm() > 0


def test_a_backward_past_the_accounting_is_caught() -> None:
    policy = small_policy(small_config())
    accounting(policy.module)
    loss = policy.velocity(torch.randn(2, 1, 8, 8), 0.5, policy.encode("two", 2)).square().mean()
    with pytest.raises(AssertionError, match="outside of Gradients"):
        loss.backward()  # type: ignore[no-untyped-call]


def test_nothing_to_train_is_an_error() -> None:
    with pytest.raises(ConfigError, match="nothing is trainable"):
        accounting(nn.Linear(2, 2).requires_grad_(False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rescale_accumulate(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    total, pending = torch.randn(1000, generator=generator), torch.randn(5, 1000, generator=generator).to(dtype)
    weights = [0.3, 0.0, -2.0, 1.0, 1e-3]
    pending[1] = torch.nan  # weight 0: not read
    kept = [0, 2, 3, 4]
    expected = total.double() + torch.tensor([weights[q] for q in kept]).double() @ pending[kept].double()
    result = rescale_accumulate_(total, pending, weights)
    assert result is total and torch.allclose(total.double(), expected, atol=2e-6)
