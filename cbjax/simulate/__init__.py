"""Simulation: workloads through the engine's own scheduler, with no model and no device.

from cbjax.simulate import read_trace, simulate, simulation_config

print(simulate(read_trace("trace.csv"), simulation_config(num_blocks=4096)))
"""

from cbjax.simulate.building import make_trace as make_trace
from cbjax.simulate.cost import ConstantCost as ConstantCost
from cbjax.simulate.cost import CostModel as CostModel
from cbjax.simulate.cost import LinearCost as LinearCost
from cbjax.simulate.cost import StepWork as StepWork
from cbjax.simulate.fit import MeasuredStep as MeasuredStep
from cbjax.simulate.fit import fit_cost as fit_cost
from cbjax.simulate.plot import plot_result as plot_result
from cbjax.simulate.plot import plot_sweep as plot_sweep
from cbjax.simulate.result import Result as Result
from cbjax.simulate.roofline import Hardware as Hardware
from cbjax.simulate.roofline import ModelSize as ModelSize
from cbjax.simulate.roofline import roofline as roofline
from cbjax.simulate.run import Simulation as Simulation
from cbjax.simulate.run import simulate as simulate
from cbjax.simulate.settings import simulation_config as simulation_config
from cbjax.simulate.sweep import Sweep as Sweep
from cbjax.simulate.sweep import run_sweep as run_sweep
from cbjax.simulate.trace import Trace as Trace
from cbjax.simulate.trace_file import read_trace as read_trace
from cbjax.simulate.workloads import WORKLOADS as WORKLOADS
from cbjax.simulate.workloads import Workload as Workload
from cbjax.simulate.workloads import workload_named as workload_named
