"""Types of a report's dictionaries: the row of a layer, the slots in it, and the sums over all layers."""

from typing import TypedDict


class Counted(TypedDict):
    """What was counted of a tensor that is cast, or of all of them.

    saturated, underflowed: shares of the elements seen, 0 to 1; sampled: share of the elements that underflowed was
    counted over.  elements, nonfinite, recasts: counts.
    """

    elements: int
    saturated: float
    underflowed: float
    sampled: float
    nonfinite: int
    recasts: int


class Slot(Counted):
    """An operand or a result of a layer; of what is never cast to FP8 only cast and format are there.

    cast: as "E4M3 per row", or "none"; format: "E4M3", "BF16", or "none".  scale: the dequantisation factor of the
    latest cast; amax: of the latest step, 0 where nothing was cast in it (a weight whose copy was kept).
    margin: powers of two.
    """

    cast: str
    format: str
    scale: float
    amax: float
    calls: int
    margin: int
    cost_millinats: float | None


class InputSlot(Slot):
    """The slot of an input.  ready: calls that took FP8 codes as they came; dequantised: calls that did not, by why."""

    ready: int
    dequantised: dict[str, int]


class OutputSlot(Slot):
    """The slot of a result.  consumers: who reads it, as "name kind"; reason: why it is not stored in FP8."""

    consumers: list[str]
    reason: str


class Layer(TypedDict):
    """A layer.  rows: of its input, all calls together, None where none was counted; experts: [used, all] or None."""

    name: str
    kind: str
    shape: list[int]
    recipe: str
    backend: str
    emulated: bool
    reason: str
    fused: str
    outliers: str
    ran: bool
    rows: int | None
    fp8_share: float
    flops_share: float
    experts: list[int] | None
    kept_bytes: int
    kept_why: str
    gather: str
    divided: str
    input: InputSlot
    weight: Slot
    grad_output: Slot
    output: OutputSlot


class Totals(Counted):
    """Sums over all layers: numbers of layers, of elements and of bytes; shares are 0 to 1.

    gather: what fully_shard's gathers send, in bytes; None where nothing is sharded.
    """

    layers: int
    converted: int
    in_fp8: int
    in_fp8_in_part: int
    in_16_bits: int
    left_alone: int
    never_ran: int
    emulated: int
    fp8_flops_share: float
    cost_millinats: float
    kept_weight_bytes: int
    gather: dict[str, int] | None
