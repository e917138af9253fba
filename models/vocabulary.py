"""Rooms, things, people and the other words that fill the slots."""

from typing import Final


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(","))


ROOMS: Final = _words(
    "kitchen, living room, bedroom, bathroom, study, hall, garage, attic, cellar, nursery,"
    "guest room, dining room, laundry, office, garden, balcony, terrace, workshop, library, gym"
)
COLOURS: Final = _words(
    "red, green, blue, yellow, orange, purple, pink, white, cyan, magenta, turquoise, gold,"
    "violet, lime, teal, coral, amber, indigo, peach, mint"
)
MODES: Final = _words("heat, cool, auto, eco, away, sleep, dry, boost, holiday, comfort")
MUSIC: Final = _words(
    "jazz, rock, pop, blues, folk, soul, techno, opera, country, reggae, swing, the news,"
    "piano music, rain sounds, a podcast, the radio, classical music, film music, dance music"
)
INPUTS: Final = _words("hdmi 1, hdmi 2, hdmi 3, antenna, usb, streaming, game console, satellite")
SPEEDS: Final = _words("low, medium, high, turbo, quiet, breeze, night, maximum, minimum")
PROGRAMS: Final = _words(
    "cotton, wool, quick, eco, delicate, rinse, spin, intensive, sport, silk, bedding, half load"
)
DISHES: Final = _words(
    "bread, pizza, roast, cake, rice, soup, fish, potatoes, cookies, lasagne, stew, pie, tea, pasta"
)
ITEMS: Final = _words(
    "cup, red mug, spare key, ladder, toolbox, umbrella, stapler, torch, passport, blanket,"
    "first aid kit, charger, remote control, water bottle, newspaper, magnifier, hammer, tape,"
    "backpack, camera bag, wallet, guitar, chess set, sewing kit, paint, bucket, broom, rope,"
    "medicine, towel, scarf, tablet, notebook, screwdriver, battery, candle, drill, tent,"
    "dog leash, car key, bike pump, birthday card, board game, vase, hat, raincoat, suitcase"
)
PLACES: Final = _words(
    "in the blue box, in the red drawer, on the top shelf, under the stairs, behind the door,"
    "in the hall closet, on the kitchen table, under the bed, in the garage, in the attic,"
    "next to the sink, on the window sill, in the green bag, in the car, at the office,"
    "behind the sofa, in the left drawer, on the piano, in the tool shed, under the desk,"
    "on the bookcase, in the white cabinet, in the laundry basket, by the front door,"
    "in the cellar, on the workbench, in the glass jar, in the grey suitcase"
)
SURFACES: Final = _words(
    "table, counter, shelf, desk, sofa, floor, tray, workbench, window sill, bed, chair, cart"
)
PEOPLE: Final = _words(
    "Anna, Ben, Clara, David, Emma, Felix, Grace, Hugo, Ida, Jonas, Karin, Leo, Mia, Nora, Oscar,"
    "Paula, Ravi, Sofia, Tom, Uma, Victor, Wanda, Yusuf, Zoe, Grandma, Grandpa, Mum, Dad"
)
TASTES: Final = _words(
    "mint tea, black coffee, tea with honey, cold milk, apple juice, dark chocolate, spicy food,"
    "quiet music, warm light, fresh bread, long walks, old films, green apples, lemon cake,"
    "hot soup, the window seat, early mornings, strong cheese, ginger biscuits, tomato salad"
)
SECRETS: Final = _words(
    "gate, alarm, safe, garage, wifi, front door, tablet, bike lock, parcel box, cellar, shed,"
    "locker, router, printer, mail box, office"
)
VISITORS: Final = _words(
    "plumber, electrician, gardener, doctor, piano teacher, painter, cleaner, postman, nurse,"
    "babysitter, carpenter, vet, tutor, roofer, inspector, delivery"
)
DAYS: Final = _words("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday")
MONTHS: Final = _words(
    "January, February, March, April, May, June, July, August, September, October, November,"
    "December"
)
GROCERIES: Final = _words(
    "milk, bread, eggs, butter, rice, apples, coffee, tea, sugar, flour, onions, carrots, soap,"
    "cheese, tomatoes, pasta, bananas, salt, honey, yoghurt, olive oil, light bulbs, cat food,"
    "paper towels, washing powder, lemons, oats, pepper, beans, potatoes"
)
TASKS: Final = _words(
    "water the plants, call the bank, feed the cat, take out the bins, pay the rent, buy stamps,"
    "walk the dog, charge the bike, clean the filter, book the train, send the parcel,"
    "check the oven, wash the car, renew the passport, ring the school, defrost the freezer"
)
MESSAGES: Final = _words(
    "dinner is ready, I am on my way, please call me back, the parcel is here, lunch is at noon,"
    "do not wait for me, the bus is late, good luck today, we need milk, the door is open,"
    "see you tonight, the meeting is over, bring an umbrella, the cat is asleep"
)
GESTURES: Final = _words("wave, nod, bow, dance, spin, point, shrug, clap, salute, stretch")

PLURALS: Final[dict[str, str]] = {
    "light": "lights", "plug": "plugs", "thermostat": "thermostats", "heater": "heaters",
    "blind": "blinds", "lock": "locks", "speaker": "speakers", "tv": "tvs", "fan": "fans",
    "camera": "cameras", "vacuum": "vacuums", "robot": "robots", "oven": "ovens",
    "washer": "washers", "humidifier": "humidifiers", "sprinkler": "sprinklers",
}  # fmt: skip
