"""Further tools that homes, phones and robots have, as data, and the fields of their results."""

from collections.abc import Callable
from random import Random
from typing import Any, Final, NamedTuple

from models.domain import likely
from models.speech.homes import PLACES
from models.speech.values import VALUES
from models.speech.voice import proper, somebody
from models.tool_families import Family, Parameter, choice_field, number_field, text_field
from models.vocabulary import DAYS, DISHES, GROCERIES, ITEMS, compose_word

_CITIES: Final = (
    "Paris", "Berlin", "London", "Boston", "Leeds", "Hamburg", "Porto", "Geneva", "Dallas",
        "Kyoto", "Cork", "Bristol", "Naples", "Denver", "Lyon", "Perth", "Ghent",
    "Seville", "Austin", "York", "Turin", "New York", "San Diego", "Cape Town", "Hong Kong",
        "Rio", "Los Angeles", "Buenos Aires", "Tel Aviv", "Cairo", "Delhi", "Moscow", "Lagos",
        "Lima",
)  # fmt: skip


def city(rng: Random) -> str:
    """Return a city, now and then a made-up one."""
    return (
        (
            f"{rng.choice(('New', 'Port', 'Saint', 'Bad', 'North'))} {proper(rng)}"
            if likely(rng, 0.1)
            else proper(rng)
        )
        if likely(rng, 0.4)
        else rng.choice(_CITIES)
    )


def _stop(rng: Random) -> str:
    tail = rng.choice(
        (
            "Street",
            "Road",
            "Square",
            "Station",
            "Park",
            "Bridge",
            "Hill",
            "Avenue",
            "Hospital",
            "Airport",
        )
    )
    known = ("Central", "Church", "Main", "Victoria", "North", "Union", "High", "Castle")
    return f"{proper(rng) if likely(rng, 0.6) else rng.choice(known)} {tail}"


def _artist(rng: Random) -> str:
    first = rng.choice(
        (
            "David",
            "Ella",
            "Johnny",
            "Miles",
            "Amy",
            "Bob",
            "Elton",
            "Joni",
            "Ray",
            "Aretha",
            "Leonard",
            "Kate",
            "Tom",
            "Billie",
            "Sam",
            "Stevie",
        )
    )
    if likely(rng, 0.2):
        return f"The {proper(rng)}s"
    return f"{first if likely(rng, 0.6) else proper(rng)} {proper(rng)}"


def _company(rng: Random) -> str:
    return (
        proper(rng)
        if likely(rng, 0.6)
        else rng.choice(
            (
                "Apple",
                "Tesla",
                "Shell",
                "Sony",
                "Bosch",
                "Toyota",
                "Nestle",
                "Intel",
                "Ford",
                "Nike",
                "BMW",
                "Volvo",
                "Philips",
            )
        )
    )


def _from(words: tuple[str, ...], made_up: float = 0.3) -> Callable[[Random], str]:
    return lambda rng: compose_word(rng) if likely(rng, made_up) else rng.choice(words)


def _device(rng: Random) -> str:
    noun = rng.choice(
        (
            "lamp",
            "fan",
            "tv",
            "door",
            "heater",
            "oven",
            "speaker",
            "camera",
            "window",
            "gate",
            "boiler",
            "robot",
            "dryer",
            "vacuum",
            "tablet",
            "drone",
            "mower",
        )
    )
    known = (*PLACES[:40], "front", "back", "left", "old", "new", "small", "big", "main")
    first = compose_word(rng) if likely(rng, 0.3) else rng.choice(known)
    return noun if likely(rng, 0.15) else f"{first} {noun}"


