"""What is honest counts, what is not counts as little as time allows: a few drawn runs."""

from tests.verify.poison.claims_over_days import Run, summary


def test_a_few_runs_of_a_day():
    shares = [share for seed in range(40) for share in Run(seed, 1.0).play()]
    table = summary(shares)
    assert table["honest"]["least"] > 0.7 and table["honest"]["median"] == 1.0
    assert table["upgraded"]["median"] > 0.95
    assert table["liar, later"]["most"] < 1.6
    assert table["liar, at once"]["most, of the others' pace"] < 10
