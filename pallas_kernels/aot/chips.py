"""The TPU generations that programs are compiled for, and what is known of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One JAX device of a TPU generation; of v4 and v5p that is a chip of two cores, of which a kernel runs on one.

    Attributes:
      name: as on the command line.
      topology: the smallest slice that libtpu knows.
      hbm_bytes_per_second: of a core (`jax.experimental.pallas.tpu.get_tpu_info`).
      vmem_bytes: of a core.
      clock_hz: from the peak rate and the number of multiply-adders of 128 x 128 matrix units; None where that gives no
        believable figure.
    """

    name: str
    topology: str
    hbm_bytes_per_second: float
    vmem_bytes: int
    clock_hz: float | None


CHIPS = {
    chip.name: chip
    for chip in (
        Chip(name="v4", topology="v4:2x2x1", hbm_bytes_per_second=615e9, vmem_bytes=16 << 20, clock_hz=1.05e9),
        Chip(name="v5e", topology="v5e:2x2", hbm_bytes_per_second=820e9, vmem_bytes=128 << 20, clock_hz=1.50e9),
        Chip(name="v5p", topology="v5p:2x2x1", hbm_bytes_per_second=1230e9, vmem_bytes=64 << 20, clock_hz=1.75e9),
        Chip(name="v6e", topology="v6e:2x2", hbm_bytes_per_second=1640e9, vmem_bytes=128 << 20, clock_hz=None),
        Chip(name="tpu7x", topology="tpu7x:2x2x1", hbm_bytes_per_second=3700e9, vmem_bytes=64 << 20, clock_hz=None),
    )
}


def chip_named(name: str) -> Chip:
    """The chip of a name.

    Raises:
      NotImplementedError: there is none.
    """
    if name not in CHIPS:
        raise NotImplementedError(f"chips are {', '.join(CHIPS)}; got {name!r}")
    return CHIPS[name]
