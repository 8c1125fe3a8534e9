"""The committed configurations: which one a shape gets, and that each can run on the card it is for.

At the end: into how many parts K is cut, and what that does to a card's multiprocessors.
"""

import functools
import itertools
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.machine_code import baselines
from fp8engine.kernels import split_k, tuning
from fp8engine.kernels.split_k import depth_of, parts_of
from fp8engine.kernels.tuning import CLASSES, Config, pick, shape_class, shared_memory, table

OPERATIONS = ("matmul_fp8", "matmul_fp8_promoted", "matmul_block", "matmul_fp16")
ARCHITECTURES = {"sm_90": (9, 0), "sm_89": (8, 9), "sm_80": (8, 0)}
CARDS = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)]
COMPILED = json.loads(baselines.path(baselines.DEVELOPED).read_text())["kernels"]
EVERY = [
    (operation, arch, name, config)
    for operation, cards in table().items()
    for arch, rows in cards.items()
    for name, config in rows.items()
]


def test_shape_classes():
    for shape, name in {
        (4096, 4096): "large",  # 32 x 16 tiles of 128x256
        (128 * 12, 256 * 8): "large",  # exactly the 96 that are enough
        (128 * 12, 256 * 8 - 255): "large",  # a ragged last column is a tile as well
        (128 * 12, 256 * 8 - 256): "medium",  # 12 x 7
        (128, 8192): "small",
        (1, 1): "small",
        (100_000, 3): "large",
    }.items():
        assert shape_class(*shape) == name
        assert shape_class(*shape, aligned=False) == "unaligned"


def test_the_table_has_every_operation_and_class():
    assert tuple(table()) == OPERATIONS
    for operation, arch in itertools.product(OPERATIONS, ARCHITECTURES):
        if arch == "sm_80":
            assert (arch in table()[operation]) == (operation == "matmul_fp16")  # an A100 has no FP8 Tensor Cores
        else:
            assert tuple(table()[operation][arch]) == CLASSES


@pytest.mark.parametrize(("operation", "arch", "name", "config"), EVERY, ids=str)
def test_a_configuration_can_run(operation, arch, name, config: Config, monkeypatch: pytest.MonkeyPatch):
    """Beside what was compiled: no kernel takes more shared memory than is known, and as many programs fit as start."""
    assert shared_memory(operation, config) <= tuning.SHARED_MEMORY[ARCHITECTURES[arch]]
    assert not config.descriptors or (arch == "sm_90" and name != "unaligned")  # descriptors are Hopper's, and aligned
    assert config.block_m % 64 == 0  # a warpgroup's rows
    assert operation != "matmul_block" or config.block_k == 128  # a scale's group of K is a step of the loop
    compiled = {
        kernel: row
        for kernel, row in COMPILED.items()
        if kernel.startswith(f"{operation} ") and f"{arch} {config} " in kernel
    }
    assert len(compiled) >= 3  # epilogues
    assert max(row["shared"] for row in compiled.values()) <= shared_memory(operation, config)
    monkeypatch.setattr(tuning, "capability", lambda where: ARCHITECTURES[arch])
    most = min(row["programs"] for kernel, row in compiled.items() if "add_parts" not in kernel)
    assert 1 <= tuning.programs(operation, config, torch.device("cpu")) <= most


def test_two_narrow_tiles_share_a_multiprocessor_of_hopper():
    for operation in OPERATIONS:
        rows = table()[operation]["sm_90"]
        held = {name: tuning.programs(operation, rows[name], torch.device("cpu")) for name in CLASSES}
        # Five stages of 64x128 leave no room for another; on an H200 they are faster than four and two programs.
        small = 1 if operation == "matmul_fp8" else 2
        assert held | {"unaligned": 1} == {"large": 1, "medium": 1, "small": small, "unaligned": 1}


def test_a_row_of_an_older_file_has_the_defaults_of_what_it_lacks():
    row = {"block_m": 64, "block_n": 128, "block_k": 128, "warps": 4, "ratio": 1.2}
    old = tuning.parse({"operations": {"matmul_fp8": {"sm_90": {"small": row}}}})
    assert old["matmul_fp8"]["sm_90"]["small"] == Config(64, 128, 128, warps=4, flatten=False, split_k=1, ratio=1.2)


def test_loops_are_flattened_where_that_keeps_the_tensor_core_s_ceiling():
    """And not where a card has timed them slower: medium results per tensor."""
    for operation, arch, name, config in EVERY:
        by_tma = arch == "sm_90" and name != "unaligned" and (operation, name) != ("matmul_fp8", "medium")
        gluon = config.kernel == "gluon"  # whose loads are a warp of their own
        assert config.flatten == (by_tma and operation != "matmul_fp8_promoted" and not gluon)


@pytest.mark.parametrize(
    ("operation", "capability"),
    [(name, card) for name, card in itertools.product(OPERATIONS, CARDS) if name == "matmul_fp16" or card >= (8, 9)],
    ids=str,
)
def test_what_a_card_is_given_fits_into_its_shared_memory(operation, capability):
    for m, n, aligned in ((8192, 8192, True), (128 * 12, 256 * 7, True), (1, 1, True), (8192, 8192, False)):
        config = pick(operation, capability, m, n, aligned)
        hopper = capability[0] in (9, 10)
        assert shared_memory(operation, config) <= (232_448 if hopper else {(8, 0): 166_912}.get(capability, 101_376))
        as_on = {9: "sm_90", 10: "sm_90", 12: "sm_89"}.get(capability[0], "sm_89" if capability == (8, 9) else "sm_80")
        row = table()[operation][as_on][shape_class(m, n, aligned)]
        assert config is row or capability != (9, 0)
        assert config == (row if capability == (9, 0) else tuning.plain(row)._replace(flatten=False))


