"""Bullets are merged, filtered and ranked, and their domain is found."""

from __future__ import annotations

import random

import pytest

from capibara.builders.playbooks.agents import Agent
from capibara.builders.playbooks.bullets import Bullet
from capibara.builders.playbooks.filters import AgentFilter, BulletFilter, Unknown
from capibara.builders.playbooks.merging import BulletMerging, leaders
from capibara.builders.playbooks.ranking import BulletRanking, DomainFrom, wilson
from capibara.builders.playbooks.selection import Entry, playbook_order, select
from capibara.core.types import UserError

pytest.importorskip("rensa")


def entry(content, helpful=1, harmful=0, section="S", source="a.md:1", **changes):
    bullet = Bullet(id="", section=section, content=content, helpful=helpful, harmful=harmful)
    return Entry(bullet=bullet, source=source, **changes)


def selected(entries, keep=BulletFilter(), ranking=BulletRanking(), merge=BulletMerging()):
    return select(entries, "sql", merge, keep, ranking)


@pytest.mark.parametrize(
    "helpful, harmful, bound",
    [(0, 0, 0), (1, 0, 0.2065), (9, 1, 0.5958), (90, 10, 0.8256), (0, 5, 0), (5, 0, 0.5655), (10**6, 0, 1)],
)
def test_the_quality_is_wilsons_lower_bound(helpful, harmful, bound):
    assert wilson(helpful, harmful) == pytest.approx(bound, abs=1e-4)


def test_the_quality_grows_with_helpful_votes_and_falls_with_harmful_ones():
    for helpful in range(20):
        for harmful in range(20):
            here = wilson(helpful, harmful)
            assert 0 <= here <= 1 and wilson(helpful + 1, harmful) > here
            assert wilson(helpful, harmful + 1) < here or helpful == 0
    assert wilson(3, 1, z=0) == 0.75


SAME = (
    ("Always verify data types before processing", "always verify the data types before processing."),
    ("Retry **three** times", "Retry three times!"),
    ("Use <SECRET:openai_key:1> in the header of requests", "Use <SECRET:openai_key:7> in the header of requests"),
    ("!!!", "!!!"),
    ("When a query on a large table is slow, look at its plan first and then add an index",
     "When a query on a large table is slow, look at its plan first and then add one index"),
)  # fmt: skip
OTHER = (
    ("Always retry a request that failed after it has timed out on the server", "Never retry a request that failed after it has timed out on the server"),
    ("Do use threads for reading of many large files from the disk at once", "Do not use threads for reading of many large files from the disk at once"),
    ("Wait 3 seconds before the next request to the server is sent again", "Wait 5 seconds before the next request to the server is sent again"),
    ("Compare with `==` to find out whether two of the values are equal", "Compare with `!=` to find out whether two of the values are equal"),
    ("Call read_csv to load all of the rows of the file into memory", "Call read_json to load all of the rows of the file into memory"),
    ("Use an index", "Use a cache"),
    ("!!!", "???"),
)  # fmt: skip


@pytest.mark.parametrize("one, other", SAME)
def test_equal_and_similar_advice_is_merged(one, other):
    assert leaders([one, "Something else", other], BulletMerging()).tolist() == [0, 1, 0]


@pytest.mark.parametrize("one, other", OTHER)
def test_other_advice_in_similar_words_is_not_merged(one, other):
    assert leaders([one, other], BulletMerging()).tolist() == [0, 1]


def test_merging_finds_what_comparing_all_pairs_finds():
    generator = random.Random(1)
    words = [f"w{'abcdefghij'[i % 10] * (1 + i // 10)}" for i in range(200)]
    texts = [" ".join(generator.choices(words, k=generator.randint(5, 20))) for _ in range(300)]
    for _ in range(300):
        copied = generator.choice(texts).split()
        copied[generator.randrange(len(copied))] = generator.choice(words)
        texts.append(" ".join(copied))

    def of(text):
        found = text.split()
        return {*found, *zip(found, found[1:])}

    expected = list(range(len(texts)))
    for i in range(len(texts)):
        scores = {
            j: len(of(texts[i]) & of(texts[j])) / len(of(texts[i]) | of(texts[j])) for j in range(i) if expected[j] == j
        }
        best = min(scores, key=lambda j: (-scores[j], j), default=i)
        expected[i] = best if scores.get(best, 0) >= 0.8 else i
    assert sum(i != j for i, j in enumerate(expected)) > 50
    assert leaders(texts, BulletMerging()).tolist() == expected


def test_votes_add_up_and_the_best_text_is_kept():
    kept, about = selected(
        [
            entry("Look at the query plan first", 2, 1, source="a.md:1", agent="ann"),
            entry("look at the query plan first.", 20, 0, source="b.md:4", agent="bob"),
            entry("Add an index to the table", 9, 0),
        ]
    )
    assert [(one.bullet.id, one.bullet.content, one.bullet.helpful, one.bullet.harmful) for one in kept] == [
        ("bul-00001", "look at the query plan first.", 22, 1),
        ("bul-00002", "Add an index to the table", 9, 0),
    ]
    assert (kept[0].sources, kept[0].agents) == (("b.md:4", "a.md:1"), ("ann", "bob"))
    assert kept[0].quality == wilson(22, 1) and (about.read, about.merged) == (3, 1)


def test_harmful_votes_add_up():
    (found,), _ = selected([entry("Look at the plan first", 9, 2), entry("Look at the plan first", 8, 3)])
    assert (found.bullet.helpful, found.bullet.harmful) == (17, 5)


def test_the_sum_of_votes_stays_readable():
    kept, _ = selected([entry("Look at the query plan first", 999_999_999), entry("Look at the query plan first", 5)])
    assert kept[0].bullet.helpful == 999_999_999


