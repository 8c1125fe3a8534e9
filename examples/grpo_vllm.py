"""GRPO on a toy reward: the trainer here in FP8, vLLM in another process, new weights sent as FP8 codes.

    python examples/grpo_vllm.py --vllm .venv-serve/bin/python     the rollouts are vLLM's
    python examples/grpo_vllm.py                                   no vLLM: fe.hf.load generates, in this process

A small Llama that has read Python's manual is rewarded for vowels.  A step: a group of answers to every prompt from the
rollout engine; advantages within the group (Shao et al. 2024, "DeepSeekMath", section 4.1.1: reward less the group's
mean, over its standard deviation); one clipped step on them, with the engine's log-probabilities as the old ones and no
KL term; then fe.hf.iter_fp8 into the engine.  Prints the reward, the gap between the trainer's and the engine's
log-probabilities of the sampled tokens, and the bytes that were sent.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import serve_export
import torch
import transformers
from vllm_rollout import Engine

import fp8engine as fe

PROMPTS, GROUP, LENGTH, TOKENS = 8, 8, 16, 24
CLIP = 0.2  # of the ratio, as PPO and GRPO have it


class Here:
    """A rollout engine without vLLM: the model that fe.hf.load makes, in this process."""

    def __init__(self, folder: Path) -> None:
        self.model = fe.hf.load(folder, dtype=torch.bfloat16)

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], tokens: int, *, seed: int = 0) -> list[tuple[list[int], list[float]]]:
        """As Engine.generate; all prompts have one length.  The caller's random numbers stay as they were."""
        ids = torch.tensor(prompts)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            out = self.model.generate(
                ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=True, top_k=0, pad_token_id=0,
                attention_mask=torch.ones_like(ids), eos_token_id=None, output_logits=True,
                return_dict_in_generate=True,
            )  # fmt: skip
        new = out.sequences[:, ids.shape[1] :]
        found = torch.stack(out.logits, 1).float().log_softmax(-1).gather(2, new[..., None])[..., 0]
        return list(zip(new.tolist(), found.tolist(), strict=True))

    @torch.no_grad()
    def update(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> int:
        """As Engine.update."""
        held, sent = self.model.state_dict(), 0
        for name, tensor in pairs:
            held[name].copy_(tensor)
            sent += tensor.nbytes
        return sent

    def close(self) -> None:
        """Nothing to end."""


def reward(tokens: list[int]) -> float:
    """The share of vowels."""
    return sum(bytes([token]) in (b"a", b"e", b"i", b"o", b"u") for token in tokens) / len(tokens)


def logprobs(model: Any, sequences: torch.Tensor) -> torch.Tensor:
    """Of the last TOKENS tokens of each sequence."""
    logits = model(sequences).logits[:, -TOKENS - 1 : -1].float()
    return logits.log_softmax(-1).gather(2, sequences[:, -TOKENS:, None])[..., 0]


def step(model: Any, optimizer: Any, engine: Any, seed: int) -> dict:
    """One step of GRPO: roll out, learn, send."""
    text = serve_export.text()
    starts = torch.randint(len(text) - LENGTH, (PROMPTS,), generator=torch.Generator().manual_seed(seed))
    prompts = [text[start : start + LENGTH].tolist() for start in starts.tolist() for _ in range(GROUP)]
    answers = engine.generate(prompts, TOKENS, seed=1000 * seed)
    sequences = torch.tensor([prompt + tokens for prompt, (tokens, _) in zip(prompts, answers, strict=True)])
    old = torch.tensor([found for _, found in answers])
    rewards = torch.tensor([reward(tokens) for tokens, _ in answers]).view(PROMPTS, GROUP)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    new = logprobs(model, sequences)
    ratio, weight = (new - old).exp(), advantages.view(-1, 1)
    loss = -torch.minimum(ratio * weight, ratio.clamp(1 - CLIP, 1 + CLIP) * weight).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    gap = (new.detach() - old).abs()
    sent = engine.update(fe.hf.iter_fp8(model))
    return {"reward": rewards.mean().item(), "gap": gap.mean().item(), "largest gap": gap.max().item(), "sent": sent}


def main(steps: int = 30, vllm: str | None = None, pretraining: int = 150) -> list[dict]:
    """A row for every step."""
    torch.manual_seed(0)
    transformers.logging.disable_progress_bar()
    model = fe.convert(serve_export.train(pretraining), "rowwise")
    bf16 = sum(2 * parameter.numel() for parameter in model.parameters())
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "start"
        fe.hf.export(model, folder)
        if vllm is None:
            print("no --vllm given: fe.hf.load generates in this process, vLLM is not run")
        engine: Any = Here(folder) if vllm is None else Engine(vllm, folder, Path(place) / "vllm.log")
        try:
            # Masters in FP32: steps this small would be lost in BF16 weights.
            optimizer = fe.amp.MasterWeights(torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0))
            rows = []
            for seed in range(steps):
                rows.append(step(model, optimizer, engine, seed))
                found = rows[-1]
                print(
                    f"step {seed:3}  reward {found['reward']:.3f}  gap of log-probabilities {found['gap']:.4f} "
                    f"(largest {found['largest gap']:.3f})  sent {found['sent']:,} bytes, "
                    f"{found['sent'] / bf16:.0%} of BF16"
                )
        finally:
            engine.close()
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="GRPO on a toy reward, rollouts by vLLM in another process.")
    parser.add_argument("--steps", type=int, default=30, help="of GRPO")
    parser.add_argument("--vllm", help="python of an environment with vLLM, such as .venv-serve/bin/python")
    options = parser.parse_args()
    main(options.steps, options.vllm)
