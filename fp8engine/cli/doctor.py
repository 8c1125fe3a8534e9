"""`fp8engine doctor`: a check of this machine's versions and devices, and of every recipe on every device.

Exit code 0 when everything needed works, 1 when something is broken; what is merely absent (a GPU, an extra) is a note.
"""

from __future__ import annotations

from fp8engine.cli.shared import Answer, command, console, say, table

BROKEN = 1


@command("doctor")
def run() -> Answer:
    """Check this machine: versions, cards, what runs where, what is emulated and why."""
    from fp8engine.cli.checks import examine

    found = examine()
    return Answer(found, lambda: _tell(found), BROKEN if found["problems"] else 0)


def _tell(found: dict) -> None:
    screen = console()
    versions = ", ".join(f"{name} {version or 'not installed'}" for name, version in found["versions"].items())
    screen.print(f"Python {found['python']}, {versions}", soft_wrap=True)
    for each in found["devices"]:
        memory = f", {each['memory_gib']} GiB" if "memory_gib" in each else f", {each['threads']} threads"
        title = f"{each['device']}: {each['name']}, {each['capability']}{memory}"
        shown = table(title, ("recipe", "backend", "FP8 matmuls", "checked"))
        for row in each["recipes"]:
            how = f"emulated in {each['emulates_in']}: {row['why']}" if row["emulated"] else "FP8 Tensor Cores"
            checked = f"[red]{row['trouble']}" if row["trouble"] else "[green]works"
            shown.add_row(row["recipe"], row["backend"], how, checked)
        screen.print(shown)
        if "milliseconds" in each:
            timings = each["milliseconds"].items()
            times = ", ".join(f"{name} {'not there' if ms is None else f'{ms:.2f} ms'}" for name, ms in timings)
            screen.print(f"one 256x512x512 matmul: {times}", highlight=False)
    say(screen, *(f"note: {note}" for note in found["notes"]))
    for problem in found["problems"]:
        screen.print(f"[bold red]broken:[/] {problem}".replace("[sm", r"\[sm"), soft_wrap=True, highlight=False)
    if not found["problems"]:
        screen.print("[green]everything needed works")
