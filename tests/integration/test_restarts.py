"""Tiers that are not there yet, are gone, or say nothing: the living are used, those that come are seen."""

import socket
import time
from pathlib import Path

from protos.v1 import router_pb2_grpc
from tests.integration.prompts import prompt, sized
from tests.rig import cluster
from tests.rig.cluster import Cluster
from tests.rig.scripted_executor import Script, expected_output

NOTICED_SECONDS = 5.0


def test_b108_a_router_is_ready_with_the_one_scheduler_that_lives_and_sees_the_others_come(
    tiny_model_folder: Path,
) -> None:
    """Of three addresses one is dead, and one takes connections and never says a word."""
    with cluster.assembling(tiny_model_folder) as running:
        with socket.socket(socket.AF_UNIX) as mute:
            mute.bind(f"{running.folder}/mute.sock")
            mute.listen()
            running.start_scripted_executor(Script())
            running.start_scheduler(name="live")
            running.process("live").wait_until_serving()
            running.start_router(schedulers=("dead", "mute", "live"))
            began = time.monotonic()
            running.process("router").wait_until_serving()
            assert time.monotonic() - began < NOTICED_SECONDS
            assert ask(running) == expected_output(prompt(9), 5)
        running.start_scripted_executor(Script(), name="other")
        running.kill("live")
        running.start_scheduler(name="dead", executors=("other",))
        running.process("dead").wait_until_serving()
        began = time.monotonic()
        while not running.is_serving("router"):
            assert time.monotonic() - began < NOTICED_SECONDS
        assert ask(running) == expected_output(prompt(9), 5)


def test_b106_a_standby_goes_on_with_what_a_killed_scheduler_had_begun_token_for_token(
    tiny_model_folder: Path,
) -> None:
    with cluster.assembling(tiny_model_folder) as running:
        running.start_scripted_executor(Script(step_seconds=0.01))
        for name in ("first", "second"):
            lease = ("--lease", f"{running.folder}/lease", "--lease-seconds", "600")
            running.start_scheduler(*lease, "--scheduler-id", name, name=name)
            if name == "first":
                running.process(name).wait_until_serving()
        running.start_router(schedulers=("first|second",))
        running.process("router").wait_until_serving()
        call = router_pb2_grpc.RouterStub(running.channel("router")).Generate(sized(9, 150), timeout=60)
        token_ids: list[int] = []
        for event in call:
            token_ids += event.delta.token_ids
            if len(token_ids) > 10 and "first" in running.names:
                running.kill("first")  # its lease is free at once, whatever its length
        assert token_ids == expected_output(prompt(9), 150)
        admitted = [entry for step in running.scripted().steps() for entry in step["admitted"]]
        assert [entry[2] for entry in admitted] == [9, 9]
        assert admitted[1][1] > 9 + 10, "it goes on after the ids that were delivered"


def ask(running: Cluster) -> list[int]:
    return list(running.router.Complete(sized(9, 5), timeout=30).choices[0].token_ids)
