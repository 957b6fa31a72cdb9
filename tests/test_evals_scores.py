"""The arithmetic of the evaluations, against examples worked by hand."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from pagealign.evals.scores import (
    Difference,
    Errors,
    anls,
    bootstrap,
    busy_seconds,
    count_errors,
    paired,
    percentiles,
    ratio,
)

# --- WER ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reference", "hypothesis", "want"),
    [
        # nothing is wrong once both are normalised
        ("mister smith will not go", "Mr. Smith won't go!", Errors(5, 0, 24, 0)),
        # "cat" -> "hat": one word of three, one character of eleven
        ("the cat sat", "the hat sat", Errors(3, 1, 11, 1)),
        # a word gone, with its space
        ("the cat sat", "the sat", Errors(3, 1, 11, 4)),
        # two words more than were said; the normaliser makes it "one and 2"
        ("one", "one and two", Errors(1, 2, 3, 6)),
        # digits for words are no error
        ("twenty two dogs", "22 dogs", Errors(2, 0, 7, 0)),
        # nothing heard
        ("the cat sat", "", Errors(3, 3, 11, 11)),
        # silence, and something heard: two words of none
        ("", "the cat", Errors(0, 2, 0, 7)),
        ("", "", Errors(0, 0, 0, 0)),
    ],
)  # fmt: skip
def test_count_errors(reference, hypothesis, want):
    assert count_errors(reference, hypothesis) == want


def test_other_languages_are_not_normalised_as_english():
    """ "won't" keeps its spelling, the apostrophe becomes a space: two words."""
    assert count_errors("will not", "won't", "de") == Errors(2, 2, 8, 5)
    assert count_errors("will not", "won't", "en") == Errors(2, 0, 8, 0)


def test_a_corpus_is_not_the_mean_of_its_clips():
    """1 error in 2 words and 1 in 8: 2 of 10, not (50 % + 12.5 %) / 2."""
    assert ratio([1, 1], [2, 8]) == 0.2
    assert math.isnan(ratio([1], [0]))


# --- ANLS ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "references", "want"),
    [
        ("12 May 1998", ["12 May 1998"], 1.0),
        ("  12 MAY 1998\n", ["12 may 1998"], 1.0),
        # one letter of eight is another
        ("Deloitte", ["Deloitfe"], 7 / 8),
        # the longer string's length counts: 4 insertions over 8
        ("1998", ["may 1998"], 0.0),
        # 3 of 7 (kitten, sitting): above the threshold
        ("kitten", ["sitting"], 4 / 7),
        # half: not below 0.5, so nothing
        ("ab", ["ac"], 0.0),
        ("abcde", ["abxye"], 3 / 5),
        ("abcd", ["abxy"], 0.0),
        # the best of several references
        ("$123", ["123", "$ 123", "$123"], 1.0),
        ("cat", ["dog", "cart"], 3 / 4),
        ("", ["x"], 0.0),
        ("", [""], 1.0),
        ("x", [], 0.0),
        # how much white space is between words doesn't matter, that there is some does
        ("a b", ["a  b"], 1.0),
        ("12\n May\t1998", ["12  may 1998 "], 1.0),
        ("ab cd", ["abcd"], 4 / 5),
    ],
)
def test_anls(answer, references, want):
    assert anls(answer, references) == pytest.approx(want, abs=1e-12)


def test_anls_has_a_threshold():
    assert anls("kitten", ["sitting"], threshold=0.4) == 0.0
    assert anls("ab", ["ac"], threshold=0.51) == 0.5


# --- intervals and differences ------------------------------------------------------------


def test_bootstrap_of_two_items():
    """Draws of two from (0, 1): 0 a quarter of the time, 1/2 half, 1 a quarter."""
    assert bootstrap([0, 1], [1, 1], seed=0) == (0.0, 1.0)
    # with weights 1 and 9 the mixed draw is 1/10, and 0 of 18 and 2 of 2 the ends
    assert bootstrap([1, 0], [1, 9], seed=0) == (0.0, 1.0)


def test_bootstrap_of_a_mean_is_near_the_normal_interval():
    values = list(np.random.default_rng(5).normal(10, 2, 400))
    low, high = bootstrap(values, [1] * 400, seed=1)
    middle, half = statistics.mean(values), 1.96 * statistics.stdev(values) / 20
    assert low == pytest.approx(middle - half, abs=0.02)
    assert high == pytest.approx(middle + half, abs=0.02)
    assert bootstrap(values, [1] * 400, seed=1) == (low, high)
    assert bootstrap(values, [1] * 400, seed=2) != (low, high)


def test_bootstrap_of_nothing():
    assert all(math.isnan(x) for x in bootstrap([], [], seed=0))
    assert all(math.isnan(x) for x in bootstrap([1, 2], [0, 0], seed=0))


def test_paired_difference_of_a_mean():
    """Differences 0.5, 0, -0.2, 0.1: mean 0.1, standard deviation 0.2944, over root 4."""
    first, second = [0.5, 1.0, 0.8, 0.0], [1.0, 1.0, 0.6, 0.1]
    found = paired(first, second, [1] * 4, [False, True, False, False])
    assert found.value == pytest.approx(0.1)
    assert found.error == pytest.approx(statistics.stdev([0.5, 0.0, -0.2, 0.1]) / 2)
    assert (found.identical, found.items) == (1, 4)


def test_paired_difference_of_a_ratio():
    """Errors +1 in 10 words and 0 in 30: 1/40; residuals 1 - 10/40 and 0 - 30/40."""
    found = paired([0, 2], [1, 2], [10, 30], [False, True])
    assert found.value == pytest.approx(1 / 40)
    assert found.error == pytest.approx(math.sqrt(2 * (0.75**2 + 0.75**2)) / 40)


def test_paired_difference_of_one_or_none():
    one = paired([1], [2], [4], [False])
    assert (one.value, one.identical, one.items) == (0.25, 0, 1) and math.isnan(one.error)
    none = paired([], [], [], [])
    assert math.isnan(none.value) and none == Difference(none.value, none.error, 0, 0)


def test_equal_runs_differ_by_nothing():
    assert paired([1, 0, 3], [1, 0, 3], [5, 6, 7], [True] * 3) == Difference(0.0, 0.0, 3, 3)


def test_percentiles():
    """Of 1 .. 11 the median is 6, the 90th percentile 10, linear between neighbours."""
    assert percentiles(range(1, 12), (50, 90, 95)) == (6.0, 10.0, 10.5)
    assert all(math.isnan(x) for x in percentiles([]))


def test_busy_seconds_are_a_union():
    """[0, 4] and [1, 3] overlap, [3, 6] goes on, [100, 101] is another evening."""
    assert busy_seconds([(100, 101), (1, 3), (0, 4), (3, 6)]) == 7
    assert busy_seconds([]) == 0
