"""Which phase of an update is running: told from outside, so that the engine itself carries no instruments."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from leangrpo.engine.reweight import schedule_type
from leangrpo.engine.trainer import Engine

PHASES = ("encode", "rollout", "reward", "backward", "recompute", "correction", "reduction", "optimizer step")
"""correction: what a schedule does when rewards or advantages are known; recompute: a second forward of a step"""


@contextmanager
def watch_phases(engine: Engine, changed: Callable[[str], None]) -> Iterator[None]:
    """Call `changed(phase)` at every change while updates of `engine` run. What no method claims is the rollout."""
    stack = ["rollout"]

    def during(phase: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            again = phase == "rollout" and "correction" in stack
            stack.append("recompute" if again else phase)
            changed(stack[-1])
            try:
                return method(*args, **kwargs)
            finally:
                stack.pop()
                changed(stack[-1])

        return wrapped

    with ExitStack() as undo:
        for owner, name, phase in _claims(engine):
            undo.enter_context(replaced(owner, name, during(phase, getattr(owner, name))))
        changed("rollout")
        yield


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` for a while, and then again what it was."""
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def _claims(engine: Engine) -> Iterator[tuple[Any, str, str]]:
    yield engine.policy, "encode", "encode"
    yield engine.policy, "transition", "rollout"
    yield engine.policy, "decode", "reward"
    yield engine.rewards, "or_nan", "reward"
    yield engine.gradients, "_run", "backward"
    for name in ("rewards_known", "group_known", "advantages_known"):
        yield schedule_type(engine.candidate), name, "correction"
    yield engine, "_off_policy_gradient", "correction"
    for name in ("reduce", "reduce_scatter", "add_gradients"):
        if hasattr(engine.backend, name):
            yield engine.backend, name, "reduction"
    yield engine.backend, "step", "optimizer step"
