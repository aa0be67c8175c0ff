"""DeepSpeed checkpoints: ZeRO stages 0 to 3, BF16_Optimizer, pipelines, experts, tensor-parallel slices, universal."""
