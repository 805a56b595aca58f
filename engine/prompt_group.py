"""Shared-prompt data parallelism: which rank makes which generation of which prompt.

R ranks form R / g groups of g, each group serves one prompt at a time, and g divides both the group size M and R; the
default is gcd(M, R). Rank i of a group makes generations i, i + g, i + 2 g, ...: a re-indexing of the same (prompt,
generation) pairs, so the gradient does not depend on it. Rewards are gathered inside the group.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from leangrpo.configs.ranks import ranks_per_prompt
from leangrpo.engine.distributed import World, all_gather


class PromptGroup:
    """This rank's place. `slots` are the prompts of an update it works on, `generations` the samples it makes of each.

    What cannot be shared out evenly has been refused in configs/ranks.py.
    """

    def __init__(
        self, world: World, group_size: int, prompts_per_update: int, samples_per_forward: int, wanted: int | None
    ):
        self.world, self.group_size, self.prompts_per_update = world, group_size, prompts_per_update
        self.size = ranks_per_prompt(group_size, world.size, wanted)
        self.concurrent = world.size // self.size
        assert prompts_per_update % self.concurrent == 0
        assert (group_size // self.size) % samples_per_forward == 0
        index, member = divmod(world.rank, self.size)
        self.slots = range(index, prompts_per_update, self.concurrent)
        self.generations = tuple(range(member, group_size, self.size))
        self._process_group = self._new_group(index)

    def all_gather(self, local: Tensor) -> Tensor:
        """Values [M, K] of all generations in order, from those of this rank's [Q, K]. Collective in the group."""
        return torch.stack(all_gather(local, self._process_group, self.size), dim=1).flatten(0, 1)

    def all_gather_prompts(self, local: Tensor) -> Tensor:
        """[P, M, K] of all prompts in order, from those of this rank's slots [turns, M, K]. Collective in the world."""
        everyone = all_gather(local, None, self.world.size)
        return torch.stack(everyone[:: self.size], dim=1).flatten(0, 1)

    def _new_group(self, index: int) -> dist.ProcessGroup | None:
        """Every process must take part in making every group."""
        if self.size == self.world.size:
            return None
        groups: list[dist.ProcessGroup] = [
            dist.new_group(list(range(first, first + self.size))) for first in range(0, self.world.size, self.size)
        ]
        return groups[index]
