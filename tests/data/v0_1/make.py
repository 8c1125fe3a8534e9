"""The files of this folder, as fp8engine 0.1 (commit e72d215) wrote them; README.md lists them.

    PYTHONPATH=tests python -m data.v0_1.make

It ran once, at that commit.  Run later it would write what the later engine writes, and the files would prove nothing:
it refuses where `fp8engine.modules.linear` is not that commit's own file.  tests/test_old_artefacts.py builds the same
models and takes the same steps with the functions here, which use public names only.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import lzma
import pickle
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from golden.trainings import digest, flat, integers
from torch import nn

import fp8engine as fe

FOLDER = Path(__file__).parent
BEFORE, AFTER = 5, 4  # steps before the file was written, and after it was read
IDS = 32


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """On the reference backend, as the files were made; no word of emulation."""
    with warnings.catch_warnings(), fe.backend("reference"):
        warnings.simplefilter("ignore")
        yield


def chain() -> nn.Module:
    """Linear layers in a row, so that `auto` stores a result in FP8."""
    return integers(nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 16)))


def two_layers() -> nn.Module:
    """Under scales predicted from four steps."""
    return fe.convert(integers(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))), fe.delayed(history=4))


def decided() -> nn.Module:
    """Under `auto`, which decides every second step."""
    return fe.convert(chain(), fe.auto(interval=2), example_inputs=inputs("auto", 0)[0])


def by_hand() -> nn.Module:
    """The engine's own fused modules."""
    heads = fe.Heads(2, 1, theta=1e4, causal=True)
    options: dict[str, Any] = {"activation": "swiglu", "bias": False, "norm": "rms", "heads": heads}
    return integers(
        nn.Sequential(
            fe.LayerNormLinear(16, 16, recipe="rowwise"),
            fe.LayerNormMLP(16, 32, recipe="current", store="fp8"),
            fe.TransformerLayer(16, 32, recipe="delayed", **options),
        )
    )


def zero_centred() -> nn.Module:
    """Norms whose weights are kept less 1."""
    options: dict[str, Any] = {"recipe": "current", "zero_centered": True}
    made = (fe.LayerNormLinear(16, 16, norm=norm, **options) for norm in ("layer", "rms"))
    return integers(nn.Sequential(*made))


def encoder() -> nn.Module:
    """torch's own layer, converted."""
    return fe.convert(integers(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)), "current")


def grouped() -> nn.Module:
    """Three experts."""
    return integers(fe.GroupedLinear(3, 16, 16, recipe="delayed"))


def family(kind: str, **options: Any) -> Any:
    """A tiny model of transformers."""
    import transformers

    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": IDS}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16, "pad_token_id": 0}
    if kind == "GPT2LMHead":
        size = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": IDS}
        heads = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    config = getattr(transformers, f"{kind.removesuffix('LMHead')}Config")(**{**size, **heads, **options})
    config._attn_implementation = "eager"
    suffix = "Model" if kind.endswith("LMHead") else "ForCausalLM"
    return integers(getattr(transformers, f"{kind}{suffix}")(config)).train()


def export(name: str, folder: Path) -> fe.hf.ExportReport:
    """One scale a tensor and one a 128x128 block of a Llama, one a row of a GPT-2; the rest in BF16."""
    size = {"current": 16, "blockwise": 128, "rowwise": 16}[name]
    if name == "rowwise":
        model, layout = family("GPT2LMHead"), "fp8engine"
    else:
        model, layout = family("Llama", hidden_size=size, intermediate_size=size), "auto"
    return fe.hf.export(model.to(torch.bfloat16).eval(), folder, name, layout=layout)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "delayed": two_layers,
    "auto": decided,
    "by_hand": by_hand,
    "zero_centred": zero_centred,
    "encoder": encoder,
    "grouped": grouped,
    "llama_fused": lambda: fe.convert(family("Llama"), "current", fuse=True),
    "gpt2": lambda: fe.convert(family("GPT2LMHead"), "delayed", fuse=False),
    "fresh": two_layers,  # no step before it was saved
    "mixtral": lambda: fe.convert(family("Mixtral", num_local_experts=2, num_experts_per_tok=1), "rowwise", fuse=False),
}
EXPORTS = ("current", "blockwise", "rowwise")


def inputs(name: str, step: int) -> tuple:
    """What the model of a name is called with in a step."""
    generator = torch.Generator().manual_seed(3000 + step)
    if name in ("llama_fused", "gpt2", "mixtral", *EXPORTS):
        return (torch.randint(0, IDS, (2, 16), generator=generator),)
    x = torch.randint(-127, 128, (2, 8, 16), generator=generator).float() / 64
    return (x.flatten(0, 1), [5, 0, 11]) if name == "grouped" else (x,)


def call(name: str, model: nn.Module, step: int) -> torch.Tensor:
    """The model's result, or its logits."""
    found = model(*inputs(name, step))
    return found if isinstance(found, torch.Tensor) else found.logits


def output(name: str, model: nn.Module) -> torch.Tensor:
    """In evaluation, of the first step's input."""
    training = model.training
    with torch.no_grad():
        found = call(name, model.eval(), 0)
    model.train(training)
    return found


