"""Who asks what, and whether the answer is right.

What a request must get, the undisturbed run, is worked out here from its prompt alone, without any server.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from router.detokenizer import ByteLevelDetokenizer
from router.request_log import ChoiceLog, End, FinishReason, RequestLog, SamplingParams
from router.stop_strings import StopStrings
from router.text_stream import TextStream
from tests.rig.scripted_executor import RequestScript, Script, expected_output
from tests.simulation.ledger import Ledger
from tests.simulation.router_node import RouterNode
from tests.simulation.world import World

ASK_AGAIN_SECONDS = 0.02
INVALID_ARGUMENT, INTERNAL = 3, 13  # the numbers of those statuses


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
    deadly_at: int | None = None
    """Executors die of computing this position of prompt and output."""
    unfit_at: int | None = None
    """Executors answer wrongly each time they compute it."""

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
    """Asks, reads, and holds the answer against the undisturbed one.

    When its router is lost it goes on at another one with the ids it has.
    """

    def __init__(
        self, world: World, ask: Ask, routers: Sequence[RouterNode], script: Script, ledger: Ledger
    ) -> None:
        """`routers`: the one it asks, then those it turns to."""
        self.ask = ask
        self.is_done = False
        self.num_refused = 0
        self._world = world
        self._routers = routers
        self._num_lost = 0
        self._script = script
        self._ledger = ledger
        self._right = undisturbed(ask, script)
        self._token_ids: list[list[int]] = [[] for _ in range(ask.n)]
        self._texts = [""] * ask.n
        self._ends: list[End | None] = [None] * ask.n
        self._log: RequestLog | None = None
        self._accepted = False
        self._given_up: FinishReason | None = None
        world.after(ask.at, self._begin)
        if ask.cancel_at is not None:
            world.after(ask.cancel_at, lambda: self._give_up(FinishReason.ABORT))
        if ask.deadline is not None:
            # The router's own clock is a little late: the scheduler's may come first.
            late = world.rng(f"lateness of {ask.name}").uniform(0.0, 0.02)
            world.after(ask.deadline + late, lambda: self._give_up(FinishReason.DEADLINE))

    @property
    def _router(self) -> RouterNode:
        return self._routers[self._num_lost % len(self._routers)]

    # --- asking -------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._given_up is not None:
            self.is_done = True
            return
        log = self._log = self._new_log()
        for choice in log.choices:
            choice.resume(self._token_ids[choice.index], self._world.now)
        self._router.submit(
            log,
            wake=lambda: self._read(log),
            refused=lambda: self._ask_again(log),
            lost=lambda: self._lost(log),
        )

    def _ask_again(self, log: RequestLog) -> None:
        if log is self._log and not self.is_done:
            self._log = None
            self.num_refused += 1
            self._num_lost += 1
            self._world.after(ASK_AGAIN_SECONDS * min(self.num_refused, 10), self._begin)

    def _lost(self, log: RequestLog) -> None:
        if log is self._log and not self.is_done:
            ids = [len(token_ids) for token_ids in self._token_ids]
            self._world.note(self.ask.name, f"has lost its router, and goes on after {ids} ids")
            self._ask_again(log)

    def _new_log(self) -> RequestLog:
        ask = self.ask
        log = RequestLog(
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
            deadline=None if ask.deadline is None else ask.deadline + self._router.process.clock_ahead,
            received_at=self._router.process.now,
        )
        log.accepted = self._accepted
        return log

    # --- reading ------------------------------------------------------------------------------------

    def _read(self, log: RequestLog) -> None:
        """The log has something new."""
        if log is not self._log or self._given_up is not None:
            return  # of a call that is over
        assert not self.is_done, f"{self.ask.name} gets more after its end"
        if not self._accepted:
            if any(_was_refused(choice) for choice in log.choices):
                self._router.release(log, End(FinishReason.ABORT))
                if any(choice.end and choice.end.status_code == INVALID_ARGUMENT for choice in log.choices):
                    self._world.note(self.ask.name, "is too long for an executor that is there")
                    self.is_done = True
                else:
                    self._ask_again(log)
                return
            if not log.taken_in:
                return
            log.accepted = self._accepted = True
        for choice in log.choices:
            self._take(choice)
        if log.ended:
            self._router.release(log, End(FinishReason.ABORT))
            self.is_done = True

    def _take(self, choice: ChoiceLog) -> None:
        index = choice.index
        name = f"{self.ask.name}/{index}"
        if self._ends[index] is not None:
            return
        piece = choice.take_delta()
        if piece is not None:
            token_ids = self._token_ids[index]
            assert piece.offset == len(token_ids), f"{name} has {len(token_ids)} ids, {piece.offset} come"
            token_ids += piece.token_ids
            self._texts[index] += piece.text
            assert [entry.token_id for entry in piece.logprobs] == (
                list(piece.token_ids) if choice.sampling.logprobs is not None else []
            ), f"{name} has log-probabilities of other tokens"
        if choice.end is not None:
            self._ends[index] = choice.end
            self._check_end(name, index, choice.end)

    def _check_end(self, name: str, index: int, end: End) -> None:
        """Law: each choice ends once, with all of the undisturbed run, or a part if its time was over."""
        token_ids, text, right = self._token_ids[index], self._texts[index], self._right
        self._world.note(name, f"ends: {end.reason.name} after {len(token_ids)} ids")
        if end.reason in {FinishReason.STOP, FinishReason.LENGTH}:
            assert end == right.end, f"{name} ended by {end}, right is {right.end}"
            assert token_ids == right.token_ids, f"{name} got {token_ids}, right is {right.token_ids}"
            assert text == right.text, f"{name} reads {text!r}, right is {right.text!r}"
        elif end.status_code == INTERNAL:
            is_guilty = self.ask.deadly_at is not None or self.ask.unfit_at is not None
            assert is_guilty or self._ledger.may_look_guilty(self.ask.prompt[0]), (
                f"{name} is found guilty: {end.message}"
            )
            self._check_part(index)
        else:  # what remains travels in whole milliseconds, rounded down, and clocks jump forward
            early = 0.001 + self._world.seconds_jumped
            deadline = self.ask.deadline
            assert end.reason is FinishReason.DEADLINE, f"{name} ended by {end}"
            assert deadline is not None, f"{name} has no deadline and ended by {end}"
            assert self._world.now >= deadline - early, f"{name} ended by {end} too early"
            self._check_part(index)

    def _give_up(self, reason: FinishReason) -> None:
        if self.is_done or self._given_up is not None:
            return
        self._given_up = reason
        self._world.note(self.ask.name, f"gives up: {reason.name}")
        if self._log is not None:
            self._router.release(self._log, End(reason))
            self.is_done = True
            for index in range(self.ask.n):
                self._check_part(index)

    def _check_part(self, index: int) -> None:
        """Law: what a choice has got is a beginning of the undisturbed run."""
        token_ids, text, right = self._token_ids[index], self._texts[index], self._right
        assert token_ids == right.token_ids[: len(token_ids)], f"{self.ask.name}/{index} got {token_ids}"
        assert right.text.startswith(text), f"{self.ask.name}/{index} reads {text!r}, not {right.text!r}"


def _was_refused(choice: ChoiceLog) -> bool:
    end = choice.end
    return end is not None and end.reason is FinishReason.ERROR and end.status_code != INTERNAL
