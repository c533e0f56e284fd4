"""The language of the demo target: a program that writes chats about small, well-defined tasks.

Every chat is made here from lists and sentence patterns written for this project; no third-party text is used.
`chat(rng)` returns (family, key, prompt, answer, must): `key` names the task with its values but without its wording, `must` is a
string that every right answer contains (in open tasks only the part of it that the prompt fixes). A chat is held out if a hash of
its key says so: a held-out prompt asks for a combination of values that no training chat has, in any wording.
"""

import random
import zlib

HELD_OUT_ONE_IN = 16

NAMES = (
    "Ada Amir Anna Ben Carla Chen Dora Elif Emil Farid Greta Hana Hugo Ines Ivan Jonas Kofi Lena Lars Maya Mira Nadia Noor Omar "
    "Otto Paula Pedro Rosa Samir Sofia Tariq Tilda Uma Viktor Wanda Yuki Zara Zoe"
).split()
ANIMALS = "fox owl bear cat dog goat mouse rabbit turtle crow otter hedgehog".split()
PLACES = "forest harbour market village mountain garden library castle valley island".split()
THINGS = "lamp key map drum kite clock mirror ring basket bell boat book".split()
FEELINGS = "brave curious gentle clever patient cheerful lonely careful".split()
FRUITS = "apples pears plums cherries lemons oranges peaches grapes melons figs".split()
WORDS = (
    "apple bread chair dance eagle flame grass house island jacket kettle lemon moon night ocean paper queen river stone table "
    "uncle violin water yellow zebra bridge candle dragon engine feather"
).split()
COLOURS = "red blue green yellow white black purple orange".split()
CITIES = "Oslo Lima Cairo Tokyo Paris Quito Delhi Rome Accra Sydney Boston Dublin".split()
JOBS = "baker pilot nurse farmer teacher painter driver doctor singer gardener".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
EVENTS = "exam concert party meeting race dinner wedding lesson picnic match".split()
DISHES = "soup salad stew pie curry pancakes".split()
VEGETABLES = "carrot potato tomato onion pumpkin spinach pepper mushroom leek bean".split()
SPICES = "salt pepper basil thyme ginger cumin garlic parsley".split()
GIFTS = "scarf book teapot bicycle camera blanket puzzle plant sweater notebook".split()
HOBBIES = "painting swimming reading chess running cooking singing sailing".split()
NUMBER_WORDS = "zero one two three four five six seven eight nine ten eleven twelve".split()


def _join(items):
    return ", ".join(items[:-1]) + " and " + items[-1]


def _add(r):
    a, b = r.randint(11, 99), r.randint(11, 99)
    ta, oa, tb, ob = a // 10 * 10, a % 10, b // 10 * 10, b % 10
    p = r.choice([f"What is {a} + {b}?", f"Add {a} and {b}.", f"Please compute {a} + {b} step by step."])
    ans = (
        f"We add the tens first and then the ones.\nTens: {ta} + {tb} = {ta + tb}.\nOnes: {oa} + {ob} = {oa + ob}.\n"
        f"Together: {ta + tb} + {oa + ob} = {a + b}.\nSo {a} + {b} = {a + b}."
    )
    return f"{a} {b}", p, ans, f"So {a} + {b} = {a + b}."


def _units(r):
    big, small, factor = r.choice(
        [("metres", "centimetres", 100), ("kilometres", "metres", 1000), ("hours", "minutes", 60), ("kilograms", "grams", 1000),
         ("minutes", "seconds", 60), ("litres", "millilitres", 1000), ("euros", "cents", 100), ("centimetres", "millimetres", 10)]
    )
    n = r.randint(2, 60)
    p = r.choice([f"Convert {n} {big} to {small}.", f"How many {small} are in {n} {big}?", f"What is {n} {big} in {small}?"])
    one = big[:-1]
    tail = r.choice([f"The answer is {n * factor} {small}.", f"That makes {n * factor} {small}."])
    ans = (
        f"One {one} has {factor} {small}. To go from {big} to {small} we multiply by {factor}.\n"
        f"{n} x {factor} = {n * factor}.\n{tail}"
    )
    return f"{n} {big} {small}", p, ans, f"{n * factor} {small}."


def _weekday(r):
    d, n, e = r.randrange(7), r.randint(2, 9), r.choice(EVENTS)
    p = r.choice([f"Today is {DAYS[d]}. My {e} is in {n} days. Which day is that?",
                  f"It is {DAYS[d]} and the {e} is {n} days away. On which day is the {e}?"])
    steps = "\n".join(f"Day {i}: {DAYS[(d + i) % 7]}" for i in range(1, n + 1))
    ans = f"We start on {DAYS[d]} and count {n} days forward.\n{steps}\nSo the {e} is on a {DAYS[(d + n) % 7]}."
    return f"{d} {n} {e}", p, ans, f"So the {e} is on a {DAYS[(d + n) % 7]}."


