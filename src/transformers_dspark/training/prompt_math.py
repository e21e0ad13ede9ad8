"""Mathematics prompts: word problems with random names and numbers, and short exercises."""

from __future__ import annotations

import random
from collections.abc import Iterator


NAMES = [
    "Amina",
    "Ben",
    "Carla",
    "Dmitri",
    "Elena",
    "Farid",
    "Grace",
    "Hiro",
    "Ines",
    "Jamal",
    "Katya",
    "Liam",
    "Maya",
    "Noah",
    "Olga",
    "Priya",
    "Quentin",
    "Rosa",
    "Samir",
    "Tara",
    "Umar",
    "Vera",
    "Wei",
    "Ximena",
    "Yusuf",
    "Zoe",
    "Anders",
    "Bianca",
    "Chidi",
    "Daria",
    "Emil",
    "Fatima",
    "Gustav",
    "Hana",
    "Ivan",
    "Julia",
    "Kofi",
    "Leila",
    "Marco",
    "Nadia",
]
ITEMS = [
    "apples",
    "pencils",
    "marbles",
    "stickers",
    "books",
    "cookies",
    "candles",
    "postcards",
    "tickets",
    "bottles",
    "shells",
    "coins",
    "beads",
    "cupcakes",
    "roses",
    "stamps",
    "notebooks",
    "buttons",
    "eggs",
    "chairs",
    "lemons",
    "balloons",
    "bricks",
    "toys",
    "muffins",
    "cards",
    "photographs",
    "plants",
    "pears",
    "ribbons",
]
PLACES = [
    "bakery",
    "school",
    "farm",
    "library",
    "market",
    "factory",
    "museum",
    "garden",
    "cinema",
    "hotel",
    "workshop",
    "bookshop",
    "stadium",
    "bakery",
]
ASKS = (
    "",
    "",
    "\nPlease reason step by step, and put your final answer within \\boxed{}.",
    " Explain your reasoning.",
    " Show your work.",
    " Let's think step by step.",
    " Give only the final number.",
)
FOLLOWUPS = (
    "What if all the numbers were doubled?",
    "Check your answer.",
    "Explain that to a ten-year-old.",
    "Can you solve it in another way?",
    "Write the solution as a single equation.",
)

