"""FP8 matmuls of all experts in one launch; how many rows an expert has is read on the card.

    rows    y[t, n]     = sum_k a[t, k] b[e(t), n, k] * scale_a scale_b + bias[e(t), n]      forward, dgrad
    sums    dw[e, m, n] = sum_{t of e} a[m, t] b[n, t] * scale_a scale_b                     wgrad

e(t): the expert of row t.  Persistent: programs walk the tiles of all experts, which `bounds` (expert_rows.py) tells
them; the host knows only a bound of how many there are.

    rows    a tile is 128 rows of one expert, or a part of them.  TMA reads beyond the expert's last row, and the result
            is stored with a mask: rows of the next expert are multiplied and not kept
    sums    a and b are laid out in blocks with zeros behind each expert's rows: whole blocks are multiplied, without a
            mask in the loop.  An expert without rows gets zeros

Scales per tensor; per row (of a: each row; of b: each row of each expert; in sums one per expert and row of a or b);
or along what is summed, 1 x 128 or 128 x 128 (or 32, 64), promoted as in matmul.py.  A row that belongs to no
expert, behind the last one, gets zeros.

Cost: 2 T N K operations each; of a ragged tile all 128 rows are multiplied: an expert of 17 rows costs what 64 cost.
Twin: fp8engine/ops/reference/grouped.py.
"""

import torch

from fp8engine.kernels.matmul import matmul_fp8
from fp8engine.kernels.tuning import Config
from fp8engine.kernels.walk import Walk


def grouped_rows(
    a, b, bounds_2E1, epilogue, promoted: bool = False, config: Config | None = None, gluon: bool = True
) -> torch.Tensor:
    """y [T, N] of rows a.data [T, K] and a stack of experts' matrices b.data [E * N, K], both contiguous along K.

    Scales FP32: (); a [T, 1] and b [E * N, 1]; or along K, a [T, G] or [128 * blocks / rows, G], where groups span
    rows of an expert, and b [E * (ceil(N / 128) * 128 / rows), G].
    epilogue: out, and as bias_N a bias [E, N]; nothing else of the twin's Epilogue.
    """
    return matmul_fp8(a, b, epilogue, promoted, config, gluon, Walk("rows", bounds_2E1))


def grouped_sums(
    a, b, bounds_2E1, epilogue, promoted: bool = True, config: Config | None = None, gluon: bool = True
) -> torch.Tensor:
    """y [E, M, N] of a.data [M, 128 * blocks] and b.data [N, 128 * blocks], laid out in blocks (expert_rows.py).

    Scales FP32: (); a [E, M] and b [E, N], of which a `rows` of 1 says so; or along the sums, [M / rows, G] and
    [N / rows, G], a group for each `cols` of the columns.  epilogue: out; nothing else of the twin's Epilogue.
    """
    return matmul_fp8(a, b, epilogue, promoted, config, gluon, Walk("sums", bounds_2E1))
