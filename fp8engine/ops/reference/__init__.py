"""Plain-torch twins of every kernel, under its name: the emulation without FP8 hardware, and the oracle of tests.

| file | twin of | what |
| --- | --- | --- |
| rounding.py | kernels/rounding.py | round-to-nearest-even, saturating, NaN-keeping |
| scale.py | kernels/scale_update.py | amax to scale; a model's windows in one call |
| operand.py | - | Operand and Slot: the values that kernels take and give |
| quantize.py | kernels/quantize.py | scale, round, count; tensor, row, block |
| cast_transpose.py | kernels/cast_transpose.py | both orientations; what a norm or an activation stores |
| epilogue.py | kernels/epilogue.py | how a matmul ends: bias, activation, statistics, the output's format |
| matmul.py | kernels/matmul.py | FP32 sums of exact products |
| grouped.py | kernels/matmul_grouped.py, quantize_experts.py, expert_rows.py | matmuls and casts of experts' rows |
| split_k.py | kernels/split_k.py | a sum over K in parts, and the order in which they are added |
| norm_quantize.py | kernels/norm_quantize.py | RMSNorm and LayerNorm, with FP8 codes of the result; backward |
| activations.py | kernels/activations.py | the table of activations, and their formulas |
| act_quantize.py | kernels/act_quantize.py | activations, with FP8 codes of the result; backward |
| attention.py | kernels/attention.py, attention_cast.py | attention in FP8: casts, forward |
| attention_backward.py | kernels/attention_backward.py | its gradients |
"""

from fp8engine.ops.reference.act_quantize import act_quantize, act_quantize_backward
from fp8engine.ops.reference.attention import attention
from fp8engine.ops.reference.attention_backward import attention_backward
from fp8engine.ops.reference.cast_transpose import Store, cast_transpose
from fp8engine.ops.reference.epilogue import KINDS, Epilogue, finish
from fp8engine.ops.reference.grouped import expert_sums, quantize_experts, transpose_experts
from fp8engine.ops.reference.matmul import column_sums, emulate, emulation_dtype, folded, matmul_fp8, matmul_fp16
from fp8engine.ops.reference.norm_quantize import Norm, RowStatistics, norm_quantize, norm_quantize_backward
from fp8engine.ops.reference.operand import Operand, Slot, as_groups, from_groups, operand
from fp8engine.ops.reference.quantize import quantize, quantize_given
from fp8engine.ops.reference.rounding import decode, round_to_grid, saturating_cast
from fp8engine.ops.reference.scale import scale_factor, scale_update
from fp8engine.ops.reference.split_k import add_parts
