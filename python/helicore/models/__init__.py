"""Model definitions: one file per family, torch modules over `helicore.ops`."""

from helicore.models.base import CausalLM, ForwardBatch
from helicore.models.config import ModelConfig
from helicore.models.loader import load_model

__all__ = ["CausalLM", "ForwardBatch", "ModelConfig", "load_model"]
