import pytest

from chairlift.figures import Answer, figures
from chairlift.seats import Member, Step


def test_figures_count_useful_rows_and_end_with_the_last_answer() -> None:
    answers = [
        Answer("A", "", num_tokens=10, first_token_seconds=1.0, total_seconds=2.0),
        Answer("B", "", num_tokens=30, first_token_seconds=2.0, total_seconds=4.0),
        Answer("C", "", num_tokens=20, first_token_seconds=6.0, total_seconds=8.0),
    ]
    steps = [
        Step(1, (Member(1, "A"), Member(2, "B"))),
        Step(2, (Member(1, "A", padding=True), Member(2, "B"), Member(3, "C"))),
        Step(3, (Member(3, "C"),)),
    ]
    result = figures(answers, steps)
    assert result.tokens_per_second == pytest.approx(60 / 8)
    assert result.mean_first_token == pytest.approx(3)
    assert result.median_first_token == pytest.approx(2)
    assert result.mean_total == pytest.approx(14 / 3)
    assert result.num_steps == 3
    assert result.mean_width == pytest.approx(5 / 3)
    assert "7.5 tokens/s" in str(result)


def test_the_width_of_one_step_is_its_rows_and_of_none_nothing() -> None:
    answers = [Answer("A", "", num_tokens=1, first_token_seconds=1.0, total_seconds=1.0)]
    assert figures(answers, [Step(1, (Member(1, "A"),))]).mean_width == 1
    assert figures(answers, []).mean_width == 0
