"""Promise: the result of a call on Ray, as it is given to another call: by reference, and row by row while it is being made."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

from engine.controller.dispatch import DP, Transfer
from engine.controller.stream import Route, Show, Taken
from engine.errors import TransientError

REBUILT = "The workers are rebuilt from the last committed step."


@dataclass(frozen=True)
class Promise:
    """What a call will return: references to the results that make it up, and the protocol that puts them together.

    showing: the processes that make the parts, where they show rows before; call: its number there.
    """

    role: str
    method: str
    transfer: Transfer
    parts: tuple[Any, ...]
    call: int
    showing: tuple[Any, ...]

    def fetch(self) -> Any:
        """Wait for the results and collect them in this process. Raises what the method raised."""
        try:
            return self.transfer.collect(ray.get(list(self.parts)))
        except RayTaskError as error:
            raise (error.cause or error) from None
        except (RayActorError, ObjectLostError) as error:
            raise TransientError(
                f"The result of {self.method} is lost: {error}.", role=self.role, remedy=REBUILT
            ) from None

    def streams_to(self, method: Callable[..., Any]) -> bool:
        """Whether a method is given rows of this while the rest is being made."""
        dealt = self.transfer == DP == method.transfer  # type: ignore[attr-defined]
        return dealt and bool(self.showing) and method.streams  # type: ignore[attr-defined,no-any-return]

    def follow(self, rank: int, ranks: int, reads: Sequence[str], show: Show) -> None:
        """Show the rows of a rank's share as they are finished, until no more come; whatever failed, `fetch` tells of it."""
        parts = len(self.parts)
        seen = dict.fromkeys(range(parts), 0)
        while seen:
            asked = {
                part: self.showing[part].take.remote(self.call, number, Route(part, parts, rank, ranks), reads)
                for part, number in seen.items()
            }
            for part, ref in asked.items():
                try:
                    taken: Taken = ray.get(ref)
                except (RayActorError, ObjectLostError):
                    return
                if taken.part is not None:
                    show(*taken.part)
                seen[part] = taken.seen
                if taken.ended:
                    del seen[part]
