"""Operations on tensors: casts, matmuls, norms and activations, each with its backends and its plain-torch twin."""
