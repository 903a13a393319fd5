"""How much of a cache each layer needs: plain numbers, the same in every backend."""

from __future__ import annotations

from .config import BlockConfig, ModelConfig


def cache_slots(config: BlockConfig, capacity: int) -> tuple[int, ...]:
    """How many positions each layer of a KVCache keeps; position p stands in slot p modulo that number.

    All of `capacity`, or, where a window reaches back `left` positions, those and the position itself: a new position
    then takes the place of the one that no later query sees.
    """
    layers = config.layers if isinstance(config, ModelConfig) else 1
    own = config.layer_windows if isinstance(config, ModelConfig) else None
    windows = (config.window,) * layers if own is None else own
    return tuple(
        capacity if window is None or window[0] is None else min(capacity, window[0] + 1) for window in windows
    )