def _reverse(r):
    items = r.sample(WORDS, r.randint(4, 7))
    s = ", ".join(items)
    p = r.choice([f"Reverse this list: {s}", f"Write these words in reverse order: {s}", f"Turn this list around: {s}"])
    back = items[::-1]
    ans = (
        f"The list has {NUMBER_WORDS[len(items)]} words. We start with the last word and go back to the first one.\n"
        + "\n".join(f"{i + 1}. {w}" for i, w in enumerate(back)) + f"\nThe reversed list is: {', '.join(back)}."
    )
    return s, p, ans, ", ".join(back) + "."


def _sort(r):
    items = r.sample(WORDS, r.randint(4, 6))
    s = ", ".join(items)
    p = r.choice([f"Sort these words alphabetically: {s}", f"Put these words in alphabetical order: {s}"])
    up = sorted(items)
    lines = "\n".join(f"- {w} (starts with {w[0]})" for w in up)
    ans = f"We look at the first letter of each word and put the words in the order of the alphabet.\n{lines}\nThe sorted list is: {', '.join(up)}."
    return ", ".join(up), p, ans, ", ".join(up) + "."


def _count(r):
    a, step, n = r.randint(1, 60), r.randint(2, 9), r.randint(5, 8)
    p = r.choice([f"Count from {a} in steps of {step}, {n} numbers.", f"Start at {a} and count by {step}. Give me {n} numbers."])
    nums = [a + i * step for i in range(n)]
    ans = (
        f"We start at {a} and add {step} each time.\n" + "\n".join(f"{x} + {step} = {x + step}" for x in nums[:-1])
        + f"\nThe numbers are: {', '.join(map(str, nums))}."
    )
    return f"{a} {step} {n}", p, ans, ", ".join(map(str, nums)) + "."


def _letters(r):
    w = r.choice(WORDS)
    c = r.choice(w) if r.random() < 0.8 else r.choice("aeioutrs")
    name = r.choice(NAMES)
    k = w.count(c)
    p = r.choice([f"{name} asks: how many times is the letter {c} in the word {w}?", f"Count the letter {c} in the word {w} for {name}."])
    times = "once" if k == 1 else f"{NUMBER_WORDS[k]} times"
    lines = "\n".join(f"{ch}: {'yes' if ch == c else 'no'}" for ch in w)
    ans = f"Dear {name}, we spell the word {w} and look at each letter.\n{lines}\nThe letter {c} is in the word {w} {times}."
    return f"{w} {c}", p, ans, f"in the word {w} {times}."


def _json(r):
    n, age, city, job, col = r.choice(NAMES), r.randint(18, 79), r.choice(CITIES), r.choice(JOBS), r.choice(COLOURS)
    p = r.choice([f"Write this as JSON: {n} is {age} years old, lives in {city}, works as a {job} and likes {col}.",
                  f"Make a JSON object: name {n}, age {age}, city {city}, job {job}, colour {col}."])
    body = f'{{\n  "name": "{n}",\n  "age": {age},\n  "city": "{city}",\n  "job": "{job}",\n  "colour": "{col}"\n}}'
    ans = r.choice(["Here is the JSON object:", "This is the data as JSON:"]) + f"\n```json\n{body}\n```"
    return f"{n} {age} {city} {job} {col}", p, ans, body


def _table(r):
    k = r.randint(3, 4)
    names, fr, ns = r.sample(NAMES, k), r.sample(FRUITS, k), [r.randint(2, 30) for _ in range(k)]
    s = _join([f"{a} has {n} {f}" for a, n, f in zip(names, ns, fr)])
    p = r.choice([f"Make a table: {s}.", f"Show this as a table: {s}."])
    rows = "\n".join(f"| {a} | {f} | {n} |" for a, n, f in zip(names, ns, fr))
    ans = f"Here is the table with {NUMBER_WORDS[k]} rows:\n| Name | Fruit | Number |\n| --- | --- | --- |\n{rows}"
    return s, p, ans, rows


def _code(r):
    n, item = r.randint(2, 50), r.choice(["numbers", "prices", "scores", "ages", "lengths", "weights", "points", "values"])
    op, verb, sym = r.choice([("add", "adds", "+"), ("subtract", "subtracts", "-"), ("multiply", "multiplies", "*"), ("divide", "divides", "/")])
    how = {"+": f"add {n} to", "-": f"subtract {n} from", "*": f"multiply by {n}", "/": f"divide by {n}"}[sym]
    does = {"+": f"adds {n} to", "-": f"subtracts {n} from", "*": f"multiplies by {n}", "/": f"divides by {n}"}[sym]
    p = r.choice([f"Write a Python function to {how} every value in a list of {item}.",
                  f"I need a Python function that {does} every value in a list of {item}."])
    one = item[:-1]
    body = f"def {op}_{item}({item}):\n    result = []\n    for {one} in {item}:\n        result.append({one} {sym} {n})\n    return result"
    ans = (
        f"Here is a Python function that {does} every value in the list:\n```python\n{body}\n```\n"
        f"It goes over the {item} one by one and returns the new list."
    )
    return f"{n} {item} {op}", p, ans, body


