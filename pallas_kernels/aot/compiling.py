"""Compiles a function for a TPU that is not there: libtpu does it on any Linux CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.aot.chips import Chip


def compile_for(chip: Chip, function: Callable, *arguments: Any, donate: Sequence[int] = ()) -> jax.stages.Compiled:
    """The executable of a function for one device of a chip.

    Args:
      function: takes and gives trees of arrays.
      arguments: trees of arrays or `jax.ShapeDtypeStruct`.
      donate: arguments whose memory the results may use.

    Raises:
      ModuleNotFoundError: libtpu is not installed.
      jax.errors.JaxRuntimeError: it does not compile; the text is the compiler's.
    """
    # Else libtpu asks a server of Google's cloud which TPU this is, and waits for it.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    # Else it lets one process at a time have it, as if there were a TPU to be had.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    topology = topologies.get_topology_desc(platform="tpu", topology_name=chip.topology)
    mesh = Mesh(np.array(topology.devices[:1]), ("device",))
    everywhere = NamedSharding(mesh, PartitionSpec())
    arguments = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere), arguments)
    # The abstract mesh knows the kind of its device, which Pallas asks where there is no TPU.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(function, donate_argnums=tuple(donate), out_shardings=everywhere).lower(*arguments)
    return lowered.compile()