def test_the_order_of_the_input_does_not_matter():
    generator = random.Random(3)
    entries = [
        entry(f"Advice about {'abcdef'[i % 6] * 5} and {'xyz'[i % 3] * 5}", i % 4, i % 3, source=f"a.md:{i}")
        for i in range(40)
    ]
    expected = selected(entries)[0]
    for _ in range(5):
        generator.shuffle(entries)
        assert selected(entries)[0] == expected


def test_a_few_votes_count_less_than_many_and_agents_decide_between_equals():
    kept, _ = selected(
        [
            entry("One helpful vote of one", 1, 0),
            entry("Ninety of a hundred", 90, 10),
            entry("Without votes, the good agent", 0, 0, standing=(0.9, 0.1)),
            entry("Without votes, of an unknown one", 0, 0),
            entry("Harmful alone, and dropped", 0, 2),
            entry("As often helpful as harmful", 3, 3),
        ]
    )
    assert [one.bullet.content.split()[0] for one in kept] == ["Ninety", "One", "As", "Without", "Without"]
    assert kept[3].bullet.content == "Without votes, the good agent"


def test_the_best_of_a_domain_are_kept():
    entries = [entry(f"{word} is good advice", i) for i, word in enumerate(("Alpha", "Beta", "Gamma", "Delta"))]
    for ranking, count in ((BulletRanking(per_domain=3), 3), (BulletRanking(per_domain=3, limits={"SQL": 2}), 2)):
        kept, about = selected(entries, ranking=ranking)
        assert [one.bullet.content.split()[0] for one in kept] == ["Delta", "Gamma", "Beta"][:count]
        assert about.excluded == {"per_domain": 4 - count}
    assert (BulletRanking().per_domain, BulletRanking().limit("sql")) == (5_000, 5_000)


def test_the_playbook_groups_by_section_the_best_first():
    kept, _ = selected([entry("Good advice here", 9, section="B"), entry("Poor advice there", 1, section="B"),
                        entry("Fair advice of another kind", 5, section="A"), entry("More of this one", 6, section="B")])  # fmt: skip
    assert [(one.section, one.id[-1]) for one in playbook_order(kept)] == [
        ("B", "1"),
        ("B", "2"),
        ("B", "4"),
        ("A", "3"),
    ]


@pytest.mark.parametrize(
    "setting, reason",
    [
        (dict(min_votes=5), "min_votes"),
        (dict(min_helpful_share=0.8), "min_helpful_share"),
        (dict(min_quality=0.9), "min_quality"),
        (dict(min_characters=50), "min_characters"),
        (dict(min_characters=0, max_characters=5), "max_characters"),
        (dict(sections=("Other",)), "sections"),
    ],
)
def test_each_setting_of_the_filter_drops_a_bullet(setting, reason):
    bullet = entry("Look at the plan", 3, 1, section="S").bullet
    assert BulletFilter().rejects(bullet, 0.3) is None
    assert BulletFilter(**setting).rejects(bullet, 0.3) == reason
    assert BulletFilter(sections=("s:",)).rejects(bullet, 0.3) is None


@pytest.mark.parametrize(
    "setting, reason",
    [
        (dict(min_graduation_score=0.9), "min_graduation_score"),
        (dict(min_interactions=11), "min_interactions"),
        (dict(min_success_rate=0.8), "min_success_rate"),
        (dict(domains=("python",)), "domains"),
        (dict(min_expertise=0.6), "min_expertise"),
        (dict(domains=("ML",), min_expertise=0.3), "min_expertise"),
        (dict(domains=("sql",), min_expertise=0.3), None),
        (dict(unknown=Unknown.DROP), None),
    ],
)
def test_each_setting_of_the_filter_drops_an_agent(setting, reason):
    agent = Agent(name="a", graduation_score=0.8, interactions=10, success_rate=0.7, expertise={"SQL": 0.5, "ml": 0.2})
    assert AgentFilter(**setting).rejects(agent) == reason
    assert AgentFilter(**setting).rejects(None) == ("unknown" if "unknown" in setting else None)


def test_an_agent_that_says_nothing_counts_as_0():
    assert AgentFilter().rejects(Agent(name="a")) is None
    assert AgentFilter(min_interactions=1).rejects(Agent(name="a")) == "min_interactions"


def test_the_domain_is_the_bullets_own_or_its_agents():
    agent = Agent(name="a", expertise={"SQL": 0.9, "Machine Learning": 0.5})
    bullet = entry("x", section="STRATEGIES").bullet
    own = Bullet(id="", section="machine-learning", content="x", domain="API")
    ranking = BulletRanking()
    assert ranking.domain(own, agent) == "api"
    assert ranking.domain(bullet, agent) == "sql" and ranking.domain(bullet, None) == "general"
    assert ranking.domain(entry("x", section="MACHINE LEARNING").bullet, agent) == "machine_learning"
    assert BulletRanking(domain_from=DomainFrom.SECTION).domain(bullet, agent) == "strategies"


@pytest.mark.parametrize(
    "make",
    [
        lambda: AgentFilter(min_success_rate=1.5),
        lambda: AgentFilter(min_interactions=-1),
        lambda: AgentFilter(min_graduation_score=float("nan")),
        lambda: BulletFilter(min_quality=-0.1),
        lambda: BulletFilter(min_votes=-1),
        lambda: BulletFilter(min_characters=10, max_characters=5),
        lambda: BulletMerging(similarity=0.1),
        lambda: BulletRanking(z=-1.0),
        lambda: BulletRanking(per_domain=0),
        lambda: BulletRanking(limits={"sql": 0}),
    ],
)
def test_settings_are_checked(make):
    with pytest.raises(UserError, match=r"\w+\.\w+.* \(.*\) must be .*: try "):
        make()
