"""Reading checkpoints: Hugging Face folders, GGUF files, the demo model."""

from cbjax.checkpoints.demo import fetch as fetch_demo
from cbjax.checkpoints.load import Checkpoint as Checkpoint
from cbjax.checkpoints.load import GenerationDefaults as GenerationDefaults
from cbjax.checkpoints.load import load as load

__all__ = ["Checkpoint", "GenerationDefaults", "fetch_demo", "load"]
