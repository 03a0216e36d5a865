"""DeepSeek-V2 and V2-Lite: softmax router, greedy or limited to groups by their best expert."""

from helicore.models.deepseek import DeepseekModel


class DeepseekV2(DeepseekModel):
    """Checkpoints of `model_type` deepseek_v2; they hold nothing besides the common tensors."""
