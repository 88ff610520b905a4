"""The background manager: requests come and go while one thread runs the engine.

`ContinuousBatchingManager` is what users have. `Loop` is its thread, and alone touches the engine. `Ledger` holds what
is shared between the loop and everybody else, an `Entry` per request, all under one lock. Whoever waits, waits on a
condition of that lock; nobody polls.
"""

from cbjax.manager.manager import ContinuousBatchingManager as ContinuousBatchingManager

__all__ = ["ContinuousBatchingManager"]
