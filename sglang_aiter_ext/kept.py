"""What this package keeps on objects that are not its own, in one place.

| kept | on | what it holds | how long |
| --- | --- | --- | --- |
| `RUNNER` | a `ModelRunner` | its AITER decode backends, and which side of them is built next | as long as the runner |
| `DECODE` | an `AiterAttnBackend` | how its decode calls are looked after | as long as the backend |
| `PLAN` | a batch's attention metadata | the slots that the ASM kernel gathers, or why it does not | one batch |
| `INDICES` | a batch's attention metadata | what the release's own index builder answered | one batch |

Three attributes that SGLang has itself are written to as well: `get_value_buffer` of a pool, only while
`v_head_dim` builds a backend; and `workspace_buffer` and `init_cuda_graph_state` of the decode backends.
"""

import dataclasses
import weakref
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Kept(Generic[T]):
    """One value of ours on an object of SGLang's, where only this package looks for it."""

    def __init__(self, name: str):
        self.attribute = f"_sglang_aiter_ext_{name}"

    def on(self, owner: Any) -> T | None:
        """What is kept on `owner` itself, or None; an attribute that `owner` passes on from another does not count."""
        return getattr(owner, "__dict__", {}).get(self.attribute)

    def keep(self, owner: Any, value: T) -> T:
        """Keep `value` on `owner`. Raises AttributeError where `owner` takes no attribute."""
        setattr(owner, self.attribute, value)
        return value


@dataclasses.dataclass
class RunnerNotes:
    """Of one `ModelRunner`: the AITER decode backends that share a workspace, and whether prefill's side is next."""

    backends: weakref.WeakSet[Any] = dataclasses.field(default_factory=weakref.WeakSet)
    prefill_is_next: bool = False


@dataclasses.dataclass(frozen=True)
class DecodeNotes:
    """Of one `AiterAttnBackend` whose decode calls `decode_pa` looks after."""

    layers_seen: bool  # when the backend was built
    routed: bool  # by `decode_pa`, so that arguments which it does not take are our business too
    fp8: bool  # the KV cache
    takes: frozenset[str]  # the parameters of its `forward_decode`


class Decline(NamedTuple):
    """Why a kernel does not serve a call: a reason that is counted, and a message that is logged once."""

    reason: str
    message: str
    arguments: tuple[Any, ...] = ()

    @property
    def text(self) -> str:
        return self.message % self.arguments


@dataclasses.dataclass
class Plan:
    """What is the same for all layers of one batch: its table, its pool slots [tokens], or why it is not served."""

    batch: weakref.ref[Any]
    table: Any
    slots: Any = None
    decline: Decline | None = None


@dataclasses.dataclass(frozen=True)
class Indices:
    """What the release's index builder answered for one batch, and what it was asked with."""

    batch: weakref.ref[Any]
    table: Any
    num_kv_slots: int
    answer: Any


RUNNER, DECODE = Kept[RunnerNotes]("runner"), Kept[DecodeNotes]("decode")
PLAN, INDICES = Kept[Plan]("plan"), Kept[Indices]("indices")
