"""Layer groups: which layers share a block table, and which array of the store each layer lies in.

All layers of a group see as far back (`window`), so they hold the same positions and share one table. The groups are of
equal size and share one pool: array j of the store holds layer j of every group, so a block id belongs to one group
at a time and is worth the same memory in each.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cbjax.attention.contract import LayerSpec

# Places of the store that may stay empty for the sake of fewer groups, as a share of all layers.
_PADDING_SHARE = 1 / 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroups:
    """See the module's docstring; made by `layer_groups`.

    Attributes:
        windows: of each group, in tokens; None is the whole context.
        shapes: (kv_heads, head_dim) of each array of the store.
        places: (group, array) of each layer.
        most_queries: query heads of a kv head, at most.
    """

    windows: tuple[int | None, ...]
    shapes: tuple[tuple[int, int], ...]
    places: tuple[tuple[int, int], ...]
    most_queries: int = 1

    @property
    def num_padded(self) -> int:
        """Places that no layer fills: their memory is paid for and never used."""
        return len(self.windows) * len(self.shapes) - len(self.places)

    def __str__(self) -> str:
        counts = Counter(group for group, _ in self.places)
        names = ["full" if window is None else f"window {window}" for window in self.windows]
        return ", ".join(f"{name}: {counts[group]}" for group, name in enumerate(names))


def layer_groups(layers: Sequence[LayerSpec], *, max_positions: int | None = None) -> LayerGroups:
    """Deals a model's layers into groups of equal size.

    Layers of one window make one or more groups. Of all ways to split the most frequent kind of layer evenly, the one
    with the fewest groups is taken that leaves at most an eighth of the layers' number in empty places, or else the one
    with the fewest empty places. Arrays are per shape, so a group fills only those of its own layers' shapes.

    Args:
        layers: of the model, in order (`record_layers`).
        max_positions: of the model; a window that reaches over all of them is none.
    """
    kinds: defaultdict[tuple[int | None, tuple[int, int]], list[int]] = defaultdict(list)
    for index, layer in enumerate(layers):
        reaches_all = layer.window is None or (max_positions is not None and layer.window >= max_positions)
        kinds[None if reaches_all else layer.window, (layer.num_kv_heads, layer.head_dim)].append(index)
    most = max(map(len, kinds.values()))
    dealt = [_deal(kinds, len(layers), split) for split in range(1, most + 1)]
    allowed = _PADDING_SHARE * len(layers)
    best = min(dealt, key=lambda groups: (max(groups.num_padded, allowed), len(groups.windows)))
    return replace(best, most_queries=max(layer.num_heads // layer.num_kv_heads for layer in layers))


def _deal(kinds: dict[tuple[int | None, tuple[int, int]], list[int]], num_layers: int, split: int) -> LayerGroups:
    """The groups if the most frequent kind of each shape is split `split` ways."""
    size: Counter[tuple[int, int]] = Counter()  # arrays of each shape
    for (_, shape), members in kinds.items():
        size[shape] = max(size[shape], -(-len(members) // split))
    first, shapes = {}, []
    for shape, count in size.items():
        first[shape] = len(shapes)
        shapes += [shape] * count
    windows: list[int | None] = []
    places: list[tuple[int, int]] = [(0, 0)] * num_layers
    for window in sorted({window for window, _ in kinds}, key=lambda window: (window is not None, window or 0)):
        mine = {shape: members for (of, shape), members in kinds.items() if of == window}
        for shape, members in mine.items():
            for i, layer in enumerate(members):
                places[layer] = (len(windows) + i // size[shape], first[shape] + i % size[shape])
        windows += [window] * max(-(-len(members) // size[shape]) for shape, members in mine.items())
    return LayerGroups(windows=tuple(windows), shapes=tuple(shapes), places=tuple(places))
