"""The table of `chairlift status`: one row a process, in plain words."""

import io

from rich.console import Console

from chairlift import status
from protos.v1 import router_pb2


def shown(answer: router_pb2.GetStatusResponse) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=300).print(status.table(answer, "here:1"))
    return [line for line in out.getvalue().splitlines() if "executor" in line or "scheduler" in line]


def test_executors_stand_below_their_scheduler_with_their_load() -> None:
    busy = router_pb2.ExecutorStatus(
        executor_id="e1", version="1.2", num_running=3, max_num_seqs=8, num_blocks=100, num_free_blocks=40,
        draining=True, previous_step_us=12_345,
    )  # fmt: skip
    gone = router_pb2.ExecutorStatus(executor_id="[red]e2", missing="it is [bold]gone")
    answer = router_pb2.GetStatusResponse(
        schedulers=[
            router_pb2.SchedulerStatus(
                address="s1", scheduler_id="s", term=4, num_running=3, num_waiting=5, executors=[busy, gone]
            ),
            router_pb2.SchedulerStatus(address="s2", refusal="the scheduler does not answer"),
        ]
    )
    leader, draining, missing, standby = shown(answer)
    assert "serving, term 4" in leader
    for part in ("draining", "1.2", "3 of 8", "60 of 100", "12.3 ms"):
        assert part in draining
    assert "executor [red]e2" in missing, "what processes say is no markup"
    assert "it is [bold]gone" in missing
    assert "the scheduler does not answer" in standby
