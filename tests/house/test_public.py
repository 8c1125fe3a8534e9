"""Public names: those of fp8engine itself."""

import fp8engine as fe

NAMES = set(
    """
    Attention BF16 Cast E4M3 E5M2 FP16 FP32 Float8Tensor Format GroupedLinear Heads LayerNormLinear LayerNormMLP Linear
    PerBlock PerRow PerTensor Recipe Report TransformerLayer amp auto backend blockwise convert current delayed
    distributed errors flow hf high_precision inspect keep_budget keep_budget_in_training load_scaling_state_dict
    matmul mxfp8 onnx quantize revert rowwise rowwise_gw_hp scaling_state scaling_state_dict smooth weights_changed
    """.split()  # noqa: SIM905
)


def test_no_public_name_is_lost_or_new():
    assert sorted(fe.__all__) == sorted(NAMES)
    assert [name for name in NAMES if not hasattr(fe, name)] == []
