"""The page that explains the method does what the engine does."""

import torch
from small import PROMPTS, brightness, small_config, small_engine

from leangrpo.tools.minimal_loop import lean_update


def test_the_minimal_loop_makes_the_engines_update() -> None:
    config = small_config(policy={"weights": "lora"}, schedule="native", samples_per_forward=1, seed=7)
    engine, explained = small_engine(config), small_engine(config)
    before = {name: p.clone() for name, p in engine.backend.full_parameters().items()}
    optimizer = torch.optim.SGD(engine.backend.masters, lr=0.1)
    engine.backend.optimizer = optimizer  # AdamW's division would blow rounding up where a gradient is tiny
    engine.train_step(PROMPTS)
    optimizer = torch.optim.SGD([p for p in explained.policy.module.parameters() if p.requires_grad], lr=0.1)
    lean_update(
        explained.policy,
        PROMPTS,
        brightness,
        optimizer,
        group_size=config.group_size,
        selected=frozenset(range(config.algorithm.selected_steps)),
        seed=7,
        update=0,
    )
    after = engine.backend.full_parameters()
    difference = (
        sum(float((after[n] - p).square().sum()) for n, p in explained.backend.full_parameters().items()) ** 0.5
    )
    moved = sum(float((after[n] - p).square().sum()) for n, p in before.items()) ** 0.5
    assert moved > 0 and difference <= 1e-4 * moved