def train(name: str, model: nn.Module, start: int, steps: int) -> list[float]:
    """Losses of SGD steps; the loss is the mean square of the result."""
    losses = []
    for step in range(start, start + steps):
        loss = call(name, model, step).float().square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=2.0**-5)
                    parameter.grad = None
        losses.append(loss.item())
    return losses


def scaler_steps(scaler: fe.amp.GradScaler) -> list[float]:
    """The scale after each of four steps, the second of which overflows."""
    weight = nn.Parameter(torch.ones(4))
    optimizer, scales = torch.optim.SGD([weight], lr=2.0**-5), []
    for factor in (1.0, torch.inf, 1.0, 1.0):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def scaler() -> fe.amp.GradScaler:
    """With rules of its own."""
    return fe.amp.GradScaler("cpu", growth_interval=2, rules=fe.amp.ScaleRules(decrease_every_n=1, floor=16.0))


def quantized() -> dict[str, fe.Float8Tensor]:
    """One for each granularity."""
    x = inputs("auto", 1)[0].flatten(0, 1)
    casts = {"tensor": fe.Cast(fe.E5M2), "row": fe.Cast(fe.E4M3, fe.PerRow(), power_of_2=True)}
    casts["block"] = fe.Cast(fe.E4M3, fe.PerBlock(1, 16))
    return {name: fe.quantize(x, cast) for name, cast in casts.items()}


def values() -> dict[str, Any]:
    """What compares equal to itself after pickle."""
    made = [
        fe.auto(interval=4, min_sqnr_db={"norm": 25.0}), fe.current(), fe.delayed(3, 1, "most_recent"), fe.rowwise(),
        fe.rowwise_gw_hp(), fe.blockwise(), fe.high_precision(fe.FP16),
    ]  # fmt: skip
    return {
        **{f"recipe_{recipe.name}": recipe for recipe in made},
        "formats": (fe.E4M3, fe.E5M2, fe.BF16, fe.FP16, fe.FP32),
        "casts": (fe.Cast(fe.E4M3, fe.PerRow(0)), fe.Cast(fe.E5M2, fe.PerTensor(), "delayed")),
        "block": fe.PerBlock(128, 128),
        "heads": fe.Heads(4, 2, theta=1e4, causal=True),
        "rules": fe.amp.ScaleRules(decrease_every_n=3),
        "description": fe.hf.describe(family("Mixtral", num_local_experts=2)),
    }


def save(name: str, value: Any) -> None:
    """Write what torch.save (.pt) or pickle (.pkl) makes of a value, through xz: half of it is zeros and names."""
    memory = io.BytesIO()
    if name.endswith(".pt"):
        torch.save(value, memory)
    else:
        pickle.dump(value, memory, protocol=2)  # 2, as torch.save: names are whole in it
    (FOLDER / f"{name}.xz").write_bytes(lzma.compress(memory.getvalue(), preset=9))


def read(name: str) -> bytes:
    """What was written under a name."""
    return lzma.decompress((FOLDER / f"{name}.xz").read_bytes())


def rounded(x: torch.Tensor) -> Any:
    """Four features of each row, to five digits."""
    return [[float(f"{value:.5g}") for value in row] for row in x.flatten(0, -2)[:, :4].tolist()]


def main() -> None:
    """Write every file."""
    spec = importlib.util.find_spec("fp8engine.modules.linear")
    if spec is None or "Linear(Float8Module" not in Path(str(spec.origin)).read_text():
        raise SystemExit("this is not the engine of commit e72d215: its files are not to be made again")
    expected: dict[str, Any] = {}
    with quiet():
        for name, make in MODELS.items():
            model = make()
            losses = train(name, model, 0, 0 if name == "fresh" else BEFORE)
            save(f"{name}.pt", model)
            state = fe.scaling_state_dict(model)
            if name in ("delayed", "auto"):
                save(f"{name}_state.pt", {"model": model.state_dict(), "scaling": state})
            if name == "auto":
                report = fe.inspect(model)
                save("report.pkl", report)
                (FOLDER / "report.json").write_text(json.dumps(report.to_dict(), indent=1))
            found = {
                "output": rounded(output(name, model)),
                "before": losses,
                "after": train(name, model, BEFORE, AFTER),
            }
            expected[name] = found | {"state": digest(*flat(state["slots"]))}
            if name == "auto":
                fe.inspect(model).save_plan(FOLDER / "plan.json")
        for name in EXPORTS:
            report = export(name, FOLDER / f"export_{name}")
            save(f"export_{name}.pkl", replace(report, path=f"export_{name}"))
            served = fe.hf.load(report.path)
            expected[name] = {"output": rounded(output(name, served))}
            if name != "blockwise":
                save(f"served_{name}.pt", served)
        flow = fe.flow.record(chain(), inputs("auto", 0))
        save("flow.pkl", flow)
        expected["flow"] = str(flow)
        save("float8.pt", quantized())
        for name, value in values().items():
            save(f"value_{name}.pkl", value)
        scale = scaler()
        expected["scaler"] = {"before": scaler_steps(scale)}
        save("scaler_state.pt", scale.state_dict())
        save("scaler.pkl", scale)
        expected["scaler"]["after"] = scaler_steps(scale)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in expected.items())
    (FOLDER / "expected.json").write_text(f"{{{lines}}}\n")


if __name__ == "__main__":
    main()
