"""DeepSeek-V3, R1 and Kimi-K2: sigmoid router with a correction bias, groups by their best two."""

from helicore.models.config import ModelConfig
from helicore.models.deepseek import DeepseekModel


class DeepseekV3(DeepseekModel):
    """Checkpoints of `model_type` deepseek_v3 and kimi_k2.

    Layers past `num_hidden_layers` predict further tokens; they are no part of the model.
    """

    @classmethod
    def ignores(cls, config: ModelConfig, name: str) -> bool:
        parts = name.split(".")
        if parts[:2] == ["model", "layers"] and len(parts) > 2 and parts[2].isdigit():
            return int(parts[2]) >= config.num_hidden_layers or super().ignores(config, name)
        return super().ignores(config, name)
