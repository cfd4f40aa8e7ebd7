"""Building blocks of model files: linear layers, norms, attention, MoE, SSM mixers, LoRA."""
