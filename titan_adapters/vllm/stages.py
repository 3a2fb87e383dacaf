"""What the stages of a model in a running engine get and give, per request: the front end's side."""

import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor

from titan_adapters.errors import EngineError
from titan_adapters.verify.records import HEAD, Call, StageRecords
from titan_adapters.vllm.recorder import recorded_of

if TYPE_CHECKING:
    import vllm

Rows = list[tuple[int, list[int]]]
"""Steps in ascending order, with rows in each."""


class _Worker:
    """The file of one worker, read as needed."""

    def __init__(self, file: str):
        self._file: Any = safe_open(file, framework="pt")
        self.names: dict[str, dict[int, str]] = defaultdict(dict)
        """What ("PATH/in/INDEX" or "PATH/out/INDEX") -> step -> name in the file."""
        for name in self._file.keys():  # noqa: SIM118
            step, _, what = name.partition("/")
            self.names[what][int(step)] = name

    def step(self, what: str, step: int) -> Tensor:
        return self._file.get_tensor(self.names[what][step])

    def rows(self, what: str, where: Rows) -> Tensor:
        return torch.cat([self.step(what, step)[rows] for step, rows in where])


class RecordedStages:
    """What an engine's stages got and gave while they were recorded. Its files are deleted together with it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="titan_stages_")
        self._workers: list[_Worker] = []
        self._steps: dict[str, dict[int, tuple[int, int]]] = {}
        """Request -> position -> step and row: the last, if it was computed again."""

    def _fill(self, llm: "vllm.LLM") -> None:
        answers = llm.collective_rpc("titan_stop_stages", args=(self._folder.name,))
        self._workers = [_Worker(file) for file, _ in answers]
        for step, requests in enumerate(answers[0][1]):  # the same for all
            for name, (first, positions) in requests.items():
                where = self._steps.setdefault(name, {})
                where.update({position: (step, first + i) for i, position in enumerate(positions)})

    def of(self, output: "vllm.RequestOutput", earlier: Sequence["vllm.RequestOutput"] = ()) -> StageRecords:
        """What the stages got and gave for one request, however its tokens were scheduled.

        Args:
            earlier: Requests of the same block, which may have computed what this one took from the prefix cache. Where
                this one's first tokens are theirs, what was recorded of them stands in for what is missing.

        Raises:
            EngineError: the request was not recorded.
        """
        tokens = _computed_tokens(output)
        where = dict(recorded_of(self._steps, output))
        for other in earlier:
            theirs = _computed_tokens(other)
            common = [a == b for a, b in zip(tokens, theirs, strict=False)] + [False]
            computed = recorded_of(self._steps, other)
            where |= {p: computed[p] for p in range(common.index(False)) if p in computed and p not in where}
        positions = sorted(position for position in where if position < len(tokens))
        rows: Rows = []
        for position in positions:
            step, row = where[position]
            if not rows or rows[-1][0] != step:
                rows.append((step, []))
            rows[-1][1].append(row)
        calls = self._calls(rows)
        at_head = self._at_head(calls, rows)
        if at_head:
            calls[HEAD] = self._head_call(list(at_head.values()))
        return StageRecords(
            torch.tensor(tokens), torch.tensor(positions), calls, torch.tensor([positions[i] for i in at_head]).long()
        )

    def _calls(self, rows: Rows) -> dict[str, Call]:
        """All but the head's. What some step lacks is left out."""
        calls: dict[str, Call] = {}
        for worker in self._workers:
            for what, names in sorted(worker.names.items(), key=_by_index):
                path, kind, index = what.rsplit("/", 2)
                if path.partition("@")[0] == HEAD or not all(step in names for step, _ in rows):
                    continue
                call = calls.setdefault(path, Call([], []))
                tensors = call.inputs if kind == "in" else call.outputs
                if int(index) == len(tensors):
                    tensors.append([])
                tensors[int(index)].append(worker.rows(what, rows))
        return calls

    @cached_property
    def _heads(self) -> dict[bytes, tuple[int, str, int, int]]:
        """Each row that came to the head, by its bits: which worker's, its call, step and row there."""
        return {
            bits: (index, path, step, row)
            for index, worker in enumerate(self._workers)
            for what, names in list(worker.names.items())
            for path in [what.removesuffix("/in/0")]
            if path != what and path.partition("@")[0] == HEAD
            for step in names
            if step in worker.names[f"{path}/out/0"]
            for row, bits in enumerate(_bits(worker.step(what, step)))
        }

    def _at_head(self, calls: dict[str, Call], rows: Rows) -> dict[int, tuple[int, str, int, int]]:
        """Of the request's rows that came to the head, by row: which worker's, its call, step and row there.

        The engine computes logits for few tokens, after the step. They are the last norm's results, and so found by
        their bits.
        """
        if "norm" not in calls:
            return {}
        found = enumerate(map(self._heads.get, _bits(calls["norm"].outputs[0][0])))
        return {row: where for row, where in found if where is not None}

    def _head_call(self, where: Sequence[tuple[int, str, int, int]]) -> Call:
        def rows(what: str) -> list[list[Tensor]]:
            found = [self._workers[index].step(f"{path}/{what}/0", step)[row] for index, path, step, row in where]
            return [[torch.stack(found)]]

        return Call(rows("in"), rows("out"))


def _computed_tokens(output: "vllm.RequestOutput") -> list[int]:
    return [*(output.prompt_token_ids or ()), *output.outputs[0].token_ids][:-1]


def _by_index(item: tuple[str, Any]) -> int:
    return int(item[0].rpartition("/")[2])


def _bits(rows: Tensor) -> list[bytes]:
    return [row.tobytes() for row in rows.view(torch.uint8).numpy()]


@contextmanager
def record_stages(llm: "vllm.LLM", layers: Sequence[int] | None = None) -> Iterator[RecordedStages]:
    """Record what the stages of `llm` get and give for what is generated inside the block.

    For engines without compilation whose workers share a file system with this process. What is recorded is in the
    workers' memory until the block ends: some ten times a layer's activations, per layer and token.

    Args:
        layers: Global indices of the layers to record; None for all.

    Raises:
        EngineError: the engine is compiled.
    """
    asked = None if layers is None else list(layers)
    answers = llm.collective_rpc("titan_start_stages", args=(asked,))
    if problems := sorted({problem for found in answers for problem in found}):
        raise EngineError("This engine's stages can't be recorded.", problems, fix="start an eager engine.")
    recorded = RecordedStages()
    try:
        yield recorded
    finally:
        recorded._fill(llm)
