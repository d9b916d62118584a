"""A small grammar that writes English sentences together with their German translations.

Translation into German needs attention. Verbs move to the end of a clause or to its front
(*the dog has seen the cat* → *der Hund hat die Katze gesehen*); articles, adjectives and relative
pronouns agree with a noun's gender, number and case; and relative clauses inside
coordinated clauses make sentences long. Every word is aligned with its translations.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import NamedTuple

Pair = tuple[str, str]
_numbers = itertools.count(1)


class Word(str):
    """A word, and the number that it shares with its translations."""

    number: int


def translations(english: str, german: str) -> tuple[Word, Word]:
    """Return two words that translate each other."""
    number, words = next(_numbers), (Word(english), Word(german))
    for word in words:
        word.number = number
    return words


class Aligned(NamedTuple):
    """A sentence in both languages, and the alignment of their words."""

    english: list[str]
    german: list[str]
    links: set[tuple[int, int]]

    @property
    def pair(self) -> Pair:
        """The two as text."""
        return " ".join(self.english), " ".join(self.german)


class Noun(NamedTuple):
    """Singular and plural of both languages, and the German gender: m, f or n."""

    english: tuple[str, str]
    german: tuple[str, str]
    gender: str


class Verb(NamedTuple):
    """English infinitive, third person and participle; German infinitive, third and participle."""

    english: tuple[str, str, str]
    german: tuple[str, str, str]


class Phrase(NamedTuple):
    """Words of both languages that translate each other, and whether they are a plural."""

    english: Sequence[str]
    german: Sequence[str]
    plural: bool = False


def _nouns(table: str) -> list[Noun]:
    rows = (line.split() for line in table.split("\n") if line)
    return [Noun((a, b), (c, d), gender) for a, b, c, d, gender in rows]


def _verbs(table: str) -> list[Verb]:
    rows = (line.split() for line in table.split("\n") if line)
    return [Verb((a, b, c), (d, e, f)) for a, b, c, d, e, f in rows]


NOUNS = _nouns("""
dog dogs Hund Hunde m
man men Mann Männer m
king kings König Könige m
bird birds Vogel Vögel m
doctor doctors Arzt Ärzte m
cat cats Katze Katzen f
woman women Frau Frauen f
queen queens Königin Königinnen f
aunt aunts Tante Tanten f
mouse mice Maus Mäuse f
child children Kind Kinder n
horse horses Pferd Pferde n
lamb lambs Lamm Lämmer n
pig pigs Schwein Schweine n
chicken chickens Huhn Hühner n
""")

TRANSITIVE = _verbs("""
see sees seen sehen sieht gesehen
find finds found finden findet gefunden
love loves loved lieben liebt geliebt
call calls called rufen ruft gerufen
carry carries carried tragen trägt getragen
hear hears heard hören hört gehört
wash washes washed waschen wäscht gewaschen
paint paints painted malen malt gemalt
""")

INTRANSITIVE = _verbs("""
sleep sleeps slept schlafen schläft geschlafen
laugh laughs laughed lachen lacht gelacht
sing sings sung singen singt gesungen
wait waits waited warten wartet gewartet
""")

#: English and German, each for a singular and a plural subject, and whether a participle follows.
AUXILIARIES = [
    (("has", "have"), ("hat", "haben"), True),
    (("will", "will"), ("wird", "werden"), False),
    (("can", "can"), ("kann", "können"), False),
    (("must", "must"), ("muss", "müssen"), False),
]

ADJECTIVES = dict(
    small="klein", big="groß", old="alt", young="jung", happy="froh", white="weiß", fast="schnell"
)
ADVERBS = dict(today="heute", now="jetzt", often="oft", sometimes="manchmal")
CONJUNCTIONS = {"and": ["und"], "but": [",", "aber"]}

#: The forms of *der* by case, for m, f, n and the plural; *dieser* has the same endings.
ARTICLES = {
    "nominative": dict(m="der", f="die", n="das", p="die"),
    "accusative": dict(m="den", f="die", n="das", p="die"),
}
ENDINGS = {"der": "er", "die": "e", "das": "es", "den": "en"}


def agreement(gender: str, plural: bool, case: str) -> tuple[str, str]:
    """Return the article of a German noun, and the ending of the adjectives between the two."""
    article = ARTICLES[case]["p" if plural else gender]
    return article, "en" if plural or article == "den" else "e"


class Grammar:
    """Draws sentence pairs.

    Args:
        seed: the same seed gives the same pairs.
    """

    def __init__(self, seed: int):
        self._random = random.Random(seed)

    def _chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def noun_phrase(self, case: str, relatives: float) -> Phrase:
        """Draw a noun with its article, perhaps an adjective and, with probability ``relatives``, a
        relative clause.
        """
        noun, plural = self._random.choice(NOUNS), self._chance(0.4)
        article, ending = agreement(noun.gender, plural, case)
        words = [translations("the", article)]
        if self._chance(0.3):
            words = [translations("these" if plural else "this", "dies" + ENDINGS[article])]
        if self._chance(0.4):
            adjective = self._random.choice(list(ADJECTIVES))
            words.append(translations(adjective, ADJECTIVES[adjective] + ending))
        words.append(translations(noun.english[plural], noun.german[plural]))
        english, german = map(list[str], zip(*words))
        if self._chance(relatives):
            clause = self.relative_clause(noun.gender, plural, relatives / 3)
            english, german = [*english, *clause.english], [*german, *clause.german]
        return Phrase(english, german, plural)

    def verb(self, verb: Verb, plural: bool) -> tuple[list[str], str, list[str]]:
        """Draw a tense; return the English verb, and the German finite verb and the rest of it."""
        if self._chance(0.4):
            third = not plural
            english, german = translations(verb.english[third], verb.german[third])
            return [english], german, []
        first, second, participle = self._random.choice(AUXILIARIES)
        form = 2 if participle else 0
        auxiliary, finite = translations(first[plural], second[plural])
        word, rest = translations(verb.english[form], verb.german[form])
        return [auxiliary, word], finite, [rest]

    def relative_clause(self, gender: str, plural: bool, relatives: float) -> Phrase:
        """Draw *that …*: in German behind a comma, the verb at its end."""
        verb = self._random.choice(TRANSITIVE)
        if self._chance(0.5):  # the noun is the subject: that sees the cat
            other = self.noun_phrase("accusative", relatives)
            words, finite, rest = self.verb(verb, plural)
            english, pronoun = [*words, *other.english], ARTICLES["nominative"]
        else:  # the noun is the object: that the cat sees
            other = self.noun_phrase("nominative", relatives)
            words, finite, rest = self.verb(verb, other.plural)
            english, pronoun = [*other.english, *words], ARTICLES["accusative"]
        that, relative = translations("that", pronoun["p" if plural else gender])
        return Phrase([that, *english], [",", relative, *other.german, *rest, finite, ","])

    def clause(self, relatives: float) -> Phrase:
        """Draw a main clause; after an adverb, the German verb precedes the subject."""
        subject = self.noun_phrase("nominative", relatives)
        transitive = self._chance(0.8)
        verb, finite, rest = self.verb(
            self._random.choice(TRANSITIVE if transitive else INTRANSITIVE), subject.plural
        )
        other = self.noun_phrase("accusative", relatives) if transitive else Phrase([], [])
        english = [*subject.english, *verb, *other.english]
        german = [*subject.german, finite, *other.german, *rest]
        if self._chance(0.3):
            word = self._random.choice(list(ADVERBS))
            adverb, translated = translations(word, ADVERBS[word])
            english = [adverb, *english]
            german = [translated, finite, *subject.german, *other.german, *rest]
        return Phrase(english, german)

    def sentence(self) -> Aligned:
        """Draw one clause, or two or three joined by *and* or *but*."""
        relatives = self._random.choice((0.0, 0.3, 0.6))
        english, german, _ = self.clause(relatives)
        for _ in range(self._random.choice((0, 0, 1, 2))):
            conjunction = self._random.choice(list(CONJUNCTIONS))
            *comma, last = CONJUNCTIONS[conjunction]
            first, last = translations(conjunction, last)
            more = self.clause(relatives)
            english = [*english, first, *more.english]
            german = [*german, *comma, last, *more.german]
        german = [x for x, after in zip(german, [*german[1:], ","]) if (x, after) != (",", ",")]
        where = {word.number: j for j, word in enumerate(german) if isinstance(word, Word)}
        links = {(i, where[x.number]) for i, x in enumerate(english) if isinstance(x, Word)}
        return Aligned(list(english), list(german), links)


def aligned_corpus(seed: int, count: int, longest: int = 30) -> list[Aligned]:
    """Return ``count`` different sentences of at most ``longest`` English words."""
    grammar, sentences = Grammar(seed), dict[str, Aligned]()
    while len(sentences) < count:
        drawn = grammar.sentence()
        if len(drawn.english) <= longest:
            sentences[drawn.pair[0]] = drawn
    return list(sentences.values())


def corpus(seed: int, count: int, longest: int = 30) -> list[Pair]:
    """Return the sentences of :func:`aligned_corpus` as text."""
    return [x.pair for x in aligned_corpus(seed, count, longest)]
