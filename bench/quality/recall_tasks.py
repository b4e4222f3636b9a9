"""Rows that ask for what stands far back: needles, associations, chains, shares.

A row is filler, facts at random places or words that fill it, and questions at its end, each of
one token followed by its answer. A fact is a key and its value after the token SET. Answers are
given in the row, as in training on text: the model's answer to one question is what it predicts at
the question's token.

Two more kinds of short rows are for training alone: one asks at each token for the one before, one
for the token that followed another. From these models learn to match keys within some hundred
steps; without them they may guess among the values for thousands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np

Task = Literal[
    "associative",
    "single",
    "multi_key",
    "multi_value",
    "tracking",
    "frequent",
    "share",
    "pairs",
    "previous",
]
*_TESTED, _, _ = get_args(Task)
TASKS: tuple[Task, ...] = tuple(_TESTED)  # that models are tested for
MATCHING: tuple[Task, ...] = ("previous", "pairs", "associative")  # that fit short rows

# Ids of tokens. A reference names a key where a value stands.
START, SET, ASK, BACK = 0, 1, 2, 15
MARKS = {task: 3 + i for i, task in enumerate((*TASKS, "pairs"))}
KEYS, VALUES, REFERENCES = range(16, 272), range(272, 400), range(400, 656)
WORDS, NUMBERS, FILLER = range(656, 720), range(720, 736), range(736, 1024)
VOCABULARY = 1024
PAIRED = range(KEYS.start, VALUES.stop)

SLOT = 4  # tokens between places of facts: SET, key, value and one of filler
MOST_QUESTIONS = 32
QUESTION_TOKENS = 4  # of a short row, for each question
LEAST = 32  # tokens of a row
MOST_NEEDLES = 8
DEPTHS = 8  # parts of a row, by which needles are told apart
OFTEN = 8  # every so many slots have the most frequent word
SHARES = 4  # a word fills 2⁰ to 2³ of 32 slots
LEAST_SLOTS = 32  # that every task has room in


class Questions(NamedTuple):
    """Of one row, in order; Q of them.

    asked, answers: int (Q,), tokens. right: lists of tokens that count as right.
    needles: places (in slots) of what each answer follows from.
    hops: how many references lie between a question and its answer.
    """

    asked: list[int]
    answers: list[int]
    right: list[list[int]]
    needles: list[list[int]]
    hops: list[int]


@dataclass(frozen=True)
class Batch:
    """Rows and what they ask; places without a question are -1 throughout.

    Args:
        ids: int64 (B, S).
        places: int64 (B, Q), where the question's token stands.
        answers: int64 (B, Q).
        right: int64 (B, Q, A), tokens that count as right; neither this nor the next two are known
            of "previous".
        needles: int64 (B, Q, M), places of the tokens that an answer follows from.
        hops: int64 (B, Q).
        tasks: int64 (B,), places in `Task`.
    """

    ids: np.ndarray
    places: np.ndarray
    answers: np.ndarray
    right: np.ndarray
    needles: np.ndarray
    hops: np.ndarray
    tasks: np.ndarray


def make_batch(rng: np.random.Generator, tasks: list[Task], length: int) -> Batch:
    """One row of `length` tokens for each of the tasks.

    Raises:
        ValueError: such a row has no room for the facts, or is too long for pairs.
    """
    is_short = set(tasks) <= {*MATCHING}
    least = LEAST if is_short else 2 * MOST_QUESTIONS + 1 + SLOT * (LEAST_SLOTS + 1)
    if length < least:
        raise ValueError(f"length={length} must be at least {least}")
    if "pairs" in tasks and length > len(PAIRED):
        raise ValueError(
            f"length={length} must be at most {len(PAIRED)} for pairs: no token twice"
        )
    rows, count = len(tasks), length if "previous" in tasks else _most_questions(length)
    batch = Batch(
        rng.integers(FILLER.start, FILLER.stop, (rows, length)),
        np.full((rows, count), -1),
        np.full((rows, count), -1),
        np.full((rows, count, 4), -1),
        np.full((rows, count, MOST_NEEDLES), -1),
        np.full((rows, count), -1),
        np.array([get_args(Task).index(task) for task in tasks]),
    )
    for row, task in enumerate(tasks):
        if task == "previous":
            _previous(rng, batch, row, length)
        else:
            _fill(rng, batch, row, task, length)
    return batch


def _previous(rng: np.random.Generator, batch: Batch, row: int, length: int) -> None:
    """The token BACK, then any: at each after the first the answer is the token before."""
    ids = batch.ids[row]
    ids[0], ids[1:] = BACK, rng.integers(PAIRED.start, PAIRED.stop, length - 1)
    batch.places[row, 2:], batch.answers[row, 2:] = np.arange(2, length), ids[1:-1]


def _fill(rng: np.random.Generator, batch: Batch, row: int, task: Task, length: int) -> None:
    ids = batch.ids[row]
    ids[0] = START
    shift = 1 + int(rng.integers(SLOT))
    body = length - 2 * _most_questions(length) - 1  # as long whatever is asked
    slots = (body - shift) // SLOT
    questions = _ROWS[task](rng, ids[shift : shift + slots * SLOT].reshape(slots, SLOT))
    count = len(questions.asked)
    tail = length - 2 * count
    ids[tail - 1] = MARKS[task]
    ids[tail::2], ids[tail + 1 :: 2] = questions.asked, questions.answers
    batch.places[row, :count] = tail + 2 * np.arange(count)
    batch.answers[row, :count] = questions.answers
    batch.hops[row, :count] = questions.hops
    for number, right in enumerate(questions.right):
        batch.right[row, number, : len(right)] = right
    for number, slots_of in enumerate(questions.needles):
        places = [shift + slot * SLOT + 2 for slot in slots_of]
        batch.needles[row, number, : len(places)] = places


def _most_questions(length: int) -> int:
    return min(MOST_QUESTIONS, length // QUESTION_TOKENS)


def _facts(body: np.ndarray, slots: np.ndarray, keys: np.ndarray, values: np.ndarray) -> None:
    """Writes facts; `body` is a view of the row."""
    body[slots, 0], body[slots, 1], body[slots, 2] = SET, keys, values


def _draw(rng: np.random.Generator, among: range, count: int) -> np.ndarray:
    return rng.choice(np.arange(among.start, among.stop), count, replace=False)


def _slots(rng: np.random.Generator, body: np.ndarray, count: int) -> np.ndarray:
    return rng.choice(len(body), count, replace=False)


def _simple(rng: np.random.Generator, body: np.ndarray, facts: int, asked: int) -> Questions:
    """Different keys, some of which are asked for."""
    slots, keys = _slots(rng, body, facts), _draw(rng, KEYS, facts)
    values = rng.integers(VALUES.start, VALUES.stop, facts)
    _facts(body, slots, keys, values)
    order = rng.permutation(facts)[:asked]
    answers = values[order].tolist()
    return Questions(
        keys[order].tolist(),
        answers,
        [[answer] for answer in answers],
        [[slot] for slot in slots[order].tolist()],
        [0] * len(order),
    )


def _associative(rng: np.random.Generator, body: np.ndarray) -> Questions:
    count = min(MOST_QUESTIONS, len(body) * 3 // 4)
    return _simple(rng, body, count, count)


def _single(rng: np.random.Generator, body: np.ndarray) -> Questions:
    return _simple(rng, body, 1, 1)


def _multi_key(rng: np.random.Generator, body: np.ndarray) -> Questions:
    return _simple(rng, body, min(128, len(body) // 2), 8)


def _multi_value(rng: np.random.Generator, body: np.ndarray) -> Questions:
    """One key has four values, asked for in the order in which they stand; any is right."""
    others = _draw(rng, KEYS, 5)
    keys = np.concatenate([np.repeat(others[:1], 4), others[1:]])
    slots, values = _slots(rng, body, 8), _draw(rng, VALUES, 8)
    slots[:4].sort()
    _facts(body, slots, keys, values)
    found = values[:4].tolist()
    return Questions(
        [int(others[0])] * 4,
        found,
        [found[i:] for i in range(4)],
        [[slot] for slot in slots[:4].tolist()],
        [0] * 4,
    )


def _tracking(rng: np.random.Generator, body: np.ndarray) -> Questions:
    """Chains of three names: the first has a value, the others refer to the one before."""
    chains, links = 4, 3
    slots = np.sort(_slots(rng, body, chains * links).reshape(chains, links), 1)
    keys = _draw(rng, KEYS, chains * links).reshape(chains, links)
    values = _draw(rng, VALUES, chains)
    _facts(body, slots[:, 0], keys[:, 0], values)
    for link in range(1, links):
        references = keys[:, link - 1] - KEYS.start + REFERENCES.start
        _facts(body, slots[:, link], keys[:, link], references)
    order = rng.permutation(chains * links)
    places = [(each // links, each % links) for each in order.tolist()]
    answers = [int(values[chain]) for chain, _ in places]
    return Questions(
        [int(keys[place]) for place in places],
        answers,
        [[answer] for answer in answers],
        [slots[chain, : link + 1].tolist() for chain, link in places],
        [link for _, link in places],
    )


def _frequent(rng: np.random.Generator, body: np.ndarray) -> Questions:
    """Slots full of words, each as often but for the one that every eighth has."""
    word, *others = _draw(rng, WORDS, len(WORDS)).tolist()
    body[:] = rng.permutation(np.resize(others, len(body)))[:, None]
    slots = _slots(rng, body, len(body) // OFTEN)
    body[slots] = word
    return Questions([ASK], [word], [[word]], [slots[:MOST_NEEDLES].tolist()], [0])


def _share(rng: np.random.Generator, body: np.ndarray) -> Questions:
    """Slots full of words, and how many of 32 four words have, as a power of two."""
    body = body[: len(body) // LEAST_SLOTS * LEAST_SLOTS]
    words = _draw(rng, WORDS, len(WORDS))
    powers = rng.integers(0, SHARES, 4)
    counts = len(body) * 2**powers // LEAST_SLOTS
    body[:] = rng.permutation(np.resize(words[4:], len(body)))[:, None]
    parts = np.split(_slots(rng, body, counts.sum()), counts.cumsum()[:-1])
    for word, slots in zip(words, parts, strict=False):
        body[slots] = word
    answers = (NUMBERS.start + powers).tolist()
    return Questions(
        words[:4].tolist(),
        answers,
        [[answer] for answer in answers],
        [slots[:MOST_NEEDLES].tolist() for slots in parts],
        [0] * 4,
    )


def _pairs(rng: np.random.Generator, body: np.ndarray) -> Questions:
    """Keys and values, none twice: a question asks for what followed one."""
    body[:] = _draw(rng, PAIRED, body.size).reshape(body.shape)
    places = _slots(rng, body.reshape(-1)[1:], min(MOST_QUESTIONS, body.size // 2))
    answers = body.reshape(-1)[places + 1].tolist()
    return Questions(
        body.reshape(-1)[places].tolist(),
        answers,
        [[answer] for answer in answers],
        [[place // SLOT] for place in places.tolist()],
        [0] * len(answers),
    )


_ROWS = {
    "associative": _associative,
    "single": _single,
    "multi_key": _multi_key,
    "multi_value": _multi_value,
    "tracking": _tracking,
    "frequent": _frequent,
    "share": _share,
    "pairs": _pairs,
}
