"""Reader of PTX: a kernel's text as a list of instructions with labels resolved.

Grammar: PTX ISA 8.7, chapters 4 (syntax) and 5 (state spaces).  Triton emits one kernel a module, its inline assembly
in nested blocks that have labels and registers of their own.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass, field

from emulator.faults import UnknownInstruction

SKIPPED = (".loc", ".file", ".section", ".pragma", ".b8", ".b32", ".b64")
BRANCH_TABLE = re.compile(r"(\$?\w+):\s*\.branchtargets([^;]*);")
LABEL = re.compile(r"^([$\w]+):\s*")
GUARD = re.compile(r"^@(!?)(%?\w+)\s+")
PARAMETER = re.compile(r"\.param\s[^,\n]*?(\w+_param_\d+)(?:\[\d+\])?")
REGISTER = re.compile(r"%\w+")
COMMENT = re.compile(r"//[^\n]*")
WIDTHS = {"pred": 1, "b8": 1, "b16": 2, "b32": 4, "b64": 8, "f32": 4, "f64": 8}


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    opcode: its name and modifiers, split at the dots.  operands: destination first, braces and brackets kept.
    guard: the predicate it is executed under; negated: under its opposite.  targets: where a branch may go.
    """

    opcode: tuple[str, ...]
    operands: tuple[str, ...]
    guard: str | None
    negated: bool
    text: str
    targets: tuple[int, ...] = ()

    @property
    def type(self) -> str:
        """The last modifier, which is most instructions' type."""
        return self.opcode[-1]


@dataclass
class Program:
    """A kernel: its instructions, the names of its parameters in order, the width of its registers by prefix or name.

    key: a checksum of its text.  architecture: 80, 89 or 90, for which it was compiled.
    registers: of a thread, as `.maxnreg` says; 0 where it says nothing.
    fragments: registers that a wgmma uses, as sums or as operands.
    """

    name: str
    key: int
    threads: int
    parameters: list[str]
    architecture: int = 90
    registers: int = 0
    instructions: list[Instruction] = field(default_factory=list)
    widths: dict[str, int] = field(default_factory=dict)
    fragments: set[str] = field(default_factory=set)


def read(ptx: str) -> Program:
    """The module's one kernel.  Raises UnknownInstruction for text that is no PTX that we know."""
    text = COMMENT.sub("", ptx[ptx.index(".entry") :])
    head, body = text.split("\n{", 1)
    name = re.match(r"\.entry\s+(\w+)\(", text)
    threads = re.search(r"\.reqntid\s+(\d+)", head)
    if name is None or threads is None:
        raise UnknownInstruction("the module has no .entry with .reqntid")
    target = re.search(r"\.target\s+sm_(\d+)", ptx)
    most = re.search(r"\.maxnreg\s+(\d+)", head)
    program = Program(name[1], zlib.crc32(ptx.encode()), int(threads[1]), PARAMETER.findall(head))
    program.architecture = int(target[1]) if target else program.architecture
    program.registers = int(most[1]) if most else 0
    cluster = re.search(r"\.reqnctapercluster\s+(\d+(?:,\s*\d+)*)", head)
    if cluster and set(re.findall(r"\d+", cluster[1])) != {"1"}:
        raise UnknownInstruction(f"{cluster[0]}: this card runs no clusters of CTAs")
    _Body(program).read(body)
    return program


class _Body:
    """Statements in nested blocks: a label is looked up in its branch's own block, then outside of all."""

    def __init__(self, program: Program):
        self.program = program
        self.statements: list[tuple[str, int]] = []  # text, number of its block
        self.labels: dict[tuple[int, str], int] = {}
        self.tables: dict[str, list[str]] = {}
        self.blocks = [0]
        self.made = 0

    def read(self, body: str) -> None:
        """Fill the program."""
        body = BRANCH_TABLE.sub(lambda found: self._table(found[1], found[2]), body)
        for line in body.split("\n"):
            if self._line(line.strip()):
                break
        for statement, block in self.statements:
            ins = self._instruction(statement, block)
            self.program.instructions.append(ins)
            if ins.opcode[:2] == ("wgmma", "mma_async"):
                self.program.fragments.update(REGISTER.findall(" ".join(ins.operands[:2])))

    def _table(self, name: str, labels: str) -> str:
        self.tables[name] = [label.strip() for label in labels.split(",")]
        return ""

    def _line(self, line: str) -> bool:
        """Take the statements of a line; whether the kernel ended."""
        while line and not line.startswith(SKIPPED):
            if line[0] == "{" and not re.match(r"^\{[^;]*\}\s*,", line):
                self.made += 1
                self.blocks.append(self.made)
                line = line[1:].strip()
            elif line[0] == "}":
                if len(self.blocks) == 1:
                    return True
                self.blocks.pop()
                line = line[1:].strip()
            elif label := LABEL.match(line):
                self.labels[self.blocks[-1], label[1]] = len(self.statements)
                line = line[label.end() :]
            else:
                statement, semicolon, line = line.partition(";")
                if not semicolon:
                    raise UnknownInstruction(f"cannot read {statement!r}: no semicolon")
                self._statement(statement.strip())
                line = line.strip()
        return False

    def _statement(self, statement: str) -> None:
        if register := re.match(r"\.reg\s+\.(\w+)\s+(.*)", statement):
            for name in register[2].split(","):
                prefix = re.sub(r"<\d+>", "", name.strip())
                self.program.widths[prefix] = WIDTHS[register[1]] if register[1] in WIDTHS else _width(register[1])
        elif statement and not statement.startswith("."):
            self.statements.append((statement, self.blocks[-1]))

    def _instruction(self, statement: str, block: int) -> Instruction:
        guard = GUARD.match(statement)
        rest = statement[guard.end() :] if guard else statement
        opcode, _, operands = re.sub(r"\s+", " ", rest).partition(" ")
        names, found = tuple(opcode.split(".")), tuple(_split(operands))
        labels = [found[0]] if names[0] == "bra" else self.tables[found[1]] if names[0] == "brx" else []
        targets = tuple(self._label(label, block) for label in labels)
        return Instruction(names, found, guard and guard[2], bool(guard and guard[1]), statement, targets)

    def _label(self, label: str, block: int) -> int:
        for scope in (block, 0):
            if (scope, label) in self.labels:
                return self.labels[scope, label]
        raise UnknownInstruction(f"a branch to {label}, and no such label in its block or in the kernel")


def _width(kind: str) -> int:
    raise UnknownInstruction(f"registers of type .{kind}")


def _split(operands: str) -> list[str]:
    """Operands at the commas that are in no braces or brackets."""
    found, depth, current = [], 0, ""
    for character in operands:
        depth += (character in "{[") - (character in "}]")
        if character == "," and depth == 0:
            found.append(current.strip())
            current = ""
        else:
            current += character
    return [*found, current.strip()] if current.strip() else found
