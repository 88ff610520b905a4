"""Compiles a function for a chip that is not there: libtpu does it for TPUs, jax's CUDA plugin for GPUs, on any CPU."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.aot.chips import Chip
from pallas_kernels.aot.gpu_chips import GpuChip

_CUDA_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")


def compile_for(
    chip: Chip | GpuChip, function: Callable, *arguments: Any, donate: Sequence[int] = ()
) -> jax.stages.Compiled:
    """The executable of a function for one device of a chip.

    Args:
      function: takes and gives trees of arrays.
      arguments: trees of arrays or `jax.ShapeDtypeStruct`.
      donate: arguments whose memory the results may use.

    Raises:
      ModuleNotFoundError: libtpu, or for GPUs jax's CUDA plugin, is not installed.
      jax.errors.JaxRuntimeError: it does not compile; the text is the compiler's.
    """
    return lower_for(chip, function, *arguments, donate=donate).compile()


def lower_for(
    chip: Chip | GpuChip, function: Callable, *arguments: Any, donate: Sequence[int] = ()
) -> jax.stages.Lowered:
    """What `compile_for` compiles; raises as it does."""
    topology = _gpu_topology(chip) if isinstance(chip, GpuChip) else _tpu_topology(chip)
    mesh = Mesh(np.array(topology.devices[:1]), ("device",))
    everywhere = NamedSharding(mesh, PartitionSpec())
    arguments = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere), arguments)
    # The abstract mesh knows the kind of its device, which Pallas asks where there is no such device.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(function, donate_argnums=tuple(donate), out_shardings=everywhere).lower(*arguments)


def check_cuda_plugin() -> None:
    """Raises ModuleNotFoundError, with what to install, where programs for GPUs cannot be compiled."""
    if not any(importlib.util.find_spec(name) for name in _CUDA_PLUGINS):
        raise ModuleNotFoundError(
            "jax's CUDA plugin is not installed: pip install 'cbjax[aot]' has it (jax-cuda13-plugin, jax-cuda13-pjrt)"
        )


def _tpu_topology(chip: Chip) -> topologies.TopologyDescription:
    # Else libtpu asks a server of Google's cloud which TPU this is, and waits for it.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    # Else it lets one process at a time have it, as if there were a TPU to be had.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    return topologies.get_topology_desc(platform="tpu", topology_name=chip.topology)


def _gpu_topology(chip: GpuChip) -> topologies.TopologyDescription:
    check_cuda_plugin()
    return topologies.get_topology_desc(
        platform="cuda", topology_name="", topology="1x1x1", target_config=chip.target_config
    )