# {a} {b} ... are small numbers, {h} a larger one, {p} a percentage, {n1} ... names, {i1} ... things, {place} a place.
WORD_PROBLEMS = (
    "{n1} has {h} {i1}. {n1} gives {a} to {n2} and buys {b} more. How many {i1} does {n1} have now?",
    "A {place} sells {i1} for ${a} each and {i2} for ${b} each. {n1} buys {c} {i1} and {d} {i2}. How much does"
    " {n1} pay?",
    "{n1} packs {a} {i1} into each box and has {b} boxes. If {c} {i1} are broken, how many good {i1} are there?",
    "{n1} earns ${a} an hour and works {b} hours a day for {c} days. After spending ${d} on {i1}, how much is left?",
    "A train travels at {h} km per hour for {a} hours and then at {b} km per hour for {c} hours. How far does it go?",
    "{n1} is {a} years older than {n2}. In {b} years, {n2} will be {c}. How old is {n1} today?",
    "A {place} had {h} visitors on Monday, {p}% more on Tuesday and {a} fewer on Wednesday than on Tuesday. How many"
    " visitors came on the three days together?",
    "{n1} reads {a} pages a day. The book has {h} pages. After {b} days, how many pages are left?",
    "{n1}, {n2} and {n3} share {h} {i1}. {n1} takes {a}, {n2} takes twice as many as {n1}, and {n3} gets the"
    " rest. How many"
    " {i1} does {n3} get?",
    "A jacket costs ${h}. It is discounted by {p}% and then a ${a} coupon is applied. What is the final price?",
    "A recipe needs {a} cups of flour for {b} {i1}. How many cups does {n1} need for {c} times as many {i1}?",
    "{n1} saves ${a} every week. {n2} starts with ${h} and spends ${b} a week. After how many weeks do they"
    " have the same?",
    "The perimeter of a rectangle is {h} cm, and its length is {a} cm more than its width. What is its area?",
    "A tank holds {h} litres. One pipe fills {a} litres a minute and another empties {b} litres a minute. How"
    " much water"
    " is in the tank after {c} minutes if it starts empty?",
    "{n1} plants {a} rows of {b} {i1} and {c} rows of {d} {i2} in the {place}. How many plants are there in total?",
    "{n1} runs {a} miles on each weekday and {b} miles on each weekend day. How many miles in {c} weeks?",
    "In a class of {h} students, {p}% play an instrument, and {a} of those also sing. How many play but do not sing?",
    "{n1} bought {a} packs of {b} {i1} and gave {c} {i1} to each of {d} friends. How many {i1} are left?",
    "A phone plan costs ${a} a month plus {b} cents a minute. {n1} talked for {h} minutes. What is the bill?",
    "{n1} invests ${h} at {p}% simple interest a year. How much money is there after {a} years?",
    "A {place} employs {a} people who each make {b} {i1} an hour. How many hours do they need for {h} {i1}?",
    "{n1} scored {h1} on the first test and {h2} on the second. What score on the third makes the average {h3}?",
    "It takes {n1} {a} hours to paint a room and {n2} {b} hours. How long does it take them together?",
    "A bag has {a} red, {b} blue and {c} green {i1}. What is the probability of drawing a blue one?",
    "{n1} drives {h} miles on {a} gallons of fuel. How many gallons are needed for {h1} miles at the same rate?",
    "The sum of three consecutive integers is {h}. If the sum is not divisible by 3, say so; otherwise find them.",
    "{n1} has {a} {i1} more than {n2}, and together they have {h}. How many does each have?",
    "A {place} sold {p}% of its {h} {i1} in the morning and half of the rest in the afternoon. How many remain?",
)
EXERCISES = (
    "Solve for x: {a}x + {b} = {h}",
    "Solve {a}x - {b} = {c}x + {d} for x.",
    "Solve the equation x^2 - {s}x + {t} = 0.",
    "What is {h} * {a} - {b}?",
    "Calculate {h1} + {h2} - {h3}.",
    "What is {p}% of {h}?",
    "Find the greatest common divisor of {h1} and {h2}.",
    "Find the least common multiple of {a} and {b}.",
    "What is the derivative of f(x) = {a}x^3 - {b}x^2 + {c}x?",
    "Evaluate the integral of {a}x^2 + {b} from 0 to {c}.",
    "Simplify: ({a}x + {b})({c}x - {d})",
    "Is {h} a prime number? Explain.",
    "Write {h} as a product of prime factors.",
    "Convert {h} from decimal to binary.",
    "What is the remainder when {h} is divided by {a}?",
    "Find the slope of the line through ({a}, {b}) and ({c}, {h}).",
    "A right triangle has legs {a} and {b}. How long is the hypotenuse?",
    "What is the area of a circle with radius {a} cm?",
    "If f(x) = {a}x + {b} and g(x) = x^2, what is f(g({c}))?",
    "What are the mean and the median of {a}, {b}, {c}, {d}, {h}?",
    "The first term of an arithmetic sequence is {a} and the difference is {b}. What is term number {h}?",
    "In how many ways can {c} people be chosen from a group of {s}?",
    "Two dice are thrown. What is the probability that the sum is {e}?",
    "Solve the system: {a}x + y = {h} and x - y = {b}.",
    "Round {h}.{a}{b} to the nearest ten and to one decimal place.",
    "Sort these numbers in increasing order: {h1}, {a}, {h2}, {b}, -{c}, {h3}.",
    "What is {a}/{b} + {c}/{d} as a fraction in lowest terms?",
    "Find the next two numbers: {a}, {ab}, {ab2}, {ab3}, ...",
    "Express {h} minutes in hours and minutes.",
    "If log_{e}(x) = {c1}, what is x?",
)


def _fields(rng: random.Random) -> dict[str, object]:
    n1, n2, n3 = rng.sample(NAMES, 3)
    i1, i2 = rng.sample(ITEMS, 2)
    a, b, c, d = (rng.randint(2, 24) for _ in range(4))
    r1, r2 = rng.randint(1, 12), rng.randint(1, 12)
    return {
        "n1": n1, "n2": n2, "n3": n3, "i1": i1, "i2": i2, "place": rng.choice(PLACES),
        "a": a, "b": b, "c": c, "d": d, "e": rng.randint(2, 12), "c1": rng.randint(2, 4),
        "h": rng.randint(40, 500), "h1": rng.randint(50, 400), "h2": rng.randint(50, 400), "h3": rng.randint(50, 100),
        "p": rng.choice((5, 10, 15, 20, 25, 30, 40, 50, 60, 75)),
        "s": r1 + r2, "t": r1 * r2, "ab": a + b, "ab2": a + 2 * b, "ab3": a + 3 * b,
    }  # fmt: skip


def word_problems(rng: random.Random) -> Iterator[list[str]]:
    """Everyday problems in a few sentences."""
    while True:
        text = rng.choice(WORD_PROBLEMS).format(**_fields(rng)) + rng.choice(ASKS)
        yield [text] if rng.random() < 0.93 else [text, rng.choice(FOLLOWUPS)]


def exercises(rng: random.Random) -> Iterator[list[str]]:
    """Short exercises in algebra, arithmetic, analysis and probability."""
    while True:
        text = rng.choice(EXERCISES).format(**_fields(rng)) + rng.choice(ASKS)
        yield [text] if rng.random() < 0.95 else [text, rng.choice(FOLLOWUPS)]
