"""Backends and their choices: what cannot be together is refused before anything is built."""

import pytest

from leangrpo.configs import Config, ConfigError, check_world_size, load_config


@pytest.mark.parametrize(
    ("overrides", "subject", "reason", "way_out"),
    [
        (["residency=resharded"], 'residency="resharded"', "always whole", "use resident"),
        (
            ["schedule=reweight", "sync=every_group", "algorithm.advantage.std=global"],
            'sync="every_group"',
            "no group is finished",
            "every_upd",
        ),
        (
            ["schedule=reweight", "buffers=streaming_sharded"],
            'buffers="streaming_sharded"',
            "replicated",
            "use streaming",
        ),
        (
            ["schedule=reweight", "buffers=streaming_sharded", "backend=fsdp2", "samples_per_forward=2"],
            "samples_per_forward=2",
            "gradient of one sample",
            "use 1",
        ),
        (["optimizer.name=adamw_8bit", "backend=fsdp2"], 'optimizer.name="adamw_8bit"', "cannot shard", "use adamw"),
        (["shard_ranks=2"], "shard_ranks=2", "no effect", "use backend=hsdp"),
    ],
)
def test_impossible_choices_are_refused(overrides: list[str], subject: str, reason: str, way_out: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("digits_flowgrpo_lora", overrides)
    message = str(caught.value)
    assert message.startswith(subject) and reason in message and way_out in message and "\n" not in message


def test_copies_and_shards_must_fill_the_world() -> None:
    config = Config(out_dir="runs/x", backend="hsdp", shard_ranks=2)
    check_world_size(config, 4, 4)
    for ranks in (1, 2, 3):
        with pytest.raises(ConfigError, match=r"^shard_ranks=2: .* but there are \d ranks; .* backend=fsdp2$"):
            check_world_size(config, ranks, ranks)
    check_world_size(Config(out_dir="runs/x", backend="hsdp"), 16, 8)  # the ranks of a node
