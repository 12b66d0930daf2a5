from protos.v1 import scheduler_pb2
from tests.simulation.links import Delay, End, Link, RefusedError
from tests.simulation.process import Process
from tests.simulation.world import World


def ack(number: int) -> scheduler_pb2.Ack:
    return scheduler_pb2.Ack(message_id=number)


class Node:
    """Keeps what it gets."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.got: list[int] = []
        self.ends: list[tuple[float, str]] = []

    def accept(self, end: End) -> None:
        self.end = end
        end.on_message = lambda message: self.got.append(message.message_id)
        end.on_end = lambda status: self.ends.append((self.world.now, status))


def processes(world: World) -> tuple[Process, Process]:
    both = Process(world, "client"), Process(world, "server")
    for process in both:
        process.start()
    return both


def stream(delay: Delay, seed: int = 0) -> tuple[World, Link, Node, Node]:
    world = World(seed)
    link = Link(*processes(world), delay)
    client, server = Node(world), Node(world)
    client.accept(link.connect(server.accept))
    return world, link, client, server


def run(world: World, seconds: float) -> None:
    over = []
    world.after(seconds, lambda: over.append(True))
    world.run(lambda: bool(over), limit_seconds=1e9)


def test_messages_arrive_once_and_in_order_whatever_each_takes() -> None:
    world, _, client, server = stream(Delay(0.0, 1.0))
    for number in range(50):
        client.end.send(ack(number))
    run(world, 60.0)
    assert server.got == list(range(50))


def test_an_end_comes_behind_what_was_sent_before() -> None:
    world, _, client, server = stream(Delay(0.0, 1.0))
    client.end.send(ack(1))
    client.end.close("OK")
    run(world, 5.0)
    assert server.got == [1]
    assert [status for _, status in server.ends] == ["OK"]
    assert client.ends == []


def test_a_cut_loses_what_is_under_way_and_each_side_learns_of_it_in_its_own_time() -> None:
    world, link, client, server = stream(Delay(0.1, 0.9))
    run(world, 1.0)
    client.end.send(ack(1))
    link.cut()
    client.end.send(ack(2))
    run(world, 5.0)
    assert server.got == []
    assert [status for _, status in client.ends + server.ends] == ["UNAVAILABLE"] * 2
    assert client.ends[0][0] != server.ends[0][0]


def test_a_refused_stream_ends_with_the_status() -> None:
    world = World(0)
    client = Node(world)

    def refuse(_: End) -> None:
        raise RefusedError("FAILED_PRECONDITION")

    client.accept(Link(*processes(world), Delay(0.1, 0.1)).connect(refuse))
    run(world, 1.0)
    assert client.ends == [(0.2, "FAILED_PRECONDITION")]


def test_a_call_is_answered_or_refused() -> None:
    world = World(0)
    link = Link(*processes(world), Delay(0.1, 0.1))
    heard: list[object] = []

    def twice(request: scheduler_pb2.Ack) -> scheduler_pb2.Ack:
        if request.message_id == 0:
            raise RefusedError("UNAVAILABLE")
        return ack(2 * request.message_id)

    link.call(ack(4), twice, lambda answer: heard.append(answer.message_id), heard.append)
    link.call(ack(0), twice, heard.append, heard.append)
    run(world, 1.0)
    assert heard == [8, "UNAVAILABLE"]


def test_what_arrives_at_the_frozen_is_done_in_order_when_they_thaw() -> None:
    world = World(0)
    client, server = processes(world)
    node = Node(world)
    end = Link(client, server, Delay(0.01, 0.02)).connect(node.accept)
    run(world, 1.0)
    server.freeze(0.7)
    for number in range(20):
        world.after(0.05 * number, lambda number=number: end.send(ack(number)))  # type: ignore[misc]
    run(world, 0.5)
    assert node.got == []
    run(world, 1.0)
    assert node.got == list(range(20))


def test_what_arrives_for_a_life_that_is_over_is_never_done() -> None:
    world = World(0)
    client, server = processes(world)
    node = Node(world)
    end = Link(client, server, Delay(0.1, 0.1)).connect(node.accept)
    run(world, 1.0)
    client_node = Node(world)
    client_node.accept(end)
    end.send(ack(1))
    server.crash()
    server.start()
    run(world, 1.0)
    assert node.got == []
    assert [status for _, status in client_node.ends] == ["UNAVAILABLE"]


def test_a_call_that_is_lost_fails_after_its_time() -> None:
    world = World(0)
    link = Link(*processes(world), Delay(0.1, 0.1), lost=1.0)
    heard: list[object] = []
    link.call(ack(4), lambda request: request, heard.append, heard.append)
    run(world, 2.0)
    assert heard == ["UNAVAILABLE"]
