"""setmaxnreg on the emulated card: registers that warps give and take, and kernels that wait for some for ever."""

import numpy as np
import pytest
from emulator.device_memory import Allocation
from emulator.faults import Deadlock, Fault
from emulator.launch import Launch
from emulator.reader import read
from emulator.scheduler import prepare
from ptx import text

BRANCH = """setp.lt.u32 %p1, %r0, 128; @%p1 bra $FIRST;
setmaxnreg.dec.sync.aligned.u32 LEAVES; bra $END;
$FIRST: setmaxnreg.inc.sync.aligned.u32 TAKES; mad.wide.u32 %rd9, %r0, 4, %rd0; st.global.b32 [%rd9], 7;
$END:"""


def launch(leaves: int, takes: int, seed: int | None, most: int = 128) -> np.ndarray:
    """Two warpgroups that begin with 128 registers a thread; what the first, which takes more, has written."""
    out = np.zeros(256, np.uint32)
    body = BRANCH.replace("LEAVES", str(leaves)).replace("TAKES", str(takes))
    limit = f".reqntid 256\n.maxnreg {most}" if most else ".reqntid 256"
    program = read(text(body, 1, 256).replace(".reqntid 256", limit))
    where = Allocation(out.ctypes.data, out.ctypes.data + out.nbytes)
    Launch(program, prepare(program), [out.ctypes.data], (1, 1, 1), 4096, [where]).run(seed)
    return out


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_warps_wait_for_registers_that_others_give(seed: int | None):
    assert launch(40, 216, seed).tolist() == [7] * 128 + [0] * 128


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_more_than_the_others_leave_is_a_deadlock(seed: int | None):
    with pytest.raises(Deadlock, match=r"wait for \('registers', 224, None\)"):
        launch(40, 224, seed)


@pytest.mark.parametrize(
    ("leaves", "takes", "most", "words"),
    [
        (136, 128, 128, r"setmaxnreg.dec to 136"),
        (40, 120, 128, r"setmaxnreg.inc to 120"),
        (44, 128, 128, "multiples of 8"),
        (16, 128, 128, "from 24 to 256"),
        (40, 128, 0, "without .maxnreg"),
        (40, 128, 264, "launches no such CTA"),
    ],
)
def test_what_has_no_defined_effect_is_refused(leaves: int, takes: int, most: int, words: str):
    with pytest.raises(Fault, match=words):
        launch(leaves, takes, None, most)
