"""Applies a family's name table: every missing, extra and mis-shaped tensor is reported in one error."""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import jax
import numpy as np

from cbjax.checkpoints.source import TensorSource
from cbjax.models.config import DecoderConfig
from cbjax.models.families import NameTable, TensorRule
from cbjax.models.params import Params, Path, abstract_params, flatten, unflatten

_LOGGER = logging.getLogger(__name__)
_MAX_NAMES_IN_ERROR = 20
_READERS = 2


def load_params(
    source: TensorSource,
    names: NameTable,
    config: DecoderConfig,
    dtype: np.dtype,
    on_tensor: Callable[[int], object] = lambda num_bytes: None,
) -> Params:
    """Parameters of `config` as jax arrays of `dtype`, read from `source` tensor by tensor.

    The host holds a few tensors beyond what is loaded. `on_tensor` is told the bytes of each array made.

    Raises:
        ValueError: tensors are missing, not in the table, of another shape, or not floating point.
    """
    wanted: dict[Path, jax.ShapeDtypeStruct] = flatten(abstract_params(config, dtype))
    rules = {path: _rule_for(path, names) for path in wanted}
    _check_names(
        source, names, config, {rule.name: rule.expected_shape(wanted[path].shape) for path, rule in rules.items()}
    )
    loaded: dict[Path, jax.Array] = {}
    tensors = _read_ahead(lambda rule: _read(source, rule, config, dtype), rules.values())
    for path, values in zip(rules, tensors, strict=True):
        loaded[path] = _place(values)
        on_tensor(values.nbytes)
    return unflatten(loaded)


def _rule_for(path: Path, names: NameTable) -> TensorRule:
    """The table's rule for one parameter, with the layer's number put into the tensor's name."""
    layer = next((part for part in path if isinstance(part, int)), None)
    template = "/".join("{i}" if isinstance(part, int) else part for part in path)
    rule = names.rules[template]
    return rule if layer is None else replace(rule, name=rule.name.replace("{i}", str(layer)))


def _check_names(
    source: TensorSource, names: NameTable, config: DecoderConfig, expected: Mapping[str, tuple[int, ...]]
) -> None:
    shapes = source.shapes
    missing = [name for name in expected if name not in shapes]
    extra = [name for name in shapes if name not in expected and not _is_ignored(name, names, config)]
    misshaped = [
        f"{name} {list(shapes[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    ]
    problems = [
        f"{len(found)} {kind}: {_listed(found)}"
        for kind, found in (("missing", missing), ("not known", extra), ("of the wrong shape", misshaped))
        if found
    ]
    if problems:
        raise ValueError(
            f"The checkpoint's tensors do not fit its configuration ({len(expected)} expected). "
            + "; ".join(problems)
            + ". Check that configuration and weights belong together and that every shard is there."
        )


def _is_ignored(name: str, names: NameTable, config: DecoderConfig) -> bool:
    for entry in names.ignored:
        pattern = re.escape(entry.name).replace(r"\{i\}", r"\d+")
        if re.fullmatch(pattern, name) and (config.tie_embeddings or not entry.tied_only):
            _LOGGER.debug("tensor %s is left out: %s", name, entry.reason)
            return True
    return False


def _listed(found: Sequence[str]) -> str:
    more = f" and {len(found) - _MAX_NAMES_IN_ERROR} more" if len(found) > _MAX_NAMES_IN_ERROR else ""
    return ", ".join(found[:_MAX_NAMES_IN_ERROR]) + more


def _read_ahead(read: Callable[[TensorRule], np.ndarray], rules: Iterable[TensorRule]) -> Iterator[np.ndarray]:
    """`map(read, rules)` with `_READERS` tensors being read while the caller handles one."""
    with ThreadPoolExecutor(_READERS) as pool:
        pending: deque[Future[np.ndarray]] = deque()
        for rule in rules:
            pending.append(pool.submit(read, rule))
            if len(pending) > _READERS:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _read(source: TensorSource, rule: TensorRule, config: DecoderConfig, dtype: np.dtype) -> np.ndarray:
    """The parameter of `rule` in memory of its own: `source` may have given a view of a file that can change."""
    values = source.read(rule.name)
    if not jax.numpy.issubdtype(values.dtype, np.floating):
        raise ValueError(
            f"Tensor {rule.name!r} has dtype {values.dtype}, weights must be floating point; "
            "quantised checkpoints are read from GGUF files only."
        )
    return np.array(values if rule.transform is None else rule.transform(values, config), dtype=dtype)


def _place(values: np.ndarray) -> jax.Array:
    """The one place that decides where a parameter lives: today, whole, on the default device."""
    return jax.numpy.asarray(values)
