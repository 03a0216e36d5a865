"""DeepSeek-V3, R1 and Kimi-K2: sigmoid router with a correction bias, groups by their best two."""

from helicore.models.config import ModelConfig
from helicore.models.deepseek import DeepseekModel


class DeepseekV3(DeepseekModel):
    """Checkpoints of `model_type` deepseek_v3 and kimi_k2.

    The `num_nextn_predict_layers` after the model's own predict further tokens; they are no part of
    it.
    """

    @classmethod
    def ignores(cls, config: ModelConfig, name: str) -> bool:
        parts = name.split(".")
        if parts[:2] == ["model", "layers"] and len(parts) > 2 and parts[2].isdigit():
            further = int(parts[2]) - config.num_hidden_layers
            if 0 <= further < config.num_nextn_predict_layers:
                return True
        return super().ignores(config, name)
