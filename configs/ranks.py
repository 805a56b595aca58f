"""What a number of ranks asks of a configuration, refused before any of them works.

R ranks form R / g groups of g, each of which serves one prompt at a time; every rank does the same work, or collectives
would not match.
"""

import math
from collections.abc import Iterator

from leangrpo.configs.checks import ConfigError, Problem
from leangrpo.configs.schema import Config


def ranks_per_prompt(group_size: int, ranks: int, wanted: int | None = None) -> int:
    """g: `wanted`, or the largest that divides group size and ranks (section 4 of the paper)."""
    return wanted or math.gcd(group_size, ranks)


def check_world_size(config: Config, ranks: int, ranks_per_node: int) -> None:
    """Raises ConfigError if that many processes, `ranks_per_node` of them on a node, cannot share the run."""
    for one in find_rank_problems(config, ranks, ranks_per_node):
        raise ConfigError(f"{one.subject}: {one.text}")


def find_rank_problems(config: Config, ranks: int, ranks_per_node: int) -> Iterator[Problem]:
    """Why that many ranks cannot share the run; choices that are auto are left to the planner."""
    yield from _check_copies(config, ranks, ranks_per_node)
    largest, wanted = math.gcd(config.group_size, ranks), config.ranks_per_prompt
    if wanted is not None and largest % wanted:
        fitting = ", ".join(str(g) for g in range(1, largest + 1) if largest % g == 0)
        text = f"must divide group_size={config.group_size} and the {ranks} ranks; use {fitting}"
        yield _problem("ranks_per_prompt", wanted, text)
    else:
        yield from _check_sharing(config, ranks, ranks_per_prompt(config.group_size, ranks, wanted))


def _check_copies(config: Config, ranks: int, ranks_per_node: int) -> Iterator[Problem]:
    shard = config.shard_ranks or ranks_per_node
    if config.backend == "hsdp" and (ranks % shard or ranks == shard):
        text = (
            f"backend=hsdp needs a multiple of it, at least twice, but there are {ranks} ranks; use a smaller "
            "shard_ranks, or backend=fsdp2"
        )
        yield _problem("shard_ranks", shard, text)


def _check_sharing(config: Config, ranks: int, sharing: int) -> Iterator[Problem]:
    """`sharing`: g, ranks that share a prompt."""
    concurrent, share = ranks // sharing, config.group_size // sharing
    prompts, batch = config.prompts_per_update, config.samples_per_forward
    if config.schedule == "reweight" and config.buffers == "streaming_sharded" and sharing != ranks:
        text = (
            f"its sums need all {ranks} ranks on one prompt, but {sharing} share one; use a group_size that {ranks} "
            "divides, or buffers=streaming"
        )
        yield _problem("buffers", config.buffers, text)
    if prompts % concurrent:
        below = prompts // concurrent * concurrent
        nearest = " or ".join(str(number) for number in (below, below + concurrent) if number)
        text = f"{ranks} ranks in groups of {sharing} sample {concurrent} prompts at once; use a multiple: {nearest}"
        yield _problem("prompts_per_update", prompts, text)
    if batch != "auto" and share % batch:
        text = f"each rank makes {share} of the group_size={config.group_size} samples; use a divisor of {share}"
        yield _problem("samples_per_forward", batch, text)


def _problem(key: str, value: object, text: str) -> Problem:
    return Problem(key, f"{key}={value}", text)
