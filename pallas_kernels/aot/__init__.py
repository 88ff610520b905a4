"""Compiles kernels for accelerators that are not there, and tells what their compiler knows."""

from pallas_kernels.aot.cases import Case as Case
from pallas_kernels.aot.chips import CHIPS as CHIPS
from pallas_kernels.aot.chips import Chip as Chip
from pallas_kernels.aot.chips import chip_named as chip_named
from pallas_kernels.aot.compiling import compile_for as compile_for
from pallas_kernels.aot.gpu_chips import GPU_CHIPS as GPU_CHIPS
from pallas_kernels.aot.gpu_chips import GpuChip as GpuChip
from pallas_kernels.aot.gpu_program import GpuProgram as GpuProgram
from pallas_kernels.aot.gpu_report import GpuKernel as GpuKernel
from pallas_kernels.aot.gpu_report import GpuReport as GpuReport
from pallas_kernels.aot.gpu_report import inspect_gpu as inspect_gpu
from pallas_kernels.aot.report import CompileError as CompileError
from pallas_kernels.aot.report import Report as Report
from pallas_kernels.aot.report import inspect as inspect