def test_a_configuration_that_does_not_fit_gives_way_to_a_smaller_one(monkeypatch: pytest.MonkeyPatch):
    def given_with(limit: int, m: int = 8192, n: int = 8192, **shape) -> Config:
        monkeypatch.setitem(tuning.SHARED_MEMORY, (9, 0), limit)
        return pick.__wrapped__("matmul_fp8", (9, 0), m, n, **shape)  # what is kept is of the real limit

    hopper, ada = table()["matmul_fp8"]["sm_90"], table()["matmul_fp8"]["sm_89"]
    needs = {name: shared_memory("matmul_fp8", config) for name, config in hopper.items()}
    assert given_with(needs["large"]) is hopper["large"]
    assert needs["medium"] > needs["large"]  # five stages of a smaller tile
    assert given_with(needs["large"] - 1) is hopper["small"]
    medium = functools.partial(given_with, m=1536, n=1024)
    assert medium(needs["medium"]) is hopper["medium"]
    assert medium(needs["medium"] - 1) is hopper["small"]
    assert given_with(needs["small"] - 1) is ada["large"]
    assert given_with(needs["unaligned"] - 1, aligned=False) is ada["unaligned"]


def test_cards_that_are_too_small_too_old_or_not_known(monkeypatch: pytest.MonkeyPatch):
    assert pick("matmul_fp8", (13, 0), 8192, 8192) == table()["matmul_fp8"]["sm_89"]["large"]  # the least memory
    for operation, capability in (("matmul_fp8", (8, 0)), ("matmul_fp16", (7, 5))):
        with pytest.raises(LookupError, match="{} has no configuration for sm_{}{}".format(operation, *capability)):
            pick(operation, capability, 64, 64)
    monkeypatch.setitem(tuning.SHARED_MEMORY, (12, 0), 10_000)
    why = r"matmul_block needs at least \d+ bytes .* sm_120 may have 10000: use fe\.backend"
    with pytest.raises(LookupError, match=why):
        pick.__wrapped__("matmul_block", (12, 0), 8192, 8192)


@given(st.sampled_from(OPERATIONS), st.integers(1, 1 << 20), st.integers(1, 1 << 20), st.booleans())
def test_a_pick_is_the_tables_and_always_the_same(operation, m, n, aligned):
    picked, rows = pick(operation, (9, 0), m, n, aligned), table()[operation]["sm_90"]
    assert picked == pick(operation, (9, 0), m, n, aligned)
    wanted = shape_class(m, n, aligned)
    if wanted == "large":  # rounds of 132 tiles, each of which asks for a tile's rows and columns
        asked = {}
        for name in ("large", "medium"):
            height, width = rows[name].block_m, rows[name].block_n
            asked[name] = -(-(-(-m // height) * -(-n // width)) // 132) * (height + width)
        wanted = "medium" if asked["medium"] < asked["large"] else "large"
    assert picked is rows[wanted]


H100 = 132
SMALL = table()["matmul_fp8"]["sm_90"]["small"]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("m", [1, 16, 64])
def test_a_decode_step_keeps_most_of_a_card_busy(operation: str, m: int):
    """M <= 64 by N 1024 by K 4096: 8 or 16 programs without split-K, and 64 or 128 with it."""
    config = pick(operation, (9, 0), m, 1024)
    tiles = math.ceil(m / config.block_m) * math.ceil(1024 / config.block_n)
    assert (tiles, tiles * parts_of(m, 1024, 4096, config, H100)) in ((8, 64), (16, 128))
    assert tiles * parts_of(m, 1024, 8192, config, H100) == 128


@pytest.mark.parametrize(
    ("m", "n", "k", "parts"),
    [
        (64, 1024, 2047, 1),  # too short: the second launch costs more
        (64, 1024, 2048, 4),
        (512, 512, 16384, 4),  # wgrad of a small layer: 32 tiles
        (1024, 1024, 16384, 1),  # 128 tiles
        (64, 128, 1 << 20, 16),  # no more than the configuration allows
        (64, 67 * 128, 8192, 1),  # 67 tiles: twice as many would not run at once
        (64, 66 * 128, 8192, 2),
        (0, 1024, 8192, 1),
        (64, 1024, 0, 1),
    ],
)
def test_the_rule(m: int, n: int, k: int, parts: int):
    """A large result and an old row are never split."""
    assert parts_of(m, n, k, SMALL, H100) == parts
    unsplit = [rows["sm_90"][name] for rows in table().values() for name in ("large", "medium")]
    for config in (*unsplit, Config(64, 128, 128)):
        assert parts_of(m, n, k, config, H100) == 1


@given(
    st.integers(1, 4096), st.integers(1, 4096), st.integers(1, 1 << 18), st.integers(1, 200), st.sampled_from([32, 128])
)
def test_every_k_is_in_one_part_and_no_part_is_empty(m, n, k, multiprocessors, block_k):
    config = SMALL._replace(block_k=block_k)
    parts = parts_of(m, n, k, config, multiprocessors)
    assert 1 <= parts <= max(config.split_k, 1)
    if parts > 1:
        tiles = math.ceil(m / config.block_m) * math.ceil(n / config.block_n)
        depth = depth_of(k, config, parts)
        assert math.ceil(k / depth) == parts  # what the kernel makes of the depth
        assert depth % block_k == 0
        assert depth >= split_k.SHORTEST_PART - block_k
        assert tiles * parts <= multiprocessors