_WORDS: Final = (
    "house",
    "water",
    "tree",
    "friend",
    "window",
    "thank you",
    "good night",
    "apple",
    "milk",
    "street",
    "train",
    "cheese",
    "moon",
    "happy",
    "winter",
    "fish",
    "key",
    "table",
    "hello",
    "sugar",
    "love",
)
_LANGUAGES: Final = (
    "French",
    "German",
    "Spanish",
    "Polish",
    "Greek",
    "Dutch",
    "Swedish",
    "Turkish",
    "Japanese",
    "Latin",
    "Danish",
    "Portuguese",
    "Russian",
    "Arabic",
    "Finnish",
    "Welsh",
)
_LISTS: Final = (
    "shopping",
    "packing",
    "wish",
    "work",
    "party",
    "gift",
    "reading",
    "holiday",
    "errand",
    "chores",
    "guest",
)
_SCENES: Final = (
    "evening",
    "party",
    "reading",
    "romantic",
    "work",
    "morning",
    "relax",
    "away",
    "night",
    "gaming",
    "bright",
    "cleaning",
    "guest",
    "sunset",
    "focus",
    "breakfast",
    "cosy",
    "yoga",
)
_DISHES: Final = (
    *DISHES,
    "risotto",
    "curry",
    "chili",
    "dumplings",
    "ramen",
    "tacos",
    "paella",
    "scones",
    "waffles",
    "omelette",
    "brownies",
    "falafel",
    "moussaka",
    "gnocchi",
)
_MONEY: Final = {
    "EUR": "euros",
    "USD": "US dollars",
    "GBP": "pounds",
    "CHF": "Swiss francs",
    "JPY": "yen",
    "SEK": "Swedish kronor",
    "PLN": "zloty",
    "CAD": "Canadian dollars",
    "AUD": "Australian dollars",
    "INR": "rupees",
    "CNY": "yuan",
    "TRY": "lira",
    "NOK": "Norwegian kroner",
    "DKK": "Danish kroner",
    "MXN": "pesos",
    "CZK": "koruna",
}
MONEY: Final = _MONEY


def _t(*names: str, values: Callable[[Random], Any]) -> Parameter:
    return text_field(*names, values=values)


def _few(
    words: tuple[str, ...], *names: str, made_up: float = 0.2
) -> Callable[[Random], Parameter]:
    """Return a parameter whose definition lists a few of these words, other ones each time."""

    def drawn(rng: Random) -> Parameter:
        some = rng.sample(words, rng.randrange(2, 6))
        return choice_field(
            *names, words=[compose_word(rng) if likely(rng, made_up) else one for one in some]
        )

    return drawn


class Entry(NamedTuple):
    """A tool of the catalogue: names, purpose, parameters, requests and fields of its results."""

    names: str
    does: str
    parameters: tuple[Parameter | Callable[[Random], Parameter], ...]
    asked: str
    fields: str = ""
    covers: str = ""


_CITY: Final = _t("city", "city", "place", "location", "town", values=city)
_TIME: Final = _t(
    "time",
    "time",
    "at",
    "when",
    values=lambda rng: (
        f"{rng.randrange(24):02d}:{rng.choice((0, 5, 10, 15, 20, 30, 40, 45, 50)):02d}"
    ),
)
_MIN: Final = number_field("minutes", "minutes", "duration", low=1, high=90)
_PERSON: Final = _t("name", "person", "to", "contact", values=somebody)
_ROOM: Final = _t("room", "room", "area", "zone", values=lambda rng: rng.choice(PLACES))
ROOM_ENUM: Final = _few(PLACES, "room", "area", "sensor", "zone", "location")
_SENSOR_ENUM: Final = _few(PLACES, "sensor", "sensor", "name", "sensor_name", "id")
_DEVICE: Final = _t("device", "device", "name", "entity", "target", values=_device)
_DEVICE_ENUM: Final = _few(
    (
        "front door",
        "back door",
        "oven",
        "dishwasher",
        "dryer",
        "heating",
        "car",
        "gate",
        "roof window",
        "boiler",
        "freezer",
        "fridge",
        "alarm system",
        "cellar window",
        "sauna",
        "iron",
        "stove",
        "mower",
        "pool cover",
        "attic hatch",
    ),
    "device",
    "device",
    "name",
    "entity",
)
_LIST_ENUM: Final = _few(("todo", *_LISTS), "list", "list", "list_name", "name", made_up=0.1)
_ITEM: Final = _t(
    "item", "item", "product", "text", "entry", values=_from((*GROCERIES, *ITEMS), 0.25)
)

