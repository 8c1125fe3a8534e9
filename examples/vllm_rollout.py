"""vLLM in a process of its own, driven over a pipe; run as a program it is that process, and imports no fp8engine.

    engine = Engine(python, folder, log)         python: of the environment where vLLM is installed
    engine.generate(prompts, tokens, seed=0)     sampled tokens and their log-probabilities
    engine.logprobs(sequences)                   of every token but the first
    engine.update(fe.hf.iter_fp8(model))         new weights into the running engine; returns the bytes that were sent
    engine.held()                                the parameters as vLLM holds them
    engine.close()

Every pair of `update` is one message in the bytes of the safetensors format, so neither side holds more than a layer.
vLLM takes them with its own `reload_weights`: it rebuilds each layer as it was before its post-load processing, loads,
processes again, and copies into the memory that the engine runs from.  Keys and values that were computed with the
old weights are of no use: the prefix cache is emptied.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load, save

# One process, this machine alone, nothing fetched, nothing reported.
OFFLINE = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
}


class EngineFailed(RuntimeError):
    """vLLM raised, its process ended, or it was closed; the message is vLLM's own last words."""


class Engine:
    """A vLLM engine that serves `folder` in another process.  log: the file for what vLLM prints.

    dtype: of what is not FP8.
    stand_in: let vLLM run where its CPU build lacks the operation that rounds to a given scale (see `stand_in` below).
    Threads may share it: a call waits until the one before has its answer.
    Raises EngineFailed where vLLM does not load the folder; so does every call after vLLM has failed.
    """

    program = Path(__file__)  # what the process runs

    def __init__(
        self, python: str | Path, folder: str | Path, log: str | Path, dtype: str = "bfloat16", stand_in: bool = False
    ) -> None:
        self._pipe, theirs = Pipe()
        self._one_call = threading.Lock()
        self.log = Path(log)
        command = [str(python), str(self.program), str(theirs.fileno()), str(folder), dtype, str(int(stand_in))]
        with self.log.open("w") as file:
            self._process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, pass_fds=[theirs.fileno()], env=os.environ | OFFLINE
            )
        theirs.close()
        self._answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process, and wait for it."""
        self._pipe.close()
        self._process.wait()

    def lines(self, *words: str) -> list[str]:
        """Lines of vLLM's log that hold one of the words."""
        return [line for line in self.log.read_text().splitlines() if any(word in line for word in words)]

    def generate(
        self, prompts: list[list[int]], tokens: int, *, temperature: float = 1.0, seed: int = 0
    ) -> list[tuple[list[int], list[float]]]:
        """For each prompt `tokens` new tokens and their log-probabilities.  temperature: 0 for the likeliest."""
        return self._ask("generate", prompts, tokens, temperature, seed)

    def logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        """For each sequence the log-probability of every token after the first, given those before it."""
        return self._ask("logprobs", sequences)

    def update(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Put new weights into the running engine; the bytes of tensors that were sent.

        An error while `pairs` are made closes the engine, which then has some of the new weights and some of the old.
        """
        sent = 0
        with self._one_call:
            try:
                self._send("update")
                for name, tensor in pairs:
                    self._pipe.send_bytes(save({name: tensor}))
                    sent += tensor.numel() * tensor.itemsize
                self._pipe.send_bytes(b"")
            except ConnectionError:  # it has failed meanwhile: its answer says why
                pass
            except BaseException:
                self.close()
                raise
            self._answer()
        return sent

    def held(self) -> dict[str, torch.Tensor]:
        """The engine's parameters by vLLM's names, in the layout of its kernels."""
        return load(self._ask("held"))

    def _ask(self, *message: Any) -> Any:
        with self._one_call:
            self._send(*message)
            return self._answer()

    def _send(self, *message: Any) -> None:
        if self._pipe.closed:
            raise EngineFailed(f"the engine has been closed; its log is {self.log}")
        with contextlib.suppress(ConnectionError):  # it has ended: the answer says how
            self._pipe.send(message)

    def _answer(self) -> Any:
        try:
            fine, answer = self._pipe.recv()
        except (EOFError, ConnectionError):
            self.close()
            fine, answer = False, f"the process ended with {self._process.returncode}"
        if not fine:
            self.close()
            raise EngineFailed(f"{answer}; its log is {self.log}")
        return answer


def stand_in() -> None:
    """Let vLLM round to a given scale on a CPU, for which its build has no kernel: the formula of its CUDA kernel.

    `requantize_with_max_scale` and everything around it stay vLLM's own.
    """
    from vllm import _custom_ops

    original = _custom_ops.scaled_fp8_quant

    def scaled_fp8_quant(x: torch.Tensor, scale: torch.Tensor | None = None, *given: Any, **options: Any) -> Any:
        if scale is None:
            return original(x, scale, *given, **options)
        limit = torch.finfo(torch.float8_e4m3fn).max
        return (x.float() * (1 / scale)).clamp(-limit, limit).to(torch.float8_e4m3fn), scale

    _custom_ops.scaled_fp8_quant = scaled_fp8_quant


class _Server:
    """What answers in vLLM's process: a method for each message."""

    def __init__(self, folder: str, dtype: str) -> None:
        from vllm import LLM

        self.llm = LLM(
            folder,
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype=dtype,
            max_model_len=256,
            max_num_seqs=64,
            seed=0,
        )

    def generate(self, prompts: list[list[int]], tokens: int, temperature: float, seed: int) -> list:
        from vllm import SamplingParams

        many = [
            SamplingParams(
                max_tokens=tokens, temperature=temperature, seed=seed + i, logprobs=0, detokenize=False, ignore_eos=True
            )
            for i in range(len(prompts))
        ]
        outputs = [each.outputs[0] for each in self.llm.generate(self._as_given(prompts), many, use_tqdm=False)]
        return [
            (list(out.token_ids), [row[t].logprob for t, row in zip(out.token_ids, out.logprobs, strict=True)])
            for out in outputs
        ]

    def logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        from vllm import SamplingParams

        asked = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
        outputs = self.llm.generate(self._as_given(sequences), asked, use_tqdm=False)
        return [
            [row[t].logprob for t, row in zip(out.prompt_token_ids[1:], out.prompt_logprobs[1:], strict=True)]
            for out in outputs
        ]

    def update(self, pairs: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": pairs})
        self.llm.apply_model(_pack_tied_heads)
        self.llm.reset_prefix_cache()

    def held(self) -> bytes:
        (found,) = self.llm.apply_model(lambda model: {name: p.data for name, p in model.named_parameters()})
        return save({name: tensor.contiguous() for name, tensor in found.items()})

    @staticmethod
    def _as_given(sequences: list[list[int]]) -> list[dict]:
        return [{"prompt_token_ids": ids} for ids in sequences]


def _pack_tied_heads(model: torch.nn.Module) -> None:
    """Pack an output head that shares the embedding's parameter anew.

    On a CPU vLLM multiplies by a packed copy of the head, and `reload_weights` leaves a tied head as it is ("Failed to
    load weights" in the log): without this the copy stays that of the old embedding.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    tables = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    shared = {id(table.weight) for table in tables if not isinstance(table, ParallelLMHead)}
    for table in tables:
        if isinstance(table, ParallelLMHead) and id(table.weight) in shared:
            table.quant_method.process_weights_after_loading(table)


def serve(pipe: Connection, make: Callable[[], Any]) -> None:
    """Answer an Engine's messages with the methods of what `make` returns, until the Engine is closed or one raises."""
    try:
        server = make()
        pipe.send((True, None))
        while True:
            what, *given = pipe.recv()
            pipe.send((True, getattr(server, what)(*([_pairs(pipe)] if what == "update" else given))))
    except EOFError:  # the trainer has closed its end
        return
    except Exception as error:
        pipe.send((False, f"vLLM: {type(error).__name__}: {error}"))
        raise


def _pairs(pipe: Connection) -> Iterator[tuple[str, torch.Tensor]]:
    while message := pipe.recv_bytes():
        yield from load(message).items()


def _vllm(folder: str, dtype: str, with_stand_in: str) -> _Server:
    if with_stand_in == "1":
        stand_in()
    return _Server(folder, dtype)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), lambda: _vllm(*sys.argv[2:]))
