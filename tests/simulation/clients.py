"""Who asks what, and whether the answer is right.

What a request must get, the undisturbed run, is worked out here from its prompt alone, without any server.
"""

from dataclasses import dataclass

from router.detokenizer import ByteLevelDetokenizer
from router.request_log import ChoiceLog, End, FinishReason, RequestLog, SamplingParams
from router.stop_strings import StopStrings
from router.text_stream import TextStream
from tests.rig.scripted_executor import RequestScript, Script, expected_output
from tests.simulation.router_node import RouterNode
from tests.simulation.world import World

ASK_AGAIN_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, and what may happen to it from outside. Times in seconds from the start of the world."""

    name: str
    at: float
    prompt: tuple[int, ...]
    max_tokens: int
    n: int = 1
    ends_after: int | None = None
    """The model says an end token after this many tokens."""
    stops: tuple[str, ...] = ()
    priority: int = 0
    cancel_at: float | None = None
    deadline: float | None = None

    def script(self, script: Script) -> RequestScript | None:
        """What the executors must be told, if anything."""
        if self.ends_after is None:
            return None
        token_ids = expected_output(self.prompt, self.ends_after, script)
        return RequestScript(prompt=self.prompt, token_ids=(*token_ids, script.eos_token_ids[0]))


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """One choice as it is when nothing happens."""

    token_ids: list[int]
    text: str
    end: End


def undisturbed(ask: Ask, script: Script) -> Undisturbed:
    """What each choice of `ask` must get."""
    given = ask.script(script)
    token_ids = list(given.token_ids) if given is not None else []
    token_ids += expected_output([*ask.prompt, *token_ids], max(0, ask.max_tokens - len(token_ids)), script)
    stream, text = text_stream(ask.stops), ""
    for index, token_id in enumerate(token_ids[: ask.max_tokens]):
        if token_id in script.eos_token_ids:
            end = End(FinishReason.STOP, matched_token_id=token_id)
            return Undisturbed(token_ids[: index + 1], text + stream.finish(), end)
        piece = stream.push((token_id,))
        text += piece.text
        if piece.matched is not None:
            end = End(FinishReason.STOP, matched_stop=piece.matched)
            return Undisturbed(token_ids[: index + 1], text, end)
    return Undisturbed(token_ids[: ask.max_tokens], text + stream.finish(), End(FinishReason.LENGTH))


def text_stream(stops: tuple[str, ...]) -> TextStream:
    """Every token is a letter."""
    letters = ByteLevelDetokenizer(lambda token_id: bytes([ord("a") + token_id % 26]))
    return TextStream(letters, StopStrings(stops, include=False))


class Client:
    """Asks, reads, and holds the answer against the undisturbed one."""

    def __init__(self, world: World, ask: Ask, router: RouterNode, script: Script) -> None:
        self.ask = ask
        self.is_done = False
        self._world = world
        self._router = router
        self._script = script
        self._right = undisturbed(ask, script)
        self._token_ids: list[list[int]] = [[] for _ in range(ask.n)]
        self._texts = [""] * ask.n
        self._log: RequestLog | None = None
        self._given_up: FinishReason | None = None
        world.after(ask.at, self._begin)
        if ask.cancel_at is not None:
            world.after(ask.cancel_at, lambda: self._give_up(FinishReason.ABORT))
        if ask.deadline is not None:
            # The router's own clock is a little late: the scheduler's may come first.
            late = world.rng(f"lateness of {ask.name}").uniform(0.0, 0.02)
            world.after(ask.deadline + late, lambda: self._give_up(FinishReason.DEADLINE))

    def _begin(self) -> None:
        if self._given_up is not None:
            self.is_done = True  # it left before anybody took it in
            return
        self._log = self._new_log()
        if not self._router.submit(self._log, self._read):
            self._log = None
            self._world.after(ASK_AGAIN_SECONDS, self._begin)

    def _new_log(self) -> RequestLog:
        ask = self.ask
        return RequestLog(
            request_id=ask.name,
            tenant="",
            prompt_token_ids=ask.prompt,
            sampling=SamplingParams(
                temperature=0.0,
                top_p=1.0,
                top_k=0,
                min_p=0.0,
                seed=0,
                max_tokens=ask.max_tokens,
                min_tokens=0,
                ignore_eos=False,
                stop_token_ids=(),
                logprobs=0 if ask.n == 1 else None,
            ),
            texts=[text_stream(ask.stops) for _ in range(ask.n)],
            eos_token_ids=frozenset(self._script.eos_token_ids),
            priority=ask.priority,
            cache_salt="",
            body_digest=ask.name.encode(),
            deadline=ask.deadline,
            received_at=self._world.now,
        )

    def _give_up(self, reason: FinishReason) -> None:
        if self.is_done or self._given_up is not None:
            return
        self._given_up = reason
        self._world.note(self.ask.name, f"gives up: {reason.name}")
        if self._log is not None:
            self._router.release(self._log, End(reason))
            self._done()

    def _read(self) -> None:
        """The log has something new."""
        assert self._log is not None
        assert not self.is_done, f"{self.ask.name} gets more after its end"
        for choice in self._log.choices:
            self._take(choice)
        if self._log.ended:
            self._router.release(self._log, End(FinishReason.ABORT))
            self._done()

    def _take(self, choice: ChoiceLog) -> None:
        piece = choice.take_delta()
        if piece is None:
            return
        token_ids = self._token_ids[choice.index]
        assert piece.offset == len(token_ids), (
            f"{self.ask.name} has {len(token_ids)} ids, {piece.offset} come"
        )
        token_ids += piece.token_ids
        self._texts[choice.index] += piece.text
        assert [entry.token_id for entry in piece.logprobs] == (
            list(piece.token_ids) if choice.sampling.logprobs is not None else []
        ), f"{self.ask.name} has log-probabilities of other tokens"

    def _done(self) -> None:
        """Law: each choice ends once, with all of the undisturbed run, or with a part if it was given up."""
        assert self._log is not None
        self.is_done = True
        for choice in self._log.choices:
            self._take(choice)
            assert choice.end is not None
            name = f"{self.ask.name}/{choice.index}"
            token_ids, text = self._token_ids[choice.index], self._texts[choice.index]
            self._world.note(name, f"ends: {choice.end.reason.name} after {len(token_ids)} ids")
            right = self._right
            if choice.end.reason in {FinishReason.STOP, FinishReason.LENGTH}:
                assert choice.end == right.end, f"{name} ended by {choice.end}, right is {right.end}"
                assert token_ids == right.token_ids, f"{name} got {token_ids}, right is {right.token_ids}"
                assert text == right.text, f"{name} reads {text!r}, right is {right.text!r}"
            else:
                assert self._may_end_by(choice.end.reason), f"{name} ended by {choice.end}"
                assert token_ids == right.token_ids[: len(token_ids)], f"{name} got {token_ids}"
                assert right.text.startswith(text), f"{name} reads {text!r}, right is {right.text!r}"

    def _may_end_by(self, reason: FinishReason) -> bool:
        if reason is FinishReason.DEADLINE:  # what remains travels in whole milliseconds, rounded down
            return self.ask.deadline is not None and self._world.now >= self.ask.deadline - 0.001
        return reason is self._given_up