CATALOGUE: Final[tuple[Entry, ...]] = (
    Entry("read_sensor get_sensor sensor_value read_temperature",
        "Read a sensor of the home: temperature in degrees|Current temperature of a sensor",
        (_SENSOR_ENUM, ),
          "how cold is it in the {0}?|"
              "what's the temperature in the {0}?|is it warm in the {0}?|"
              "how hot is the {0}?|read the {0} sensor|what does the {0} sensor say?|"
              "temperature in the {0}?|tell me how warm the {0} is|"
              "is the {0} freezing?|"
              "check the {0} temperature|how many degrees in the {0}?|is the {0} warm enough?",
              "temperature"),
    Entry("get_temperature room_temperature", "Temperature of a room", (ROOM_ENUM, ),
        "what's the temperature of the {0}?|is the {0} too cold?|"
        "temperature {0}|how warm is the {0} now?|is it chilly in the {0}?", "temperature"),
    Entry("get_state get_status device_state check_device",
        "Get the current state of a device|State of a device", (_DEVICE_ENUM, ),
          "is the {0} on?|is the {0} open?|is the {0} closed?|is the {0} locked?|"
              "has the {0} finished?|is the {0} done?|"
              "what's the {0} doing?|is the {0} still running?|check the {0}|"
              "what's the state of the {0}?|did I close the {0}?|did I lock the {0}?|"
              "how is the {0}?|has the {0} stopped?|is the {0} ready?|can you check on the {0}?|"
              "did somebody open the {0}?|is the {0} off?", "state state,minutes_left",
              "ask_state ask_on ask_locked ask_open ask_playing ask_set ask_sensor"),
    Entry("get_weather weather current_weather getWeather",
        "Get today's weather for a city|Weather of a city", (_CITY, ),
          "how's the weather in {0}?|is it raining in {0}?|"
              "do I need a coat in {0}?|weather in {0}|is it sunny in {0} today?|"
              "will it rain in {0} today?|is it warm in {0}?|"
              "should I take an umbrella in {0}?|what's it like in {0} today?|"
              "do I need sunscreen in {0}?|tell me the weather for {0}|"
              "how cold is it in {0} today?|is there snow in {0}?",
              "temperature condition,temperature condition,temperature,wind_kmh condition,humidity",
              "off_topic"),
    Entry("forecast_for forecast weather_forecast",
        "Weather forecast for the next days|Forecast of a city", (_CITY, number_field("days",
        "days", "number_of_days", low=2, high=10)),
          ""
              "forecast for {0}, "
              "{1} days|how will the weather be in {0} for the next {1} days?|"
              "show me {1} days of weather in {0}|what's the {1} day forecast for {0}?|"
              "I'm in {0} for {1} days, what will the weather be?", "days_list condition",
              "off_topic"),
    Entry("get_time world_clock time_in local_time",
        "Get the current time in a city|Local time of a place", (_CITY, ),
          "how late is it in {0}?|"
              "tell me the time in {0}|time in {0}|what time do they have in {0}?|"
              "is it already night in {0}?|my {rel} is in {0}, what time is it there?|"
              "current time in {0}", "time", "off_topic"),
    Entry("set_timer start_timer countdown", "Start a timer", (_MIN,),
          "start a timer for {0} minutes|timer for {0} minutes|"
              "{0} minutes, please|the {dish} needs {0} minutes, start a timer|"
              "count down {0} minutes|I need a {0} minute timer|let me know in {0} minutes|"
              "put {0} minutes on the clock|time {0} minutes|start a {0} minute timer|"
              "remind me in {0} minutes", "", "set_timer"),
    Entry("set_alarm add_alarm wake_up", "Set an alarm|Wake somebody at a time", (_TIME, ),
        "wake me at {0}|set an alarm for {0}|alarm at {0}|wake me up at {0}|"
        "I have to get up at {0}|get me up at {0}|I need to be awake at {0}|set the alarm to {0}",
        "", "set_alarm"),
    Entry("send_message send_text message_person notify",
        "Send a message to a person|Send a text", (_t("to", "to", "recipient", "person",
        "contact", values=somebody), _t("text", "text", "message", "body", values=VALUES["",
        "text"])),
          "text {0}: {1}|text {0} that {1}|tell {0} that {1}|"
              "message {0}: {1}|send {0} a message: {1}|let {0} know that {1}|write to {0}: {1}|"
              "send a text to {0} saying {1}|send a message to {0}: {1}|message {0} saying {1}|"
              'text {0}: "{1}"|send {0} the message "{1}"|write {0} that {1}', "",
              "send_message"),
    Entry("send_email send_mail email", "Send an e-mail", (_t("to", "recipient", values=somebody),
        _t("subject", values=_from(("invoice", "holiday", "meeting", "rent", "party",
        "repair")))),
        "mail {0} about {1}|send {0} an e-mail about {1}|write an e-mail to {0} about {1}|"
        "email {0} about the {1}", "", ""),
    Entry("call_person call phone_call make_call", "Call a person|Start a phone call", (_PERSON,
        ), "call {0}|ring {0}|give {0} a ring|give {0} a call|phone {0}|I want to talk to {0}|"
        "get {0} on the line|I need to speak to {0}|can you call {0} for me?|"
        "put me through to {0}|start a call with {0}", "", "call"),
    Entry("bus_departures next_departure bus_times next_tram next_train",
        "Next departure from a stop",
        (_t("stop", "stop", "station", "from", values=_stop), ),
          ""
              "next bus from {0}|when can I get a bus at {0}?|"
              "when does the next train leave {0}?|what time is the next tram from {0}?|"
              "when do I have to be at {0} for the bus?|departures from {0}",
              "line,departure departure line,departure,delay", "off_topic"),
    Entry("add_to_list list_add add_item", "Add an item to a list", (_LIST_ENUM, _ITEM),
        "add {1} to my {0} list|"
        "write {1} on the {0} list|{1} on the {0} list|I need {1} on the {0} list|"
        "note {1} on my {0} list|put {1} on my {0} list", "", "add_item"),
    Entry("list_items show_list get_list", "Read a list", (_LIST_ENUM, ),
        ""
        "show me the {0} list|is there anything on the {0} list?|tell me what's on my {0} list|"
        "read the {0} list|what have I got on the {0} list?", "items", ""),
    Entry("clear_list empty_list", "Delete all items of a list", (_LIST_ENUM, ),
        "clear the {0} list|empty my {0} list|delete everything on the {0} list|wipe the {0} list",
        "", ""),
    Entry("room_power power_usage energy_used",
        "Energy used today, in kWh|Power usage of a room", (_ROOM, ),
        "how much power does the {0} use?|"
        "what's the power usage of the {0}?|energy used in the {0}|"
        "how much energy did the {0} need today?|what did the {0} use in electricity?", "kwh",
        ""),
    Entry("battery_of battery_level battery", "Battery level of a device, in percent", (_DEVICE,
        ), "how much battery does the {0} have?|what's the battery of the {0}?|"
        "how full is the battery of the {0}?|is the {0} charged?|battery of the {0}|"
        "how much charge does the {0} have left?|does the {0} need charging?|"
        "check the {0} battery|how much battery has the {0} left?", "percent percent,charging",
        ""),
    Entry("play_music play_artist start_music", "Play music of an artist", (_t("artist", "artist",
        "query", "band", values=_artist), ),
        "play something by {0}|play {0}|put on {0}|play some {0}|I want to hear {0}|"
        "let's hear {0}|put on something by {0}|I'm in the mood for {0}|start {0}|music by {0}, "
        "please|I'd like to listen to {0}", "", "play play_something play_in_room"),
    Entry("set_volume volume", "Set the volume, from 0 to 100", (number_field("level", "level",
        "volume", "percent", low=0, high=100), ),
        "volume {0}|put the volume at {0}|"
        "turn the volume to {0}|make the volume {0} percent|I want volume {0}", "",
        "media everyday"),
    Entry("pollen_today pollen_count air_quality get_air_quality get_uv uv_index",
        "Current value for a city", (_CITY, ), "", "index,level", "off_topic"),
    Entry("recipe_for get_recipe recipe_search", "Find a recipe for a dish", (_t("dish", "dish",
        "query", "food", values=_from(_DISHES, 0.3)), ),
        "how do I make {0}?|I want to cook {0}, find a recipe|"
        "recipe for {0}|give me a recipe for {0}|how do you cook {0}?|show me a recipe for {0}|"
        "I'd like to make {0}, how does it go?",
        "dish,minutes,ingredients minutes,servings ingredients", "off_topic"),
    Entry("translate_text translate translation", "Translate a word into a language", (_t("word",
        "word", "text", values=_from(_WORDS, 0.25)), _t("language", "language", "target", "to",
        values=lambda rng: rng.choice(_LANGUAGES))),
        "what's {0} in {1}?|translate {0} into {1}|"
        "what is the {1} word for {0}?|{0} in {1}, please|what does {0} mean in {1}?|"
        "translate the word {0} to {1}|I need the {1} word for {0}", "translation", "off_topic"),
    Entry("unread_mails unread_mail check_mail", "Count the unread e-mails", (),
        "have I got mail?|do I have any new mail?|how many unread mails do I have?|"
        "any new e-mails?|check my mail|is there any unread mail?|did I get an e-mail?|"
        "anything in my inbox?|how full is my inbox?", "unread,newest_from unread", "off_topic"),
    Entry("panel_power solar_power solar_now",
        "Current output of the solar panels, in watts", (),
        "how much are the solar panels making?|what's the solar output?|"
        "how much power comes from the roof?|are the solar panels working?|"
        "how much sun power do we have right now?|solar output, please|"
        "what do the panels produce?", "watts watts,today_kwh", ""),
    Entry("pet_feeder dispense_food feeder", "Give the pet food, in grams", (number_field("grams",
        "grams", "amount", low=10, high=300), ),
        "feed the {pet} {0} grams|{0} grams for the {pet}|"
        "put {0} grams in the bowl|let the {pet} have {0} grams|the {pet} gets {0} grams", "",
        ""),
    Entry("apply_scene set_scene start_scene scene", "Activate a scene of the home",
        (_few(_SCENES, "scene", "scene", "name", made_up=0.15), ),
        "{0} scene, please|activate the {0} scene|start the {0} scene|"
        "set the {0} scene|{0} mode|switch to the {0} scene|I want the {0} scene|"
        "turn on the {0} scene|let's have the {0} scene|make it {0}|time for the {0} scene|"
        "go to {0} mode", "", "scenes"),
    Entry("room_humidity get_humidity humidity", "Humidity of a room, in percent", (_ROOM, ),
        "how humid is it in the {0}?|is it damp in the {0}?|"
        "is the air dry in the {0}?|humidity in the {0}|how's the humidity in the {0}?|"
        "tell me how humid the {0} is", "humidity", ""),
    Entry("read_co2 get_co2 air_sensor", "CO2 of a room in ppm", (_ROOM, ),
        "how's the air in the {0}?|is the air bad in the {0}?|what's the CO2 in the {0}?|"
        "do I need to air the {0}?|how fresh is the air in the {0}?", "ppm", ""),
    Entry("share_price stock_price quote", "Share price of a company", (_t("company",
        "company", "symbol", "name", values=_company), ),
        "how is {0} doing on the stock market?|"
        "what does a share of {0} cost?|{0} stock price|how much is {0} worth?|"
        "what are {0} shares at?|how are {0} shares?", "price,change price", "off_topic"),
    Entry("book_table reserve_table", "Book a table in a restaurant", (_t("restaurant",
        "restaurant", "name", values=_artist), number_field("people", "people", "guests", low=1,
        high=12)), "book a table for {1} at {0}|reserve a table at {0} for {1}|"
        "I want a table for {1} people at {0}|get us a table for {1} at {0}|"
        "table for {1} at {0}, please", "confirmation", "off_topic"),
    Entry("order_taxi call_taxi book_ride", "Order a taxi to a place", (_t("destination",
        "destination", "to", values=_stop), ),
        "get me a taxi to {0}|order a taxi to {0}|I need a taxi to {0}|call a cab to {0}|"
        "book me a ride to {0}|taxi to {0}", "minutes,driver", "off_topic"),
    Entry("get_news news headlines", "Headlines about a topic", (_t("topic", "topic", "category",
        values=_from(("sports", "politics", "science", "music", "football", "business", "health",
        "cars"))), ),
        "what's the news about {0}?|give me the headlines on {0}|any news about {0}?|{0} news, "
        "please|what's new in {0}?", "headline", "off_topic"),
    Entry("define_word dictionary", "Meaning of a word", (_t("word", values=_from(_WORDS, 0.4)),
        ), "what does {0} mean?|define {0}|what's the meaning of {0}?|look up the word {0}|"
        "explain the word {0}", "meaning", "off_topic"),
    Entry("get_distance distance route", "Distance from one place to another", (_t("start",
        "start", "origin", "from", values=city), _t("goal", "goal", "destination", "to",
        values=city)), "how far is it from {0} to {1}?|distance from {0} to {1}|"
        "how many kilometres are there from {0} to {1}?|how long is the way from {0} to {1}?|"
        "what's the distance between {0} and {1}?", "km,hours km", "off_topic"),
    Entry("track_parcel parcel_status", "Status of a parcel", (_t("number", "number", "parcel",
        "code",
        values=lambda rng: "".join(rng.choice("0123456789") for _ in range(rng.randrange(4, 9)))),
        ),
        "where is parcel {0}?|track parcel {0}|what about my parcel {0}?|has parcel {0} arrived?|"
        "when does parcel {0} come?", "status,day status", "off_topic"),
    Entry("charge_car set_charging ev_charge", "Charge the car up to a percentage",
        (number_field("percent", "percent", "target", "level", low=10, high=100), ),
        "charge the car to {0} percent|I need the car at {0} percent|"
        "fill the car battery to {0} percent|stop charging the car at {0} percent|"
        "charge up to {0}%", "", ""),
    Entry("get_calendar calendar_day agenda", "Appointments of a day", (_t("day", "day", "date",
        values=lambda rng: rng.choice(DAYS)), ),
        "what's in my calendar on {0}?|am I free on {0}?|"
        "do I have anything on {0}?|my appointments on {0}|what are my plans for {0}?|"
        "how busy am I on {0}?", "events", ""),
    Entry("create_note take_note save_note", "Save a note", (_t("text", "text", "note", "content",
        values=VALUES["", "text"]), ),
        "make a note: {0}|note: {0}|take a note: {0}|write down: {0}|save a note saying {0}|"
        "jot this down: {0}", "", ""),
    Entry("set_reminder remind_me create_reminder", "Set a reminder", (_t("text", "text", "task",
        "what", values=VALUES["", "task"]), _TIME),
        "remind me to {0} at {1}|at {1} remind me to {0}|set a reminder for {1} to {0}|"
        "I must not forget to {0} at {1}|create a reminder at {1}: {0}", "", "remind"),
    Entry("get_traffic traffic", "Traffic on a road or to a place", (_t("place", "place", "to",
        "road", values=_stop), ),
        "how's the traffic to {0}?|is there a jam at {0}?|traffic on {0}|"
        "how long does it take to {0}?|is the road to {0} free?", "minutes,delay minutes",
        "off_topic"),
    Entry("get_sunset sun_times sunset_time", "Sunset of a city", (_CITY, ),
        "when is sunset in {0}?|when does the sun go down in {0}?|what time is sunset in {0}?|"
        "when does it get dark in {0}?|sunset in {0}", "sunset,sunrise sunset", "off_topic"),
    Entry("water_zone start_irrigation water_plants",
        "Water a zone of the garden for some minutes", (_few(("lawn", "roses", "hedge", "beds",
        "pots", "orchard", "vegetables", "front yard", "herbs"), "zone", "zone", "area"), _MIN),
        "give the {0} {1} minutes of water|"
        "{1} minutes of water for the {0}|irrigate the {0} for {1} minutes", "", ""),
    Entry("get_score match_result team_score", "Last result of a team", (_t("team", "team",
        "club", values=lambda rng: rng.choice((proper(rng), f"{proper(rng)} United",
        f"FC {proper(rng)}", "Arsenal", "Ajax", "the Lakers"))), ),
        "how did {0} play?|what was the score of {0}?|did {0} win?|the result of {0}, please|"
        "how did the {0} match end?", "score,opponent score", "off_topic"),
    Entry("read_meter meter_reading get_meter", "Read a meter", (_few(("electricity", "gas",
        "water", "heat", "solar", "oil"), "meter", "meter", "name", made_up=0.05), ),
        "what's the {0} meter at?|read the {0} meter|what does the {0} meter say?|{0} meter, "
        "please|give me the reading of the {0} meter", "reading,unit reading", ""),
    Entry("find_phone locate_device ring_device locate", "Find a device and say where it is",
        (_t("device", "device", "name", "what", values=_device), ),
        "where is my {0}?|find my {0}|I can't find the {0}|locate the {0}|"
        "place", ""),
    Entry("roll_dice dice", "Roll a die", (number_field("sides", "sides", "faces", low=4,
        high=20), ), "roll a die with {0} sides|roll a {0} sided die|throw a die with {0} faces|"
        "give me a number from a {0} sided die", "number", ""),
    Entry("convert_units unit_converter", "Convert a number into another unit",
        (number_field("amount", "amount", "value", low=1, high=500), _t("source", "source",
        "from_unit", values=lambda rng: rng.choice(("miles", "pounds", "inches", "cups", "ounces",
        "feet"))), _t("target", "target", "to_unit", values=lambda rng: rng.choice(("kilometres",
        "kilograms", "centimetres", "litres", "grams", "metres")))),
        "convert {0} {1} to {2}|{0} {1} in {2}|"
        "what are {0} {1} in {2}?|how many {2} are {0} {1}?", "result", "off_topic"),
    Entry("set_thermostat heat_room set_heating", "Set the temperature of a room", (ROOM_ENUM,
        number_field("degrees", "degrees", "temperature", low=5, high=28)),
        "heat the {0} to {1}|I want {1} degrees in the {0}|"
        "make it {1} degrees in the {0}|{0} at {1} degrees|warm the {0} up to {1} degrees", "",
        "climate everyday"),
    Entry("set_light switch_light light", "Switch the light of a room", (ROOM_ENUM,
        choice_field("state", "state", "power", words=("on", "off"))),
        "turn {1} the light in the {0}|{0} light {1}|switch the {0} light {1}|"
        "turn the light in the {0} {1}|light {1} in the {0}|put the {0} light {1}", "",
        "lights switch scenes everyday"),
    Entry("send_robot robot_go go_to drive_to", "Send the robot to a room", (_ROOM, ),
        "go to the {0}|drive to the {0}|send the robot to the {0}|come to the {0}|"
        "robot to the {0}|move over to the {0}|I need the robot in the {0}", "", "robots plans"),
    Entry("start_vacuum vacuum_room clean_room", "Vacuum a room", (ROOM_ENUM, ),
        "vacuum the {0}|clean the {0}|hoover the {0}|the {0} needs a clean|"
        "start vacuuming in the {0}|do the floor in the {0}|sweep the {0}", "",
        "robots everyday plans"),
    Entry("take_photo snapshot camera_picture", "Take a picture with a camera", (_few(("door",
        "garden", "porch", "garage", "nursery", "street", "yard", "pool", "hall"), "camera",
        "camera", "name"), ), "show me the {0} camera|"
        "who is in front of the {0} camera?|snapshot of the {0}, please|"
        "a photo from the {0} camera", "picture", ""),
    Entry("get_bin_day next_collection", "Next day the bins are collected", (),
        "when are the bins collected?|which bin goes out next?|when's bin day?|"
        "do I have to take the bins out?|when do they pick up the trash?", "day,bin day",
        "off_topic"),
    Entry("get_water_level tank_level pool_level", "Level of the water tank in percent", (),
        "how full is the tank?|what's the water level?|is there enough water in the tank?|"
        "how much water is left?|check the tank", "percent,litres percent", ""),
    Entry("get_joke random_fact tell_joke", "A joke or a fact", (),
        "tell me a joke|do you know a joke?|make me laugh|say something funny|a fun fact, please",
        "text", "talk off_topic"),
    Entry("search_film find_film cinema_times", "When a film is shown", (_t("film", "film",
        "title", "movie", values=_artist), ),
        "when is {0} on?|when do they show {0}?|can I see {0} tonight?|cinema times for {0}|"
        "where is {0} playing?", "cinema,start start", "off_topic"),
    Entry("get_price price_of product_price", "Price of a product", (_t("product", "product",
        "item", values=_from((*GROCERIES, *ITEMS), 0.3)), ),
        "how much is {0}?|what does {0} cost?|price of {0}|what's the price of {0}?|"
        "is {0} expensive?", "price,shop price", "off_topic"),
)  # fmt: skip

_POLLEN: Final = {
    "pollen": ("what's the pollen count in {0}?",
        "is there a lot of pollen in {0}?", "pollen in {0}",
        "should people with hay fever go out in {0}?"),
    "air": ("how's the air in {0}?", "is the air clean in {0}?", "what's the air quality in {0}?",
        "how bad is the smog in {0}?", "air quality in {0}"),
    "uv": ("how strong is the sun in {0}?", "what's the UV index in {0}?",
        "do I need sun cream in {0}?", "UV in {0}"),
}  # fmt: skip


def family_of(rng: Random, entry: Entry) -> Family:
    """Return an entry as a family, with listed values drawn for this conversation."""
    names, asked = entry.names.split(), tuple(filter(None, entry.asked.split("|")))
    if not entry.asked:
        name = rng.choice(names)
        topic = next((key for key in _POLLEN if key in name), "air")
        names, asked = [name], _POLLEN[topic]
    parameters = tuple(one if isinstance(one, Parameter) else one(rng) for one in entry.parameters)
    return Family(
        tuple(names),
        tuple(entry.does.split("|")),
        parameters,
        asked,
        (),
        frozenset(entry.covers.split()),
    )
