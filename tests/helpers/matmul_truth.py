"""What each cast really does to each matmul's result, by multiplying: the truth that `reads.judge` is held against."""

import torch
from real_casts import restored

from fp8engine.scaling.choice import OPERANDS, casts, reading
from fp8engine.scaling.reads import OPTIONS, READS

MOST_DB = 100.0  # beyond it only the rounding of scales is left
Tensors = dict[str, torch.Tensor]  # input [M, K], weight [N, K], grad_output [M, N]


def error_of(tensor: torch.Tensor, read: int, option: int) -> torch.Tensor:
    """The engine's cast of an operand as that matmul reads it, less the operand; in float64."""
    (role, matmul), (granularity, format) = READS[read], OPTIONS[option]
    made = casts(role, granularity, format)
    return restored(tensor, made[min(reading(role, matmul), len(made) - 1)]) - tensor.double()


def product(matmul: str, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The result of a matmul of its two operands, in the order of OPERANDS: y, dx or dw."""
    if matmul == "wgrad":
        return first.t() @ second
    return first @ (second.t() if matmul == "forward" else second)


def multiplied(tensors: Tensors, read: int, option: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(signal, noise): energies of the result's rows along the operand's own index, where it alone is cast."""
    role, matmul = READS[read]
    both = [tensors[each].double() for each in OPERANDS[matmul]]
    place = OPERANDS[matmul].index(role)
    exact = product(matmul, *both)
    both[place] = error_of(tensors[role], read, option)
    return exact.square().sum(1 - place), product(matmul, *both).square().sum(1 - place)


def squares(tensors: Tensors, read: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Squares of both operands, [own index, index of the sum]: of the one that is cast, and of the other."""
    role, matmul = READS[read]
    (other,) = (each for each in OPERANDS[matmul] if each != role)
    a, b = (tensors[each].double().square() for each in (role, other))
    return a.t() if reading(role, matmul) else a, b.t() if reading(other, matmul) else b


def defined(tensors: Tensors, read: int, option: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(signal, noise) as reads.py defines them: sums of squares, weighted by the other operand's energies."""
    a, b = squares(tensors, read)
    error = error_of(tensors[READS[read][0]], read, option).square()
    return a @ b.sum(0), (error.t() if reading(*READS[read]) else error) @ b.sum(0)


def rows_db(signal: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """SQNR of each row that is not zero, sorted."""
    return _db(signal[signal > 0], noise[signal > 0]).sort().values


def _db(signal: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    return (10 * (signal / noise).log10()).clamp(max=MOST_DB)
