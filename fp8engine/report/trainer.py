"""Callbacks for transformers' Trainer: the scaling state beside each checkpoint, the report while a model trains.

A converted model trains, evaluates and saves under Trainer without it.  But the state_dict that Trainer saves has no
scaling state, on purpose: without it `auto` decides anew in a resumed run, and delayed scaling casts the first steps
with current scaling (a ResumeWarning says so); with it the run equals the uninterrupted one bit for bit.

Nothing else imports this module, because it needs transformers.
"""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path
from typing import Literal

import torch
from transformers import TrainerCallback

from fp8engine import files
from fp8engine.errors import ResumeWarning, StateError
from fp8engine.report.live import LiveReport
from fp8engine.report.state import load_scaling_state_dict, scaling_state_dict, without_state

FILE = "scaling_state.pt"


class ScalingStateCallback(TrainerCallback):
    """Writes `scaling_state.pt` into each checkpoint of Trainer, and reads it back when a run is resumed from one.

    Where Trainer ends with the best checkpoint's weights (`load_best_model_at_end`), their scales come with them.
    resume_from: the checkpoint's folder; None: `output_dir/checkpoint-STEP`, where Trainer puts them; False: start
    with fresh scales.  Raises StateError when the file is missing, cut short, or another model's: nothing is loaded.

    >>> from transformers import Trainer, TrainingArguments, LlamaConfig, LlamaForCausalLM
    >>> import tempfile, warnings
    >>> from fp8engine.convert.swap import convert
    >>> config = LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=1)
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     model = convert(LlamaForCausalLM(config), "delayed")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     arguments = TrainingArguments(folder, max_steps=8, save_steps=4, report_to="none")
    ...     trainer = Trainer(model, arguments, callbacks=[ScalingStateCallback()])
    """

    def __init__(self, resume_from: str | os.PathLike | Literal[False] | None = None):
        self.resume_from: str | os.PathLike | Literal[False] | None = resume_from

    def on_save(self, args, state, control, model=None, **_):
        """Write the scaling state beside the checkpoint that Trainer has written, whole or not at all."""
        if not state.is_world_process_zero or model is None:
            return
        files.write_by(_folder(args, state) / FILE, lambda path: torch.save(scaling_state_dict(model), path))

    def on_train_begin(self, args, state, control, model=None, **_):
        """Load the scaling state of the checkpoint that Trainer resumes from; at step 0 there is none."""
        if model is None or state.global_step == 0:
            return
        if self.resume_from is False:
            without_state(model)
            return
        path = (Path(self.resume_from) if self.resume_from else _folder(args, state)) / FILE
        if not path.exists():
            raise StateError(
                f"resumed at step {state.global_step}, but {path} is not there: ScalingStateCallback(resume_from=...) "
                "names the checkpoint's folder; resume_from=False starts with fresh scales"
            )
        _load(model, path)

    def on_train_end(self, args, state, control, model=None, **_):
        """Load the scaling state of the best checkpoint, whose weights Trainer has just loaded."""
        if model is None or not args.load_best_model_at_end or not state.best_model_checkpoint:
            return
        path = Path(state.best_model_checkpoint) / FILE
        if path.exists():
            _load(model, path)
        else:  # a checkpoint of before this callback
            told = f"{path} is not there: the weights are the best checkpoint's, and the scales are the last step's"
            warnings.warn(told, ResumeWarning, stacklevel=2)


class ReportCallback(TrainerCallback):
    """Calls a `LiveReport` (live.py) with each step of Trainer, and at the training's end.

    folder, every: as of `LiveReport`.  Trainer gives the mean loss of `logging_steps` steps, which each of them gets.

    >>> ReportCallback("runs/first", every=500).live.every
    500
    """

    def __init__(self, folder: str | os.PathLike, every: int = 100):
        self.live, self.logged = LiveReport(folder, every), 0

    def on_train_begin(self, args, state, control, **_):
        """Begin where a resumed run does."""
        self.logged = state.global_step

    def on_log(self, args, state, control, logs=None, **_):
        """Keep the loss that Trainer logs."""
        if logs and "loss" in logs:
            self.live.losses |= dict.fromkeys(range(self.logged, state.global_step), logs["loss"])
            self.logged = state.global_step

    def on_step_end(self, args, state, control, model=None, **_):
        """Note the step."""
        if model is not None:
            self.live.step(model, state.global_step - 1)

    def on_train_end(self, args, state, control, model=None, **_):
        """Write the last report."""
        if model is not None and state.global_step:
            self.live.write(model, state.global_step - 1)


def _load(model, path: Path) -> None:
    """Load the scaling state of that file."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise StateError(f"{path} cannot be read ({type(error).__name__}): cut short or damaged") from error
    load_scaling_state_dict(model, saved)


def _folder(args, state) -> Path:
    """The folder of Trainer's checkpoint of this step."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
