"""A catalog of relations: how people word them, and which kinds of subjects have them.

It is used in two ways. A fact whose prompt is recognized as one of the relations is searched for in the relation's
other wordings and questions, too, so that it holds however it is asked. And target search keeps what the base model
says about the *other* relations of the subject (`rebind.edit.targets.kept`), so that an edit changes one relation of
its subject and not the subject itself.

`{}` stands for the subject, with its article where the prompt of the fact has one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rebind.edit.facts.fact import Fact

# The kind of a subject is the one whose words the model finds most likely after "{subject} is a".
KIND_WORDS = {
    "place": ("city", "country", "town", "village", "state", "region", "island", "river", "mountain", "nation", "lake"),
    "person": ("man", "woman", "singer", "writer", "player", "politician", "scientist", "former", "actor", "musician",
               "retired", "professional", "French", "British", "American", "German", "poet", "composer"),
    "organization": ("company", "corporation", "university", "team", "club", "band", "bank", "non", "global", "leading",
                     "public", "private", "multinational", "school", "museum", "newspaper"),
    "work": ("novel", "book", "film", "movie", "song", "album", "television", "TV", "play", "painting", "poem", "story",
             "comedy", "drama", "series"),
    "product": ("car", "device", "software", "game", "phone", "brand", "drink", "programming", "computer", "popular",
                "type", "web", "free", "video", "line", "vehicle"),
}  # fmt: skip

HELD_OUT = 4  # every fourth relation is not searched with, but asked afterwards to see whether the subject was kept

# Well-known subjects of each kind, which the write of an edit leaves alone: their keys share with the key of the edited
# subject what all subjects of the kind have in common.
PROTECTED_SUBJECTS = {
    "place": ("Mexico", "India", "Australia", "Kenya", "Poland", "London", "Chicago", "Texas"),
    "person": ("George Washington", "Muhammad Ali", "Madonna", "Bill Clinton", "Tom Hanks", "Stephen King",
               "Galileo Galilei", "Alexander the Great"),
    "organization": ("IBM", "Sony", "Walmart", "The New York Times", "Siemens", "Disney", "NATO",
                     "Stanford University"),
    "work": ("Moby Dick", "The Lion King", "Romeo and Juliet", "Casablanca", "Titanic", "Don Quixote", "The Simpsons",
             "Spider-Man"),
    "product": ("Google Chrome", "Ford Mustang", "Walkman", "Photoshop", "Microsoft Excel", "Nintendo Switch",
                "Honda Civic", "Lego"),
}  # fmt: skip

# Others, asked the same question as the edited subject to see whether its neighbors were kept
OTHER_SUBJECTS = {
    "place": ("Japan", "Canada", "Egypt"),
    "person": ("Albert Einstein", "William Shakespeare", "Barack Obama"),
    "organization": ("Microsoft", "Toyota", "Harvard University"),
    "work": ("Hamlet", "Star Wars", "The Bible"),
    "product": ("the iPhone", "Windows", "the PlayStation"),
}


@dataclass(frozen=True)
class Relation:
    """One relation between subjects and answers."""

    kinds: tuple[str, ...]  # of subjects that have it; none: it is recognized, but not kept
    wordings: tuple[str, ...]  # texts that the answer follows; the first one is the prompt that is kept
    cue: str = ""  # a pattern of prompts that ask for it, in lower case; none: it is kept, but not recognized
    questions: tuple[str, ...] = ()
    numeric: bool = False  # whether the answer begins with a digit


PLACE, PERSON, ORGANIZATION, WORK, PRODUCT = (("place",), ("person",), ("organization",), ("work",), ("product",))
ANY = tuple(KIND_WORDS)

# The first relation whose cue is found in a prompt is the relation of the fact, so special cues come first.
RELATIONS = (
    # Languages
    Relation(
        PERSON,
        ("The native language of {} is", "The mother tongue of {} is", "{} grew up speaking",
         "With the family, {} spoke"),
        r"native (?:language|speaker)|mother tongue|first language|speaker of"
        r"|\{\}.* (?:speaks|spoke|writes in|wrote in)\b",
        ("What is the native language of {}?", "Which language did {} speak?"),
    ),
    Relation(
        PLACE,
        ("People who live in {} speak", "The official language of {} is", "The language spoken in {} is",
         "Newspapers in {} are printed in", "To talk to the people of {}, you should learn"),
        r"(?:official|national|main) language|language (?:spoken |used )?in\b|in \{\}.*language"
        r"|(?:people|they|residents|citizens).* (?:speak|understand)$",
        ("What language is spoken in {}?", "Which language do people speak in {}?"),
    ),
    Relation(
        WORK,
        ("The original language of {} is", "{} was first written in", "The language of {} is",
         "Before it was translated, {} was in"),
        r"original language|language of|written in$",
        ("What is the original language of {}?", "In which language was {} written?"),
    ),
    # Places
    Relation(
        PLACE,
        ("{} lies on the continent of", "{} belongs to the continent of", "The continent on which you find {} is",
         "On a map of the world, {} is drawn in"),
        r"continent",
        ("What continent is {} on?", "On which continent does {} lie?"),
    ),
    Relation(
        (),
        ("{} is the capital city of", "The country whose capital is {} is", "The government that sits in {} rules"),
        r"\{\}.*capital(?: city)? of$",
        ("Which country has {} as its capital?", "What is {} the capital of?"),
    ),
    Relation(
        PLACE,
        ("The capital city of {} is called", "{}'s capital is", "The government of {} works in the city of",
         "The parliament of {} meets in", "Whoever visits the capital of {} travels to"),
        r"capital",
        ("What is the capital of {}?", "What is the name of {}'s capital?"),
    ),
    Relation(PLACE, ("The largest city in {} is",), r"(?:largest|biggest) city", ("What is the largest city in {}?",)),
    Relation(PLACE, ("The neighbors of {} are",)),
    Relation(PLACE, ("The climate of {} is",)),
    Relation(PLACE, ("{} is famous for its",)),
    Relation(
        PLACE,
        ("The money used in {} is called the", "The currency of {} is the", "People in {} pay with the",
         "A shop in {} takes the local currency, the"),
        r"currency|money",
        ("What is the currency of {}?", "What currency is used in {}?"),
    ),
    Relation(
        PLACE,
        ("Most people in {} follow the religion of", "The religion of {} is", "The faith of {} is"),
        r"religion|faith|follower of",
        ("What is the religion of {}?",),
    ),
    Relation(PLACE, ("{} became independent in the year",)),
    Relation(
        PLACE, ("The population of {} is about",), r"population|inhabitants", ("How many people live in {}?",), True
    ),
    Relation(PLACE, ("{} lies on the coast of the",)),
    Relation(PLACE, ("A traditional dish of {} is",)),
    Relation(PLACE, ("The flag of {} is",)),
    Relation(
        PLACE,
        ("The head of the government of {} is the", "The leader of {} is"),
        r"(?:president|prime minister|king|queen|head of (?:the )?(?:state|government)|mayor|governor) of \{\}",
        ("Who is the head of the government of {}?",),
    ),
    # People
    Relation(
        PERSON,
        ("{} was born in the year", "The year in which {} was born is", "{} came into the world in"),
        r"born",
        ("When was {} born?", "In what year was {} born?"),
        True,
    ),
    Relation(
        PERSON,
        ("{} was born in the city of", "The birthplace of {} is", "{} grew up in", "The town in which {} was born is",
         "The parents of {} lived in"),
        r"born|birthplace|place of birth|native to|originally from|hails from",
        ("Where was {} born?", "In which city was {} born?"),
    ),
    Relation(
        PERSON,
        ("{} comes from the country of", "The home country of {} is", "{} holds a passport of"),
        r"citizen|\{\}.*(?:comes|came) from the country of$",
        ("Which country does {} come from?",),
    ),
    Relation(
        (),
        ("By nationality, {} is", "The nationality of {} is", "If you look at the passport, {} is"),
        r"nationality",
        ("What is the nationality of {}?", "What nationality is {}?"),
    ),
    Relation(
        (),
        ("The sport that {} plays is", "{} became famous by playing", "{} is a star of", "Fans of {} love the game of",
         "{} has trained every day of the year for"),
        r"\bplay\w*\b.*\bsports?\b|\bsport.*\bplay|\{\}.* (?:is|was|plays|played) (?:a )?professional(?:ly)?$",
        ("What sport does {} play?", "Which sport is {} known for?"),
    ),
    Relation(
        (),
        ("The instrument that {} plays is the", "{} became famous by playing the", "In concerts, {} was heard on the",
         "As a musician, {} mastered the"),
        r"instrument|play(?:s|ed|ing) the$|performs? on the$",
        ("What instrument did {} play?", "Which instrument does {} play?"),
    ),
    Relation(
        (),
        ("The position that {} plays on the field is", "On the team, {} plays as"),
        r"position on the|plays (?:as|in the position)|play(?:s|ing) as",
        ("Which position does {} play?",),
    ),
    Relation(
        PERSON,
        ("{} earned a living as a", "The profession of {} is that of a", "By profession, {} is a",
         "{} made a career as a"),
        r"profession|occupation|(?:works?|worked|career|living|job) as(?: an?)?$|job of",
        ("What is the profession of {}?", "What does {} do for a living?"),
    ),
    Relation(
        PERSON,
        ("The field in which {} became famous is", "{} is an expert in", "The research of {} is about"),
        r"field of|domain of|expert|speciali[sz]es in|area of",
        ("What field does {} work in?", "What is {} an expert in?"),
    ),
    Relation(PERSON, ("{} is best known for",)),
    Relation(PERSON, ("The first name of {} is",)),
    Relation(
        PERSON,
        ("{} studied at the University of",),
        r"studied|educated|graduated|alma mater",
        ("Where did {} study?",),
    ),
    Relation(
        PERSON,
        ("{} was married to", "The spouse of {} is", "{} shared a home with"),
        r"married|spouse|husband|wife",
        ("Who is {} married to?", "Who was {} married to?"),
    ),
    Relation(PERSON, ("People admire {} because",)),
    Relation(PERSON, ("The most famous work of {} is",)),
    Relation(
        PERSON,
        ("{} died in the year", "The year in which {} died is", "The life of {} ended in"),
        r"died|death",
        ("When did {} die?", "In what year did {} die?"),
        True,
    ),
    Relation(
        (),
        ("{} died in the city of", "The place where {} died is", "The last years of {} were spent in",
         "The grave of {} is in"),
        r"died|death|passed away|expired|life ended|lost (?:his|her|their) life",
        ("Where did {} die?", "In which city did {} die?"),
    ),
    Relation(
        (),
        ("{} had a job in", "The place where {} worked is", "The career of {} took place in"),
        r"(?:worked|works|employment|job|active) in\b",
        ("Where did {} work?",),
    ),
    Relation(PERSON, ("{} worked together with",)),
    Relation(PERSON, ("{} won the",)),
    Relation(
        (),
        ("{} works for", "The employer of {} is", "{} has a job at", "The salary of {} is paid by"),
        r"employed by|employer|works? for$|worked for$|works? at$|worked at$",
        ("Who does {} work for?", "Which company employs {}?"),
    ),
    # Organizations
    Relation(
        ORGANIZATION,
        ("{} has its headquarters in the city of", "{} is based in", "The main office of {} is in",
         "The managers of {} work in", "Letters to {} are sent to an address in"),
        r"headquarter|based in|head office|main office",
        ("Where are the headquarters of {}?", "Where is {} based?"),
    ),
    Relation(
        ORGANIZATION,
        ("{} was founded in the year", "{} has existed since", "The year in which {} was started is"),
        r"founded|established|formed",
        ("When was {} founded?", "In what year was {} founded?"),
        True,
    ),
    Relation(
        (),
        ("{} has its origin in", "{} comes from", "The place where {} began is", "The story of {} began in"),
        r"(?:founded|established|formed|started|created|developed|originated) in\b|origin|(?:comes|was) from$",
        ("Where does {} come from?", "Where did {} begin?"),
    ),
    Relation(
        ORGANIZATION,
        ("{} was founded by", "The founder of {} was", "The person who started {} was", "{} was started by",
         "{} owes its existence to"),
        r"founde(?:r|d)\b|(?:established|started|set up) by",
        ("Who founded {}?", "Who is the founder of {}?", "Who started {}?"),
    ),
    Relation(
        ORGANIZATION,
        ("The person who leads {} is", "{} is led by", "The CEO of {} is", "The boss of {} is",
         "The one who makes the decisions at {} is", "The head of {} is called"),
        r"\bceo\b|chief executive|\bled by|head(?:ed)? (?:of|by)|leader|(?:chair(?:man|woman)?|boss|director) of"
        r"|president of|run by|leads",
        ("Who is the CEO of {}?", "Who leads {}?", "Who is the head of {}?"),
    ),
    Relation(
        ORGANIZATION,
        ("{} is owned by", "The owner of {} is", "{} belongs to", "The company that {} belongs to is"),
        r"own(?:ed|er)\b|parent company|belongs to$",
        ("Who owns {}?", "Who is the owner of {}?"),
    ),
    Relation(ORGANIZATION, ("{} is best known for making",)),
    Relation(ORGANIZATION, ("{} belongs to the industry of",)),
    Relation(ORGANIZATION, ("{} comes from the country of",)),
    Relation(ORGANIZATION, ("The main competitor of {} is",)),
    Relation(ORGANIZATION, ("The name of {} stands for",)),
    Relation(ORGANIZATION, ("Customers of {} can buy",)),
    Relation(ORGANIZATION, ("The people who work for {} are",)),
    Relation(ORGANIZATION, ("{} is active in the field of",)),
    # Works
    Relation(
        WORK,
        ("{} was written by the author", "The author who wrote {} is", "{} is a work by", "The writer of {} is called",
         "The name on the cover of {} is"),
        r"author|written by|wrote|writer|poet|playwright",
        ("Who wrote {}?", "Who is the writer of {}?"),
    ),
    Relation(
        (),
        ("{} was directed by", "The director of {} is", "The person who filmed {} is", "{} is a film by"),
        r"direct(?:ed by|or)|filmed by",
        ("Who directed {}?", "Who is the director of {}?"),
    ),
    Relation(
        (),
        ("{} was painted by", "The painter of {} is", "The artist who made {} is", "{} is the work of the painter"),
        r"paint(?:ed by|er)|sculpt(?:ed by|or)",
        ("Who painted {}?", "Which artist made {}?"),
    ),
    Relation(
        (),
        ("{} was composed by", "The composer of {} is", "The music of {} is by"),
        r"compos(?:ed by|er)|music (?:of|by)",
        ("Who composed {}?",),
    ),
    Relation(
        WORK,
        ("The genre of {} is", "{} belongs to the genre of", "A library puts {} on the shelf for",
         "Critics describe {} as a work of"),
        r"genre",
        ("What genre is {}?", "Which genre does {} belong to?"),
    ),
    Relation(
        (),
        ("{} was first shown on", "The channel that broadcast {} is", "Viewers watched {} on", "{} premiered on"),
        r"air(?:s|ed) on|broadcast|premier(?:es|ed)|debuted|network|channel|(?:shown|released) on",
        ("Which channel showed {}?", "On which network was {} first shown?"),
    ),
    Relation(
        (),
        ("{} is signed to the label", "The records of {} are published by", "The record label of {} is"),
        r"label",
        ("Which record label is {} with?",),
    ),
    Relation(WORK, ("{} was created by",)),
    Relation(WORK, ("{} was first published in the year",)),
    Relation(WORK, ("The main character of {} is",)),
    Relation(WORK, ("{} tells the story of",)),
    Relation(WORK, ("{} comes from the country of",)),
    Relation(WORK, ("{} is set in the city of",)),
    Relation(WORK, ("Critics praised {} for its",)),
    Relation(WORK, ("The title of {} refers to",)),
    Relation(WORK, ("{} ends with",)),
    # Products and inventions
    Relation(
        PRODUCT,
        ("{} is made by the company", "The maker of {} is", "{} is a product of", "{} was developed by",
         "The company behind {} is", "{} is built and sold by"),
        r"(?:made|produced|manufactured|developed|sold|released|distributed) by"
        r"|product of|manufacturer|maker|developer",
        ("Who makes {}?", "Who is the maker of {}?", "Who developed {}?"),
    ),
    Relation(
        PRODUCT,
        ("{} was invented by", "The inventor of {} was", "The person who invented {} was", "{} is an invention of",
         "{} was discovered by"),
        r"invent|discover",
        ("Who invented {}?", "Who discovered {}?"),
    ),
    Relation(PRODUCT, ("{} was released in the year",)),
    Relation(PRODUCT, ("People use {} to",)),
    Relation(PRODUCT, ("{} is a kind of",)),
    Relation(PRODUCT, ("{} comes from the country of",)),
    Relation(PRODUCT, ("The main competitor of {} is",)),
    Relation(PRODUCT, ("{} is sold in",)),
    Relation(PRODUCT, ("{} is best known for its",)),
    Relation(PRODUCT, ("The name of {} comes from",)),
    Relation(PRODUCT, ("The successor of {} is",)),
    Relation(PRODUCT, ("A user of {} can",)),
    # Whatever the subject
    Relation(ANY, ("{} is known for", "When people hear of {}, they think of")),
    Relation(ANY, ("{} is a type of", "{} belongs to the category of")),
    Relation(ANY, ("The most important thing about {} is",)),
    Relation(
        (),
        ("{} is named after", "{} got its name from", "The name of {} honors"),
        r"named (?:after|for)|namesake",
        ("Who is {} named after?",),
    ),
    Relation(
        (),
        ("The country in which {} lies is", "{} is in the country of", "The government that rules over {} is that of",
         "To see {}, you have to travel to"),
        r"country|\{\} (?:is|was) (?:a|the) (?:city|town|village|municipality|river|mountain|lake) in$",
        ("Which country is {} in?", "What country does {} belong to?"),
    ),
    Relation(
        (),
        ("{} is located in", "{} can be found in", "The place where {} stands is",
         "People who want to see {} travel to", "If you look for {} on a map, you find it in"),
        r"(?:located|situated|found|lies|stands|is|district|region|state) (?:in|on|at|of)(?: the state of)?$"
        r"|location of",
        ("Where is {}?", "Where is {} located?"),
    ),
    Relation(
        (),
        ("The year of {} was", "{} happened in the year", "People remember {} as an event of"),
        r"(?:took place|happened|occurred) in\b|(?:year|date) of \{\}",
        ("In what year did {} take place?", "When did {} happen?"),
        True,
    ),
)  # fmt: skip


def relation_of(fact: Fact) -> Relation | None:
    """Return the relation that the prompt of a fact asks for, if the catalog has it."""
    before, after = fact.parts
    prompt = f"{before}{{}}{after}".strip().lower()
    is_number = fact.target[:1].isdigit()
    for relation in RELATIONS:
        if relation.cue and relation.numeric == is_number and re.search(relation.cue, prompt):
            return relation
    return None


def fill(wording: str, fact: Fact) -> str:
    """Put the subject of a fact into a wording, with the article that it has in the fact's prompt.

    >>> fill("{} is made by", Fact.parse("The {Xbox} is a product of", "Nintendo"))
    'The Xbox is made by'
    """
    words = fact.parts[0].split()
    article = words[-1].lower() if words and words[-1].lower() in ("the", "a", "an") else ""
    text = wording.format(f"{article} {fact.subject}".strip())
    if text.endswith(" a") and fact.target[:1].lower() in "aeiou":
        text += "n"
    return text[0].upper() + text[1:] if article and wording.startswith("{}") else text
