"""What a capability is: a probe of the release that is installed, wrappers, and a switch."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .errors import Refusal, Unsupported
from .names import ATTENTION, TARGETS
from .settings import Setting
from .source import Release, mentions, parameters

APPLY, UPSTREAM, NOT_APPLICABLE, UNSUPPORTED = "apply", "upstream", "not_applicable", "unsupported"
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
#: (original, instance or None, args, kwargs) -> result
Wrapper = Callable[[Callable[..., Any], Any, Args, Kwargs], Any]


class Verdict(NamedTuple):
    """One of the four words above, and a reason that a person can act on."""

    verdict: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Needs:
    """A function of the release that a capability relies on.

    `module` is dotted, and `function` is `name` or `Class.name`. The other fields are names with spaces
    between them: the `parameters` that it must have, the first ones in the order of `leading`, and what
    it `mentions` in its body.
    """

    module: str
    function: str
    parameters: str = ""
    leading: str = ""
    mentions: str = ""

    def check(self, release: Release) -> None:
        """Raises Unsupported, which names what is missing."""
        function, leading = release.function(self.module, self.function), self.leading.split()
        where, have = f"{self.function} in {self.module}", parameters(function)
        for name in (*self.parameters.split(), *leading):
            if name not in have:
                raise Unsupported(f"{where} has no parameter {name} (it has {', '.join(have)})")
        if have[: len(leading)] != leading:
            raise Unsupported(f"{where} takes {', '.join(have)}, where {', '.join(leading)} is the order expected")
        for name in self.mentions.split():
            if not mentions(function, name):
                raise Unsupported(f"{where} does not use {name}")


@dataclasses.dataclass(frozen=True)
class Capability:
    """One fast path or fix, with everything that is known about it.

    `probe` reads a release and returns a Verdict, or raises Unsupported. Where the verdict is `apply`,
    `wrappers` says what is wrapped in that release: the full name of a function or method in one of the
    `targets`, and the wrapper that goes around it. The documents and `doctor` show the same names.

    `kernels` are those of AITER's that it calls or whose calls it changes; `check` is asked before anything
    is wrapped and raises what stands in the way. Where a wrapper fails, `internal_error` is what it raises
    in place of leaving the call to SGLang. `until` is the release from which on it is not needed.

    `architectures` are the GPUs that it is for, all of them where there are none, and `aiter_problem` says
    why the AITER in a folder cannot serve it, or None.
    """

    name: str
    summary: str
    why: str
    upstream: tuple[str, ...]
    until: str
    switch: Setting | None
    kernels: tuple[str, ...]
    needs: tuple[Needs, ...]
    probe: Callable[[Release], Verdict]
    wrappers: Callable[[Release], Mapping[str, Wrapper]]
    check: Callable[[], None] | None = None
    internal_error: type[Refusal] | None = None
    architectures: tuple[str, ...] = ()
    aiter_problem: Callable[[pathlib.Path], str | None] | None = None

    @property
    def targets(self) -> frozenset[str]:
        """The modules that it may wrap something in."""
        return frozenset(need.module for need in self.needs) & frozenset(TARGETS)

    def verdict(self, release: Release | None) -> Verdict:
        """What the release that is installed needs of this capability."""
        if release is None:
            return Verdict(NOT_APPLICABLE, "no SGLang is installed for this Python")
        try:
            for need in self.needs:
                need.check(release)
            return self.probe(release)
        except Unsupported as error:
            return Verdict(UNSUPPORTED, str(error))
        except (OSError, SyntaxError, ValueError) as error:
            return Verdict(UNSUPPORTED, f"the source of the release cannot be read: {error}")
        except Exception as error:
            return Verdict(UNSUPPORTED, f"internal error of the probe: {type(error).__name__}: {error}")

    def on_machine(self, gpus: tuple[str, ...], aiter: pathlib.Path | None) -> Verdict | None:
        """What keeps it from acting on a machine with these `gpus` and this `aiter`, or None.

        No GPU, or no AITER, means that it is not known, and keeps nothing from acting.
        """
        if gpus and self.architectures and not set(gpus) & set(self.architectures):
            here, there = ", ".join(gpus), ", ".join(self.architectures)
            # Who turned it on himself is to hear of it.
            word = NOT_APPLICABLE if self.switch is None or self.switch.default else UNSUPPORTED
            return Verdict(word, f"the GPU is {here}, and this is for {there}")
        problem = self.aiter_problem(aiter) if self.aiter_problem is not None and aiter is not None else None
        return problem and Verdict(UNSUPPORTED, problem)  # type: ignore[return-value]

    def wraps(self, release: Release | None) -> list[str]:
        """What it wraps in `release`, as `module.function`; nothing where the verdict is not `apply`."""
        if release is None or self.verdict(release).verdict != APPLY:
            return []
        return [short(name) for name in self.wrappers(release)]


def short(name: str) -> str:
    """The full name of a function without the packages that its module lies in."""
    return name.removeprefix(f"{ATTENTION}.")
