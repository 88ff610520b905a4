"""The GPUs that programs are compiled for, and what is known of them: public specifications, as in XLA's own files."""

from __future__ import annotations

from dataclasses import dataclass

# Of every multiprocessor of compute capability 9.0 and 10.0. Each block of threads takes the last for itself.
REGISTERS = 65536
THREADS = 2048
BLOCKS = 32
SHARED_BYTES = 228 << 10
RESERVED_SHARED_BYTES = 1 << 10
# What one block of threads may take.
BLOCK_SHARED_BYTES = SHARED_BYTES - RESERVED_SHARED_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuChip:
    """One GPU.

    Attributes:
      name: as on the command line.
      kind: what JAX calls the device.
      capability: compute capability, major and minor.
      multiprocessors: of the GPU.
      hbm_bytes_per_second, memory_bytes, l2_bytes: of the GPU.
      clock_hz: the highest.
      shared_bytes: of a multiprocessor.
    """

    name: str
    kind: str
    capability: tuple[int, int]
    multiprocessors: int
    hbm_bytes_per_second: float
    memory_bytes: int
    l2_bytes: int
    clock_hz: float
    shared_bytes: int = SHARED_BYTES

    @property
    def arch(self) -> str:
        """What ptxas calls it, from Hopper on with the instructions that only its generation has."""
        major, minor = self.capability
        return f"sm_{major}{minor}{'a' if major >= 9 else ''}"

    @property
    def target_config(self) -> str:
        """XLA's description of it (`stream_executor.GpuTargetConfigProto` as text)."""
        major, minor = self.capability
        # What a generation alone has: wgmma, tcgen05. There is no such thing before Hopper.
        own = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {THREADS}
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {self.shared_bytes - RESERVED_SHARED_BYTES}
  shared_memory_per_core: {self.shared_bytes}
  core_count: {self.multiprocessors} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: {REGISTERS} registers_per_block_limit: {REGISTERS}
  memory_bandwidth: {self.hbm_bytes_per_second:.0f} l2_cache_size: {self.l2_bytes}
  device_memory_size: {self.memory_bytes} clock_rate_ghz: {self.clock_hz / 1e9}
  cuda_compute_capability {{ major: {major} minor: {minor} {own} }}
  platform_version: "Compute Capability {major}.{minor}a"
  device_vendor: "NVIDIA Corporation" name: "{self.kind}" device_address_bits: 64
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.12.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 patch: 0 }}
device_description_str: "{self.kind}"
"""


GPU_CHIPS = {
    chip.name: chip
    for chip in (
        # Our kernels need Hopper; programs without them compile for this one, too.
        GpuChip(
            name="a100",
            kind="NVIDIA A100-SXM4-80GB",
            capability=(8, 0),
            multiprocessors=108,
            hbm_bytes_per_second=2.039e12,
            memory_bytes=85_094_825_984,
            l2_bytes=40 << 20,
            clock_hz=1.41e9,
            shared_bytes=164 << 10,
        ),
        GpuChip(
            name="h100",
            kind="NVIDIA H100 80GB HBM3",
            capability=(9, 0),
            multiprocessors=132,
            hbm_bytes_per_second=3.35232e12,
            memory_bytes=84_942_979_072,
            l2_bytes=50 << 20,
            clock_hz=1.98e9,
        ),
        GpuChip(
            name="h200",
            kind="NVIDIA H200",
            capability=(9, 0),
            multiprocessors=132,
            hbm_bytes_per_second=4.8e12,
            memory_bytes=151_397_597_184,
            l2_bytes=50 << 20,
            clock_hz=1.98e9,
        ),
        GpuChip(
            name="b200",
            kind="NVIDIA B200",
            capability=(10, 0),
            multiprocessors=148,
            hbm_bytes_per_second=7.67232e12,
            memory_bytes=191_514_411_008,
            l2_bytes=132_644_864,
            clock_hz=1.965e9,
        ),
    )
}
