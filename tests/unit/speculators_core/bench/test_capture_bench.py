from __future__ import annotations

from speculators_core.bench.capture import BatchSettings, Comparison, Side, Work, _turn, mark_fastest


def measured(work: Work, batched: int, plain: tuple[float, ...], store: str = "file") -> Comparison:
    return Comparison(
        work=work,
        store=store,
        settings=BatchSettings(max_num_seqs=16, max_num_batched_tokens=batched),
        plain=plain,
        captured=plain,
        ratio=1.0,
        fastest=False,
    )


def test_the_fastest_plain_engine_is_found_for_each_kind_of_work_and_all_stores() -> None:
    measures = [
        measured("prefill", 512, (90, 100, 900)),
        measured("prefill", 1024, (110, 120, 130), "file"),
        measured("prefill", 1024, (110, 120, 130), "shm"),
        measured("generate", 512, (30, 31, 32)),
        measured("generate", 1024, (10, 11, 12)),
    ]
    marked = mark_fastest(measures)
    assert [one.fastest for one in marked] == [False, True, True, True, False], "by the median"
    assert ["*" in one.line() for one in marked] == [one.fastest for one in marked]


def test_the_sides_of_a_turn_go_there_and_back() -> None:
    asked: list[int] = []

    def side(number: int) -> Side:
        def run(work: Work) -> float:
            asked.append(number)
            return float(number)

        return run

    sides = [side(number) for number in range(3)]
    assert _turn(sides, "prefill", backwards=False) == _turn(sides, "prefill", backwards=True) == [0.0, 1.0, 2.0]
    assert asked == [0, 1, 2, 2, 1, 0]
