"""What a step costs outside its kernels: the sums are right, every phase is seen, and the engine is left as it was."""

import pytest
import torch

from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.engine.profiling.instruments import PHASES, Meter, covered, device_times, is_wait, metered, named_kernels
from kvrelay.engine.profiling.step_profile import StepProfiler, StepWorkload
from kvrelay.engine.step.build import load_engine
from kvrelay.engine.step.config import EngineConfig
from kvrelay.errors import ConfigError
from kvrelay.kernels.select import select_backend


class Clock:
    """A clock that the test sets."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s

    def lasting(self, seconds, then=lambda: None):
        def work(*args):
            self.now_s += seconds
            then()

        return work


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(params=["cpu", "reference"])
def engine(folder, request):
    engine = load_engine(
        folder, select_backend(request.param, "cpu", 1), torch.float32, EngineConfig(kv_memory_bytes=8 << 20)
    )
    yield engine
    engine.close()


def test_time_belongs_to_the_innermost_phase_and_kernels_are_apart():
    clock = Clock()
    meter = Meter(clock)
    kernel = meter.kernel(clock.lasting(5.0))
    inner = meter.phase("inner", clock.lasting(1.0, kernel))
    outer = meter.phase("outer", clock.lasting(2.0, inner))
    meter.begin()
    clock.now_s += 7.0  # outside of all phases
    outer()
    times = meter.taken()
    assert times.outside_s == {"outer": 2.0, "inner": 1.0}
    assert times.kernels_s == {"inner": 5.0} and times.num_kernels == 1
    meter.begin()
    assert meter.taken().outside_s == {}


def test_an_error_in_a_phase_ends_the_phase():
    clock = Clock()
    meter = Meter(clock)

    def fails():
        clock.now_s += 1.0
        raise ValueError

    meter.begin()
    with pytest.raises(ValueError):
        meter.phase("a", fails)()
    meter.phase("b", clock.lasting(3.0))()
    assert meter.taken().outside_s == {"a": 1.0, "b": 3.0}


def test_what_the_clocks_cost_is_taken_off():
    clock = Clock()
    meter = Meter(clock)
    meter.kernel_cost_s, meter.phase_cost_s = 0.5, 0.25
    kernel = meter.kernel(lambda: None)
    outer = meter.phase("outer", clock.lasting(2.0, lambda: (kernel(), meter.phase("inner", lambda: None)())))
    meter.begin()
    outer()
    assert meter.taken().outside_s == {"outer": 1.25, "inner": 0.0}


def test_torch_operators_are_kernels_but_for_views():
    meter = Meter()
    x = torch.zeros(8, 8)
    with torch.inference_mode():
        for work, is_kernel in (
            (lambda: x.view(-1), False),
            (lambda: x.split(2), False),
            (lambda: x.to(torch.float32), False),
            (lambda: x.to(torch.bfloat16), True),
            (lambda: x.t().contiguous(), True),
            (lambda: x + 1, True),
        ):
            meter.begin()
            meter.phase("work", meter.with_operators(work))()
            assert bool(meter.taken().kernels_s) == is_kernel


def test_every_phase_of_every_kind_of_step_is_seen_and_the_engine_is_left_clean(engine):
    before = vars(engine).keys() | vars(engine.scheduler).keys() | vars(engine.runner).keys()
    profiler = StepProfiler(engine, context_tokens=20, num_steps=3)
    for workload in (StepWorkload(1, 0), StepWorkload(3, 0), StepWorkload(0, 40), StepWorkload(2, 24)):
        profile = profiler.run(workload)
        assert [phase.name for phase in profile.phases] == list(PHASES)
        assert set(profiler._meter.taken().outside_s) == set(PHASES)  # of the last step with clocks
        assert profile.step_s > 0 and profile.kernels_s > 0 and profile.host_waits is None
        assert profile.outside_s == sum(phase.outside_s for phase in profile.phases)
    assert not engine.scheduler.has_work and not engine.scheduler.sequences
    assert engine.pool.counts().used == 0
    assert vars(engine).keys() | vars(engine.scheduler).keys() | vars(engine.runner).keys() == before


def test_compiled_kernels_are_counted_and_put_back(engine):
    if engine.backend.name != "cpu" or engine.backend.compiled_kernels is None:
        pytest.skip("no compiled kernels")
    lib = engine.backend.compiled_kernels.lib
    profile = StepProfiler(engine, context_tokens=20, num_steps=3).run(StepWorkload(0, 40))
    assert profile.kernel_calls > 5 * engine.model.spec.num_layers
    assert engine.backend.compiled_kernels.lib is lib


def test_steps_to_sample_run_kernels_in_frames_of_their_names(engine):
    seen = []

    def watch(run_rounds):
        library = engine.backend.compiled_kernels.lib if engine.backend.compiled_kernels else None
        if library is not None:
            seen.append(library.kr_sample.__code__.co_name)
        steps = engine.reports.timing.num_steps
        run_rounds()
        seen.append(engine.reports.timing.num_steps - steps)

    StepProfiler(engine, context_tokens=20, num_steps=2).sample(StepWorkload(2, 0), 5, watch)
    assert seen in (["kr_sample", 5], [5])
    with named_kernels(engine), metered(engine, Meter()):
        assert not engine.scheduler.has_work


@pytest.mark.parametrize(
    ("workload", "named"),
    [
        (StepWorkload(1000, 0), "--batch 1000"),
        (StepWorkload(1, 4000), "engine.token_budget"),
        (StepWorkload(1, 0), "--context"),
    ],
)
def test_a_workload_that_the_engine_cannot_run_is_refused(folder, workload, named):
    engine = load_engine(
        folder, select_backend("cpu", "cpu", 1), torch.float32, EngineConfig(kv_memory_bytes=8 << 20, max_model_len=256)
    )
    profiler = StepProfiler(engine, context_tokens=300, num_steps=3)
    with pytest.raises(ConfigError, match=named):
        profiler.run(workload)
    assert not engine.scheduler.sequences
    engine.close()


def test_a_device_is_busy_where_any_kernel_runs_and_the_host_waits_where_it_blocks():
    assert covered([(0, 4), (2, 3), (3, 6), (8, 9)]) == 7
    assert covered([]) == 0
    events = [
        ("gemm", True, 0.0, 10.0),
        ("attention", True, 5.0, 20.0),
        ("Memcpy HtoD (Pageable -> Device)", True, 30.0, 32.0),
        ("cudaLaunchKernel", False, 0.0, 1.0),
        ("cudaStreamSynchronize", False, 1.0, 20.0),
        ("aten::mm", False, 0.0, 1.0),
    ]
    times = device_times(events, num_steps=2)
    assert times.busy_s == pytest.approx(11e-6) and times.num_kernels == 1.0 and times.num_waits == 0.5
    assert is_wait("cudaMemcpy") and is_wait("cuMemcpyDtoH_v2") and not is_wait("cudaMemcpyAsync")
