"""Small talk with fixed answers."""

from models.domain import Intent
from models.replies import says


def _talk(name: str, answer: str, *phrasings: str) -> Intent:
    return Intent(name, "talk", (), says(answer), phrasings)


INTENTS = (
    _talk(
        "hello", "Hello! What can I do for you?",
        "hello", "hi", "hi there", "hey", "good day", "hello Hearth", "good evening",
        "hello there", "hi Hearth", "hey there", "hello, world", "say hello", "greetings",
    ),
    _talk(
        "who", "I am Hearth, a small assistant that lives on your own device.",
        "who are you?", "what are you?", "what is your name?", "introduce yourself",
        "are you a robot?", "tell me about yourself", "who am I talking to?",
        "hello, who are you?", "hi, who are you?", "say who you are", "what's your name?",
    ),
    _talk(
        "help",
        "I can switch devices, set lights and heating, play music, send robots around, "
        "keep timers and lists, remember what you tell me, and answer questions about your home.",
        "what can you do?", "help", "how can you help me?", "what do you know?",
        "what can I ask you?", "help me", "hello, what can you do?", "hi, what can you do?",
        "what else can you do?", "what are you good for?", "how do I use you?",
    ),
    _talk(
        "how", "I am well, thank you. The house is warm and all is quiet.",
        "how are you?", "how do you do?", "are you well?", "how is it going?",
        "is everything fine?",
    ),
    _talk(
        "thanks", "You are welcome.",
        "thanks", "thank you", "thank you very much", "great, thanks", "well done", "nice",
    ),
    _talk(
        "bye", "Goodbye! I will keep an eye on the house.",
        "goodbye", "bye", "see you later", "until tomorrow", "that is all", "bye bye",
    ),
    _talk(
        "joke", "Why did the lamp go to school? It wanted to be brighter.",
        "tell me a joke", "make me laugh", "do you know a joke?", "say something funny",
        "another joke",
    ),
    _talk(
        "privacy",
        "Everything you say stays on this device. I need no network, and I forget a "
        "conversation when it ends.",
        "is this private?", "do you send my data away?", "who can hear me?",
        "where does my data go?", "do you need the internet?",
    ),
    _talk(
        "story_robot",
        "Once there was a little robot that lived under the stairs. Every night it rolled "
        "through the dark house and counted the lamps. One night a lamp was missing. The robot "
        "looked in the kitchen, in the hall and in the garden. At last it found the lamp in the "
        "nursery, where it kept a small child from being afraid. The robot sat down beside it, "
        "and together they shone until the morning.",
        "tell me a story", "tell me a story about a robot", "I want to hear a story",
        "a story, please", "read me a story about a robot",
    ),
    _talk(
        "story_fox",
        "A fox came to the garden every evening and looked through the window. Inside, a fire "
        "burned in the hearth and a cat slept on the sofa. The fox wished for a fire of its own. "
        "So one cold night the cat opened the door, and the fox came in and lay down. Since then "
        "two tails are warm by the fire, and nobody in the house has ever seen a mouse again.",
        "tell me a story about a fox", "tell me about the fox", "read me the fox story",
        "I want to hear the story of the fox", "a fox story, please",
    ),
    _talk(
        "explain",
        "You speak, and your words become a list of numbers. Twelve layers look at the numbers, "
        "one after the other, and each looks back at everything that was said before. At the end "
        "I choose the next piece of the answer, then the next, until the answer is complete. All "
        "of it happens on this device, in a few million small steps.",
        "how do you work?", "explain how you work", "how does this work?",
        "what happens when I talk to you?", "explain yourself",
    ),
    _talk(
        "off_topic",
        "I only know this home: its devices, robots, timers, lists and the facts you tell me.",
        "what is the capital of France?", "who won the match?", "write a poem",
        "what is the meaning of life?", "how far is the moon?", "translate this into German",
        "what will the weather be?", "how old is the universe?", "solve this equation",
        "who is the president?", "what is two plus two?", "write some code for me",
        "recommend a good book", "how tall is the highest mountain?", "what is love?",
        "tell me about history", "do you like cats?", "can you sing?", "what should I cook?",
        "write a haiku", "tell me about Paris", "say hello in French", "what is the weather like?",
        "count to ten", "what is a computer?", "why is the sky blue?", "summarise this text",
        "what is the time?", "how do I bake a cake?", "write a short story about the sea",
        "what day is it today?", "which stock should I buy?", "how do I fix my car?",
    ),
)  # fmt: skip
