"""Flax NNX layers and one config-driven decoder."""

from cbjax.models.config import DecoderConfig as DecoderConfig
from cbjax.models.config import ExpertsConfig as ExpertsConfig
from cbjax.models.decoder import Decoder as Decoder
from cbjax.models.params import abstract_params as abstract_params
from cbjax.models.params import build as build
from cbjax.models.params import check_same_params as check_same_params
from cbjax.models.params import flatten as flatten
from cbjax.models.params import init_params as init_params
from cbjax.models.params import unflatten as unflatten
from cbjax.models.rope_config import LinearScaling as LinearScaling
from cbjax.models.rope_config import Llama3Scaling as Llama3Scaling
from cbjax.models.rope_config import RopeConfig as RopeConfig
from cbjax.models.rope_config import YarnScaling as YarnScaling
