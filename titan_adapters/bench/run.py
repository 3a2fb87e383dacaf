"""The interleaved run of all implementations."""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan_adapters.bench.engine import Engine, EngineFailed
from titan_adapters.bench.profile import profiles
from titan_adapters.bench.workload import Workload


@dataclass
class Results:
    samples: dict[str, dict[str, list[float]]]
    """By implementation and point."""
    failed: dict[str, str] = field(default_factory=dict)
    """By implementation: why it did not start, or ended."""
    machine: dict[str, str] = field(default_factory=dict)
    classes: dict[str, str] = field(default_factory=dict)
    """By implementation: which class of vLLM's it turned out to be."""
    graphs: dict[str, list[str]] = field(default_factory=dict)
    """By implementation, start after start: compiled, from the cache, or none."""
    profiles: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By what was profiled, and by implementation."""


@dataclass(frozen=True)
class Settings:
    folders: dict[str, Path]
    """What each implementation serves; its keys say which are measured."""
    options: dict[str, Any]
    """Keyword arguments of `vllm.LLM`."""
    workload: Workload
    repeats: int
    start_repeats: int
    """0: the one start of each engine is what is reported."""
    concurrent_start: bool
    profile: bool
    logs: Path


class Run:
    """Args:
    settings: What to measure.
    say: Told in one line what happens.
    save: Called with what there is so far, after every round.
    """

    def __init__(self, settings: Settings, say: Callable[[str], None], save: Callable[[Results], None]):
        self.settings, self._say, self._save = settings, say, save
        self.results = Results({name: {} for name in settings.folders})
        self._engines: dict[str, Engine] = {}
        self._caches: Path | None = None

    def execute(self) -> Results:
        settings = self.settings
        try:
            with tempfile.TemporaryDirectory(prefix="titan-bench-caches-") as caches:
                if settings.start_repeats:
                    self._caches = Path(caches)
                    self._measure_starts()
                if settings.workload.points != ("start",) or not settings.start_repeats:
                    self._start_all()
                    self._measure_rounds()
                    for name in list(self._engines):
                        self._engines.pop(name).close()
        finally:
            for engine in self._engines.values():
                engine.close(patience=0)
        self._save(self.results)
        return self.results

    def _measure_starts(self) -> None:
        """Fresh processes, A B C, A B C, ...; each implementation has caches of its own, empty the first time."""
        for folder in set(self.settings.folders.values()):
            for path in folder.glob("*.safetensors"):  # so that the first to read it isn't the only one to wait
                with path.open("rb") as file:
                    while file.read(2**24):
                        pass
        for repeat in range(self.settings.start_repeats):
            for name in self._remaining():
                with self._failing(name):
                    self._engines[name] = self._start(name)
                    self._record_start(name, "cold " if repeat == 0 else "")
                    self._engines.pop(name).close()
            self._save(self.results)

    def _start_all(self) -> None:
        names = self._remaining()
        if self.settings.concurrent_start:
            self._say(f"starting {', '.join(names)}")
            self._engines = {name: self._start(name) for name in names}
        for name in names:
            with self._failing(name):
                if self.settings.concurrent_start:
                    self._ready(name)
                else:
                    self._engines[name] = self._start(name)
                    self._record_start(name)
        self._save(self.results)

    def _start(self, name: str) -> Engine:
        environment = {}
        if self._caches is not None:
            keys = {"VLLM_CACHE_ROOT": "vllm", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
            environment = {key: str(self._caches / name / folder) for key, folder in keys.items()}
        log = self.settings.logs / f"{name}.log"
        return Engine(name, self.settings.folders[name], self.settings.options, log, environment)

    def _ready(self, name: str) -> dict[str, float]:
        """Seconds of its start."""
        answer = self._engines[name].ready()
        self.results.machine |= answer.pop("machine")
        self.results.classes[name] = answer.pop("class")
        self.results.graphs.setdefault(name, []).append(answer.pop("graphs"))
        return answer

    def _record_start(self, name: str, kind: str = "") -> None:
        answer = self._ready(name)
        self._say(f"{kind}start of {name}: {answer['start s']:.1f} s, graphs: {self.results.graphs[name][-1]}")
        if "start" in self.settings.workload.points:
            self._record(name, {kind + point: value for point, value in answer.items()})

    def _measure_rounds(self) -> None:
        measurements = self.settings.workload.measurements()
        for number in range(self.settings.repeats + 1) if measurements else ():
            begin = time.perf_counter()
            for title, measure in measurements.items():
                for name in self._order(number):
                    engine, seed = self._engines[name], f"{number} {title}"  # the same prompts for all
                    with self._failing(name):
                        rates = measure(lambda *lengths, engine=engine, seed=seed: engine.seconds(*lengths, seed))
                        if number:  # the first one warms up
                            self._record(name, rates)
            title = f"round {number} of {self.settings.repeats}" if number else "warm-up"
            self._say(f"{title}: {time.perf_counter() - begin:.1f} s")
            self._save(self.results)
        if "memory" in self.settings.workload.points:
            for name in list(self._engines):
                with self._failing(name):
                    self._record(name, self._engines[name].memory())
        if self.settings.profile:
            self._say("profiling")
            for name in list(self._engines):
                with self._failing(name):
                    for title, profile in profiles(self._engines[name].profile, self.settings.workload):
                        self.results.profiles.setdefault(title, {})[name] = profile

    def _order(self, number: int) -> list[str]:
        """Another implementation begins each round: whoever runs after others finds a warmer machine."""
        names = list(self._engines)
        first = number % len(names) if names else 0
        return names[first:] + names[:first]

    def _record(self, name: str, values: dict[str, float]) -> None:
        for point, value in values.items():
            self.results.samples[name].setdefault(point, []).append(value)

    def _remaining(self) -> list[str]:
        return [name for name in self.settings.folders if name not in self.results.failed]

    @contextmanager
    def _failing(self, name: str) -> Iterator[None]:
        """An implementation that fails is out of the run, which goes on."""
        try:
            yield
        except EngineFailed as error:
            self.results.failed[name] = str(error)
            self._say(f"{name} failed: {error}\n  its log: {self.settings.logs / name}.log")
            if name in self._engines:
                self._engines.pop(name).close()
