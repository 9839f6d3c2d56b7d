"""A region that lies about its work spoils its own share and nothing else."""

from __future__ import annotations

import pytest

from diloco_cli.core.budget import MOST_TOKENS
from diloco_cli.core.claims import CEILING, FIRST_CREDIT
from diloco_cli.core.rounds import Accept, Refused
from diloco_cli.observe.metrics import warnings
from diloco_cli.server.build_status import build_status, build_summary
from diloco_cli.server.recovery.verify import replay
from diloco_cli.wire.messages import News, parse
from tests.server.harness import LEASE, close_server, in_a_loop, read_journal, replayed
from tests.server.lying import CAP, STEP_TOKENS, Trial, totals

LIES: list[dict[str, float]] = [
    {"tokens": 1e12},
    {"steps": 2400.0},
    {"steps": 2.4e6},
    {"steps": 1e9},
]
"""What was tried on a server that believed them: the second lie was enough to end its run."""


@in_a_loop
async def test_a_region_that_claims_steps_it_never_made_cannot_end_the_run(tmp_path):
    trial = Trial(tmp_path)
    await trial.join()
    began = trial.clock.now
    refused = 0
    for turn in range(48):
        answer = await trial.exchange(turn % 2, LIES[turn % len(LIES)])
        refused += isinstance(answer, Refused)
        assert not trial.state.ledger.end
    seconds = trial.clock.now - began
    assert refused == 12, "so many tokens per step are refused as they always were"
    assert 0 < trial.counted("evil") <= FIRST_CREDIT + CEILING * seconds
    assert trial.counted("iowa") == trial.counted("paris") == seconds / 2, "honest work counts"
    status = build_status(trial.server, "")
    assert status.tokens.applied <= 2 * STEP_TOKENS * seconds + STEP_TOKENS * (
        FIRST_CREDIT + CEILING * seconds
    )
    assert status.tokens.pending >= 0 and status.tokens.uncounted > 1e9
    assert any(words.startswith("evil claims") for words in warnings(status))
    assert any("diloco amend --repace evil" in words for words in warnings(status))
    assert build_summary(trial.server).balanced is True


@in_a_loop
async def test_weights_follow_what_counts_and_a_replay_gives_the_same_bits(tmp_path):
    trial = Trial(tmp_path)
    await trial.join()
    shares = []
    for turn in range(12):
        await trial.exchange(turn % 2, {"steps": 1e9})
        closed = [fields for kind, fields in trial.noted if kind == "closed"][-1]
        shares.append(closed["weights"][0] / sum(closed["weights"]))
    # Its first frame was worth the cap of three; later ones what the ceiling gives, no more.
    assert max(shares) < CAP / (CAP + 12) + 1e-9
    digests = trial.digests()
    await close_server(trial.server)
    settings = trial.settings
    again = replayed(settings, tmp_path, trial.kept)
    assert [state.digest for state in again] == digests
    found = replay(settings, tmp_path / "server")
    assert [line.digest for line in found.lines] == digests


@in_a_loop
async def test_what_does_not_count_at_all_is_merged_with_next_to_no_weight(tmp_path):
    trial = Trial(tmp_path)
    await trial.join()
    await trial.exchange(0, {"steps": 1e9})
    trial.clock.now -= 6.0  # No time passes for the credit to grow in.
    await trial.exchange(0, {"steps": 1e9})
    closed = [fields for kind, fields in trial.noted if kind == "closed"][-1]
    assert closed["members"] == ["evil", "iowa", "paris"]
    assert 0 < closed["weights"][0] < 1e-5 * closed["weights"][1]


@in_a_loop
async def test_verdicts_survive_a_restart_and_time_goes_on_by_the_wall_clock(tmp_path):
    trial = Trial(tmp_path)
    await trial.join()
    for turn in range(6):
        await trial.exchange(turn % 2, {"steps": 1e9})
    ledger, clock = trial.state.ledger, trial.state.allowance_clock
    assert clock == 36.0
    trial.clock.now += 100.0
    trial.restart()
    assert trial.state.ledger == ledger
    assert trial.state.allowance_clock == 136.0
    trial.clock.now -= 3600.0
    trial.restart()
    assert trial.state.allowance_clock == 36.0, "a clock that was set back takes nothing away"
    trial.clock.now += 1e9
    trial.restart()
    assert trial.state.allowance_clock == 36.0 + 7 * 86400, "nor does one set forward give more"


@in_a_loop
async def test_a_counter_off_by_a_thousand_does_not_matter_to_the_others(tmp_path):
    broken = Trial(tmp_path / "broken")
    sound = Trial(tmp_path / "sound")
    for trial, steps in ((broken, 6000.0), (sound, 6.0)):
        await trial.join()
        for turn in range(6):
            await trial.exchange(turn % 2, {"steps": steps})
    for name in ("iowa", "paris"):
        assert broken.counted(name) == sound.counted(name)
        assert broken.state.totals.applied(name) == sound.state.totals.applied(name)


@in_a_loop
async def test_a_region_that_was_away_for_a_week_is_welcome_with_all_its_work(tmp_path):
    trial = Trial(tmp_path, budget=10**12)
    await trial.join()
    for turn in range(20):
        await trial.exchange(turn % 2, {"steps": 60.0}, seconds=60.0)
    assert trial.state.ledger.paces["evil"].steps_per_second
    week = 7 * 86400.0 / 2  # In steps: each fragment was sent every other time.
    trial.clock.now += 2 * week
    for name in trial.regions:
        await trial.beat(name, 6.0)
    trial.server.tick()
    assert isinstance(await trial.upload("evil", trial.lie(0, steps=week)), Accept)
    worth = trial.state.ledger.slots[0].waiting["evil"].worth
    assert worth.steps == week and worth.tokens == week * STEP_TOKENS