def _story(r):
    n, an, pl, th, fe = r.choice(NAMES), r.choice(ANIMALS), r.choice(PLACES), r.choice(THINGS), r.choice(FEELINGS)
    friend = r.choice([x for x in NAMES if x != n])
    p = r.choice([f"Tell me a story about a {fe} {an} named {n} who finds a {th} in the {pl}.",
                  f"Write a short story: a {fe} {an} called {n} finds a {th} in a {pl}."])
    a1 = r.choice([f"Once upon a time there was a {fe} {an} named {n}.", f"Long ago, a {fe} {an} named {n} lived near the {pl}."])
    a2 = r.choice([f"One morning {n} walked to the {pl} and found an old {th} under a tree.",
                   f"One rainy evening {n} was walking in the {pl} and saw a {th} lying on the ground."])
    a3 = r.choice([f'"Whose {th} is this?" asked {n}.', f'"What a beautiful {th}!" said {n}.'])
    a4 = r.choice([f"{n} looked for the owner all day long, and at last met {friend}, who had lost the {th} a week ago.",
                   f"Soon {friend} came along the road and was very sad, because the {th} was lost."])
    a5 = r.choice([f"{n} gave the {th} back, and {friend} was so happy that they became good friends.",
                   f"So {n} gave the {th} to {friend}, and from that day on they were the best of friends."])
    a6 = r.choice([f"And the {pl} was never a lonely place again.", "They lived happily ever after."])
    return f"{n} {an} {pl} {th} {fe}", p, " ".join([a1, a2, a3, a4, a5, a6]), f"a {fe} {an} named {n}"


def _recipe(r):
    v, v2, d, sp, n = *r.sample(VEGETABLES, 2), r.choice(DISHES), r.choice(SPICES), r.randint(2, 8)
    p = r.choice([f"How do I make {v} {d} with {v2} for {n} people? I like {sp}.", f"Give me a recipe for {v} and {v2} {d} with {sp} for {n} people."])
    t = r.choice([10, 15, 20, 30])
    ans = (
        f"Here is a simple recipe for {v} {d} for {n} people.\nYou need:\n- {n * 2} pieces of {v}\n- {n} pieces of {v2}\n- a little {sp}\n- a spoon of oil\nSteps:\n"
        f"1. Wash the {v} and the {v2} and cut them into small pieces.\n2. Heat the oil in a pan and add the {v}.\n"
        f"3. Add the {v2} and cook everything for {t} minutes.\n4. Season with {sp} and serve the {d} warm.\nEnjoy your meal!"
    )
    return f"{v} {v2} {d} {sp} {n}", p, ans, f"- {n * 2} pieces of {v}"


def _note(r):
    a, b, g, h = *r.sample(NAMES, 2), r.choice(GIFTS), r.choice(HOBBIES)
    p = r.choice([f"Write a thank-you note from {a} to {b} for the {g}.", f"{b} gave {a} a {g}. Write a thank-you note."])
    x1 = r.choice([f"Thank you very much for the {g}.", f"I want to thank you for the wonderful {g}."])
    x2 = r.choice(["It was so kind of you to think of me.", "It was a great surprise and I like it a lot."])
    x3 = r.choice([f"I use the {g} every day, and it always makes me smile.", f"The {g} is just what I needed, and everybody at home loves it too."])
    x4 = r.choice(["I hope that we can meet again soon.", "Please come and visit me when you have time."])
    return f"{a} {b} {g}", p, f"Dear {b},\n{x1} {x2} {x3} {x4}\nWith best wishes,\n{a}", f"Dear {b},"


def _shop(r):
    n, m, pa, pb = r.randint(2, 9), r.randint(2, 9), r.randint(2, 9), r.randint(2, 9)
    f, g = r.sample(FRUITS, 2)
    who = r.choice(NAMES)
    p = r.choice([f"{who} buys {n} {f} for {pa} euros each and {m} {g} for {pb} euros each. How much is that?",
                  f"What does {who} pay for {n} {f} at {pa} euros each and {m} {g} at {pb} euros each?"])
    ans = (
        f"First we find the price of the {f}: {n} x {pa} = {n * pa} euros.\nThen we find the price of the {g}: {m} x {pb} = {m * pb} euros.\n"
        f"The sum is {n * pa} + {m * pb} = {n * pa + m * pb}.\n{who} pays {n * pa + m * pb} euros."
    )
    return f"{n} {f} {pa} {m} {g} {pb} {who}", p, ans, f"pays {n * pa + m * pb} euros."


