"""Model definitions: one file per family, torch modules over `helicore.ops`."""

from helicore.models.base import CausalLM, ForwardBatch
from helicore.models.config import ModelConfig

__all__ = ["CausalLM", "ForwardBatch", "ModelConfig"]
