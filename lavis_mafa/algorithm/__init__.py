"""The method on tensors: one training step and its parts, without LAVIS."""