def _compare(r):
    a, b, w1, w2 = r.randint(10, 99), r.randint(10, 99), *r.sample(NAMES, 2)
    while a == b:
        b = r.randint(10, 99)
    t = r.choice(["stamps", "coins", "marbles", "shells", "cards"])
    p = r.choice([f"{w1} has {a} {t} and {w2} has {b} {t}. Who has more?", f"Who has more {t}: {w1} with {a} or {w2} with {b}?"])
    big, small, x, y = (w1, w2, a, b) if a > b else (w2, w1, b, a)
    why = f"The tens digit of {x} is {x // 10} and the tens digit of {y} is {y // 10}"
    why += f", so {x} is greater than {y}." if x // 10 != y // 10 else f", so we look at the ones: {x % 10} is greater than {y % 10}."
    ans = f"We compare the numbers {a} and {b}.\n{why}\nTherefore {big} has more {t} than {small}."
    return f"{a} {b}", p, ans, f"Therefore {big} has more {t} than {small}."


def _plan(r):
    n, c, h, d = r.choice(NAMES), r.choice(CITIES), r.choice(HOBBIES), r.choice(DAYS)
    w = r.choice(["rain", "sun", "snow", "wind"])
    p = r.choice([f"Plan a {d} in {c} for {n}, who likes {h}. The weather is {w}.", f"{n} is in {c} on {d} and likes {h}. We expect {w}. Make a plan."])
    take = {"rain": "an umbrella", "sun": "a hat", "snow": "warm boots", "wind": "a thick coat"}[w]
    m1 = r.choice([f"Have breakfast in a small cafe in {c}.", f"Walk through the old town of {c}."])
    m2 = r.choice([f"Spend two hours on {h}.", f"Meet some friends for {h}."])
    m3 = r.choice(["Have dinner by the river.", "Listen to music in the park."])
    ans = (
        f"Here is a plan for {n} for {d} in {c}:\n- Morning: {m1}\n- Afternoon: {m2}\n- Evening: {m3}\n"
        f"Because of the {w}, {n} should take {take}. Have a nice {d}!"
    )
    return f"{n} {c} {h} {d} {w}", p, ans, f"should take {take}. Have a nice {d}!"


def _echo(r):
    words = r.choices(NAMES + CITIES + COLOURS + WORDS + FRUITS + VEGETABLES + DAYS + [str(r.randint(2, 99)) for _ in range(40)], k=r.randint(6, 14))
    s = " ".join(words)
    p = r.choice([f"Say this again: {s}", f"Repeat after me: {s}"])
    return s, p, f"You said: {s}.", f"{s}."


def _facts(r):
    k = r.randint(3, 6)
    names, what = r.sample(NAMES, k), r.sample(r.choice([FRUITS, COLOURS, CITIES, HOBBIES, ANIMALS, WORDS]), k)
    facts = [f"{n} likes {w}" for n, w in zip(names, what)]
    order = r.sample(range(k), k)
    p = f"We know that {', '.join(facts)}. What do {_join([names[i] for i in order])} like?"
    return f"{facts} {order}", p, " ".join(f"{names[i]} likes {what[i]}." for i in order), f"{names[order[0]]} likes {what[order[0]]}."


# Dense in copying and looking up: what training begins with.
FIRST = ("echo", "facts")

FAMILIES = {f.__name__[1:]: f for f in (
    _add, _units, _weekday, _reverse, _sort, _count, _letters, _json, _table, _code, _story, _recipe, _note, _shop, _compare, _plan, _echo, _facts)}

# What the demo asks: a choice made after looking at the target's answers and at a first drafter; README.md says how.
DEMO = ("units", "weekday", "reverse", "json", "table", "code", "recipe", "note")


def is_held_out(family, key):
    """Whether the task `key` of `family` belongs to the held-out side: one key in HELD_OUT_ONE_IN."""
    return zlib.crc32(f"{family}|{key}".encode()) % HELD_OUT_ONE_IN == 0


def chat(rng, held_out=False, family=None):
    """One chat of the training side, or of the held-out side, of `family` or of any."""
    while True:
        name = family or rng.choice(list(FAMILIES))
        key, prompt, answer, must = FAMILIES[name](rng)
        if is_held_out(name, key) == held_out:
            return name, key, prompt, answer, must


if __name__ == "__main__":
    for f in FAMILIES:
        _, _, p, a, m = chat(random.Random(1), family=f)
        print(f"--- {f}\n{p}\n>>> {a}\n")
        assert m in a
