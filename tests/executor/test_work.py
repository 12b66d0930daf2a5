from executor.device import StepTimings
from executor.plan import BatchPlan, NewSequence, SamplingParams
from executor.sequences import SequenceTable
from executor.work import EpochWork
from tests.rig.scripted_executor import Script, ScriptedRunner


def work(clock_us: list[int]) -> EpochWork:
    script = Script(num_blocks=8)
    table = SequenceTable(
        num_blocks=8,
        block_size=16,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_seq_len=100,
        vocab_size=script.vocab_size,
        eos_token_ids=script.eos_token_ids,
    )
    times = iter(clock_us)
    return EpochWork(ScriptedRunner(script), table, clock_ns=lambda: next(times) * 1000)


def prompt_plan() -> BatchPlan:
    new = NewSequence(1, (1, 2, 3), 3, 0, (0,), SamplingParams(max_tokens=4))
    return BatchPlan(1, 1, admitted=(new,), seq_ids=(1,), num_tokens=(3,))


def test_the_first_steps_idle_time_is_zero_and_the_next_ones_is_the_gap() -> None:
    steps = work([1000, 1010, 1050, 1060, 1100, 1103, 1150, 1151])
    _, first = steps.execute(prompt_plan())
    _, second = steps.execute(BatchPlan(1, 2, 1, seq_ids=(1,), num_tokens=(1,), positions_sum=3))
    assert (first.idle_us, first.inputs_us, first.total_us) == (0, 10, 60)
    assert (second.idle_us, second.inputs_us, second.total_us) == (40, 3, 51)


def test_a_plan_without_rows_does_not_touch_the_device() -> None:
    steps = work([5, 6, 8])
    result, timings = steps.execute(BatchPlan(1, 1))
    assert (result.step_id, result.seq_ids) == (1, ())
    assert timings == StepTimings(inputs_us=1, sample_us=2, total_us=3)
