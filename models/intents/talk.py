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
        "hiya", "good afternoon", "hey Hearth", "hello again", "hi, Hearth", "hey, how's things?",
        "yo", "nice to meet you", "are you there?", "hello, is anybody there?",
    ),
    _talk(
        "who", "I am Hearth, a small assistant that lives on your own device.",
        "who are you?", "what are you?", "what is your name?", "introduce yourself",
        "are you a robot?", "tell me about yourself", "who am I talking to?",
        "hello, who are you?", "hi, who are you?", "say who you are", "what's your name?",
        "who's this?", "what's this?", "what should I call you?", "what do they call you?",
        "do you have a name?", "are you a person?", "are you human?", "are you an AI?",
        "what kind of thing are you?",
    ),
    _talk(
        "help",
        "I can switch devices, set lights and heating, play music, send robots around, "
        "keep timers and lists, remember what you tell me, and answer questions about your home.",
        "what can you do?", "help", "how can you help me?", "what do you know?",
        "what can I ask you?", "help me", "hello, what can you do?", "hi, what can you do?",
        "what else can you do?", "what are you good for?", "how do I use you?",
        "what are you able to do?", "what can you help me with?", "what do you do?", "I need help",
        "can you help me?", "how can I use you?", "what can I say?", "what things can you do?",
        "which commands do you know?", "give me some help",
    ),
    _talk(
        "how", "I am well, thank you. The house is warm and all is quiet.",
        "how are you?", "how do you do?", "are you well?", "how is it going?",
        "is everything fine?",
        "how are you doing?", "how's it going?", "how do you feel?", "are you OK?",
        "how are things?", "you OK?", "how's your day?",
    ),
    _talk(
        "thanks", "You are welcome.",
        "thanks", "thank you", "thank you very much", "great, thanks", "well done", "nice",
        "thanks a lot", "thank you so much", "cheers", "perfect, thanks", "that's great",
        "good job", "nice one", "thanks for your help", "much appreciated", "great", "awesome",
        "perfect",
    ),
    _talk(
        "bye", "Goodbye! I will keep an eye on the house.",
        "goodbye", "bye", "see you later", "until tomorrow", "that is all", "bye bye",
        "bye for now", "see you", "see you soon", "talk to you later", "that's all",
        "that's it for now", "I'm done", "catch you later", "goodbye Hearth",
    ),
    _talk(
        "joke", "Why did the lamp go to school? It wanted to be brighter.",
        "tell me a joke", "make me laugh", "do you know a joke?", "say something funny",
        "another joke",
        "got any jokes?", "know any jokes?", "tell me something funny", "can you tell me a joke?",
        "be funny", "cheer me up", "one more joke",
    ),
    _talk(
        "privacy",
        "Everything you say stays on this device. I need no network, and I forget a "
        "conversation when it ends.",
        "is this private?", "do you send my data away?", "who can hear me?",
        "where does my data go?", "do you need the internet?",
        "are you listening to me?", "are you spying on me?", "do you record me?",
        "is my data safe?", "who sees what I say?", "does this go to the cloud?",
        "do you send anything to the cloud?", "are you connected to the internet?",
        "do you keep what I say?", "is anybody listening?",
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
        "tell me a bedtime story", "can you tell me a story?",
        "could you tell me a story about a robot?", "tell me a robot story", "I'd like a story",
        "story time",
    ),
    _talk(
        "story_fox",
        "A fox came to the garden every evening and looked through the window. Inside, a fire "
        "burned in the hearth and a cat slept on the sofa. The fox wished for a fire of its own. "
        "So one cold night the cat opened the door, and the fox came in and lay down. Since then "
        "two tails are warm by the fire, and nobody in the house has ever seen a mouse again.",
        "tell me a story about a fox", "tell me about the fox", "read me the fox story",
        "I want to hear the story of the fox", "a fox story, please",
        "can you tell me a story about a fox?", "I'd like the story with the fox",
        "what about the fox?", "tell me the fox story", "the story about the fox, please",
    ),
    _talk(
        "explain",
        "You speak, and your words become a list of numbers. Twelve layers look at the numbers, "
        "one after the other, and each looks back at everything that was said before. At the end "
        "I choose the next piece of the answer, then the next, until the answer is complete. All "
        "of it happens on this device, in a few million small steps.",
        "how do you work?", "explain how you work", "how does this work?",
        "what happens when I talk to you?", "explain yourself",
        "how does it all work?", "can you explain how you work?", "tell me how you work",
        "what goes on inside you?", "how do you understand me?", "what is a language model?",
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
        "what time is it?", "what's the time?", "do you know what time it is?", "what's the date?",
        "what day is today?", "what's the weather?", "what's the weather like today?",
        "will it rain tomorrow?", "is it going to rain?", "what's the capital of Spain?",
        "who wrote Hamlet?", "who won the game last night?", "what's 2 plus 2?",
        "what's 17 times 23?", "how many people live in China?", "order me a pizza",
        "book me a flight", "call me a taxi", "what's the news?", "what's on the news?",
        "what's the score?", "write me an email", "write me a poem", "sing me a song",
        "what's your favourite colour?", "do you love me?", "are you happy?",
        "how do I get to the station?", "how far is it to the airport?",
        "what's a good restaurant?", "give me a recipe for pancakes", "what should I wear today?",
        "how much is a dollar in euros?", "what's the stock market doing?", "tell me a fact",
        "explain quantum physics", "what happened in 1066?", "who invented the telephone?",
        "translate hello into Spanish", "how old are you?", "where do you come from?",
        "do you dream?", "can you drive a car?", "what does that mean?", "is there a god?",
        "recommend a film", "what's a good name for a dog?", "find me a cheap hotel",
        "search the web for shoes", "buy me a new phone",
    ),
)  # fmt: skip