@in_a_loop
@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"trained": 1e6}, "it claims 192 tokens, but its totals leave 1000000 of 1000000 trained"),
        ({"discarded": 64.0}, "it claims 192 tokens, but its totals leave 128 of 192 trained"),
        (
            {"trained": 5192.0, "applied": 5000.0},
            "its totals say that 5000 tokens of its folder are merged, but 0 are",
        ),
    ],
)
async def test_a_header_that_contradicts_itself_is_refused_with_both_numbers(
    tmp_path, changed, why
):
    trial = Trial(tmp_path)
    await trial.join()
    await trial.call(0)
    evil = trial.regions["evil"]
    said = totals(evil, 0, 6 * STEP_TOKENS) | changed
    answer = await trial.upload("evil", evil.frame(0, totals=said))
    assert isinstance(answer, Refused) and answer.why == why
    assert trial.state.ledger.slots[0].decided["evil"].fate == "refused"


@in_a_loop
async def test_only_known_fates_of_a_header_reach_the_journal(tmp_path):
    """A header may have a mebibyte, and the journal is compacted only after a round."""
    trial = Trial(tmp_path)
    await trial.join()
    await trial.call(0)
    evil = trial.regions["evil"]
    said = totals(evil, 0, 6 * STEP_TOKENS)
    junk = {"x" * n: 1.0 for n in range(1, 33)}
    assert isinstance(await trial.upload("evil", evil.frame(0, totals=said | junk)), Accept)
    await close_server(trial.server)
    decided = [each for each in read_journal(tmp_path) if each["kind"] == "decided"]
    assert [each["totals"] for each in decided] == [said]


@in_a_loop
async def test_a_folder_that_gave_up_what_was_merged_may_go_on(tmp_path):
    """Another folder spoke for it meanwhile: its own sum is smaller than ours, and honest."""
    trial = Trial(tmp_path)
    await trial.join()
    await trial.exchange(0, {"steps": 6.0})
    evil = trial.regions["evil"]
    assert evil.applied[0] == 6 * STEP_TOKENS
    evil.applied[0] = 0.0
    await trial.call(0)
    data = evil.frame(0, totals=totals(evil, 0, 6 * STEP_TOKENS))
    assert isinstance(await trial.upload("evil", data), Accept)


@in_a_loop
@pytest.mark.parametrize("tokens", [1e-300, 5.0])
async def test_fewer_tokens_than_steps_are_no_claim(tmp_path, tokens):
    """A weight of nothing would end the server when the round closes."""
    trial = Trial(tmp_path)
    await trial.join()
    await trial.call(0)
    answer = await trial.upload("evil", trial.lie(0, steps=6.0, tokens=tokens))
    assert isinstance(answer, Refused) and "tokens in 6 steps" in answer.why


@in_a_loop
async def test_reports_of_steps_that_could_not_count_call_nobody(tmp_path):
    """Otherwise one region could have rounds of crumbs at the speed of the network."""
    trial = Trial(tmp_path, quorum=1)
    await trial.join()
    for name in ("iowa", "paris"):
        await trial.beat(name, step_seconds=1.0, step=100)
    calls = 0
    for _ in range(40):
        await trial.beat("evil", [1e9, 0.0], step_seconds=1e-9, step=100)
        trial.server.tick()
        if 0 not in trial.state.ledger.calls():
            break
        calls += 1
        await trial.upload("evil", trial.lie(0, steps=6.0))
        trial.clock.now += 5.0 if calls == 1 else 0.0
        for name in ("iowa", "paris"):
            await trial.beat(name, step_seconds=1.0, step=100)
        trial.clock.now += 5.0
        await trial.settle()
        trial.clock.now -= 5.0
    assert calls <= (FIRST_CREDIT + CEILING * 10) / 6


@in_a_loop
async def test_heartbeats_that_contradict_what_is_merged_are_shown_and_added_to_nothing(tmp_path):
    trial = Trial(tmp_path)
    await trial.join()
    await trial.exchange(0, {"steps": 6.0})
    before = build_status(trial.server, "").tokens
    evil = trial.regions["evil"]
    evil.trained, evil.pending, evil.applied = [1e12, 1e12], [0.0, 0.0], [1e12, 1e12]
    await trial.beat("evil")
    status = build_status(trial.server, "")
    assert status.tokens == before and status.tokens.pending >= 0
    assert [region.unbalanced for region in status.regions] == [True, False, False]
    assert build_summary(trial.server).balanced is False


@in_a_loop
async def test_a_region_that_claims_more_than_a_message_can_say_may_still_join_and_report(tmp_path):
    trial = Trial(tmp_path)
    await trial.join()
    await trial.call(0)
    await trial.upload("evil", trial.lie(0, steps=6.0, tokens=MOST_TOKENS))
    evil = trial.regions["evil"]
    evil.trained, evil.pending = [MOST_TOKENS] * 2, [MOST_TOKENS] * 2
    trial.clock.now += LEASE
    evil.boot += 1
    joined = await trial.join("evil")
    news = await trial.beat("evil")
    assert joined.until == MOST_TOKENS, "it is told a number that a message can hold"
    assert parse(News, news.body()).until == MOST_TOKENS
