"""The prompts of `make_smollm2.py`: what they cover matters more than what they say."""


def user(text: str) -> list[dict[str, str]]:
    """A conversation of one user message."""
    return [{"role": "user", "content": text}]


LONG_TEXT = (
    "The lighthouse on the northern cape was built in 1867 by a company of twelve stonemasons who lived in "
    "tents on the rocks for almost two years. Every stone was cut inland, numbered, and carried to the "
    "shore on sledges pulled by oxen, because no road could bear the weight of a wagon. The first keeper, "
    "a retired sailor called Henrik, moved in with his wife and three daughters before the lamp was even "
    "installed. They kept goats, grew potatoes in soil that they had brought in barrels, and wrote down "
    "the weather four times a day. When the electric lamp came in 1931, the oldest daughter was still "
    "there, and she went on writing in the same ledgers until she was eighty. Those ledgers are now in the "
    "town museum, where researchers use them to study how storms have changed. Visitors may climb the 142 "
    "steps to the top on weekends between May and September, as long as the wind is calm."
)

CHAT_PROMPTS: dict[str, list[dict[str, str]]] = {
    "fact": user("What is the capital of France?"),
    "explanation": user("Why is the sky blue? Explain it in two sentences."),
    "code": user("Write a Python function that returns the n-th Fibonacci number."),
    "code_question": user("What does this print?\n\n```python\nfor i in range(3):\n\tprint(i * i)\n```"),
    "list": user("Give me a numbered list of five things to pack for a trip to the mountains."),
    "arithmetic": user("I have 17 apples and I buy 25 more. How many apples do I have now?"),
    # A line break and two spaces before a digit are one token only if digits are split off before words.
    "digits": user("Sort these numbers from smallest to largest:\n  42\n  7\n  1999\n  305\n  8"),
    "one_word": user("Answer with one word only: is water wet?"),
    "poem": user("Write a short poem about the sea at night."),
    "spanish": user("¿Cuál es la capital de España? Responde en español, por favor."),
    "chinese": user("请用中文介绍一下北京。"),
    "emoji": user("What do these emojis mean? 🎉🚀👩‍🚀"),
    "system": [
        {"role": "system", "content": "You are a pirate. You answer every question like a pirate."},
        {"role": "user", "content": "How do I make a cup of tea?"},
    ],
    "multi_turn": [
        {"role": "user", "content": "My name is Ada and my favourite colour is green."},
        {"role": "assistant", "content": "Nice to meet you, Ada! Green is a lovely colour."},
        {"role": "user", "content": "What is my name?"},
    ],
    "long": user(f"Summarise the following text in one sentence.\n\n{LONG_TEXT}"),
}

# Length in tokens: text that has at least as many. Lengths sit at and around multiples of common block sizes.
RAW_PROMPTS: dict[int, str] = {
    1: "The",
    2: "Once upon",
    15: "The recipe is simple: mix two cups of flour with one cup of milk, then add the eggs and the salt.",
    16: ("Mathematics is the study of numbers, shapes and patterns, and it is used in science, engineering and art."),
    17: "def add(a, b):\n    return a + b\n\n\ndef multiply(a, b):\n    return a * b\n",
    31: (
        "The history of the bicycle began in the early nineteenth century, when a German baron built a "
        "wooden machine with two wheels that the rider pushed along with his feet on the ground."
    ),
    32: (
        "Dear Sir or Madam,\n\nI am writing to apply for the position of junior gardener that was "
        "advertised in the local newspaper last week. I have worked in my grandmother's garden since I was "
        "nine years old."
    ),
    33: (
        "Photosynthesis is the process by which green plants and some other organisms use sunlight to make "
        "food from carbon dioxide and water. The process gives off oxygen as a by-product and happens in "
        "the leaves."
    ),
    64: (
        "Question: A train leaves the station at 9:15 and arrives at 11:45. The distance is 180 "
        "kilometres. What is the average speed of the train?\n\nAnswer: The journey takes two and a half "
        "hours. The average speed is the distance divided by the time, so we divide 180 by 2.5 and get 72 "
        "kilometres per hour.\n\nQuestion: A cyclist"
    ),
    129: (
        "It was raining when Marta opened the door of the bookshop for the first time since her uncle's "
        "death. The bell above her head made the same small sound that she remembered from childhood, and "
        "the smell of paper and dust came towards her like an old friend. Nothing had been moved. The "
        "ladder still leaned against the shelf of atlases, the cash register still showed the price of the "
        "last book sold, and on the counter lay a cup with a dry brown ring at the bottom. She put down "
        "her bag, took off her wet coat, and began to walk slowly along the shelves, reading the titles "
        "aloud, as she had done when she was too small to reach the second row. At the end of the last "
        "aisle she found a door that she had never seen before."
    ),
}
