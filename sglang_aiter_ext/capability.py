"""What a capability is: a probe of the installed release, wrappers, and a switch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

from .installed import Release, mentions, parameters
from .settings import Setting

APPLY, UPSTREAM, NOT_APPLICABLE, UNSUPPORTED = "apply", "upstream", "not_applicable", "unsupported"


class Verdict(NamedTuple):
    """One of the four words above, and a reason a person can act on."""

    verdict: str
    reason: str


class Unsupported(Exception):
    """Raised by a probe: something it relies on is gone or different."""


class NothingToServe(Exception):
    """Raised by `install`: what the capability would serve cannot run in this process, and nobody need hear of it."""


@dataclasses.dataclass(frozen=True)
class Needs:
    """A function of the release that a capability relies on.

    `module` is dotted, without `sglang.`; `function` is `name` or `Class.name`. It must have
    `parameters`, the first ones in the order of `leading`, and use the names in `mentions`.
    """

    module: str
    function: str
    parameters: tuple[str, ...] = ()
    leading: tuple[str, ...] = ()
    mentions: tuple[str, ...] = ()

    def check(self, release: Release) -> None:
        """Raises LookupError or Unsupported, naming what is missing."""
        function = release.function(self.module, self.function)
        have = parameters(function)
        for name in (*self.parameters, *self.leading):
            if name not in have:
                raise Unsupported(
                    f"{self.function} in sglang.{self.module} has no parameter {name} (it has {', '.join(have)})"
                )
        if have[: len(self.leading)] != list(self.leading):
            raise Unsupported(
                f"{self.function} in sglang.{self.module} takes {', '.join(have)}, where {', '.join(self.leading)} is the order expected"
            )
        for name in self.mentions:
            if not mentions(function, name):
                raise Unsupported(f"{self.function} in sglang.{self.module} does not use {name}")


@dataclasses.dataclass(frozen=True)
class Capability:
    """One fast path or fix, with everything that is known about it.

    `probe` reads the release and returns a Verdict, or raises Unsupported. `install` wraps
    what lies in one of the `targets` modules of the release, which has just been imported, and is
    called once for each of them; it raises where it cannot. `wraps` says what that is, `kernels` which
    of AITER's it calls, `until` from which release on it is not needed.
    """

    name: str
    summary: str
    why: str
    wraps: tuple[str, ...]
    upstream: tuple[str, ...]
    until: str
    switch: Setting | None
    targets: tuple[str, ...]
    kernels: tuple[str, ...]
    needs: tuple[Needs, ...]
    probe: Callable[[Release], Verdict]
    install: Callable[[ModuleType, Release], None]

    def verdict(self, release: Release | None) -> Verdict:
        """What the release that is installed needs of this capability."""
        if release is None:
            return Verdict(NOT_APPLICABLE, "no SGLang is installed for this Python")
        try:
            for need in self.needs:
                need.check(release)
            return self.probe(release)
        except (Unsupported, LookupError) as error:
            return Verdict(UNSUPPORTED, str(error))
        except (OSError, SyntaxError, ValueError) as error:
            return Verdict(UNSUPPORTED, f"the source of the release cannot be read: {error}")
        except Exception as error:
            return Verdict(UNSUPPORTED, f"internal error of the probe: {type(error).__name__}: {error}")
